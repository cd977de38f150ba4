"""Finding the self-attentions of a block, and where their skips join, in what was read of it.

An attention is softmax over products of queries and keys, or one of the fused kernels for it. It is
a self-attention where q, k and v come of one input: x̂. Its branch is followed from what the
attention returns to the sum with the residual stream, of which x̂ is the norm; whatever scales or
norms the branch on that way would do so to the skip, which then joins behind it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from mmpreproj.architectures import SiteRule
from mmpreproj.reading import Entry, Reader, Value, class_of, values_in, width_of

__all__ = ["CROSS", "Left", "NoSite", "mentions_attention", "read_block"]

# What passes numbers on as they are; "move" changes which token is where
_SAME = {"shape", "drop", "either", "enter", "out", "item"}
_LINEAR = _SAME | {"move", "add", "scale", "weigh"}
_SOFTMAX = re.compile(
    r"softmax|scaled_dot_product|attention_interface|ALL_ATTENTION|flash_attn|flex_attention"
    r"|logsumexp|mra2_attention",
    re.IGNORECASE,
)
# Softmax over products of channels (q and k transposed) looks alike in the source
_CHANNELS = re.compile(r"XCA|CrossCov|Channel")


CROSS = "it is a cross-attention"


class NoSite(Exception):
    """An attention that cannot take the method; the message says why."""


@dataclasses.dataclass(frozen=True)
class Left:
    """An attention without the method, and why."""

    attention: str
    why: str


def mentions_attention(module: nn.Module) -> bool:
    """Whether a module's own class may compute attention, by a look at its source."""
    return isinstance(module, nn.MultiheadAttention) or _mentions(class_of(module))


def read_block(block: nn.Module, inner: Iterable[str]) -> tuple[list[SiteRule], list[Left]]:
    """The self-attentions of a block in order of execution, and those that are left out.

    Args:
        inner: the paths in the block of the modules that `mentions_attention` names.
    """
    paths: dict[int, str] = {}
    for path, module in block.named_modules():
        paths.setdefault(id(module), path)
    inner = list(inner)
    try:
        reader = Reader(
            block, paths, lambda path: any(f"{i}.".startswith(f"{path}.") for i in inner)
        )
    except Exception as error:  # of a source that does what nobody thought of
        return [], [Left(path, f"its block's forward cannot be read: {error}") for path in inner]
    return _Block(block, reader).sites()


