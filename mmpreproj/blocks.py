"""Finding the self-attentions of a block, and where their skips join, in what was read of it.

An attention is softmax over products of queries and keys, or one of the fused kernels for it. It is
a self-attention where q, k and v come of one input: x̂. Its branch is followed from what the
attention returns to the sum with the residual stream, of which x̂ is the norm; whatever scales or
norms the branch on that way would do so to the skip, which then joins behind it.
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import nn

from mmpreproj.architectures import Left, Site, width_of
from mmpreproj.branches import (
    PASSES,
    Branches,
    NoSite,
    branch_of,
    entry_order,
    entry_scope,
    is_norm,
    origins,
    same,
)
from mmpreproj.reading import Reader
from mmpreproj.source import methods_of, source_of
from mmpreproj.values import Entry, Value, class_of, values_in

__all__ = ["CROSS", "NoSite", "mentions_attention", "read_block"]

_SOFTMAX = re.compile(
    r"softmax|scaled_dot_product|attention_interface|ALL_ATTENTION|flash_attn|flex_attention"
    r"|logsumexp|mra2_attention|YosoCumulation",
    re.IGNORECASE,
)
# Softmax over products of channels (q and k transposed) looks alike in the source
_CHANNELS = re.compile(r"XCA|CrossCov|Channel")


CROSS = "it is a cross-attention"


def mentions_attention(module: nn.Module) -> bool:
    """Whether a module's own class may compute attention, by a look at its source."""
    return isinstance(module, nn.MultiheadAttention) or _mentions(class_of(module))


def read_block(block: nn.Module, inner: Iterable[str]) -> tuple[list[Site], list[Left]]:
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


