"""The video VAE of Kandinsky's KVAE 1.0: ``AutoencoderKLKVAEVideo``, decoded in segments that hand a cache to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.kvae import widest_stage
from decode_service.decoding.families.passes import PassesFamily
from decode_service.errors import ConfigError
from decode_service.planning.spec import ModelSpec, StrideTiles
from decode_service.planning.temporal import SegmentFrames

# B batch, C channels, T latent frames, F pixel frames, H height, W width.

#: Pixel frames by which ``AutoencoderKLKVAEVideo.decode`` goes on; the first segment has one more.
SEGMENT_FRAMES = 16


class KVAEVideoFamily(PassesFamily):
    """``AutoencoderKLKVAEVideo``.

    GroupNorm takes its statistics over the frames of a segment, so segments are the model's own and not free. It takes
    them over the whole picture too: sharding merges them and is exact, tiles only approximate. diffusers has no tiles for
    this class: its ``enable_tiling`` changes nothing.
    """

    class_names = ("AutoencoderKLKVAEVideo",)
    serves = "KVAE 1.0 for videos"

    @property
    def frame_rule(self) -> SegmentFrames:
        rule = self.spec.frame_rule
        assert isinstance(rule, SegmentFrames)
        return rule

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        compression = config["temporal_compress_times"]
        if compression not in (1, 2, 4, 8):
            # Others give segments that do not add up, or of one frame each, which diffusers neither upsamples nor continues.
            raise ConfigError(
                f"temporal_compress_times of {name} must be 1, 2, 4 or 8 for segments of {SEGMENT_FRAMES} frames, "
                f"got {compression}"
            )
        widths = [config["ch"] * multiplier for multiplier in config["ch_mult"]]
        ratio = 2 ** (len(widths) - 1)
        # From the structure: a decoder with fewer stages than halvings of time upsamples less often.
        doublings = sum(stage.upsample.temporal_compress for stage in list(self.vae.decoder.up)[1:])
        rule = SegmentFrames(
            first=math.ceil((SEGMENT_FRAMES + 1) / compression),
            later=math.ceil(SEGMENT_FRAMES / compression),
            ratio=2**doublings,
        )
        # The widest operand is an activation of all frames of a segment, none of which has more than a first one; of one frame
        # it is the input of a convolution, which puts two frames before it. Segments in between are bounded by a line.
        width = widest_stage(widths)
        whole = width * (1 + rule.ratio * (rule.first - 1))
        later = math.ceil((whole - 3 * width) / (rule.first - 1)) if rule.first > 1 else 0
        return ModelSpec(
            name=name,
            family="kvae-video",
            class_name="AutoencoderKLKVAEVideo",
            latent_channels=config["z_channels"],
            output_channels=config["out_ch"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=rule,
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles, ratio, "AutoencoderKLKVAEVideo"),
            chunked=False,
            operand_per_pixel=max(0, later),
            operand_per_pixel_first=3 * width,
            pass_frames=rule.first,
        )

    def denormalization(self) -> str:
        return "latents"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """Nothing: the config has neither a factor nor statistics, and ``vae.decode`` takes what ``vae.encode`` gives."""
        return latents_BCTHW

    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        frames = latents_BCTHW.shape[2]
        cache = self.vae._make_decoder_cache()
        for start, stop in self.frame_rule.chunks(frames):
            if stop == frames:
                cache = _for_the_last_pass(cache)
            yield self.call_decoder(latents_BCTHW[:, :, start:stop], cache)


class _ReadOnly(dict[str, Any]):
    """The cache of a convolution that nothing follows: what it would remember is forgotten.

    Of a picture of one frame the caches of all convolutions would be gigabytes.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        pass


def _for_the_last_pass(cache: Any) -> Any:
    """``cache``, its convolutions' parts read-only and the rest as it is."""
    if isinstance(cache, list):
        return [_for_the_last_pass(entry) for entry in cache]
    if not isinstance(cache, dict):
        return cache
    if "padding" in cache:
        return _ReadOnly(cache)
    return {key: _for_the_last_pass(entry) for key, entry in cache.items()}