class _Block:
    def __init__(self, block: nn.Module, reader: Reader) -> None:
        self.block, self.reader = block, reader
        self.users: dict[Value, list[Value]] = defaultdict(list)
        self.sources: dict[Value, frozenset[Value]] = {}
        for value in reader.values:
            for used in value.inputs:
                self.users[used].append(value)

    def sites(self) -> tuple[list[SiteRule], list[Left]]:
        found: dict[str, dict[SiteRule, int]] = defaultdict(dict)
        left: dict[str, str] = {}
        for core, q_k_v in self.cores():
            path = core.scope[-1] if core.scope else ""
            try:
                path, group, entry = self.self_attention(core, q_k_v)
                rule = self.rule(path, group, entry, core)
                found[rule.attention].setdefault(rule, entry_order(entry))
            except NoSite as error:
                left.setdefault(path, str(error))
        for path, rules in list(found.items()):
            if len(rules) > 1:
                left[path] = "what it reads or adds to is not the same wherever it runs"
                del found[path]
        for value in self.reader.values:
            unread = value.op == "call" and isinstance(value.key, str)
            if unread and re.search(
                "att", class_of(self.block.get_submodule(value.module)).__name__, re.I
            ):
                left.setdefault(value.module, f"its forward cannot be read: {value.key}")
        orders = {rule: order for rules in found.values() for rule, order in rules.items()}
        rules = sorted(orders, key=orders.__getitem__)
        inside = [rule.attention for rule in rules]
        return rules, [
            Left(path, why)
            for path, why in left.items()
            if not any(f"{path}.".startswith(f"{i}.") for i in inside)
        ]

    def cores(self) -> Iterator[tuple[Value, list[Value]]]:
        """Every attention, with its q, its k and what may be its v."""
        for value in self.reader.values:
            if value.op == "attend" and value.scope:
                made = [v for v in value.inputs if any(w.op == "call" for w in self.before(v))]
                q_k_v = made if len(made) > 2 else list(value.inputs)
                yield value, [q_k_v[0], q_k_v[min(1, len(q_k_v) - 1)], q_k_v[-1]]
            elif value.op == "softmax":
                uses = self.products(value, lambda v: self.users[v])
                weights = self.behind(value) if uses else set()
                values = [v for use in uses for v in use.inputs if v not in weights]
                for product in self.products(value, lambda v: v.inputs) if uses else ():
                    yield value, [*product.inputs[:2], *values]

    def products(self, of: Value, next_to: Callable) -> list[Value]:
        """The nearest products of two values, within the same module."""
        seen, line, found = {of}, [of], []
        for value in line:
            for each in next_to(value):
                if each in seen or each.scope[: len(of.scope)] != of.scope:
                    continue
                seen.add(each)
                if each.op == "matmul" and sum(v.op != "fact" for v in each.inputs) > 1:
                    found.append(each)
                elif each.op != "enter" or len(each.scope) > len(of.scope):
                    line.append(each)
        return found

    def behind(self, of: Value) -> set[Value]:
        seen, line = {of}, [of]
        for value in line:
            new = [v for v in self.users[value] if v not in seen]
            seen.update(new)
            line.extend(new)
        return seen

    def before(self, of: Value) -> frozenset[Value]:
        """What a value was computed of, whichever way its forward took."""
        if of not in self.sources:
            ways = [self.before(v) for v in of.inputs if of.op != "fact"]
            if of.op == "either":
                # zeros, and what is computed of an input that may be given or not, are no other way
                ways = [w for w in ways if any(v.op == "input" for v in w)]
                shared = frozenset.intersection(*ways) if ways else frozenset()
                plain = [w for w in ways if not (w - shared) & self.reader.optional] or ways
                ways = [frozenset.intersection(*plain)] if plain else []
            self.sources[of] = frozenset({of}).union(*ways)
        return self.sources[of]

    def self_attention(self, core: Value, q_k_v: list[Value]) -> tuple[str, list[str], Entry]:
        """The innermost module with one input of which q, k and v come, and that input's names."""
        sources = [self.before(v) for v in q_k_v]
        for path in reversed(core.scope):
            entries = [
                e for e in self.reader.entries if e.path == path and entry_order(e) < core.order
            ]
            if not entries:
                continue
            groups: dict[Value, list[str]] = defaultdict(list)
            of: dict[Value, set[Value]] = defaultdict(set)
            for name, given in entries[-1].arguments.items():
                for value in values_in(given):
                    origin = same(value)
                    of[origin].add(value)
                    if isinstance(given, Value):
                        groups[origin].append(name)
            for origin, names in groups.items():
                keys = all(of[origin] & source for source in sources[:2])
                if keys and (len(sources) < 3 or any(of[origin] & v for v in sources[2:])):
                    if _CHANNELS.search(_class_name(self.block, path)):
                        raise NoSite("it attends across channels, not tokens")
                    parts = {
                        v
                        for v in self.reader.values
                        if v.key == "part" and same(v.inputs[0]) is origin
                    }
                    if sources[0] & parts and not sources[1] & parts:
                        raise NoSite(
                            "its queries are those of some tokens only, such as a class token"
                        )
                    return path, names, entries[-1]
        if not core.scope:
            raise NoSite("it is computed in the block's own forward, with no module to attach to")
        if sources[0] & sources[1] & {v for v in self.reader.values if v.op == "input"}:
            raise NoSite("its q, k and v read no one input")
        own = sources[0] | {self.reader.first}
        of_keys = [v.key for v in sources[1] if v.op == "input" and v not in own]
        if any(re.search("kv|shared", str(name)) for name in of_keys):
            raise NoSite("it reads the keys and values of another layer")
        raise NoSite(CROSS)

    def rule(self, path: str, names: list[str], entry: Entry, core: Value) -> SiteRule:
        x_hat = entry.arguments[names[0]]
        if _branch(entry) not in self.behind(core):
            raise NoSite("it is not what its module returns first")
        branch, chain, total = self.followed(path, entry, x_hat)
        # the outermost module that takes x̂ alone to the same branch, such as one with the output's
        # projection beside the attention
        for outer in [scope for scope in reversed(entry_scope(entry)) if scope not in total.scope]:
            wider = [e for e in self.reader.entries if e.path == outer]
            given = [n for e in wider for n, v in e.arguments.items() if v is same(x_hat, outer)]
            if not given or not any(v.op == "out" and v.module == outer for v in chain):
                break
            path, names, entry = outer, given, wider[-1]
            x_hat = entry.arguments[given[0]]
            branch, chain, total = self.followed(path, entry, x_hat)
        reader = self.first_reader(x_hat, path)
        origin, normed, norm = self.norm_of(x_hat)
        join = self.join(path, branch, chain, total)
        self.check_width(path, branch, chain, reader)
        moved = join.join is not None and any(v.op == "move" for v in chain[: join.place])
        if moved:
            self.check_layouts(origin, chain[join.place :])
        return SiteRule(
            path,
            join=join.join,
            join_output=join.output,
            normed=normed,
            divisor=join.divisor,
            carried=join.carried,
            norm=norm,
            moved=moved,
            reads=tuple((entry.names.index(name), name) for name in names),
            reader=reader,
        )

    def followed(self, path: str, entry: Entry, x_hat: Value) -> tuple[Value, list[Value], Value]:
        """What the attention returns, what it goes through, and the residual sum it ends in."""
        branch = _branch(entry)
        stream = self.stream(x_hat)
        if self.carries(branch, stream):  # it adds the residual itself
            if self.carries(branch, {x_hat}):
                raise NoSite("its module holds the norm and the residual sum too: no x̂ enters it")
            return branch, [], branch
        arrived: list[tuple[Value, list[Value]]] = []
        seen: set[Value] = set()

        def follow(value: Value, chain: list[Value]) -> None:
            for use in self.users[value]:
                if use.op == "fact" or use in seen:
                    continue
                others = [v for v in use.inputs if v is not value]
                if use.op == "add" and any(self.carries(v, stream) for v in others):
                    arrived.append((use, chain))
                elif not (use.op == "item" and use.key not in (0, None)):
                    seen.add(use)
                    follow(use, [*chain, use])

        follow(branch, [])
        if not arrived:
            raise NoSite("what it returns is not added to the residual stream that its norm reads")
        total, chain = min(arrived, key=lambda item: item[0].order)
        ways = {self.join(path, branch, c, t).key for t, c in arrived}
        if len(ways) > 1:
            raise NoSite("its branch is added in several places, in different ways")
        return branch, chain, total

    def stream(self, x_hat: Value) -> set[Value]:
        """x̂ and what it is the norm of: the residual stream before the attention."""
        seen: set[Value] = set()
        line = [(x_hat, 3)]
        for value, calls in line:
            if value not in seen:
                seen.add(value)
                if value.op in _LINEAR or (value.op == "call" and calls):
                    line.extend((v, calls - (value.op == "call")) for v in value.inputs)
        # or an input of the block that it must be given, as in reversible layers
        seen |= {v for v in self.reader.values if v.op == "input"} - self.reader.optional
        return {v for v in seen if v.op != "fact"}

    def carries(self, value: Value, stream: set[Value]) -> bool:
        """Whether a value is the residual stream, maybe scaled, moved, or with more added."""
        seen, line = {value}, [value]
        for each in line:
            if each in stream:
                return True
            if each.op in _LINEAR:
                line.extend(v for v in each.inputs if v not in seen)
                seen.update(each.inputs)
        return False

    def join(self, path: str, branch: Value, chain: list[Value], total: Value) -> _Join:
        """Where a skip that is to reach `total` as it is joins."""
        changes = [i for i, v in enumerate(chain) if v.op not in _SAME | {"add", "scale", "move"}]
        if not changes:
            return _Join(divisor=_factor(chain), place=0)
        last = changes[-1]
        rest = list(enumerate(chain))[last + 1 :]
        place = next((i for i, v in rest if v.op == "drop" and v.module and _is_tensor(v)), None)
        if place is not None:
            return self.checked(
                _Join(chain[place].module, False, _factor(chain[place:]), place), branch
            )
        if chain[last].op == "call":
            found = _Join(chain[last].module, True, _factor(chain[last:]), last + 1)
            return self.checked(found, branch)
        for i, v in rest:
            if v.op == "out" and v.key in (None, 0) and not f"{path}.".startswith(f"{v.module}."):
                return _Join(v.module, True, _factor(chain[i:]), i + 1)
        for inner in reversed(total.scope):  # a module that takes the stream and the branch
            if not f"{path}.".startswith(f"{inner}."):
                self.passes(total, inner)
                return _Join(inner, True, 1.0, len(chain))
        return self.carried(total, chain)

    def checked(self, join: _Join, branch: Value) -> _Join:
        made = [v for v in self.reader.values if v.module == join.join and v.op in ("call", "drop")]
        made = [v for v in made if v.order > branch.order]
        if len({v.order for v in made}) and made[0].line != min(made, key=lambda v: v.order).line:
            raise NoSite(f"{join.join} runs for something else before its branch comes there")
        return join

    def passes(self, total: Value, inner: str) -> None:
        """Raise NoSite unless a module returns a sum as it is."""
        line = [total]
        for value in line:
            for use in self.users[value]:
                if use.op == "out" and use.module == inner:
                    return
                if use.op in _SAME:
                    line.append(use)
        raise NoSite(f"its branch is scaled in {inner}, which changes the sum as well")

    def carried(self, total: Value, chain: list[Value]) -> _Join:
        """The skip joins where the sum is read next, and what the block returns."""
        if any(value.key == "unsqueeze" for value in chain):
            raise NoSite("its branch is spread over several residual streams")
        readers: dict[str, int] = {}
        line, seen, returned = [total], {total}, False
        outputs = set(list(values_in(self.reader.output))[:1])
        for value in line:
            returned |= value in outputs
            for use in self.users[value]:
                if use.op in ("call", "enter") and use.module:
                    readers[use.module] = readers.get(use.module, 0) + 1
                elif use.op in _SAME | {"add"}:
                    if use not in seen:
                        seen.add(use)
                        line.append(use)
                elif use.op != "fact":
                    raise NoSite(
                        f"a parameter scales its branch, with no module behind, {total.line}"
                    )
        if len(readers) != 1 or any(n > 1 for n in readers.values()):
            raise NoSite(f"a parameter scales its branch, with no module behind, {total.line}")
        return _Join(next(iter(readers)), False, 1.0, len(chain), returned)

    def first_reader(self, x_hat: Value, path: str) -> str | None:
        """The first module in the attention that reads x̂ itself."""
        line, moved = [(x_hat, False)], False
        for value, moved in line:
            for use in self.users[value]:
                if use.op == "call" and use.module:
                    module = self.block.get_submodule(use.module)
                    if _channels_first(module) and not moved:
                        raise NoSite("it reads maps with channels first, not tokens [..., D]")
                    return use.module
                if use.op in _SAME | {"move"} and f"{path}." in "".join(f"{s}." for s in use.scope):
                    line.append((use, moved or use.op == "move"))
        return None

    def norm_of(self, x_hat: Value) -> tuple[Value, bool, str | None]:
        """Where x̂ comes from, whether that is a norm, and the norm's path."""
        value = x_hat
        while value.op in _SAME | {"move"} and value.inputs:
            if value.op == "drop" and value.module and _is_identity(self.block, value.module):
                return value, True, value.module  # in the place of a norm
            if value.op == "out" and re.search("norm|ln", value.module, re.I):
                return value, True, value.module
            value = value.inputs[0]
        if value.op == "call":
            return value, True, value.module
        return value, value.op != "input", None

    def check_layouts(self, origin: Value, behind: list[Value]) -> None:
        fixed = origin is self.reader.first or origin.op in ("call", "drop", "out")
        value = origin
        while value.op in _SAME | {"call"} and value.inputs:
            value = value.inputs[0]
        if not fixed or value.op == "move" or any(v.op == "move" for v in behind):
            raise NoSite("its tokens are moved about and its branch is scaled behind that")

    def check_width(self, path: str, branch: Value, chain: list[Value], reader: str | None) -> None:
        width = reader and width_of(self.block.get_submodule(reader))
        value = branch
        while value.op in _SAME | {"move"} and value.inputs:
            value = value.inputs[0]
        made = (
            getattr(self.block.get_submodule(value.module), "out_features", None)
            if value.op == "call"
            else None
        )
        if width and made and width != made:
            raise NoSite(f"it reads {width} channels and returns {made}")


