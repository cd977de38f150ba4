"""Finding the self-attentions of a model, and where their skips join the residual stream.

Each block's own forward says both: `mmpreproj.blocks` reads it off its source. The few blocks that
cannot be read stand in `mmpreproj.architectures`; paths that the user gave are found here as well.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from torch import nn

from mmpreproj.architectures import (
    Found,
    Left,
    Site,
    class_name,
    known_stack,
    rules_of,
    starred,
)
from mmpreproj.blocks import NoSite, mentions_attention, read_block
from mmpreproj.by_hand import by_hand
from mmpreproj.messages import listed, nearest
from mmpreproj.mlps import read_mlp
from mmpreproj.preproj import PreProjConfig
from mmpreproj.values import class_of

__all__ = ["Found", "Site", "block_sites", "chosen", "find", "find_sites", "starred", "survey"]


def find_sites(model: nn.Module, config: PreProjConfig) -> list[Site]:
    """The self-attentions of `model` that `config` asks for, in order of execution.

    Raises:
        ValueError: if no attention can take the method, a path matches nothing, or `config.layers`
            names a block that does not exist.
    """
    return chosen(find(model, config), config)


def find(model: nn.Module, config: PreProjConfig) -> Found:
    """Every self-attention of `model`. Raises as `find_sites`."""
    part = model
    if config.within is not None:
        part = dict(model.named_modules()).get(config.within)
        if part is None:
            near = nearest(config.within, dict(model.named_modules()), cutoff=0.3)
            raise ValueError(f"within={config.within!r} is no module; the nearest are {near}")
    if config.attention is not None:
        found = by_hand(part, config)
    else:
        found = survey(part)
        if not found.stacks:
            raise ValueError(_nothing(part, found))
    if config.sites != "attention":
        modules = dict(part.named_modules())
        for blocks in found.stacks.values():
            found.mlps.update({p: _mlp_of(p, held, modules) for p, held in blocks.items() if held})
    return found if config.within is None else found.under(f"{config.within}.")


def _mlp_of(path: str, sites: list[Site], modules: dict[str, nn.Module]) -> Site | Left:
    """The MLP of the block at a path, which has these self-attentions, or why there is none."""
    left = Left(path, "its MLP cannot be found")
    for around in dict.fromkeys((path, sites[0].block)):
        try:
            mlp = read_mlp(modules[around]).under(f"{around}." if around else "")
        except NoSite as error:
            left = Left(path, str(error))
        else:
            if _in(mlp.attention, path):
                return dataclasses.replace(mlp, rank=len(sites))
    return left


def chosen(found: Found, config: PreProjConfig) -> list[Site]:
    """The sites of the blocks that `config.layers` asks for, MLPs behind their attentions.

    Raises:
        ValueError: as `find_sites`, also if the MLP of such a block cannot take the pre-projection.
    """
    sites: list[Site] = []
    by_stack = config.layers if isinstance(config.layers, dict) else None
    unknown = [stack for stack in by_stack or () if stack not in found.stacks]
    if unknown:
        raise ValueError(f"layers: {unknown[0]!r} is no stack; they are {list(found.stacks)}")
    for stack, blocks in found.stacks.items():
        if by_stack is not None and stack not in by_stack:
            continue
        layers = config.layers if by_stack is None else by_stack[stack]
        in_order, paths = list(blocks.values()), list(blocks)
        for index in _chosen(layers, len(in_order)):
            if not in_order[index] and layers is not None:
                having = [i for i, block in enumerate(in_order) if block]
                raise ValueError(
                    f"layers={list(layers)}: block {index} of {stack!r} has no "
                    f"self-attention; those that have one are {listed(having, 40)}"
                )
            sites.extend(_of_block(in_order[index], found.mlps.get(paths[index]), config))
    return sites


def _of_block(sites: list[Site], mlp: Site | Left | None, config: PreProjConfig) -> list[Site]:
    """The sites of a block that `config.sites` asks for."""
    if config.sites == "attention" or not sites:
        return sites
    if not isinstance(mlp, Site):
        raise ValueError(
            f"sites={config.sites!r}: {mlp.why} (block {mlp.attention!r}). Leave such blocks out "
            "with layers=, or use sites='attention'"
        )
    return [*(sites if config.at(mlp=False).enabled else ()), mlp]


def block_sites(block: nn.Module, config: PreProjConfig) -> list[Site]:
    """The sites of one block, with paths relative to it. Raises as `find_sites`."""
    rules, left = _rules(block, [path for path in _mentioned(block) if path])
    if not rules:
        raise ValueError(_nothing(block, Found(left=left)))
    sites = [dataclasses.replace(rule, rank=rank) for rank, rule in enumerate(rules)]
    plain = config.sites == "attention"
    return _of_block(sites, None if plain else _mlp_of("", sites, {"": block}), config)


def survey(model: nn.Module) -> Found:
    """Every self-attention that can take the method, by stack and block, and what is left out."""
    known = known_stack(model)
    if known is not None:
        names = [f"{known.stack}.{name}" for name in model.get_submodule(known.stack)._modules]
        return Found({known.stack: {n: [known.site.under(f"{n}.")] for n in names}})
    modules = dict(model.named_modules())
    mentioned = _mentioned(model)
    leaves = [p for p, q in zip(mentioned, [*mentioned[1:], "-"], strict=False) if not _in(q, p)]
    tried: dict[str, tuple[list[Site], list[Left]]] = {}
    left: dict[str, Left] = {}
    sites: dict[str, Site] = {}
    for leaf in leaves:
        for path in _blocks_around(leaf, modules):
            if path not in tried:
                tried[path] = _read(path, modules, mentioned)
            here, missed = tried[path]
            if any(_in(leaf, site.attention) for site in here):
                sites.update((site.attention, site) for site in here)
                break
            for each in missed:
                if _in(leaf, each.attention):
                    left.setdefault(each.attention, each)
    for path, module in modules.items():
        if rules_of(module) is not None and path not in tried:
            sites.update((site.attention, site) for site in _read(path, modules, mentioned)[0])
    for leaf in leaves:
        named = re.search("att", class_of(modules[leaf]).__name__, re.IGNORECASE)
        if named and not any(_in(leaf, path) or _in(path, leaf) for path in (*sites, *left)):
            left[leaf] = Left(leaf, "it has no softmax over products of queries and keys")
    found = Found(left=[each for p, each in left.items() if not any(_in(p, s) for s in sites)])
    order = {path: index for index, path in enumerate(modules)}
    layers: dict[str, list[Site]] = {}
    for site in sites.values():
        layers.setdefault(_layer(site, modules), []).append(site)
    for layer in sorted(layers, key=order.__getitem__):
        stack, _, name = layer.rpartition(".")
        held = found.stacks.setdefault(stack, {})
        if name.isdigit() and not held:
            held.update({f"{stack}.{n}".lstrip("."): [] for n in modules[stack]._modules})
        held[layer] = sorted(layers[layer], key=lambda site: site.rank)
    for stack, held in found.stacks.items():
        bare = {p: class_name(type(modules[p])) for p, inner in held.items() if not inner}
        if bare:
            found.without[stack] = bare
    return found


def _read(
    path: str, modules: dict[str, nn.Module], mentioned: list[str]
) -> tuple[list[Site], list[Left]]:
    """The sites in the block at a path, and what is left out there, with qualified paths."""
    block, prefix = modules[path], f"{path}." if path else ""
    inner = [m.removeprefix(prefix) for m in mentioned if _in(m, path) and m != path]
    rules, left = _rules(block, inner)
    sites = [dataclasses.replace(rule.under(prefix), rank=rank) for rank, rule in enumerate(rules)]
    # read in the model's own forward, a site may still be whole within one of its blocks
    for i, site in enumerate(sites):
        layer = _layer(site, modules)
        paths = [p for p in (site.join, site.norm) if p is not None]
        if (
            site.block == path
            and _in(layer, path)
            and not site.carried
            and all(_in(p, layer) for p in paths)
        ):
            sites[i] = dataclasses.replace(site, block=layer)
    return sites, [Left(prefix + each.attention, each.why) for each in left]


def _layer(site: Site, modules: dict[str, nn.Module]) -> str:
    """The element of a stack of blocks that a site is in, or else its block."""
    around = site.attention.rpartition(".")[0]
    while around:
        if _is_numbered(around, modules):
            return around
        around = around.rpartition(".")[0]
    return site.block


def _rules(block: nn.Module, inner: list[str]) -> tuple[list[Site], list[Left]]:
    rules = rules_of(block)
    return (list(rules), []) if rules is not None else read_block(block, inner)


def _mentioned(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if mentions_attention(module)]


def _in(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}.") or parent == ""


def _blocks_around(path: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """The modules that may be the block of an attention, the likeliest first."""
    parents = []
    while path:
        path, _, name = path.rpartition(".")
        parents.append(path)
    numbered = [p for p in parents if _is_numbered(p, modules)]
    # the innermost element of a stack of blocks, or else the modules right around the attention
    yield from numbered[:2] or [p for p in parents if not _is_list(modules[p])][:2]


def _is_list(module: nn.Module) -> bool:
    """Whether a module only holds others."""
    return isinstance(module, nn.Sequential) or class_of(module).forward is nn.Module.forward


def _is_numbered(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module is an element of a stack of blocks, not of a list of a block's parts."""
    stack, _, name = path.rpartition(".")
    if not name.isdigit():
        return False
    classes = [type(child) for child in modules[stack].children()]
    distinct = len(classes) > 1 and len(set(classes)) == len(classes)
    owner, _, number = stack.rpartition(".")[0].rpartition(".")
    if distinct and number.isdigit():
        return len({type(child) for child in modules[owner].children()}) != 1
    return True


