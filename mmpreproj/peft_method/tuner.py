"""PEFT's tuner for the method: it gives a model its `PreProjLayer`s and takes them away again.

Of PEFT it overrides hooks that are not public; the range of versions that was tested stands in
setup.cfg.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from mmpreproj.architectures import unwrapped
from mmpreproj.attach import is_within, make_preproj, plan_swaps, report, swap_all
from mmpreproj.fingerprint import base_facts, base_parameters, check_base
from mmpreproj.folders import PEFT_PREFIX
from mmpreproj.messages import nearest
from mmpreproj.peft_method.config import AdapterConfigs, PreProjPeftConfig, check_name_is_free
from mmpreproj.peft_method.layer import NO_MERGE, PreProjLayer
from mmpreproj.preproj import PreProj
from mmpreproj.sites import Site, find_sites
from mmpreproj.swap import AttentionSwap, Swapped, swap_back

__all__ = ["PreProjModel"]

# What a PEFT model of some task adds to modules_to_save by itself, whether the model has it or not
TASK_HEADS = ("classifier", "score", "qa_outputs")


class PreProjModel(BaseTuner):
    """What `get_peft_model` makes of a model and a `PreProjPeftConfig`.

    Raises:
        ValueError: before the model is touched, for whatever `mmpreproj.attach` refuses, a second
            `get_peft_model`, and names of adapters or modules_to_save that cannot work.
    """

    prefix = "by_name"  # in the key of every adapter's parameter, and in no other
    tuner_layer_cls = PreProjLayer

    def __init__(
        self,
        model: nn.Module,
        peft_config: PeftConfig | dict[str, PeftConfig],
        adapter_name: str,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, PeftModel):  # LoRA, say: its layers are in the base and stay there
            if model.active_peft_config.is_prompt_learning:
                raise ValueError("a model with a learned prompt cannot carry the method as well")
            model = model.get_base_model()
        # PeftModel hands over a dict; inject_adapter_in_model does not, and may add an adapter
        first = isinstance(peft_config, dict)
        configs = peft_config if first else {adapter_name: peft_config}
        taken = getattr(model, "peft_config", None) or {}
        if _layers(model) and (first or adapter_name in taken):
            raise ValueError(
                "the model carries the method already, from get_peft_model or a load that failed: "
                "use add_adapter or load_adapter of the PeftModel that has it, call its unload(), "
                "or load the base afresh"
            )
        check_name_is_free(taken, adapter_name, configs[adapter_name])
        requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        super().__init__(model, AdapterConfigs(configs), adapter_name, **kwargs)
        self._requires_grad = requires_grad

    # Adding an adapter

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        kwargs.pop("state_dict", None)  # the config says where parameters go, not the keys of some
        config = self.peft_config[adapter_name]
        known = {**self.peft_config, **(getattr(model, "peft_config", None) or {})}
        if config.beside and not _others(known):
            warnings.warn(
                f"the adapter was saved from a model that had {config.beside} beside it, of "
                "another method: load that first, and this one onto it",
                stacklevel=2,
            )
        self._sites = find_sites(model, config.preproj_config())
        _check(model, adapter_name)
        _check_modules_to_save(model, config, self._sites, self._own_adapters())
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        report(model, self._sites)

    def _prepare_adapter_config(
        self, peft_config: PreProjPeftConfig, model_config: dict[str, Any]
    ) -> PreProjPeftConfig:
        return peft_config  # PEFT would fill in target_modules

    def _prepare_model(self, peft_config: PreProjPeftConfig, model: nn.Module) -> None:
        """Make everything that an adapter needs, so that what is refused is refused in here."""
        config = peft_config.preproj_config()
        self._new: dict[str, PreProj | None] = {}
        layers = {}
        for site in self._sites:
            attention = model.get_submodule(site.attention)
            self._new[site.attention] = make_preproj(model, site, config)
            if not isinstance(attention, AttentionSwap):
                layers[site.attention] = PreProjLayer(next(attention.parameters()))
        fresh = [site for site in self._sites if site.attention in layers]
        if peft_config.base is not None:
            check_base(
                *(model, config, self._new.values(), peft_config.base),
                also=_saved_modules(model, peft_config),
                what="the adapter",
                way="give a config whose base = None",
            )
        # skip or not: the next adapter may have one
        self._swaps = plan_swaps(model, fresh, layers, skip=True)

    def _check_target_module_exists(self, peft_config: PreProjPeftConfig, key: str) -> bool:
        return key in self._new

    def _create_and_replace(
        self,
        peft_config: PreProjPeftConfig,
        adapter_name: str,
        target: AttentionSwap,
        *args: Any,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        # All at once, and not before PEFT has seen whether the model has adapters already: it
        # freezes the base only if there are none.
        swap_all(self.model, self._swaps)
        self._swaps = {}
        target.preproj.by_name[adapter_name] = self._new[current_key]
        self._new[current_key] = None

    # Using adapters

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """As PEFT's, but a head that another method trains is left as it is."""
        own = self._own_adapters()
        for module in self.model.modules():
            if isinstance(module, PreProjLayer):
                module.set_adapter(adapter_name, inference_mode=inference_mode)
            elif isinstance(module, AuxiliaryTrainingWrapper) and module._adapters & own:
                name = module.check_set_adapter(adapter_name)
                names = name if name in module._adapters else []
                module.set_adapter(names, inference_mode=inference_mode)
        self.active_adapter = adapter_name

    @contextlib.contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """PEFT drops `adapter_names` unseen where a method does not look at it."""
        if kwargs.get("adapter_names") is not None:
            raise ValueError("adapter_names: every sample of a batch runs the active adapter")
        yield

    def _own_adapters(self) -> set[str]:
        return {n for n, c in self.peft_config.items() if isinstance(c, PreProjPeftConfig)}

    # Taking the method away

    def _check_merge_allowed(self) -> None:
        raise ValueError(NO_MERGE)

    def _unload_and_optionally_merge(self, merge: bool = True, **kwargs: Any) -> nn.Module:
        """The base as it was, `requires_grad` included; adapters of other methods stay."""
        if merge:
            self._check_merge_allowed()
        own = self._own_adapters()
        for path, module in list(self.model.named_modules()):
            if isinstance(module, Swapped):
                swap_back(module)
            elif isinstance(module, ModulesToSaveWrapper) and module._adapters <= own:
                parent, _, name = path.rpartition(".")
                setattr(self.model.get_submodule(parent), name, module.original_module)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._requires_grad.get(name, parameter.requires_grad))
        if own < self.peft_config.keys():
            for name in own:
                del self.peft_config[name]
        elif hasattr(self.model, "peft_config"):
            del self.model.peft_config
        return self.model

    # Files

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: PreProjPeftConfig,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        base = unwrapped(model)
        config.of_model = {
            "base": _base_facts(base, config, adapter_name, state_dict),
            "beside": _others(base.peft_config) or None,
        }
        return {key: state_dict[key] for key in sorted(_keys(model, adapter_name))}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        head, marker, tail = key.rpartition(f".{cls.prefix}.{adapter_name}.")
        if marker:
            return f"{head}.{cls.prefix}.{tail}"
        return super()._remove_adapter_name_from_key(key, adapter_name)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, adapter_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Also refuses what does not fit, where PEFT warns of missing tensors alone."""
        given = {"model": model, "adapter_name": adapter_name, **kwargs}
        named = super()._remap_adapter_state_dict_for_load(**given)
        faults = {
            "missing": _keys(model, adapter_name) - named.keys(),
            "unknown": named.keys() - model.state_dict().keys(),
        }
        told = [f"{fault}: {', '.join(sorted(keys))}" for fault, keys in faults.items() if keys]
        if told:
            raise ValueError(
                f"the saved adapter does not fit this model. Tensors {'; '.join(told)}"
            )
        return named


def _layers(model: nn.Module) -> dict[str, PreProjLayer]:
    return {path: m for path, m in model.named_modules() if isinstance(m, PreProjLayer)}


def _keys(model: nn.Module, adapter_name: str) -> set[str]:
    """The keys of an adapter's parameters in the model's state dict."""
    return {
        f"{path}.{PreProjModel.prefix}.{adapter_name}.{name}"
        for path, layer in _layers(model).items()
        if adapter_name in layer.by_name
        for name, _ in layer.by_name[adapter_name].named_parameters()
    }


def _base_facts(
    model: nn.Module, config: PreProjPeftConfig, adapter_name: str, state: dict[str, Tensor]
) -> dict[str, Any] | None:
    """What is saved of the base; None where its weights are not all at hand."""
    tensors = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in state.items()}
    own = [(name, parameter) for _, name, parameter in base_parameters(model)]
    if any(parameter.is_meta or name not in tensors for name, parameter in own):
        return None
    new = (layer.by_name for layer in _layers(model).values())
    new = [by_name[adapter_name] for by_name in new if adapter_name in by_name]
    also = _saved_modules(model, config)
    return base_facts(model, config.preproj_config(), new, also, tensors)


def _others(configs: Mapping[str, PeftConfig]) -> list[str]:
    """The adapters of other methods."""
    return sorted(n for n, c in configs.items() if not isinstance(c, PreProjPeftConfig))


def _saved_modules(model: nn.Module, config: PreProjPeftConfig) -> list[str]:
    ends = tuple(config.modules_to_save or ())
    return [path for path, _ in model.named_modules() if path.endswith(ends)] if ends else []


def _check(model: nn.Module, adapter_name: str) -> None:
    """Raise ValueError for what `find_sites` does not see, while the model is as it was."""
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise ValueError("this model is compiled: call get_peft_model first, then torch.compile")
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if isinstance(module, AttentionSwap) and not isinstance(module.preproj, PreProjLayer):
            raise ValueError(f"mmpreproj.attach gave {path!r} the method; call mmpreproj.detach")
    names = {name for path in (*modules, *_PARTS) for name in path.split(".")}
    if adapter_name in names and not _is_adapter(adapter_name, modules.values()):
        raise ValueError(
            f"adapter_name={adapter_name!r} is a module's name too, and PEFT would leave that "
            "module out when it saves another adapter; use another name"
        )


_PARTS = ("preproj", PreProjModel.prefix, "up", "down", "skip", "reduce")


def _is_adapter(name: str, modules: Iterable[nn.Module]) -> bool:
    layers = (module for module in modules if isinstance(module, BaseTunerLayer))
    return any(name in layer._get_available_adapters() for layer in layers)


def _check_modules_to_save(
    model: nn.Module, config: PreProjPeftConfig, sites: list[Site], own: set[str]
) -> None:
    modules = dict(model.named_modules())
    for target in config.modules_to_save or ():
        found = [path for path in modules if path.endswith(target)]  # as PEFT matches them
        if not found and target not in TASK_HEADS:
            near = nearest(target, modules, cutoff=0.3)
            raise ValueError(f"modules_to_save: {target!r} matches no module; nearest are {near}")
        for path in found:
            inside = [site.attention for site in sites if is_within(site.attention, path)]
            if inside:
                raise ValueError(
                    f"modules_to_save: {target!r} holds the self-attention {inside[0]!r}"
                )
            others = getattr(modules[path], "_adapters", own) - own
            if isinstance(modules[path], ModulesToSaveWrapper) and others:
                raise ValueError(
                    f"modules_to_save: {path!r} is trained by {sorted(others)} already"
                )
