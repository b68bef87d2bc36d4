"""Which rewrites a loaded model runs with: found by structure, checked on its weights, reported by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from decode_service.decoding.rewrites.causal_residual import causal_residual_sites
from decode_service.decoding.rewrites.convolutions import causal_input_sites, one_frame_sites
from decode_service.decoding.rewrites.layout import layout_sites
from decode_service.decoding.rewrites.normalization import fused_sites, norm_sites, residual_sites
from decode_service.decoding.rewrites.packing import packing_sites
from decode_service.decoding.rewrites.site import Site
from decode_service.decoding.rewrites.structure import DecoderStructure
from decode_service.decoding.rewrites.upsampling import upsample_sites

logger = logging.getLogger(__name__)

#: Largest difference between a rewrite and what it stands in for, relative to the largest output: some roundings of a
#: product of a few hundred terms.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What became of one rewrite on one model.

    Attributes:
        name: as in the config.
        active: whether the model runs with it.
        modules: how many modules it stands in for.
        reason: why it is off; empty where it is on.
    """

    name: str
    active: bool
    modules: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Kind:
    sites: Callable[[nn.Module, DecoderStructure], Iterator[Site]]
    cpu_only: bool = False
    half_only: bool = False
    # What stands for it on CUDA, in half precision, where it is another thing there.
    on_cuda: Callable[[nn.Module, DecoderStructure], Iterator[Site]] | None = None


# In this order: later ones stand before earlier ones where both concern a module.
_KINDS: dict[str, _Kind] = {
    "channels_last": _Kind(layout_sites, half_only=True),
    "causal_input": _Kind(causal_input_sites),
    "one_frame_conv2d": _Kind(one_frame_sites),
    "causal_residual": _Kind(causal_residual_sites),
    "upsample_conv": _Kind(upsample_sites, cpu_only=True),
    "norm_activation": _Kind(norm_sites, on_cuda=fused_sites),
    "residual": _Kind(residual_sites),
    "packed_weights": _Kind(packing_sites, cpu_only=True),
}

#: All rewrites.
NAMES = tuple(_KINDS)


def apply_rewrites(
    vae: nn.Module,
    structure: DecoderStructure,
    *,
    enabled: Collection[str] = NAMES,
    declined: Mapping[str, str] | None = None,
) -> tuple[Rewrite, ...]:
    """Put the ``enabled`` rewrites into the decoder side of ``vae``, which is on its device in its dtype already.

    A rewrite is on for all the modules it fits or for none: one that differs on any of them is taken back everywhere.

    Args:
        declined: why rewrites that are enabled stay off on this machine, by name.
    """
    return tuple(
        Rewrite(name, False, 0, declined[name])
        if declined and name in declined and name in enabled
        else _apply(name, kind, vae, structure, name in enabled)
        for name, kind in _KINDS.items()
    )


def _apply(name: str, kind: _Kind, vae: nn.Module, structure: DecoderStructure, enabled: bool) -> Rewrite:
    if not enabled:
        return Rewrite(name, False, 0, "switched off in the config")
    device, dtype = next(vae.parameters()).device, next(vae.parameters()).dtype
    if kind.half_only and dtype == torch.float32:
        return Rewrite(name, False, 0, "in float32 its kernels round worse; half precision has it")
    if kind.cpu_only and device.type != "cpu":
        return Rewrite(name, False, 0, f"measured to be faster on CPUs only, and this model is on {device.type}")
    sites = kind.sites
    if kind.on_cuda is not None and device.type == "cuda":
        sites = kind.on_cuda
        if dtype == torch.float32:
            return Rewrite(
                name, False, 0, "on CUDA it is for channels-last memory, which decoders in float32 do not have"
            )
    installed: list[Site] = []
    try:
        with torch.no_grad():
            for site in sites(vae, structure):
                before = site.outputs(_numbers())
                site.install()
                installed.append(site)
                _compare(before, site.outputs(_numbers()))
    except Exception as error:  # noqa: BLE001 - whatever a rewrite fails with, the model's own modules decode
        for site in reversed(installed):
            site.undo()
        reason = f"it differs from the modules it would stand in for, or fails: {type(error).__name__}: {error}"
        logger.warning("rewrite %s is off for this model: %s", name, reason)
        return Rewrite(name, False, 0, reason)
    if not installed:
        return Rewrite(name, False, 0, "this decoder has no module that it fits in this dtype")
    return Rewrite(name, True, len(installed), "")


def _numbers() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _compare(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    for expected, got in zip(before, after, strict=True):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise ValueError(f"{got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}")
        scale = expected.abs().max().float().clamp_min(1e-30).item()
        difference = (got.float() - expected.float()).abs().max().item() / scale
        # Not a number is not within the tolerance either.
        if not difference <= TOLERANCES[expected.dtype]:
            raise ValueError(f"its output is off by {difference:.1e} of the largest")
