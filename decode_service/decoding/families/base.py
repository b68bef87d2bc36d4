"""What a VAE family tells the rest of the service, and the base of the families.

A family owns everything that differs between architectures: how latents are denormalized, in which passes they are
decoded, how tiles are cut and put together, and what its pixels mean. It runs diffusers' own decoder modules, or exact
rewrites of them that it only describes (``structure``), and keeps no state of a request: two decodes interleaved on one
model give what each gives alone.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self

import numpy as np
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
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
        serves: the models that people know it by.
        tile_geometry: whose tiles its tiles are, where they are not those of diffusers for the class.
        structure: the parts of its decoder that exact rewrites may stand in for.
        compiles: whether the decoder can be compiled; where it cannot, it runs eagerly whatever the settings say.
        eager_reason: why not, for people.
        spec: what planning knows of the model.
        timestep: what a decoder with timestep conditioning is given.
        call_decoder: ``vae.decoder``, or a compiled form of it.
    """

    class_names: ClassVar[tuple[str, ...]]
    serves: ClassVar[str]
    tile_geometry: ClassVar[str] = "diffusers"
    structure: ClassVar[DecoderStructure] = DecoderStructure()
    compiles: ClassVar[bool] = True
    eager_reason: ClassVar[str] = "this family's decoder keeps state that torch.compile cannot follow; it runs eagerly"
    timestep: float = 0.0

    def __init__(self, vae: nn.Module, name: str, tiles: StrideTiles | None = None) -> None:
        self.vae = vae
        _with_plain_booleans(vae)
        _with_one_attention_function(vae)
        self.config: dict[str, Any] = dict(vae.config)
        self.spec = dataclasses.replace(self.make_spec(name, tiles), tile_difference=what_a_tile_misses(vae.decoder))
        self.call_decoder: Callable[..., torch.Tensor] = vae.decoder

    @classmethod
    def building(cls) -> AbstractContextManager[None]:
        """A context in which diffusers makes the model; families enter it to leave out what only encoding needs.

        It may change diffusers for the whole process, so that it must not be entered twice at once.
        """
        return nullcontext()

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

    def conditioned(self, timestep: float) -> Self:
        """The same family, sharing everything with this one, whose decoder is given ``timestep``."""
        twin = copy.copy(self)
        twin.timestep = timestep
        return twin

    def noised(
        self, latents_BCTHW: torch.Tensor, noise_BCTHW: torch.Tensor, scale: float, *, denormalize: bool
    ) -> torch.Tensor:
        """Latents as ``vae.decode`` takes them with noise of weight ``scale`` mixed in, in the order of ``LTXPipeline``.

        Args:
            denormalize: whether the latents are as the denoiser produces them.
        """
        raw_BCTHW = self.denormalize(latents_BCTHW) if denormalize else latents_BCTHW
        return mixed(raw_BCTHW, noise_BCTHW, scale)

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

    def statistics(self) -> dict[str, Any]:
        """What ``denormalize`` uses, as plain numbers."""
        keys = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
        return {key: self.config[key] for key in keys if self.config.get(key) is not None}

    def denormalization(self) -> str:
        """What ``denormalize`` does with them, in words."""
        return inspect.getdoc(self.denormalize) or ""

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


def mixed(latents_BCTHW: torch.Tensor, noise_BCTHW: torch.Tensor, scale: float) -> torch.Tensor:
    """``(1 - scale) * latents + scale * noise``, rounded as the LTX pipelines do: the weight has the latents' dtype."""
    weight = latents_BCTHW.new_full((1, 1, 1, 1, 1), scale)
    return (1 - weight) * latents_BCTHW + weight * noise_BCTHW


def what_a_tile_misses(decoder: nn.Module) -> str:
    """Why the pixels of one tile are not those of the undivided frame, by what the decoder is made of."""
    modules = list(decoder.modules())
    causes = []
    if any(isinstance(module, nn.GroupNorm) for module in modules):
        causes.append("takes its own GroupNorm statistics")
    names = [type(module).__name__.lower() for module in modules]
    if any("attention" in name or "attn" in name for name in names):
        causes.append("attends to itself alone")
    return f"every tile {' and '.join(causes or ['ends where its convolutions would see more of the frame'])}"


def _with_one_attention_function(vae: nn.Module) -> None:
    """Make diffusers' ``Attention`` modules call ``scaled_dot_product_attention``, which can be cut into blocks of queries.

    Its older processor multiplies matrices and takes the softmax by itself: the same function, with all scores at once.
    """
    for module in vae.modules():
        if isinstance(module, Attention) and type(module.processor) is AttnProcessor and module.scale_qk:
            module.set_processor(AttnProcessor2_0())


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
