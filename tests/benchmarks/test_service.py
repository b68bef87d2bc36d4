"""The parts of the service benchmark, against one running service with a narrow model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest
import torch

from benchmarks import models, report
from benchmarks.models import MODELS
from benchmarks.service import AT_ONCE, Served, describe, measure_group, measure_overhead, measure_reply

pytestmark = pytest.mark.ray


def test_every_part_is_measured_on_the_running_service(tmp_path: Path) -> None:
    model, device = MODELS["autoencoder_kl"], torch.device("cpu")
    channels = models.write(model, tmp_path / "model", narrow=True)
    latents = models.random_latents(model.latent_shape(channels, 32, 1)).numpy()
    served = Served(tmp_path / "model", "float32", device, ranks=2, threads=1)
    before = torch.get_num_threads()
    options = argparse.Namespace(json=None)
    out = report.Report("service", options, device, threads=1)
    try:
        decoder = served.bare()
        with served.running(out, haproxy=None) as url:
            overhead = measure_overhead(url, decoder, "small", latents, concurrency=3, rounds=2)
            reply = measure_reply(url, mebibytes=1, rounds=2)
            group = measure_group(url, latents, rounds=1, together=served.together)
        decoder.close()
    finally:
        torch.set_num_threads(before)

    served_s, bare_s = overhead["service"]["median_s"], overhead["bare"]["median_s"]
    assert overhead["requests"] == 6
    assert math.isclose(overhead["ratio"], served_s / bare_s)
    assert math.isclose(overhead["overhead_ms_per_request"], (served_s - bare_s) / 3 * 1e3)
    assert 0 < overhead["latency_ms"]["p50"] <= overhead["latency_ms"]["p90"] <= overhead["latency_ms"]["p99"]

    # The pixels, and around them a map with the plan.
    assert 1 << 20 <= reply["reply_bytes"] < 5 << 18
    for whole_s, decode_s, beyond_s in zip(
        *(reply[name]["seconds"] for name in ("service", "decode", "beyond_decode")), strict=True
    ):
        # Timed within what the whole was timed by.
        assert decode_s + beyond_s <= whole_s
    assert min(reply["decode"]["seconds"]) > 0 and min(reply["beyond_decode"]["seconds"]) > 0
    assert math.isclose(reply["ratio"], reply["beyond_decode"]["median_s"] / reply["uvicorn"]["median_s"])

    assert group["requests"] == AT_ONCE
    assert math.isclose(
        group["throughput_ratio"], group["one_by_one_sharded"]["median_s"] / group["at_once"]["median_s"]
    )
    for result in (overhead, reply, group):
        assert report.times(result.get("ratio", result.get("throughput_ratio"))) in describe(result)
