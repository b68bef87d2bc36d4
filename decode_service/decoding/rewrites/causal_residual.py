"""Residual blocks of causal convolutions that keep what these see of the frames before as they take it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from decode_service.decoding.causal_conv3d import ChannelNorm
from decode_service.decoding.rewrites.convolutions import CausalInput
from decode_service.decoding.rewrites.normalization import InPlaceSiLU, PixelRMSNorm
from decode_service.decoding.rewrites.site import ClassSite, Site, random_input
from decode_service.decoding.rewrites.structure import DecoderStructure
from decode_service.decoding.tracing import is_traced

# B batch, C channels, T frames, H height, W width.


class CausalResidual:
    """Wan's residual block, whose caches are what ``continued_conv3d`` makes of them.

    diffusers copies the last frames before the convolution, which puts them together with the next ones later: where ranks share
    a frame, their neighbours' rows would travel with every pass that sees them. Here they are kept with those rows, and the rows
    of new frames alone travel. In eager decodes on the CPU norm and SiLU write to where the convolution takes their result.
    """

    def forward(
        self, x_BCTHW: torch.Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None
    ) -> torch.Tensor:
        block: Any = self
        if feat_cache is None or feat_idx is None:
            output: torch.Tensor = super().forward(x_BCTHW)  # type: ignore[misc]
            return output
        shortcut = block.conv_shortcut(x_BCTHW)
        for norm, conv in ((block.norm1, block.conv1), (block.norm2, block.conv2)):
            slot = feat_idx[0]
            pixel_norm = _pixel_norm(norm, block.nonlinearity, x_BCTHW)
            if pixel_norm is None:
                x_BCTHW = block.nonlinearity(norm(x_BCTHW))
            x_BCTHW, feat_cache[slot] = conv.continued(feat_cache[slot], x_BCTHW, pixel_norm)
            feat_idx[0] += 1
        return x_BCTHW + shortcut


def causal_residual_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    for module in decoder.modules():
        if isinstance(module, structure.residual_blocks) and _fits(module):
            yield ClassSite(module, CausalResidual, [_three_passes])


def _fits(block: Any) -> bool:
    """Whether both convolutions are rewritten and look back, and nothing is dropped."""
    convolutions = (block.conv1, block.conv2)
    rewritten = all(isinstance(conv, CausalInput) and conv.kernel_size[0] > 1 for conv in convolutions)
    return rewritten and (not block.dropout.p or not block.dropout.training)


def _pixel_norm(norm: Any, activation: nn.Module, x_BCTHW: torch.Tensor) -> ChannelNorm | None:
    """What ``norm`` and ``activation`` do to ``x``, where the convolution can do it with its input: in eager decodes on the CPU."""
    known = isinstance(norm, PixelRMSNorm) and isinstance(activation, InPlaceSiLU)
    # Elsewhere the norm needs more memory for itself, and the operand should not be there yet.
    here = x_BCTHW.device.type == "cpu" and not is_traced(x_BCTHW)
    return ChannelNorm(norm.scale, norm.gamma.flatten()) if known and here else None


def _three_passes(module: Any, generator: torch.Generator) -> torch.Tensor:
    # Of one frame, with none before it and with one, and of three, with two.
    cache: list[Any] = [None, None]
    passes = [
        module(random_input(module, (1, module.in_dim, frames, 3, 4), generator), cache, [0]) for frames in (1, 1, 3)
    ]
    return torch.cat(passes, dim=2)
