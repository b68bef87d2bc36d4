"""Classes that no family describes: diffusers' own ``decode``, whole, with what planning must know measured at loading."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from decode_service.decoding.families.base import Family
from decode_service.decoding.memory import is_out_of_memory
from decode_service.errors import ConfigError
from decode_service.planning.plan import DecodePlan
from decode_service.planning.spec import WHOLE_CLIP, ModelSpec, StrideTiles
from decode_service.planning.temporal import FrameRule, LinearFrames, SingleFrame
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames, F pixel frames, H height, W width.

#: Where configs say how many channels latents have; a ``post_quant_conv``, which takes them, is asked first.
CHANNEL_KEYS = ("latent_channels", "z_channels", "z_dim", "latent_dim", "vq_embed_dim", "embed_dim")

#: Keys of a config that only models of sound have.
_SOUND_KEYS = ("sampling_rate", "sample_rate", "audio_channels", "mel_bins")

#: Latent rows and columns to measure with. They differ, so that a size which is no multiple is noticed; small ones first:
#: some decoders need room for a window or a reflection.
_SIZES = ((2, 3), (4, 5), (8, 9), (16, 17))

#: Latent frames to measure with: two give the rule, the third tests it.
_FRAMES = ((1, 2, 3), (2, 3, 4), (5, 6, 7), (8, 9, 10))


class UnlistedFamily(Family):
    """Any diffusers class whose ``decode(z)`` makes pictures or videos of latents.

    It is called as it is: undivided, without tiles, eagerly. Nothing here knows the class, and no test compares it with
    diffusers, so the spec says ``tested=False`` and every reply repeats it. Pixels are taken to be in [-1, 1], as diffusers'
    autoencoders have them, and how large the decoder's operands get is not known.

    A ``decode`` that draws noise (``ConsistencyDecoderVAE``) gets a generator with the same seed every time.

    Raises:
        ConfigError: ``decode`` makes no pictures, or their sizes follow no rule that planning knows.
    """

    class_names = ()
    compiles = False
    eager_reason = "this class is not one of the tested families; it runs eagerly"

    def __init__(self, vae: nn.Module, name: str, tiles: StrideTiles | None = None) -> None:
        self.vae = vae
        config: Any = vae.config
        self.config = dict(config)
        self._takes_generator = "generator" in inspect.signature(_decode_of(vae)).parameters
        self._measured = self._measure()
        self.spec = self.make_spec(name, tiles)
        self.call_decoder = self._decode_whole

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        measured, class_name = self._measured, type(self.vae).__name__
        if tiles is not None:
            raise ConfigError(
                f"{class_name} is not one of the tested families and has no tile mode; remove policy.tile"
            )
        return ModelSpec(
            name=name,
            family="unlisted",
            class_name=class_name,
            latent_channels=measured.channels,
            output_channels=measured.output_channels,
            spatial_ratio=measured.ratio,
            decoder_ratio=measured.ratio,
            frame_rule=measured.frame_rule,
            accepts_images=measured.frame_rule is None,
            exact_axes=(),
            no_exact_axes_reason=f"{class_name} is not one of the tested families, so nobody knows how to divide it",
            tiles=None,
            no_tiles_reason=f"{class_name} is not one of the tested families, so nobody knows how its tiles blend",
            tested=False,
            chunked=False,
            pass_frames=WHOLE_CLIP if isinstance(measured.frame_rule, LinearFrames) else 0,
            min_cells=measured.min_cells,
            no_denormalize_reason=self._no_denormalize_reason(measured.channels),
        )

    # Measuring

    def _measure(self) -> _Measured:
        """Decode tiny random latents until some fit, the likeliest shapes first.

        Raises:
            ConfigError: none fit; the message has the last attempt's own error.
        """
        class_name = type(self.vae).__name__
        candidates = _channel_candidates(self.vae, self.config)
        if not candidates:
            raise ConfigError(
                f"{class_name} does not say how many channels its latents have: its config has none of "
                f"{', '.join(CHANNEL_KEYS)}, and it has no post_quant_conv"
            )
        videos = any(isinstance(module, nn.Conv3d) for module in self.vae.modules())
        problem = ""
        for has_frames in (True, False) if videos else (False, True):
            for channels in candidates:
                for height, width in _SIZES:
                    try:
                        return self._measure_at(channels, height, width, has_frames)
                    except _DoesNotFit as error:
                        # What is said of the likeliest shape is kept: the others are expected to fail.
                        problem = problem or str(error)
        raise ConfigError(f"{class_name} is not one of the tested families, and its decode cannot be used: {problem}")

    def _measure_at(self, channels: int, height: int, width: int, has_frames: bool) -> _Measured:
        smallest = 1 if (height, width) == _SIZES[0] else height
        if not has_frames:
            shape = self._try((1, channels, height, width))
            return _Measured(channels, shape[1], _ratio(shape, height, width), None, smallest)
        rule, frames = self._frame_rule(channels, height, width)
        shape = self._try((1, channels, frames, height, width))
        return _Measured(channels, shape[1], _ratio(shape, height, width), rule, smallest)

    def _frame_rule(self, channels: int, height: int, width: int) -> tuple[FrameRule, int]:
        """The rule, and a number of latent frames that the decoder takes."""
        problem = _DoesNotFit("no number of latent frames")
        for lengths in _FRAMES:
            try:
                counts = [self._try((1, channels, frames, height, width))[2] for frames in lengths]
            except _DoesNotFit as error:
                problem = problem if lengths is not _FRAMES[0] else error
                continue
            ratio = counts[1] - counts[0]
            if ratio < 1 or counts[2] - counts[1] != ratio:
                raise _DoesNotFit(f"{lengths} latent frames give {tuple(counts)} frames, which is no straight line")
            return LinearFrames(ratio, counts[0] - ratio * lengths[0], lengths[0]), lengths[0]
        if self._try((1, channels, 1, height, width))[2] == 1:
            return SingleFrame(), 1
        raise problem

    def _try(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the picture decoded from latents of ``shape``."""
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(shape, generator=generator).to(self._device(), self.dtype())
        try:
            with torch.inference_mode():
                pixels = self._decode_whole(latents)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise _DoesNotFit(f"latents {list(shape)} give {type(error).__name__}: {error}") from error
        found = tuple(pixels.shape)
        if len(found) != len(shape) or found[0] != 1 or found[1] not in (1, 3, 4):
            raise _DoesNotFit(
                f"latents {list(shape)} are decoded to {list(found)}, which is no picture of 1, 3 or 4 channels"
            )
        return found

    def _device(self) -> torch.device:
        return next(self.vae.parameters()).device

    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.vae.parameters() if parameter.is_floating_point())

    # Normalization

    def _no_denormalize_reason(self, channels: int) -> str:
        config = self.config
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            if len(config["latents_mean"]) == len(config["latents_std"]) == channels:
                return ""
            return f"latents_mean and latents_std of its config are not one value for each of {channels} channels"
        if config.get("scaling_factor") is not None:
            return ""
        return "its config has neither a scaling_factor nor latents_mean and latents_std"

    def statistics(self) -> dict[str, Any]:
        return {} if self.spec.no_denormalize_reason else super().statistics()

    def denormalization(self) -> str:
        if self.spec.no_denormalize_reason:
            return f"not possible: {self.spec.no_denormalize_reason}"
        config = self.config
        factor = " / scaling_factor" if config.get("scaling_factor") else ""
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            return f"latents * latents_std{factor} + latents_mean, per channel"
        return f"latents{factor}{' + shift_factor' if config.get('shift_factor') is not None else ''}"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule that the config's keys have in most pipelines of diffusers.

        With mean and deviation ``latents * std / scaling_factor + mean`` (SDXL, Mochi, LTX), otherwise
        ``latents / scaling_factor + shift_factor`` (SD3, FLUX.1); a factor or shift that is not there changes nothing.
        """
        config = self.config
        if self.spec.no_denormalize_reason:
            raise ValueError(f"cannot denormalize: {self.spec.no_denormalize_reason}")
        scaling = config.get("scaling_factor") or 1.0
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            mean, std = (
                torch.tensor(config[key]).view(1, -1, 1, 1, 1).to(latents_BCTHW)
                for key in ("latents_mean", "latents_std")
            )
            return latents_BCTHW * std / scaling + mean
        scaled = latents_BCTHW / scaling
        return scaled + config["shift_factor"] if config.get("shift_factor") is not None else scaled

    # Decoding

    def _decode_whole(self, latents: torch.Tensor) -> torch.Tensor:
        """The tensor in what ``vae.decode`` answers: a tensor, a tuple that begins with it, or an output's ``sample``."""
        options = {}
        if self._takes_generator:
            options["generator"] = torch.Generator(latents.device).manual_seed(0)
        decoded = _decode_of(self.vae)(latents, **options)
        if isinstance(decoded, (tuple, list)):
            decoded = decoded[0]
        pixels = getattr(decoded, "sample", decoded)
        if not isinstance(pixels, torch.Tensor):
            raise TypeError(
                f"decode answers a {type(decoded).__name__}, not a tensor, a tuple or something with a sample"
            )
        return pixels

    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        if self.spec.frame_rule is None:
            pixels_BCFHW = self.call_decoder(latents_BCTHW.squeeze(2)).unsqueeze(2)
        else:
            pixels_BCFHW = self.call_decoder(latents_BCTHW)
        planned = (latents_BCTHW.shape[0], self.spec.output_channels, *self.spec.output_extents(latents_BCTHW.shape))
        if pixels_BCFHW.shape != planned:
            # A rule that was measured on three sizes need not hold for all; what is missing must not be made up.
            raise RuntimeError(
                f"{self.spec.class_name} decoded {list(latents_BCTHW.shape)} to {list(pixels_BCFHW.shape)} and not to "
                f"{list(planned)}, which the sizes measured at loading predict"
            )
        yield pixels_BCFHW

    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        raise NotImplementedError("a class that no family describes has no tile mode")

    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        raise NotImplementedError("a class that no family describes has no tile mode")

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError("a class that no family describes has no tile mode")


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a decode of tiny latents showed."""

    channels: int
    output_channels: int
    ratio: int
    frame_rule: FrameRule | None
    min_cells: int


class _DoesNotFit(Exception):
    """These latents are not what the decoder takes, or what it makes of them is no picture."""


def unlisted_problem(cls: Any, config: Mapping[str, Any]) -> str | None:
    """Why a diffusers class that no family describes cannot be decoded, as far as can be told without its weights.

    Args:
        cls: what diffusers has under the class's name.
        config: of the model.
    """
    if not inspect.isclass(cls) or not issubclass(cls, nn.Module) or not callable(getattr(cls, "decode", None)):
        return "which has no decode"
    if "audio" in cls.__name__.lower() or any(key in config for key in _SOUND_KEYS):
        return "which makes sound; this service decodes pictures and videos"
    # Without self and what it decodes.
    others = list(inspect.signature(_decode_of(cls)).parameters.values())[2:]
    needed = [p.name for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        return f"whose decode needs more than latents: {', '.join(needed)}"
    return None


def _decode_of(owner: Any) -> Any:
    return owner.decode


def _channel_candidates(vae: nn.Module, config: Mapping[str, Any]) -> list[int]:
    conv = getattr(vae, "post_quant_conv", None)
    found = [getattr(conv, "in_channels", None), *(config.get(key) for key in CHANNEL_KEYS)]
    return list(dict.fromkeys(value for value in found if isinstance(value, int) and value > 0))


def _ratio(shape: tuple[int, ...], height: int, width: int) -> int:
    """Pixels per latent cell."""
    ratio = shape[-2] // height
    if ratio < 1 or shape[-2:] != (height * ratio, width * ratio):
        raise _DoesNotFit(
            f"{height} x {width} latent cells give {shape[-2]} x {shape[-1]} pixels, not a whole number for each cell"
        )
    return ratio
