"""What a VAE family tells the rest of the service, and the base of the families.

A family owns everything that differs between architectures: how latents are denormalized, in which passes they are
decoded, how tiles are cut and put together, and what its pixels mean. It runs diffusers' own decoder modules, or exact
rewrites of them that it only describes (``structure``), and keeps no state of a request: two decodes interleaved on one
model give what each gives alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from decode_service.decoding.rewrites import DecoderStructure
from decode_service.errors import ConfigError
from decode_service.planning.plan import DecodePlan
from decode_service.planning.spec import ModelSpec, StrideTiles
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames, F pixel frames, H height, W width.


class Family(ABC):
    """One loaded VAE decoder.

    Args:
        vae: the diffusers model, in eval mode; only its decoder side is used.
        name: the name under which it is served.
        tiles: tile geometry that overrides the family's own, or None.

    Attributes:
        class_names: diffusers classes that the family decodes.
        structure: the parts of its decoder that exact rewrites may stand in for.
        compiles: whether the decoder can be compiled; where it cannot, it runs eagerly whatever the settings say.
        spec: what planning knows of the model.
        call_decoder: ``vae.decoder``, or a compiled form of it.
    """

    class_names: ClassVar[tuple[str, ...]]
    structure: ClassVar[DecoderStructure] = DecoderStructure()
    compiles: ClassVar[bool] = True

    def __init__(self, vae: nn.Module, name: str, tiles: StrideTiles | None = None) -> None:
        self.vae = vae
        _with_plain_booleans(vae)
        self.config: dict[str, Any] = dict(vae.config)
        self.spec = self.make_spec(name, tiles)
        self.call_decoder: Callable[..., torch.Tensor] = vae.decoder

    @abstractmethod
    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        """Describe the model to planning.

        Raises:
            ConfigError: if ``tiles`` cannot tile this model.
        """

    @abstractmethod
    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """Latents as ``vae.decode`` takes them, from latents as the denoiser produces them.

        The order of operations is that of the family's diffusers pipeline, so that half precision rounds alike.
        """

    @abstractmethod
    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """Pixels (B,C,F,H,W) pass by pass, in frame order, not clamped yet: infinite ones must still be seen.

        Args:
            chunk: latent frames per pass after the first; any value gives the same pixels.
        """

    @abstractmethod
    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        """One tile, all its frames, in the space where tiles are blended: shape ``tile_shape``."""

    @abstractmethod
    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        """Shape of ``decode_tile``, as a function of the latents' shape alone: ranks need not exchange it."""

    @abstractmethod
    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        """Pixels (B,C,F,H,W), not clamped yet, from all tiles: part by part, row by row."""

    def to_unit_range(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels in [-1, 1], from pixels as ``decode`` and ``merge_tiles`` return them."""
        return pixels.clamp(-1.0, 1.0)

    def to_model_range(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels as ``vae.decode`` returns them, from pixels as ``decode`` and ``merge_tiles`` return them."""
        return pixels

    def dtype(self) -> torch.dtype:
        """The dtype that latents are cast to: that of the first module which sees them."""
        first = getattr(self.vae, "post_quant_conv", None)
        return next((first if first is not None else self.vae.decoder).parameters()).dtype


def _with_plain_booleans(vae: nn.Module) -> None:
    """Make numpy booleans on the modules Python's.

    diffusers leaves some where a config's numbers are compared with numpy (both HunyuanVideo 1.5 and HunyuanImage's refiner),
    and ``torch.compile`` fails on guards of them. The values stay what they are.
    """
    for module in vae.modules():
        for name, value in vars(module).items():
            if isinstance(value, np.bool_):
                setattr(module, name, bool(value))


def stride_tiles(given: StrideTiles | None, spatial_ratio: int, class_name: str) -> StrideTiles:
    """The tile geometry of a family with free tiles.

    Raises:
        ConfigError: if the given one does not fit the model.
    """
    tiles = given or StrideTiles()
    problem = tiles.problem(spatial_ratio)
    if problem:
        raise ConfigError(f"policy.tile does not fit {class_name}: {problem}")
    return tiles
