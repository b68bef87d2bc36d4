"""Norms and the activations after them, in fewer passes over memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from decode_service.decoding.group_norm import group_moments, normalize_groups
from decode_service.decoding.norm_activation import fuses, group_norm_silu, rms_norm_silu, silu_over
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

    torch's own kernel takes twice as long on it where weights are in half precision. In float32 decoders keep the other
    layout, to which torch's kernel brings back what an attention has turned.
    """

    num_groups: int
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
        plain = last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last)
        if plain or x.dtype == torch.float32 or torch.compiler.is_compiling() or ShardedFrame.is_active():
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
        return silu_over(x)


def norm_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    for module in decoder.modules():
        if isinstance(module, structure.rms_norms) and _is_plain(module):
            yield ClassSite(module, PixelRMSNorm, [_normalize])
        if type(module) is nn.GroupNorm and module.affine and module.weight.dtype != torch.float32:
            yield ClassSite(module, ChannelsLastGroupNorm, [_normalize_groups])
        for activation in structure.activations:
            silu = getattr(module, activation.attribute, None) if isinstance(module, activation.module) else None
            if type(silu) is nn.SiLU:
                yield ClassSite(silu, InPlaceSiLU, [_activate])


class FusedNorm:
    """A norm that does the work of the SiLU after it, and says so on what it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not fuses(x):
            output: torch.Tensor = super().forward(x)  # type: ignore[misc]
            return output
        norm: Any = self
        if isinstance(self, nn.GroupNorm):
            activated = group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
        else:
            activated = rms_norm_silu(x, norm.scale, norm.gamma.flatten())
        setattr(activated, _ACTIVATED, True)
        return activated


class PassedSiLU:
    """A SiLU that lets pass what a ``FusedNorm`` has activated already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and getattr(x, _ACTIVATED, False):
            delattr(x, _ACTIVATED)
            return x
        return silu_over(x)


#: What a tensor that a ``FusedNorm`` made is marked with until its SiLU has seen it. The mark belongs to the tensor, so requests
#: cannot disturb each other, and a norm that did not fuse (another layout, the compiler) is followed by the SiLU as ever.
_ACTIVATED = "_decode_service_activated"


class _FusedSite(Site):
    """An activation and the norms before it, together: a norm alone gives something else than before."""

    def __init__(self, norms: Sequence[Any], silu: nn.Module) -> None:
        self._norms, self._silu = norms, silu
        self._parts = [ClassSite(norm, FusedNorm, []) for norm in norms] + [ClassSite(silu, PassedSiLU, [])]

    def install(self) -> None:
        for part in self._parts:
            part.install()

    def undo(self) -> None:
        for part in self._parts:
            part.undo()

    def outputs(self, generator: torch.Generator) -> list[torch.Tensor]:
        found = [_activate(self._silu, generator)]
        for norm in self._norms:
            grouped = isinstance(norm, nn.GroupNorm)
            channels, video = (
                norm.num_channels if grouped else norm.gamma.shape[0],
                not grouped and norm.gamma.dim() == 4,
            )
            x = random_input(norm, (2, channels, *((3, 5, 6) if video else (5, 6))), generator)
            for memory in (torch.channels_last_3d if video else torch.channels_last, torch.contiguous_format):
                found.append(self._silu(norm(x.contiguous(memory_format=memory))))
        return found


def fused_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    """Activations with the norms before them, in decoders that keep their channels last: as one pass over memory."""
    if not structure.keeps_channels_last(next(decoder.parameters()).dtype):
        return
    for module in decoder.modules():
        for activation in structure.activations:
            silu = getattr(module, activation.attribute, None) if isinstance(module, activation.module) else None
            if type(silu) is not nn.SiLU or getattr(module, "time_embedding_norm", "default") == "scale_shift":
                continue
            norms = [getattr(module, name, None) for name in activation.norms]
            fitting = [norm for norm in norms if norm is not None and _can_fuse(norm, structure)]
            if fitting:
                yield _FusedSite(fitting, silu)


def _can_fuse(norm: nn.Module, structure: DecoderStructure) -> bool:
    if type(norm) is nn.GroupNorm:
        return norm.affine
    return isinstance(norm, structure.rms_norms) and _is_plain(norm)


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
