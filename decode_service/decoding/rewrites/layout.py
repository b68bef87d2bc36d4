"""channels_last: weights stored so that convolutions take and give activations with the channels next to each other.

A convolution decides by its input's and its weight's layout, so one channels-last weight makes the chain after it channels
last, too; norms, activations, upsampling and sums of such tensors keep it. oneDNN's bfloat16 kernels for AMX work in
this layout and copied every input and output before (2 to 4 times the time of the convolution itself). In float32 they took 0.72
to 1.0 of the time on the same shapes, but decoders come out less exact (``DecoderStructure.keeps_channels_last``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from decode_service.decoding.rewrites.site import ClassSite, Site
from decode_service.decoding.rewrites.structure import DecoderStructure

# B batch, C channels, T frames, H height, W width.

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class _WeightLayout(Site):
    """The weight of a convolution in channels-last memory: the same numbers."""

    def __init__(self, conv: nn.Conv2d | nn.Conv3d) -> None:
        self._conv = conv
        self._original = conv.weight.data

    def install(self) -> None:
        # Convolutions keep their weight as a parameter: what lists or casts parameters still finds it.
        weight = self._conv.weight
        weight.data = weight.data.contiguous(memory_format=_FORMATS[weight.dim()])

    def undo(self) -> None:
        self._conv.weight.data = self._original

    def outputs(self, generator: torch.Generator) -> list[torch.Tensor]:
        # A corner says enough of numbers that are only moved, and weights are large.
        return [self._conv.weight.data[:32, :32]]


class ChannelDuplication:
    """Wan's ``DupUp3D`` with its result channels last: channels repeated, then dealt out to frames, rows and columns."""

    factor_t: int
    factor_s: int
    out_channels: int
    repeats: int

    def forward(self, x_BCTHW: torch.Tensor, first_chunk: bool = False) -> torch.Tensor:
        batch, _, frames, height, width = x_BCTHW.shape
        x = x_BCTHW.permute(0, 2, 3, 4, 1).unsqueeze(-1).expand(-1, -1, -1, -1, -1, self.repeats)
        x = x.reshape(
            batch, frames, height, width, self.out_channels, self.factor_t, self.factor_s, self.factor_s
        ).permute(0, 1, 5, 2, 6, 3, 7, 4)
        x = x.reshape(
            batch, frames * self.factor_t, height * self.factor_s, width * self.factor_s, self.out_channels
        ).permute(0, 4, 1, 2, 3)
        return x[:, :, self.factor_t - 1 :] if first_chunk else x


def layout_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    if not structure.keeps_channels_last(next(decoder.parameters()).dtype):
        return
    for module in decoder.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            yield _WeightLayout(module)
        elif isinstance(module, structure.duplications):
            yield ClassSite(module, ChannelDuplication, [_duplicate])


def _duplicate(module: nn.Module, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn((1, module.in_channels, 2, 3, 4), generator=generator)  # type: ignore[arg-type]
    outputs = [module(x), module(x, first_chunk=True)]
    return torch.cat(outputs, dim=2)