class _Block(Branches):
    """The self-attentions of a block."""

    def sites(self) -> tuple[list[Site], list[Left]]:
        found: dict[str, dict[Site, int]] = defaultdict(dict)
        left: dict[str, str] = {}
        for core, q_k_v in self.cores():
            path = core.scope[-1] if core.scope else ""
            try:
                path, group, entry = self.self_attention(core, q_k_v)
                rule = self.rule(path, group, entry, core, q_k_v)
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
                q_k_v = value.inputs
                yield value, [q_k_v[0], q_k_v[min(1, len(q_k_v) - 1)], q_k_v[-1]]
            elif value.op == "softmax":
                uses = self.products(value, lambda v: self.users[v])
                weights = self.behind(value) if uses else set()
                values = [v for use in uses for v in use.inputs if v not in weights]
                for product in self.products(value, lambda v: v.inputs) if uses else ():
                    yield value, [*product.inputs[:2], *values]

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

    def rule(
        self, path: str, names: list[str], entry: Entry, core: Value, q_k_v: list[Value]
    ) -> Site:
        for taken, scope in self.reader.taken:
            if path not in scope and f"{taken}.".startswith(f"{path}."):
                raise NoSite("its block computes it of its weights at times, without calling it")
        replaced = self.replaced(path)
        if replaced:  # the module around it stays
            outer = next(
                (e for e in self.reader.entries if e.path == path.rpartition(".")[0]), None
            )
            x_hat = entry.arguments[names[0]]
            given = (
                [n for n, v in outer.arguments.items() if v is same(x_hat, outer.path)]
                if outer
                else ()
            )
            if not given:
                raise NoSite(f"{replaced} puts another module in its place while the model runs")
            return self.within(outer.path, given, outer, core, q_k_v)
        try:
            return self.around(path, names, entry, core, q_k_v)
        except NoSite as error:
            if self.carries(branch_of(entry), {entry.arguments[names[0]]}) or self.sums(
                entry, core
            ):
                return self.within(path, names, entry, core, q_k_v)
            raise error

    def replaced(self, path: str) -> str | None:
        """The method, if one does, that puts another module in the place of this one."""
        parent, _, name = path.rpartition(".")
        cls = class_of(self.block.get_submodule(parent)) if parent else class_of(self.block)
        for found in methods_of(cls):
            if found.name != "__init__" and any(
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and node.attr == name
                for node in ast.walk(found)
            ):
                return f"{cls.__name__}.{found.name}"
        return None

    def sums(self, entry: Entry, core: Value) -> bool:
        """Whether a module adds what is behind its attention to the residual stream itself."""
        behind, given = self.behind(core), set(values_in(entry.arguments))
        sums = [v for v in behind if v.op == "add" and entry.path in v.scope]
        others = [v for total in sums for v in total.inputs if v not in behind]
        return any(self.carries(v, given) for v in others)

    def within(
        self, path: str, names: list[str], entry: Entry, core: Value, q_k_v: list[Value]
    ) -> Site:
        """A site in a module that adds the residual itself: only what makes q, k and v reads x̃."""
        given = entry.arguments[names[0]]
        x_hat = self.normed_inside(given, path) or given
        start = core
        if core.op == "softmax":
            start = self.products(core, lambda v: self.users[v])[0]
        _, chain, total = self.followed(path, start, given)
        join = self.join(path, start, chain, total)
        moves = [v for v in chain[join.place :] if v.op == "move"]
        if join.join is None or join.carried or moves:
            raise NoSite("its module adds the residual too, with no place for the skip before that")
        readers = self.readers(x_hat, path, q_k_v)
        _, normed, norm = self.norm_of(x_hat)
        return Site(
            path,
            join=join.join,
            join_output=join.output,
            divisor=join.divisor,
            normed=normed,
            norm=norm,
            channels_first=self.first_reader(x_hat, path)[1],
            reader=readers[0],
            readers=readers,
        )

    def normed_inside(self, given: Value, path: str) -> Value | None:
        """What a norm in the attention's module makes of its input, if nothing else reads it."""
        calls = self.calls(given, path)
        norms = [v for v in calls if is_norm(self.block.get_submodule(v.module))]
        return norms[0] if norms and calls == norms[:1] else None

    def calls(self, x_hat: Value, path: str) -> list[Value]:
        """The modules in the attention that read x̂ itself, in order."""
        calls = [v for v in self.reader.values if v.op == "call" and path in v.scope and v.inputs]
        return [v for v in calls if same(x_hat) in origins(v.inputs[0])]

    def readers(self, x_hat: Value, path: str, q_k_v: list[Value]) -> tuple[str, ...]:
        """The projections that make q, k and v of x̂. Raises NoSite if anything else does, too."""
        calls = self.calls(x_hat, path)
        sources = frozenset().union(*map(self.before, q_k_v))
        others = [v for v in sources - set(calls) if v.op not in PASSES | {"fact"}]
        all_read = all(set(calls) & self.before(v) for v in q_k_v)
        if not all_read or any(same(w) is same(x_hat) for v in others for w in v.inputs):
            raise NoSite("more than projections reads x̂ within its module")
        return tuple(dict.fromkeys(v.module for v in calls))

    def around(
        self, path: str, names: list[str], entry: Entry, core: Value, q_k_v: list[Value]
    ) -> Site:
        """A site whose module gives the branch alone: all that it reads of x̂ is x̃."""
        x_hat = entry.arguments[names[0]]
        if branch_of(entry) not in self.behind(core):
            raise NoSite("it is not what its module returns first")
        branch, chain, total = self.followed(path, branch_of(entry), x_hat)
        # the outermost module that takes x̂ alone to the same branch, such as one with the output's
        # projection beside the attention
        for outer in [scope for scope in reversed(entry_scope(entry)) if scope not in total.scope]:
            wider = [e for e in self.reader.entries if e.path == outer]
            given = [n for e in wider for n, v in e.arguments.items() if v is same(x_hat, outer)]
            if not given or not any(v.op == "out" and v.module == outer for v in chain):
                break
            path, names, entry = outer, given, wider[-1]
            x_hat = entry.arguments[given[0]]
            branch, chain, total = self.followed(path, branch_of(entry), x_hat)
        inside = self.normed_inside(x_hat, path)
        readers = () if inside is None else self.readers(inside, path, q_k_v)
        x_hat = inside or x_hat
        reader, channels_first = self.first_reader(x_hat, path)
        origin, normed, norm = self.norm_of(x_hat)
        join = self.join(path, branch, chain, total)
        self.check_width(path, branch, chain, reader)
        if isinstance(entry.output, dict) and join.join is None:
            raise NoSite("it returns its branch in a dict, and nothing stands behind it")
        moved = join.join is not None and any(v.op == "move" for v in chain[: join.place])
        if moved:
            self.check_layouts(origin, chain[join.place :])
        if moved and readers:
            raise NoSite("its norm is within its module, and its tokens are moved about")
        # in reversible layers the branch joins another stream, and runs again in the backward pass,
        # without the block: the skip is handed over within what holds both
        others = [v for v in total.inputs if v not in self.behind(branch)]
        reversible = join.join and not any(self.carries(v, self.stream(x_hat)) for v in others)
        block = os.path.commonprefix([f"{path}.", f"{join.join}."]) if reversible else ""
        block = block.rpartition(".")[0]
        return Site(
            path,
            block=block,
            join=join.join,
            join_output=join.output,
            normed=normed,
            divisor=join.divisor,
            carried=join.carried,
            norm=norm,
            moved=moved,
            channels_first=channels_first,
            reads=tuple((entry.names.index(name), name) for name in names),
            reader=reader,
            readers=readers,
        )

    def norm_of(self, x_hat: Value) -> tuple[Value, bool, str | None]:
        """Where x̂ comes from, whether that is a norm, and the norm's path."""
        value = x_hat
        while value.op in PASSES | {"move"} and value.inputs:
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
        while value.op in PASSES | {"call"} and value.inputs:
            value = value.inputs[0]
        if not fixed or value.op == "move" or any(v.op == "move" for v in behind):
            raise NoSite("its tokens are moved about and its branch is scaled behind that")

    def check_width(self, path: str, branch: Value, chain: list[Value], reader: str | None) -> None:
        width = reader and width_of(self.block.get_submodule(reader))
        value = branch
        while value.op in PASSES | {"move"} and value.inputs:
            value = value.inputs[0]
        for each in (value, *chain):
            made = None
            if each.op == "call" and each.module is not None:
                module = self.block.get_submodule(each.module)
                names = ("out_features", "out_channels", "num_features")
                made = next((n for n in (getattr(module, name, None) for name in names) if n), None)
            if width and made and width != made:
                raise NoSite(f"it reads {width} channels and returns {made}")


def _class_name(block: nn.Module, path: str) -> str:
    return class_of(block.get_submodule(path)).__name__


def _is_identity(block: nn.Module, path: str) -> bool:
    return isinstance(block.get_submodule(path), nn.Identity)


def _mentions(cls: type) -> bool:
    return any(
        _SOFTMAX.search(source_of(base))
        for base in cls.__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
    )
