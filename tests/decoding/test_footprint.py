"""What families declare of their operands, and what is measured of their memory, against decodes that are watched."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from decode_service.decoding import footprint
from decode_service.decoding.families import FAMILIES, Family
from decode_service.decoding.footprint import LiveMemory, clip_lengths, measure, with_footprint, without_data
from decode_service.planning.memory import memory_need
from decode_service.planning.planner import Policy, _Planner, make_plan
from decode_service.planning.spec import ModelSpec
from decode_service.planning.tiles import TileSpan
from tests.decoding import catalogue
from tests.decoding.harness import latents_of

CELLS = 5


def cells_of(spec: ModelSpec) -> int:
    return spec.tiles.size_px // spec.spatial_ratio if spec.tile_only else CELLS  # type: ignore[union-attr]


def watched(family: Family, latents: torch.Tensor, chunk: int) -> LiveMemory:
    """What a decode of ``latents``, undivided or as one tile, took."""
    memory = LiveMemory()
    memory.know([*family.vae.parameters(), *family.vae.buffers()])
    cells = latents.shape[-1]
    span = TileSpan(0, cells, 0, cells)
    with torch.inference_mode(), memory:
        if family.spec.tile_only:
            family.decode_tile(latents, 0, span, span, chunk)
        else:
            for pixels in family.decode(latents, chunk):
                del pixels
    return memory


def declared(spec: ModelSpec, frames: int, cells: int, chunk: int) -> int:
    """The bound by which the planner goes."""
    times = () if spec.frame_rule is None else (frames,)
    planner = _Planner(spec, (1, spec.latent_channels, *times, cells, cells), 1, Policy(), "shards", chunk)
    return planner.operand_elements((cells, cells), planner.chunk)


def check_operands(family: Family, device: str) -> None:
    spec, cells = family.spec, cells_of(family.spec)
    clips = list(dict.fromkeys(zip(clip_lengths(spec), (1, 1, 2), strict=True)))
    # Blocks and clips that are part of the model are bounded at their full length.
    for frames, chunk in clips[-1:] if spec.tile_only else clips:
        shape = (1, spec.latent_channels, frames, cells, cells)
        latents = latents_of(shape) if device == "cpu" else torch.empty(shape, device=device)
        widest = watched(family, latents, chunk)
        bound = declared(spec, frames, cells, chunk)
        extent = cells * spec.spatial_ratio
        padded = (1 + spec.operand_padding / extent) ** 2
        assert widest.widest <= bound <= 2 * widest.widest * padded, (
            f"{spec.family}: {widest.widest_name} has {widest.widest / bound:.2f} of the declared elements "
            f"({frames} latent frames, chunk {chunk})"
        )


@pytest.mark.parametrize("name", catalogue.TINY)
def test_no_operation_of_a_decode_has_a_wider_operand_than_declared(name: str) -> None:
    """PyTorch's kernels fail or return zeros at 2^31 elements, so what is declared must hold, and be no excuse."""
    check_operands(catalogue.family(name), "cpu")


@pytest.mark.parametrize(
    "name", ["AutoencoderKL", "AutoencoderKLWan, 2.1", "AutoencoderKLAllegro", "AutoencoderKLCogVideoX"]
)
def test_the_declared_operands_hold_at_published_widths(name: str) -> None:
    vae = catalogue.published(name)
    check_operands(FAMILIES[type(vae).__name__](vae, name), "meta")


class Peak:
    """Bytes that a real decode on the CPU had alive at its peak, beyond its weights."""

    def __init__(self, family: Family, latents: torch.Tensor, chunk: int) -> None:
        gc.collect()
        self.bytes = watched(family, latents, chunk).peak


@pytest.mark.parametrize(
    ("name", "frames", "chunk"),
    [
        ("AutoencoderKL", 1, 1),
        ("AutoencoderKLWan, 2.1", 6, 3),
        ("AutoencoderKLHunyuanVideo", 4, 1),
        ("AutoencoderKLLTXVideo", 6, 1),
    ],
)
def test_the_prediction_is_what_a_decode_of_another_size_has_alive(name: str, frames: int, chunk: int) -> None:
    """Measured at one size without data, applied to another size with data."""
    family = catalogue.family(name)
    spec = with_footprint(family)
    assert spec.footprint is not None
    times = () if spec.frame_rule is None else (frames,)
    shape = (1, spec.latent_channels, *times, 9, 11)
    need = memory_need(spec, shape, mode="direct", share=1.0, items=1, chunk=chunk)
    assert need is not None
    latents = latents_of((1, spec.latent_channels, frames, 9, 11))
    seen = Peak(family, latents, chunk).bytes
    predicted = need.activations + need.caches
    assert 0.85 * seen <= predicted <= 1.35 * seen, f"predicted {predicted / seen:.2f} of what was seen"


def test_a_band_needs_more_per_pixel_than_the_frame_and_less_in_all() -> None:
    spec = with_footprint(catalogue.family("AutoencoderKLWan, 2.1"))
    assert spec.footprint is not None and spec.footprint.banded is not None
    band, whole = spec.footprint.banded, spec.footprint.whole
    assert band.clip + band.per_frame > whole.clip + whole.per_frame
    shape = (1, 4, 21, 60, 104)
    direct = make_plan(spec, shape, group_size=1, policy=Policy(), mode="direct").memory
    shard = make_plan(spec, shape, group_size=4, policy=Policy(), mode="spatial_shard_width").memory
    assert direct is not None and shard is not None
    assert direct.activations / 4 < shard.activations < direct.activations / 2


def test_a_decoder_that_cannot_run_on_shapes_is_served_without_a_prediction(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "_measured", {})

    class NeedsValues(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    vae = catalogue.TINY["AutoencoderKL"]().eval().requires_grad_(False)
    vae.decoder.conv_act = NeedsValues()
    spec = with_footprint(FAMILIES["AutoencoderKL"](vae, "odd"))
    assert spec.footprint is None and "odd" in caplog.text
    assert make_plan(spec, (1, 4, 8, 8), group_size=1, policy=Policy()).memory is None


def test_half_precision_takes_half_the_memory() -> None:
    vae = catalogue.TINY["AutoencoderKL"]().eval().requires_grad_(False)
    single = measure(FAMILIES["AutoencoderKL"](vae, "x"))
    half = measure(FAMILIES["AutoencoderKL"](vae.bfloat16(), "x"))
    assert half.weight_bytes * 2 == single.weight_bytes and half.itemsize == 2
    assert 0.45 < half.whole.still / single.whole.still < 0.65


def test_measuring_leaves_the_model_alone() -> None:
    family = catalogue.family("AutoencoderKLFlux2")
    before = {name: x.clone() for name, x in family.vae.state_dict().items()}
    shadow = without_data(family)
    assert all(x.is_meta for x in shadow.vae.state_dict().values())
    assert all(torch.equal(x, before[name]) for name, x in family.vae.state_dict().items())
