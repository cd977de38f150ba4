"""What becomes of an attention's branch between the attention and the residual stream.

A branch is followed through the graph that `mmpreproj.reading` makes of a block, from what the
attention returns to the sum with the residual stream, of which x̂ is the norm. Whatever scales or
norms the branch on that way would do so to the skip, which therefore joins behind it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

from torch import nn

from mmpreproj.reading import Reader
from mmpreproj.values import Entry, Value, class_of, values_in

__all__ = ["Branches", "Join", "NoSite", "PASSES", "branch_of", "entry_order", "entry_scope"]
__all__ += ["is_norm", "origins", "same"]

# What passes numbers on as they are; "move" changes which token is where
PASSES = {"shape", "drop", "either", "enter", "out", "item"}
_LINEAR = PASSES | {"move", "add", "scale", "weigh"}
# What changes tokens one by one, and leaves each where it is
_ONE_BY_ONE = frozenset(
    "product clamp tanh sigmoid silu gelu relu mul div where masked_fill nan_to_num pow abs sqrt "
    "layer_norm rms_norm normalize linear add sub neg exp round multiply sum_of".split()
)


class NoSite(Exception):
    """An attention that cannot take the method; the message says why."""


@dataclasses.dataclass(frozen=True)
class Join:
    join: str | None = None
    output: bool = False
    divisor: float = 1.0
    place: int = 0  # in the chain
    carried: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        return (self.join, self.output, self.divisor, self.carried)


class Branches:
    """The graph of a block's forward, and the ways through it."""

    def __init__(self, block: nn.Module, reader: Reader) -> None:
        self.block, self.reader = block, reader
        self.users: dict[Value, list[Value]] = defaultdict(list)
        self.sources: dict[Value, frozenset[Value]] = {}
        for value in reader.values:
            for used in value.inputs:
                self.users[used].append(value)

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

    def followed(self, path: str, branch: Value, x_hat: Value) -> tuple[Value, list[Value], Value]:
        """What a branch goes through, and the residual sum that it ends in."""
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
                required = {same(v) for v in others if same(v).op == "input"}
                if use.op == "add" and any(self.carries(v, stream) for v in others):
                    arrived.append((use, chain))
                elif use.op == "add" and required - self.reader.optional:  # of two, if reversible
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
                if value.op == "out" and calls:  # of a norm that was read into, say
                    read = [e for e in self.reader.entries if e.path == value.module]
                    given = [v for e in read for v in values_in(e.arguments)]
                    line.extend((v, calls - 1) for v in given)
        return {v for v in seen if v.op != "fact"}

    def carries(self, value: Value, stream: set[Value]) -> bool:
        """Whether a value is the residual stream, maybe scaled, moved, or with more added.

        Taken away, as in the attention's output less the stream, it does not count.
        """
        seen, line = {value}, [value]
        for each in line:
            if each in stream:
                return True
            if each.op in _LINEAR and each.number > 0:
                line.extend(v for v in each.inputs if v not in seen)
                seen.update(each.inputs)
        return False

    def join(self, path: str, branch: Value, chain: list[Value], total: Value) -> Join:
        """Where a skip that is to reach `total` as it is joins."""
        changes = [i for i, v in enumerate(chain) if v.op not in PASSES | {"add", "scale", "move"}]
        for value in chain:
            beside = any(not f"{path}.".startswith(f"{inner}.") for inner in value.scope)
            if value.op == "other" and value.key not in _ONE_BY_ONE and not beside:
                what = value.key or "something"
                raise NoSite(f"its branch goes through {what}, {value.line}, which is not known")
        if not changes:
            return Join(divisor=_factor(chain), place=0)
        last = changes[-1]
        rest = list(enumerate(chain))[last + 1 :]
        place = next((i for i, v in rest if v.op == "drop" and v.module and _is_tensor(v)), None)
        if place is not None:
            return self.checked(
                Join(chain[place].module, False, _factor(chain[place:]), place), branch
            )
        if chain[last].op == "call":
            found = Join(chain[last].module, True, _factor(chain[last:]), last + 1)
            return self.checked(found, branch)
        for i, v in rest:
            if v.op == "out" and v.key in (None, 0) and not f"{path}.".startswith(f"{v.module}."):
                return Join(v.module, True, _factor(chain[i:]), i + 1)
        for inner in reversed(total.scope):  # a module that takes the stream and the branch
            if not f"{path}.".startswith(f"{inner}."):
                self.passes(total, inner)
                return Join(inner, True, 1.0, len(chain))
        return self.carried(total, chain)

    def checked(self, join: Join, branch: Value) -> Join:
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
                if use.op in PASSES:
                    line.append(use)
        raise NoSite(f"its branch is scaled in {inner}, which changes the sum as well")

    def carried(self, total: Value, chain: list[Value]) -> Join:
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
                elif use.op in PASSES | {"add"}:
                    if use not in seen:
                        seen.add(use)
                        line.append(use)
                elif use.op != "fact":
                    raise NoSite(
                        f"a parameter scales its branch, with no module behind, {total.line}"
                    )
        if len(readers) != 1 or any(n > 1 for n in readers.values()):
            raise NoSite(f"a parameter scales its branch, with no module behind, {total.line}")
        return Join(next(iter(readers)), False, 1.0, len(chain), returned)

    def first_reader(self, x_hat: Value, path: str) -> tuple[str | None, bool]:
        """The first module in the attention that reads x̂ itself, and whether as channels first."""
        line, moved = [(x_hat, False)], False
        for value, moved in line:
            for use in self.users[value]:
                if use.op == "call" and use.module:
                    module = self.block.get_submodule(use.module)
                    return use.module, _channels_first(module) and not moved
                if use.op in PASSES | {"move"} and f"{path}." in "".join(
                    f"{s}." for s in use.scope
                ):
                    line.append((use, moved or use.op == "move"))
        return None, False


def same(value: Value, until: str | None = None) -> Value:
    """The value before it was passed on as it is; or the one that entered a module."""
    while value.op in ("shape", "either", "enter", "out", "drop") and value.inputs:
        if until is not None and value.op == "enter" and value.module == until:
            return value
        value = value.inputs[0]
    return value


def origins(value: Value) -> set[Value]:
    """Every value that this may be, passed on as it is."""
    seen, line = {value}, [value]
    for each in line:
        if each.op in ("shape", "either", "enter", "out", "drop"):
            line.extend(v for v in each.inputs if v not in seen)
            seen.update(each.inputs)
    return seen


def entry_order(entry: Entry) -> int:
    """When a module is entered, as its place among all that is computed."""
    return min((v.order for v in values_in(entry.arguments)), default=0)


def entry_scope(entry: Entry) -> tuple[str, ...]:
    """The modules around the one that is entered, the outermost first."""
    return next((v.scope[:-1] for v in values_in(entry.arguments)), ())


def branch_of(entry: Entry) -> Value:
    """What a module returns, the first of it where it is several."""
    branch = entry.output
    while isinstance(branch, (tuple, list, dict)) and branch:
        branch = next(iter(branch.values())) if isinstance(branch, dict) else branch[0]
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


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its class's name, with nothing that mixes channels in it."""
    plain = not any(isinstance(m, (nn.Linear, nn.modules.conv._ConvNd)) for m in module.modules())
    return plain and "norm" in class_of(module).__name__.lower()


def _channels_first(module: nn.Module) -> bool:
    kinds = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
    return any(isinstance(m, kinds) for m in (module, *list(module.children())[:1]))
