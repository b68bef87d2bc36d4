"""The counts from which times are predicted, against real decodes of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from decode_service.decoding import work
from decode_service.decoding.communicator import Communicator, Messages
from decode_service.decoding.families import FAMILIES, Family
from decode_service.decoding.rewrites import apply_rewrites
from decode_service.decoding.sharding import ShardedFrame
from decode_service.decoding.work import FlopCount, count, with_work
from decode_service.planning.bands import split
from decode_service.planning.cost import Amount
from decode_service.planning.planner import Policy, amount_of, make_plan
from decode_service.planning.spec import ModelSpec
from tests.decoding import catalogue
from tests.decoding.harness import latents_of
from tests.decoding.threads import on_ranks

ROWS, COLUMNS = 6, 11


def expected(spec: ModelSpec, frames: int, chunk: int, mode: str, ranks: int) -> Amount:
    times = () if spec.frame_rule is None else (frames,)
    shape = (1, spec.latent_channels, *times, ROWS, COLUMNS)
    done = amount_of(
        spec, make_plan(spec, shape, group_size=ranks, policy=Policy(), mode=mode, chunk=chunk, strict=True)
    )
    assert done is not None
    return done


def counted(family: Family) -> ModelSpec:
    return with_work(family, family.spec)


@pytest.mark.parametrize(
    ("name", "frames", "chunk"),
    [
        ("AutoencoderKL", 1, 1),
        ("AutoencoderKLWan, 2.1", 6, 3),
        ("AutoencoderKLHunyuanVideo", 4, 1),
        ("AutoencoderKLLTXVideo", 6, 1),
        ("AutoencoderDC", 1, 1),
    ],
)
def test_a_decode_of_another_size_does_what_was_counted(name: str, frames: int, chunk: int) -> None:
    """Counted on squares without data, applied to a rectangle with data, pass by pass."""
    family = catalogue.family(name)
    done = expected(counted(family), frames, chunk, "direct", 1)
    flops, passes = FlopCount(), 0
    # The CPU's fused attention has no formula; the plain one does the same multiplications.
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), flops:
        for _ in family.decode(latents_of((1, family.spec.latent_channels, frames, ROWS, COLUMNS)), chunk):
            passes += 1
    assert done.flops == pytest.approx(flops.total, rel=0.01)
    assert done.passes == passes


@pytest.mark.parametrize(
    ("name", "frames", "chunk"),
    [
        ("AutoencoderKL", 1, 1),
        ("AutoencoderKLWan, 2.1", 4, 2),
        ("AutoencoderKLHunyuanVideo", 2, 1),
        ("AutoencoderKLCogVideoX", 5, 1),
    ],
)
@pytest.mark.parametrize("axis", ["height", "width"])
def test_ranks_exchange_what_was_counted(name: str, frames: int, chunk: int, axis: str) -> None:
    family = catalogue.family(name)
    spec, dim = counted(family), {"height": -2, "width": -1}[axis]
    done = expected(spec, frames, chunk, f"spatial_shard_{axis}", 2)
    latents = latents_of((1, spec.latent_channels, frames, ROWS, COLUMNS))
    bands = split(latents.shape[dim], 2)

    def decode(communicator: Communicator) -> tuple[int, int]:
        received = 0
        begin = communicator.begin_exchange

        def watched(sends: Messages, receives: Messages) -> Callable[[], None]:
            nonlocal received
            received += sum(buffer.numel() * buffer.element_size() for _, buffer in receives)
            return begin(sends, receives)

        # Statistics travel by all_gather, which is made of exchanges here; they are too small to count.
        gather = communicator.all_gather

        def unwatched(tensor: torch.Tensor) -> list[torch.Tensor]:
            nonlocal received
            before = received
            parts = gather(tensor)
            received = before
            return parts

        communicator.begin_exchange, communicator.all_gather = watched, unwatched  # type: ignore[method-assign]
        frame = ShardedFrame(communicator, axis, bands)
        band = bands[communicator.rank]
        with torch.inference_mode():
            passes = family.decode(latents.narrow(dim, band.start, band.size), chunk)
            while True:
                with frame:
                    if next(passes, None) is None:
                        return frame.exchanges, received

    for exchanges, nbytes in on_ranks(2, decode):
        assert done.exchanges == exchanges
        # Halos alike on both ranks; of keys and values each receives the other's, which differ by a row. A pass also
        # sends the halo of the frames that it looks back at, once per pass however many frames it has.
        assert done.nbytes == pytest.approx(nbytes, rel=0.15)


def test_a_band_is_its_share_of_the_frame() -> None:
    spec = counted(catalogue.family("AutoencoderKLWan, 2.1"))
    whole, band = (expected(spec, 3, 1, mode, 2) for mode in ("direct", "spatial_shard_height"))
    assert band.flops == pytest.approx(whole.flops / 2)
    assert band.banded and band.exchanges > 0 == whole.exchanges


def test_a_decoder_that_cannot_run_on_shapes_is_planned_by_rules(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_counted", {})

    class NeedsValues(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    vae = catalogue.TINY["AutoencoderKL"]().eval().requires_grad_(False)
    vae.decoder.conv_act = NeedsValues()
    family = FAMILIES["AutoencoderKL"](vae, "odd")
    assert with_work(family, family.spec).work is None and "odd" in caplog.text


def test_tiles_that_a_model_is_made_of_are_counted_too() -> None:
    for name in ("AutoencoderKLMiniMaxH3", "AutoencoderKLAllegro"):
        counts = count(catalogue.family(name))
        assert counts.flops[0] > 0 and counts.exchanges == (0.0, 0.0)


def test_what_rewrites_save_is_counted() -> None:
    """A causal convolution over one frame is a 2-D one: a third of the arithmetic of a still."""
    torch.manual_seed(1)
    vae = catalogue.TINY["AutoencoderKLWan, 2.1"]().eval().requires_grad_(False)
    rewritten = FAMILIES["AutoencoderKLWan"](vae, "rewritten")
    applied = apply_rewrites(vae, rewritten.structure, enabled=["one_frame_conv2d"])
    assert [rewrite.active for rewrite in applied if rewrite.name == "one_frame_conv2d"] == [True]
    plain, less = counted(catalogue.family("AutoencoderKLWan, 2.1")).work, counted(rewritten).work
    assert plain is not None and less is not None
    assert less.flops[0] < 0.5 * plain.flops[0]
    assert less.flops[1] == pytest.approx(plain.flops[1], rel=0.01), "later frames have others before them"
