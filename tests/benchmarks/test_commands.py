"""The commands end to end, on narrow models: they measure what they say, and everything that they say."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import httpx2
import pytest
import torch

from benchmarks import decode, models, sharding
from benchmarks.models import MODELS
from benchmarks.ranks import Loaded, RankFailedError, Ranks
from benchmarks.service import Transfers, plain_uvicorn, stage_s


@pytest.fixture(autouse=True)
def threads_stay_as_they_were() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_decode_measures_every_contender_frame_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The norms of narrow models, over few channels, make much of rounding, which grows with the pixels.
    monkeypatch.setattr(models, "OUTPUT_STD", 0.2)
    target = tmp_path / "decode.json"
    # bfloat16 first: the reference in float32 must be there all the same.
    arguments = "--narrow --no-compile --threads 1 --repeats 2 --size 32 --models wan21 --dtypes bfloat16 float32"
    report = decode.main([*arguments.split(), "--json", str(target)])
    assert json.loads(target.read_text()) == report
    results = report["results"]
    assert [(result["dtype"], result["frames"]) for result in results] == [
        ("float32", 1),
        ("float32", 3),
        ("bfloat16", 1),
        ("bfloat16", 3),
    ]
    for result in results:
        assert result["output_shape"] == [1, 3, 4 * result["frames"] - 3, 32, 32]
        assert result["flops"] > 0 and result["matmul_peak_flops_per_s"] > 0
        service, diffusers = (result["contenders"][name] for name in ("service", "diffusers"))
        assert len(service["seconds"]) == len(diffusers["seconds"]) == 2
        assert math.isclose(result["speedup_over_diffusers"], diffusers["median_s"] / service["median_s"])
        assert result["speedup_over_compiled"] is None
        assert min(service["peak_memory_bytes"], diffusers["peak_memory_bytes"]) > 3 * 32 * 32 * 2
        accuracy = result["accuracy"]
        assert 0.1 < accuracy["output_std"] < 1
        if result["dtype"] == "float32":
            assert accuracy["service"]["max_abs_error"] <= 1e-5 and "diffusers" not in accuracy
        else:
            assert accuracy["diffusers"]["rms_error"] > 0
            # Of so few numbers as narrow models have the ratio is off by more than a tenth by chance.
            assert accuracy["rms_error_against_diffusers"] <= 1.3


def test_a_wrong_picture_is_not_passed_over() -> None:
    pixels = {"service": torch.tensor([0.0, 1.5]), "diffusers": torch.tensor([0.0, 1.0])}
    found = decode.accuracy(pixels, pixels["diffusers"], is_reference=True)
    assert found["service"]["max_abs_error"] == 0.5
    assert math.isclose(found["service"]["max_abs_error_over_std"], 0.5 / 0.5**0.5, rel_tol=1e-6)
    with pytest.raises(RuntimeError, match=r"decoded to \(2,\), diffusers to \(3,\)"):
        decode.accuracy(pixels, torch.tensor([0.0, 1.0, 2.0]), is_reference=True)


@pytest.mark.parametrize("name", list(MODELS))
def test_arithmetic_is_counted_for_the_shape_that_is_decoded(name: str) -> None:
    model = MODELS[name]
    small, large = (
        models.count_flops(model, model.latent_shape(4, cells * model.ratio, 1), narrow=True) for cells in (8, 16)
    )
    # Four times the area; attention, a small part here, grows with its square.
    assert 4 * small <= large < 6 * small


def test_written_models_decode_to_pixels_of_the_spread_of_a_picture(tmp_path: Path) -> None:
    model = MODELS["autoencoder_kl"]
    channels = models.write(model, tmp_path, narrow=True)
    vae = models.load(tmp_path, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        pixels = vae.decode(models.random_latents(model.latent_shape(channels, 64, 1))).sample
    assert math.isclose(pixels.std().item(), models.OUTPUT_STD, rel_tol=1e-3)


def test_sharding_measures_real_ranks_that_are_gone_afterwards() -> None:
    arguments = "--narrow --repeats 1 --size 32 --models autoencoder_kl --dtypes float32 --ranks 2"
    (result,) = sharding.main(arguments.split())["results"]
    assert result["case"].endswith("32x32")
    assert (result["ranks"], result["mode"], result["bands"]) == (2, "spatial_shard_width", [2, 2])
    assert result["max_abs_difference"] <= 1e-5 < result["output_std"]
    timings = result["timings"]
    assert math.isclose(result["speedup"], timings["one"]["median_s"] / timings["sharded"]["median_s"])
    assert math.isclose(result["ceiling"], 2 * timings["one"]["median_s"] / timings["ceiling"]["median_s"])
    assert len(result["peak_memory_bytes"]["sharded"]) == 2
    assert 0 < result["memory_per_rank"] < 1.5
    assert multiprocessing.active_children() == []


def test_a_rank_that_fails_says_why_and_all_end(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="ConfigError"):
        Ranks(1, Loaded(tmp_path / "nothing", "float32", "cpu", 1))
    assert multiprocessing.active_children() == []
    model = MODELS["autoencoder_kl"]
    channels = models.write(model, tmp_path / "model", narrow=True)
    latents = models.random_latents(model.latent_shape(channels, 32, 1)).numpy()
    with Ranks(2, Loaded(tmp_path / "model", "float32", "cpu", 1)) as ranks:
        plan = sharding.plans_of(ranks, latents.shape)["sharded"]
        assert sharding.whole_picture(ranks, plan, latents).shape == (1, 3, 32, 32)
        ranks._processes[1].kill()
        with pytest.raises(RankFailedError, match=r"rank 1 died|closed by peer, rank 1"):
            ranks.decode("whole")
        assert multiprocessing.active_children() == []


def test_plain_uvicorn_sends_what_it_should_and_ends() -> None:
    with httpx2.Client() as http:
        with plain_uvicorn(3 << 20) as address:
            transfers = Transfers(http, "GET", address, b"", [], [], [])
            transfers()
        assert transfers.nbytes == 3 << 20
        assert 0 < transfers.head_s[0] <= transfers.total_s[0]
        assert len(transfers.body_timing().seconds) == 1
        with pytest.raises(httpx2.ConnectError):
            http.get(address)


def test_the_time_of_a_stage_is_read_from_the_reply() -> None:
    header = "queue;dur=1.50, decode;dur=250.00, rank_decode;dur=9.00, total;dur=300.12"
    assert stage_s(header, "decode") == 0.25
    assert stage_s(header, "queue") == 0.0015
    assert stage_s("", "decode") == 0.0