def _chosen(layers: tuple[int, ...] | None, depth: int) -> list[int]:
    """Block numbers from 0, ascending. Raises ValueError on a wrong one, or one named twice."""
    if layers is None:
        return list(range(depth))
    wrong = [layer for layer in layers if not -depth <= layer < depth]
    if wrong:
        raise ValueError(
            f"layers={list(layers)}: there is no block {wrong[0]} in a stack of {depth}; "
            f"use 0 to {depth - 1}, or -{depth} to -1 from the end"
        )
    chosen = sorted({layer % depth for layer in layers})
    if len(chosen) < len(layers):
        raise ValueError(f"layers={list(layers)} names a block of this stack of {depth} twice")
    return chosen


def _nothing(model: nn.Module, found: Found) -> str:
    """What to say of a model without a self-attention that can take the method."""
    why = "; ".join(dict.fromkeys(f"{starred(each.attention)}: {each.why}" for each in found.left))
    blocks = sorted(set(_repeated_classes(model)) or {class_name(type(model))})
    reason = f" What looks like attention is left out ({why})." if why else ""
    return (
        f"{type(model).__name__} has no transformer block that is known here, or whose "
        f"self-attention can be read off its forward.{reason} Its repeated blocks are "
        f"{', '.join(blocks)}. Give the paths by hand: "
        "PreProjConfig(attention='path.to.blocks.*.attn', join=None or the module behind the "
        "branch's scale, such as 'path.to.blocks.*.drop_path1')"
    )


def _repeated_classes(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            classes = {class_name(type(child)) for child in module}
            if len(classes) == 1 and any(module[0].children()):
                yield classes.pop()
