"""One decode on several ranks against one rank: ``python -m benchmarks.sharding``.

Real processes, sockets between them on the CPU and NCCL on CUDA; one thread or one device each. For each number of ranks,
in turn on the same processes:

- ``one``: rank 0 decodes the whole frame, the others wait;
- ``sharded``: all ranks decode it, divided along the axis that the planner takes, exactly;
- ``ceiling``: every rank decodes the whole frame for itself at the same time. N of them in the time t are N / t decodes a
  second, which is what the machine can give N processes: they share its memory, caches and clock, so it is less than N
  times one. A frame that could be divided at no cost would be decoded in t / N.

Decoders run eagerly everywhere.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import models, report
from benchmarks.machine import cores
from benchmarks.memory import METHODS
from benchmarks.models import MODELS, Model
from benchmarks.ranks import Loaded, Ranks
from benchmarks.report import Report
from benchmarks.timing import interleave
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan
from local_service import exit_on_signals


def plans_of(ranks: Ranks, shape: tuple[int, ...]) -> dict[str, DecodePlan]:
    """The planner's: ``direct`` for a rank by itself, and ``sharded`` for all, divided exactly as ``auto`` divides.

    Raises:
        ValueError: so many ranks cannot divide latents of this ``shape``.
    """
    # 0: sharded whatever the size of the frame.
    policy = Policy(direct_max_pixels=0)
    sharded = make_plan(ranks.spec, shape, group_size=ranks.size, policy=policy)
    if not sharded.exact or sharded.ranks != ranks.size:
        raise ValueError(f"{ranks.size} ranks cannot shard latents {list(shape)} exactly: {sharded.reason}")
    direct = make_plan(ranks.spec, shape, group_size=1, policy=policy, mode="direct", strict=True)
    return {"direct": direct, "sharded": sharded}


def whole_picture(ranks: Ranks, plan: DecodePlan, latents: np.ndarray) -> np.ndarray:
    """What ``plan`` decodes: (B,C,F,H,W) or (B,C,H,W) in float32."""
    ranks.prepare(plan, latents, PixelFormat("float32", "model"), name="whole")
    ranks.decode("whole", plan.ranks)
    axis = {"height": -2, "width": -1}.get(str(plan.axis), -1)
    return np.concatenate(ranks.pixels(plan.ranks), axis=axis)


def measure(ranks: Ranks, latents: np.ndarray, dtype_name: str, repeats: int) -> dict[str, Any]:
    """The result of as many ranks, which decode ``latents`` to pixels of ``dtype_name``."""
    plans = plans_of(ranks, tuple(latents.shape))
    for name, plan in plans.items():
        ranks.prepare(plan, latents, PixelFormat(dtype_name, "model"), name=name)
    # These calls warm up, too: each kind of decode has run once before it is timed.
    direct, sharded = (whole_picture(ranks, plan, latents) for plan in plans.values())
    (peak_one,), peaks = ranks.peak_bytes("direct", 1), ranks.peak_bytes("sharded")
    ways = {
        "one": partial(ranks.decode, "direct", 1),
        "sharded": partial(ranks.decode, "sharded"),
        "ceiling": partial(ranks.decode, "direct"),
    }
    ways["ceiling"]()
    timings = interleave(ways, repeats)
    one_s = timings["one"].median
    speedup = one_s / timings["sharded"].median
    ceiling = ranks.size * one_s / timings["ceiling"].median
    plan = plans["sharded"]
    return {
        "ranks": ranks.size,
        "mode": plan.mode,
        "bands": [band.size for band in plan.bands],
        "timings": {name: timing.to_dict() for name, timing in timings.items()},
        "speedup": speedup,
        "ceiling": ceiling,
        "share_of_ceiling": speedup / ceiling,
        "peak_memory_bytes": {"one": peak_one, "sharded": peaks},
        "memory_per_rank": max(peaks) / peak_one,
        "max_abs_difference": float(np.abs(sharded - direct).max()),
        "output_std": float(direct.std()),
    }


def default_ranks(device: torch.device) -> list[int]:
    """1 and 2, and 4 and 8 where there are cores or devices for them."""
    available = torch.cuda.device_count() if device.type == "cuda" else cores()
    return [1, 2, *(ranks for ranks in (4, 8) if ranks <= available)] if available > 1 else [1]


def measure_model(model: Model, options: argparse.Namespace, device: torch.device, folder: Path, out: Report) -> None:
    """All frames, dtypes and numbers of ranks of one model."""
    size = options.size or model.size
    channels = models.write(model, folder, narrow=options.narrow)
    frames = options.frames if model.frames else 1
    latents = models.random_latents(model.latent_shape(channels, size, frames)).numpy()
    clip = f", {frames} latent frame{'s' if frames > 1 else ''}" if model.frames else ""
    for dtype_name in options.dtypes:
        loaded = Loaded(folder, dtype_name, device.type, options.threads)
        for count in options.ranks:
            with Ranks(count, loaded) as ranks:
                result = measure(ranks, latents, dtype_name, options.repeats)
            case = f"{model.title} {size}x{size}{clip}"
            out.add({"model": model.name, "case": case, "frames": frames, "dtype": dtype_name, **result})
            out.say(describe(out.results[-1]))


def describe(result: dict[str, Any]) -> str:
    """One result as a line."""
    one, sharded = (result["timings"][name]["median_s"] for name in ("one", "sharded"))
    return (
        f"{result['case']}, {result['dtype']}, {result['ranks']} rank{'s' if result['ranks'] > 1 else ''}: {report.seconds(one)} -> {report.seconds(sharded)}, "
        f"{report.times(result['speedup'])} of {report.times(result['ceiling'])}"
    )


def summary(results: Sequence[dict[str, Any]]) -> str:
    """All results as a table."""
    return report.table(
        [
            "sharded",
            "ranks",
            "one rank",
            "sharded",
            "speed-up",
            "machine's",
            "share",
            "memory, one",
            "per rank",
            "max difference",
        ],
        [
            [
                f"{result['case']}, {result['dtype']}",
                str(result["ranks"]),
                report.seconds(result["timings"]["one"]["median_s"]),
                report.seconds(result["timings"]["sharded"]["median_s"]),
                report.times(result["speedup"]),
                report.times(result["ceiling"]),
                f"{result['share_of_ceiling']:.0%}",
                report.mebibytes(result["peak_memory_bytes"]["one"]),
                report.times(result["memory_per_rank"]),
                f"{result['max_abs_difference']:.1e}",
            ]
            for result in results
        ],
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command, and return its report."""
    parser = report.parser(
        "sharding", "One decode on several ranks against one rank.", models=["wan21", "autoencoder_kl"], repeats=3
    )
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=report.positive,
        metavar="N",
        help="numbers of ranks; default: 1 and 2, and 4 and 8 where there are cores or devices for them",
    )
    parser.add_argument("--threads", type=report.positive, default=1, help="torch threads of each rank")
    parser.add_argument("--frames", type=report.positive, default=2, metavar="T", help="latent frames of video models")
    options = parser.parse_args(arguments)
    device = report.chosen_device(options, parser)
    if options.ranks is None:
        options.ranks = default_ranks(device)
    if device.type == "cuda" and max(options.ranks) > torch.cuda.device_count():
        parser.error(f"--ranks {max(options.ranks)}: each needs a device, and there are {torch.cuda.device_count()}")
    for name in options.models:
        size = options.size or MODELS[name].size
        try:
            MODELS[name].latent_shape(1, size, 1)
        except ValueError as error:
            parser.error(f"--size: {error}")
        if size // MODELS[name].ratio < max(options.ranks):
            parser.error(f"--size {size}: {name} has fewer latent rows than {max(options.ranks)} ranks")
    out = Report("sharding", options, device, options.threads)
    out.note("peak memory", METHODS[device.type])
    out.note(
        "machine's", "speed-up of as many independent decodes at once over one: what the machine gives N processes"
    )
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        for name in options.models:
            measure_model(MODELS[name], options, device, Path(scratch) / name, out)
    out.say("\n" + summary(out.results))
    return out.finish()


if __name__ == "__main__":
    # SIGTERM must unwind the stack: the ranks end with this process.
    exit_on_signals()
    main()
    sys.exit(0)
