"""Attention layers of a Hugging Face model: their names, kinds and numbers, and its forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel


@contextlib.contextmanager
def switched(model: torch.nn.Module) -> Iterator[None]:
    """Switch the model to Regard's attention, and restore its backend on exit."""
    hosts = _hosts(model)
    before = {id(config): (config, config._attn_implementation) for host in hosts for config in _configs(host.config)}
    from . import hf

    hf.register()
    try:
        for host in hosts:
            if host.config._attn_implementation == "regard":
                continue
            if not host._can_set_attn_implementation():
                raise ValueError(
                    f"model: {type(host).__name__} does not support attention backends; its attention cannot be recorded"
                )
            host.set_attn_implementation("regard")
        yield
    finally:
        for config, implementation in before.values():
            config._attn_implementation_internal = implementation


def _hosts(model: torch.nn.Module) -> list[PreTrainedModel]:
    hosts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not hosts:
        raise TypeError(f"model: expected a PreTrainedModel, or a module that contains one, found {type(model).__name__}")
    return hosts


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and its sub-configurations."""
    yield config
    for name in config.sub_configs:
        inside = getattr(config, name, None)
        if inside is not None:
            yield from _configs(inside)


class Site(NamedTuple):
    kind: str
    layer: int
    name: str


def kind_of(module: torch.nn.Module, name: str, translates: bool) -> str:
    """Kind of attention: `self`, `cross`, `encoder` (of an encoder-decoder), `vision` and `audio` (of a multimodal model)."""
    place = name.lower()
    if getattr(module, "is_cross_attention", False) or any(word in place for word in ("cross", "encdec", "encoder_attn")):
        return "cross"
    if translates and side_of(name) == "encoder":
        return "encoder"
    return "vision" if "vision" in place or "visual" in place else "audio" if "audio" in place else "self"


def side_of(name: str) -> str | None:
    """`encoder` or `decoder`, by the outermost part of the module name."""
    return next((part for part in name.split(".") if part in ("encoder", "decoder")), None)


def slides(module: torch.nn.Module) -> bool:
    """Whether a layer has a sliding-window cache."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is not None and layer is not None:
        return types[layer] != "full_attention"
    return getattr(module, "sliding_window", getattr(config, "sliding_window", None)) is not None


class ModelCalls:
    """The attention calls of a model: hooks count its forward passes, and those of submodels that are called directly."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.translates = bool(_hosts(model)[0].config.is_encoder_decoder)
        self.forward = 0
        """Number of forward passes."""
        self.depth = 0
        """Whether a forward pass is under way: how many modules with hooks are."""
        self.sites: dict[tuple[torch.nn.Module, int], Site] = {}
        self._turns: dict[torch.nn.Module, int] = {}

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        hosts = [module for module in self.names if module is self.model or isinstance(module, PreTrainedModel)]
        handles = [host.register_forward_pre_hook(self.enter, with_kwargs=True) for host in hosts]
        handles += [host.register_forward_hook(self._leave, always_call=True) for host in hosts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self.depth == 0:
            self.forward += 1
            self._turns = {}
        self.depth += 1

    def _leave(self, *_: Any) -> None:
        self.depth -= 1

    def next_site(self, module: torch.nn.Module) -> Site:
        """The layer of the next call of a module: one module may serve several layers."""
        turn = self._turns[module] = self._turns.get(module, -1) + 1
        return self.site(module, turn)

    def site(self, module: torch.nn.Module, turn: int) -> Site:
        """Kind and layer of a module, by its name; cached. One module may serve several layers: `turn` counts its calls."""
        found = self.sites.get((module, turn))
        if found is None:
            name = self.names[module]
            kind = kind_of(module, name, self.translates)
            taken = {site.layer for site in self.sites.values() if site.kind == kind}
            layer = getattr(module, "layer_idx", None)
            if layer is None:
                layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
            if layer in taken:
                layer = max(taken) + 1
            found = self.sites[module, turn] = Site(kind, layer, name)
        return found
