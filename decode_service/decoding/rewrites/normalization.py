"""Norms and the activations after them, in fewer passes over memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from decode_service.decoding.pixel_norm import pixel_rms_norm
from decode_service.decoding.rewrites.site import ClassSite, Site, random_input
from decode_service.decoding.rewrites.structure import DecoderStructure


class PixelRMSNorm:
    """An RMS norm over channels by ``pixel_rms_norm``."""

    scale: float
    gamma: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pixel_rms_norm(x, self.scale, self.gamma.flatten())


class InPlaceSiLU:
    """A SiLU that writes over its input, which a norm has just made and nobody else holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x, inplace=True)


def norm_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    for module in decoder.modules():
        if isinstance(module, structure.rms_norms) and _is_plain(module):
            yield ClassSite(module, PixelRMSNorm, [_normalize])
        for activation in structure.activations:
            silu = getattr(module, activation.attribute, None) if isinstance(module, activation.module) else None
            if type(silu) is nn.SiLU:
                yield ClassSite(silu, InPlaceSiLU, [_activate])


def _is_plain(norm: Any) -> bool:
    return bool(norm.channel_first) and not isinstance(norm.bias, torch.Tensor) and not norm.bias


def _normalize(module: Any, generator: torch.Generator) -> torch.Tensor:
    # gamma has one dimension for every dimension of the input after the batch.
    shape = (1, module.gamma.shape[0], *(2, 5, 6)[4 - module.gamma.dim() :])
    x = random_input(module, shape, generator)
    # A position whose channels are all zero has no direction: the norm leaves it zero.
    x[..., 0] = 0
    output: torch.Tensor = module(x)
    return output


def _activate(module: nn.Module, generator: torch.Generator) -> torch.Tensor:
    output: torch.Tensor = module(torch.randn((2, 3, 4), generator=generator))
    return output