@dataclasses.dataclass(frozen=True)
class _Join:
    join: str | None = None
    output: bool = False
    divisor: float = 1.0
    place: int = 0  # in the chain
    carried: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        return (self.join, self.output, self.divisor, self.carried)


def same(value: Value, until: str | None = None) -> Value:
    """The value before it was passed on as it is; or the one that entered a module."""
    while value.op in ("shape", "either", "enter", "out", "drop") and value.inputs:
        if until is not None and value.op == "enter" and value.module == until:
            return value
        value = value.inputs[0]
    return value


def entry_order(entry: Entry) -> int:
    return min((v.order for v in values_in(entry.arguments)), default=0)


def entry_scope(entry: Entry) -> tuple[str, ...]:
    """The modules around the one that is entered, the outermost first."""
    return next((v.scope[:-1] for v in values_in(entry.arguments)), ())


def _branch(entry: Entry) -> Value:
    """What a module returns, the first of it where it is several."""
    branch = entry.output
    while isinstance(branch, (tuple, list)) and branch:
        branch = branch[0]
    if not isinstance(branch, Value):
        raise NoSite(f"it returns a {type(entry.output).__name__}, not its branch first")
    return branch


def _is_tensor(value: Value) -> bool:
    return len(value.inputs) == 1


def _factor(chain: list[Value]) -> float:
    for value in chain:
        if value.op == "scale" and value.number == 0:
            raise NoSite(f"{value.key} is 0, which turns the attention off")
    return math.prod(v.number for v in chain if v.op == "scale")


def _class_name(block: nn.Module, path: str) -> str:
    return class_of(block.get_submodule(path)).__name__


def _is_identity(block: nn.Module, path: str) -> bool:
    return isinstance(block.get_submodule(path), nn.Identity)


def _channels_first(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm2d, nn.GroupNorm))


def _mentions(cls: type) -> bool:
    from mmpreproj.source import source_of

    return any(
        _SOFTMAX.search(source_of(base))
        for base in cls.__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
    )
