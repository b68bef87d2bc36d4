"""One rank's decode against diffusers: ``python -m benchmarks.decode``.

For each model, frame and dtype, in turn, with the same threads and the same weights from the same folder:

- ``service``: ``RankDecoder`` in mode ``direct``, loaded and called as a rank of the service does it, in a process with the
  environment of a rank, compiled where the service compiles by default (on CUDA) and where that measures faster;
- ``diffusers``: ``vae.decode`` as a user calls it;
- ``compiled``: the same with the decoder that it calls compiled by ``torch.compile``. Its first call compiles and is
  reported by itself.

A matrix product measured in the same turns says what the machine could do.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import models, report
from benchmarks.memory import METHODS, peak_memory
from benchmarks.models import DTYPES, MODELS, Model
from benchmarks.ranks import Loaded, Ranks
from benchmarks.report import Report
from benchmarks.timing import Matmul, interleave, synchronizer
from decode_service.config import ServiceConfig
from decode_service.decoding.pixels import from_carrier
from decode_service.planning.plan import PixelFormat
from decode_service.planning.planner import Policy, make_plan
from local_service import exit_on_signals


class Contenders:
    """The three ways of decoding one model in one dtype."""

    def __init__(self, folder: Path, dtype_name: str, device: torch.device, threads: int, *, compiled: bool) -> None:
        settings: dict[str, Any] = {
            "model": {"name": "benchmark", "source": str(folder), "dtype": dtype_name},
            "group": {"device": device.type},
        }
        config = ServiceConfig(**settings)
        self.dtype_name = dtype_name
        self.dtype = DTYPES[dtype_name]
        self.device = device
        self.policy = Policy(chunk=config.policy.chunk)
        self.rank = Ranks(1, Loaded(folder, dtype_name, device.type, threads, config.compile_enabled()))
        self.service_compiles = config.compile_enabled()
        self.vae = models.load(folder, self.dtype, device)
        self._eager = self.vae.decoder
        self._compiles = compiled

    def of(self, latents: torch.Tensor) -> dict[str, Callable[[], Any]]:
        """The contenders as calls without arguments, by name."""
        plan = make_plan(
            self.rank.spec, tuple(latents.shape), group_size=1, policy=self.policy, mode="direct", strict=True
        )
        # Values exactly as vae.decode returns them, in the model's own dtype: nobody converts more than the others.
        pixels = PixelFormat(self.dtype_name, "model")
        carrier = latents.numpy()
        self.rank.prepare(plan, carrier, pixels, compiled=self.service_compiles)
        there = latents.to(self.device, self.dtype)

        def diffusers() -> Any:
            with torch.no_grad():
                return self.vae.decode(there).sample

        contenders: dict[str, Callable[[], Any]] = {"service": self.rank.decode, "diffusers": diffusers}
        if self._compiles:
            # Compiled anew for each shape, as for a user who decodes that shape only.
            torch._dynamo.reset()
            decoder = torch.compile(self._eager)

            def compiled() -> Any:
                self.vae.decoder = decoder
                try:
                    return diffusers()
                finally:
                    self.vae.decoder = self._eager

            contenders["compiled"] = compiled
        return contenders

    def watched(self, name: str, call: Callable[[], Any]) -> tuple[torch.Tensor, int]:
        """What a contender decodes, as float32 on the CPU, and the memory that this takes at the peak."""
        if name == "service":
            return from_carrier(self.rank.pixels()[0], self.dtype_name).float(), self.rank.peak_bytes()[0]
        outcome, peak = peak_memory(call, self.device)
        return outcome.float().cpu(), peak


def measure(
    contenders: Contenders,
    latents: torch.Tensor,
    flops: int,
    repeats: int,
    reference: torch.Tensor | None,
    matmul: Matmul,
) -> tuple[dict[str, Any], torch.Tensor]:
    """One result, and diffusers' pixels.

    Args:
        flops: of one decode.
        reference: diffusers' pixels in float32; None where that is what is measured here.
        matmul: what the machine could do, in the same dtype.
    """
    device = contenders.device
    synchronize = synchronizer(device)
    calls = contenders.of(latents)
    measured: dict[str, dict[str, Any]] = {}
    pixels: dict[str, torch.Tensor] = {}
    for name, call in list(calls.items()):
        begun = time.perf_counter()
        try:
            call()
        except Exception as error:
            # Whether torch can compile a model is one of the things found out here; diffusers itself must decode.
            if name != "compiled":
                raise
            measured[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
            del calls[name]
            continue
        synchronize()
        first_s = time.perf_counter() - begun
        pixels[name], peak = contenders.watched(name, call)
        measured[name] = {"first_call_s": first_s, "peak_memory_bytes": peak}
    matmul()
    timings = interleave({**calls, "matmul": matmul}, repeats, synchronize=synchronize)
    peak_flops = matmul.flops / timings["matmul"].best
    for name in calls:
        reached = flops / timings[name].median
        measured[name] |= {
            **timings[name].to_dict(),
            "flops_per_s": reached,
            "share_of_matmul_peak": reached / peak_flops,
        }
    theirs = pixels["diffusers"]
    expected = theirs if reference is None else reference
    result = {
        "dtype": contenders.dtype_name,
        "latent_shape": list(latents.shape),
        "output_shape": list(theirs.shape),
        "flops": flops,
        "matmul_peak_flops_per_s": peak_flops,
        "contenders": measured,
        "speedup_over_diffusers": timings["diffusers"].median / timings["service"].median,
        "speedup_over_compiled": (
            timings["compiled"].median / timings["service"].median if "compiled" in timings else None
        ),
        "memory_against_diffusers": measured["service"]["peak_memory_bytes"]
        / measured["diffusers"]["peak_memory_bytes"],
        "accuracy": accuracy(pixels, expected, is_reference=reference is None),
    }
    return result, theirs


def accuracy(pixels: dict[str, torch.Tensor], expected: torch.Tensor, *, is_reference: bool) -> dict[str, Any]:
    """How far each contender's pixels are from diffusers' in float32.

    Args:
        is_reference: whether diffusers' own pixels are what ``expected`` is, so that they have no error to speak of.
    """
    spread = expected.std().item()
    result: dict[str, Any] = {"output_std": spread}
    for name, values in pixels.items():
        if name == "diffusers" and is_reference:
            continue
        if values.shape != expected.shape:
            raise RuntimeError(f"{name} decoded to {tuple(values.shape)}, diffusers to {tuple(expected.shape)}")
        difference = values - expected
        largest = difference.abs().max().item()
        result[name] = {
            "max_abs_error": largest,
            "max_abs_error_over_std": largest / spread,
            "rms_error": difference.square().mean().sqrt().item(),
        }
    if not is_reference:
        for kind in ("max_abs_error", "rms_error"):
            result[f"{kind}_against_diffusers"] = result["service"][kind] / result["diffusers"][kind]
    return result


def measure_model(model: Model, options: argparse.Namespace, device: torch.device, folder: Path, out: Report) -> None:
    """All frames and dtypes of one model."""
    size = options.size or model.size
    channels = models.write(model, folder, narrow=options.narrow)
    clips = options.frames if options.frames and model.frames else model.frames or (1,)
    shapes = {frames: model.latent_shape(channels, size, frames) for frames in clips}
    flops = {frames: models.count_flops(model, shape, narrow=options.narrow) for frames, shape in shapes.items()}
    # float32 first: it is what the others are held to.
    dtypes = sorted(options.dtypes, key=lambda name: name != "float32")
    reference: dict[int, torch.Tensor] = {}
    if "float32" not in dtypes:
        vae = models.load(folder, torch.float32, device)
        with torch.no_grad():
            reference = {
                frames: vae.decode(models.random_latents(shape).to(device)).sample.cpu()
                for frames, shape in shapes.items()
            }
        del vae
    for dtype_name in dtypes:
        gc.collect()
        contenders = Contenders(folder, dtype_name, device, options.threads, compiled=options.compile)
        matmul = Matmul(contenders.dtype, device, 256 if options.narrow else None)
        for frames, shape in shapes.items():
            latents = models.random_latents(shape)
            result, theirs = measure(contenders, latents, flops[frames], options.repeats, reference.get(frames), matmul)
            reference.setdefault(frames, theirs)
            clip = f", {frames} latent frame{'s' if frames > 1 else ''}" if model.frames else ""
            out.add({"model": model.name, "case": f"{model.title} {size}x{size}{clip}", "frames": frames, **result})
            out.say(describe(out.results[-1]))
        contenders.rank.close()
        del contenders


def describe(result: dict[str, Any]) -> str:
    """One result as a table."""
    rows = []
    for name, measured in result["contenders"].items():
        if "failed" in measured:
            rows.append([name, "failed", "", "", "", "", ""])
            continue
        error = result["accuracy"].get(name)
        rows.append(
            [
                name,
                report.seconds(measured["median_s"]),
                report.times(measured["median_s"] / result["contenders"]["service"]["median_s"]),
                f"{measured['flops_per_s'] / 1e9:.0f} ({measured['share_of_matmul_peak']:.0%})",
                report.mebibytes(measured["peak_memory_bytes"]),
                f"{error['max_abs_error']:.1e} ({error['max_abs_error_over_std']:.1e})" if error else "reference",
                report.seconds(measured["first_call_s"]),
            ]
        )
    title = (
        f"\n{result['case']}, {result['dtype']}: {result['flops'] / 1e9:.0f} GFLOP, "
        f"matrix products at {result['matmul_peak_flops_per_s'] / 1e9:.0f} GFLOP/s, "
        f"output deviates by {result['accuracy']['output_std']:.2f}"
    )
    lines = [
        title,
        report.table(
            ["", "median", "to service", "GFLOP/s (of peak)", "peak memory", "max error (/std)", "first call"], rows
        ),
    ]
    lines += [
        f"{name}: {measured['failed']}" for name, measured in result["contenders"].items() if "failed" in measured
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command, and return its report."""
    parser = report.parser("decode", "One rank's decode against diffusers.", models=list(MODELS), repeats=3)
    parser.add_argument(
        "--frames",
        nargs="+",
        type=report.positive,
        metavar="T",
        help="latent frames of video models, instead of their own",
    )
    parser.add_argument("--threads", type=report.positive, default=report.default_threads(), help="torch threads")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave compiled diffusers out (it takes minutes)"
    )
    options = parser.parse_args(arguments)
    device = report.chosen_device(options, parser)
    for name in options.models:
        try:
            MODELS[name].latent_shape(1, options.size or MODELS[name].size, 1)
        except ValueError as error:
            parser.error(f"--size: {error}")
    torch.set_num_threads(options.threads)
    out = Report("decode", options, device, options.threads)
    out.note("peak memory", METHODS[device.type])
    out.note("FLOP", "those of diffusers' decode, also where a contender does less arithmetic for the same pixels")
    out.note("bfloat16 errors", "against diffusers in float32 with the same weights before they were rounded")
    if device.type == "cuda":
        out.note("TF32", "off for all contenders, as in the service")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        for name in options.models:
            measure_model(MODELS[name], options, device, Path(scratch) / name, out)
    out.say("\n" + summary(out.results))
    return out.finish()


def summary(results: Sequence[dict[str, Any]]) -> str:
    """The ratios of all results as a table."""
    rows = []
    for result in results:
        compiled, ratio = result["speedup_over_compiled"], result["accuracy"].get("rms_error_against_diffusers")
        rows.append(
            [
                f"{result['case']}, {result['dtype']}",
                report.times(result["speedup_over_diffusers"]),
                "-" if compiled is None else report.times(compiled),
                report.times(result["memory_against_diffusers"]),
                f"{result['accuracy']['service']['max_abs_error']:.1e}",
                "-" if ratio is None else report.times(ratio),
            ]
        )
    return report.table(
        ["service", "faster than diffusers", "than compiled", "its memory", "max error", "its rms error"], rows
    )


if __name__ == "__main__":
    # SIGTERM must unwind the stack: the models' files, gigabytes, go with this process.
    exit_on_signals()
    main()
    sys.exit(0)
