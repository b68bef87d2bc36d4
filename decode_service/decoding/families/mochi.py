"""Mochi 1: ``AutoencoderKLMochi``, a causal decoder that diffusers can only run over the whole video at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.passes import CausalPassesFamily
from decode_service.planning.spec import ModelSpec, StrideTiles
from decode_service.planning.temporal import CausalFrames

# B batch, C channels, T latent frames, F pixel frames, H height, W width.


class MochiFamily(CausalPassesFamily):
    """``AutoencoderKLMochi``.

    Its convolutions are causal and its GroupNorm takes statistics frame by frame, so the video could be decoded a few
    frames at a time. In diffusers it cannot: the framewise mode switches off the spatial padding of the convolutions
    along with the temporal one, and fails. So a request holds all frames at full resolution (8.7e9 elements for 163
    frames of 848 x 480). Here passes are joined by what the halo rule is in space: padding in time means the frames before.

    Of the pixel frames of the first latent frame only the last is kept (diffusers: ``drop_last_temporal_frames``).
    """

    class_names = ("AutoencoderKLMochi",)
    serves = "Mochi"
    compiles = False

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config, ratio = self.config, self.vae.spatial_compression_ratio
        frames = self.vae.temporal_compression_ratio
        # The last stage at full resolution: what a later latent frame gives, and the two frames before. The first pass
        # computes as many.
        operand = config["decoder_block_out_channels"][0] * (frames + 2)
        return ModelSpec(
            name=name,
            family="mochi",
            class_name="AutoencoderKLMochi",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=CausalFrames(frames),
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles, ratio, "AutoencoderKLMochi"),
            operand_per_pixel=operand,
            operand_per_pixel_first=operand,
        )

    def denormalization(self) -> str:
        if self.config.get("latents_mean") is None or self.config.get("latents_std") is None:
            return "latents / scaling_factor"
        return "latents * latents_std / scaling_factor + latents_mean, per channel"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of the Mochi pipeline."""
        config, shape = self.config, (1, self.spec.latent_channels, 1, 1, 1)
        if config.get("latents_mean") is None or config.get("latents_std") is None:
            return latents_BCTHW / config["scaling_factor"]
        device, dtype = latents_BCTHW.device, latents_BCTHW.dtype
        mean = torch.tensor(config["latents_mean"]).view(shape).to(device, dtype)
        std = torch.tensor(config["latents_std"]).view(shape).to(device, dtype)
        return latents_BCTHW * std / config["scaling_factor"] + mean

    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        frames = latents_BCTHW.shape[2]
        if frames == 1:
            # Nothing follows, so nothing is remembered, and the decoder may run compiled.
            yield self.call_decoder(latents_BCTHW)[0][:, :, self.frame_rule.ratio - 1 :]
            return
        before = FramesBefore()
        for start, stop in self.frame_rule.chunks(frames, chunk):
            with before:
                # Eagerly: the tracer would bake the frames of this request into its graph.
                pixels_BCFHW, _ = self.vae.decoder(latents_BCTHW[:, :, start:stop])
            yield pixels_BCFHW if start else pixels_BCFHW[:, :, self.frame_rule.ratio - 1 :]


class FramesBefore(TorchFunctionMode):
    """While active, causal padding in time means the frames that the same convolution saw last.

    One instance belongs to one request; enter it anew for every pass of the decoder over consecutive frames. In the first
    pass padding repeats the first frame, as the model has it. Passes must call the same functions in the same order, which
    a decoder without branches does: the paddings of a pass are told apart by their order.

    It works together with ``ShardedFrame``: entered inside it, what is left of a padding is the halo rule's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[torch.Tensor] = []
        self._index = 0

    def __enter__(self) -> FramesBefore:
        self._index = 0
        super().__enter__()
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.pad:
            return self._pad(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _pad(
        self, input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
    ) -> torch.Tensor:
        if len(pad) != 6 or input.dim() != 5 or not pad[4]:
            return F.pad(input, pad, mode=mode, value=value)
        if mode != "replicate" or pad[5]:
            raise NotImplementedError(f"padding {tuple(pad)} of mode {mode} is not causal padding in time")
        rows = pad[4]
        if self._index == len(self._seen):
            before = input[:, :, :1].expand(-1, -1, rows, -1, -1)
            self._seen.append(before)
        else:
            before = self._seen[self._index]
        input = torch.cat([before, input], dim=2)
        # A copy, so that the whole chunk is not kept for its last frames.
        self._seen[self._index] = input[:, :, -rows:].clone()
        self._index += 1
        return F.pad(input, (*pad[:4], 0, 0), mode=mode, value=value)
