"""Norms and the activations after them, in fewer passes over memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from decode_service.decoding.group_norm import group_moments, normalize_groups
from decode_service.decoding.pixel_norm import pixel_rms_norm
from decode_service.decoding.rewrites.site import ClassSite, Site, random_input
from decode_service.decoding.rewrites.structure import DecoderStructure
from decode_service.decoding.sharding import ShardedFrame


class PixelRMSNorm:
    """An RMS norm over channels by ``pixel_rms_norm``."""

    scale: float
    gamma: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pixel_rms_norm(x, self.scale, self.gamma.flatten())


class ChannelsLastGroupNorm:
    """A group norm that reads channels-last memory twice, statistics first.

    torch's own kernel takes twice as long on it where weights are in half precision, and sums squares before it subtracts
    the mean, which rounds two to four times worse.
    """

    num_groups: int
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
        plain = last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last)
        if plain or torch.compiler.is_compiling() or ShardedFrame.is_active():
            output: torch.Tensor = super().forward(x)  # type: ignore[misc]
            return output
        return normalize_groups(x, *group_moments(x, self.num_groups), self.weight, self.bias, self.eps)


class InPlaceResidual:
    """diffusers' residual block whose sum is written over what its last convolution made, and not divided by one."""

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        block: Any = self
        if temb is not None or args or kwargs:
            return super().forward(input_tensor, temb, *args, **kwargs)  # type: ignore[misc]
        hidden = block.conv1(block.nonlinearity(block.norm1(input_tensor)))
        hidden = block.conv2(block.nonlinearity(block.norm2(hidden)))
        if block.conv_shortcut is not None:
            input_tensor = block.conv_shortcut(input_tensor)
        return hidden.add_(input_tensor)


class InPlaceSiLU:
    """A SiLU that writes over its input, which a norm has just made and nobody else holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x, inplace=True)


def norm_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    for module in decoder.modules():
        if isinstance(module, structure.rms_norms) and _is_plain(module):
            yield ClassSite(module, PixelRMSNorm, [_normalize])
        if type(module) is nn.GroupNorm and module.affine:
            yield ClassSite(module, ChannelsLastGroupNorm, [_normalize_groups])
        for activation in structure.activations:
            silu = getattr(module, activation.attribute, None) if isinstance(module, activation.module) else None
            if type(silu) is nn.SiLU:
                yield ClassSite(silu, InPlaceSiLU, [_activate])


def residual_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    for module in decoder.modules():
        if type(module) is ResnetBlock2D and _is_unconditional(module):
            yield ClassSite(module, InPlaceResidual, [_add])


def _is_unconditional(block: Any) -> bool:
    """Whether a residual block is two norms, activations and convolutions, and a sum."""
    plain = block.time_emb_proj is None and block.upsample is None and block.downsample is None
    return (
        plain
        and block.time_embedding_norm in ("default", "group")
        and block.output_scale_factor == 1
        and not block.dropout.p
    )


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


def _normalize_groups(module: Any, generator: torch.Generator) -> torch.Tensor:
    x = random_input(module, (2, module.num_channels, 5, 6), generator)
    output: torch.Tensor = module(x.to(memory_format=torch.channels_last))
    return output


def _add(module: Any, generator: torch.Generator) -> torch.Tensor:
    output: torch.Tensor = module(random_input(module, (1, module.in_channels, 4, 5), generator), None)
    return output
