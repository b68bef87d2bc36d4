"""What a family says of its decoder, so that exact rewrites find the modules they can stand in for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class SpatialPadding:
    """How a convolution pads its frames: in the order of ``F.pad``, and by which of its modes."""

    left: int
    right: int
    top: int
    bottom: int
    mode: str = "constant"

    @property
    def by_convolution(self) -> bool:
        """Whether ``F.conv2d`` can pad so by itself."""
        return self.mode == "constant" and self.left == self.right and self.top == self.bottom


@dataclass(frozen=True, slots=True)
class CausalConvolution:
    """A module that convolves frames with those before them.

    Attributes:
        module: its class.
        front: what stands before the first frame: ``zeros``, or the first frame again (``repeat``).
        padding: how the module pads in space, whether by itself or by its convolution.
        convolution: the attribute that holds its convolution, 3-D or (for single frames only) 2-D; empty where the module is
            one itself.
        takes_cache: whether ``forward(x, cache)`` takes the frames before ``x``; without, they are what ``front`` says.
    """

    module: type[nn.Module]
    front: Literal["zeros", "repeat"]
    padding: Callable[[Any], SpatialPadding]
    convolution: str = ""
    takes_cache: bool = False

    def conv(self, module: nn.Module) -> nn.Conv2d | nn.Conv3d:
        """The convolution of ``module``."""
        convolution = module.get_submodule(self.convolution)
        assert isinstance(convolution, (nn.Conv2d, nn.Conv3d))
        return convolution


@dataclass(frozen=True, slots=True)
class Activation:
    """A module's activation that only ever sees what a norm of the same module has just made.

    Attributes:
        module: class of the module that has it.
        attribute: its name there.
        norms: names of the norms there whose output goes into it, and nowhere else.
    """

    module: type[nn.Module]
    attribute: str
    norms: tuple[str, ...] = ("norm1", "norm2")


@dataclass(frozen=True, slots=True)
class DecoderStructure:
    """The parts of a decoder that rewrites need to be told of; what they recognise by itself is not listed.

    Attributes:
        causal_convolutions: its causal convolutions.
        rms_norms: classes that compute ``F.normalize(x, dim=1) * scale * gamma + bias``, with these attribute names.
        activations: SiLUs that may write over their input.
        duplications: classes that repeat channels into frames, rows and columns, as Wan's ``DupUp3D``.
        residual_blocks: classes that give either of their causal convolutions a place in a list of caches, as ``WanResidualBlock``
            does: ``forward(x, feat_cache, feat_idx)``.
        channels_last: whether its activations can stay channels last from the first convolution to the last.
    """

    causal_convolutions: tuple[CausalConvolution, ...] = ()
    rms_norms: tuple[type[nn.Module], ...] = ()
    activations: tuple[Activation, ...] = ()
    duplications: tuple[type[nn.Module], ...] = ()
    residual_blocks: tuple[type[nn.Module], ...] = ()
    channels_last: bool = False

    def keeps_channels_last(self, dtype: torch.dtype) -> bool:
        """Whether a decoder whose weights are of ``dtype`` should be channels last: not in float32.

        oneDNN's float32 kernels for that layout round worse. With random weights FLUX.1's decoder was 1.6e-5 off float64 and
        Wan 2.1's 0.9e-5, and 0.5e-5 in the other layout, where 1e-5 is all that may be off.
        """
        return self.channels_last and dtype != torch.float32
