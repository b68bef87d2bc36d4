"""`make demo`: start the service, decode three sample latents through the Python client, write pictures, stop.

It runs the shipped `deploy/config.yaml` (CPU, the built-in demo VAE, two ranks) and needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from decode_client import DecodeClient, DecodeError

from decode_service.demo import SAMPLES, load_sample
from local_service import DEFAULT_CONFIG, ROOT, START_TIMEOUT_S, LocalService, ServiceFailed, exit_on_signals

FPS = 8.0


@dataclass(frozen=True, slots=True)
class Request:
    """One picture or clip to make: which latents, and the file that they become."""

    title: str
    latents_BCTHW: np.ndarray
    format: str
    path: Path

    @property
    def options(self) -> dict[str, Any]:
        return {"format": self.format, "fps": FPS} if self.format == "mp4" else {"format": self.format}


def requests(folder: Path) -> Iterator[Request]:
    """What the demo decodes, in order."""
    for name in SAMPLES:
        latents_BCTHW = load_sample(name)
        if latents_BCTHW.shape[2] == 1:
            yield Request(f"{name}: a picture", latents_BCTHW, "png", folder / f"{name}.png")
            continue
        yield Request(f"{name}: a clip", latents_BCTHW, "mp4", folder / f"{name}.mp4")
        if name == "landscape":
            # The decoder is causal: the first latent frame alone is the first picture of the clip.
            first_BCTHW = latents_BCTHW[:, :, :1]
            yield Request(f"{name}: its first frame", first_BCTHW, "png", folder / f"{name}-first-frame.png")


def describe_plan(plan: dict[str, Any]) -> str:
    """One line about how a request was decoded."""
    ranks = plan["ranks"]
    line = f"{plan['mode']} on {ranks} rank{'s' if ranks != 1 else ''}"
    if plan.get("axis"):
        line += f", divided along the {plan['axis']}"
        if plan.get("bands"):
            line += f" ({' + '.join(str(size) for _, size in plan['bands'])})"
    line += f"; {plan['reason']}"
    if plan.get("fallback"):
        line += f" (fallback: {plan['fallback']})"
    return line


def describe_timings(timings_ms: dict[str, float], round_trip_ms: float) -> str:
    """One line about where the time went, in the order in which the service reports it."""
    stages = ", ".join(f"{stage} {spent_ms:.0f}" for stage, spent_ms in timings_ms.items())
    return f"{round_trip_ms:.0f} ms seen by the client; on the server: {stages}"


def decode_samples(url: str, folder: Path) -> list[Path]:
    """Decode every sample, print how, and return the files written."""
    written = []
    with DecodeClient(url) as client:
        for request in requests(folder):
            started = time.perf_counter()
            result = client.decode(request.latents_BCTHW, **request.options)
            round_trip_ms = (time.perf_counter() - started) * 1000
            result.save(request.path)
            size = result.plan["output"]
            frames = size["frames"]
            print(f"\n{request.title}, {size['width']}x{size['height']}, {frames} frame{'s' if frames != 1 else ''}")
            print(f"  file  {shown(request.path)} ({request.path.stat().st_size / 1024:.0f} KiB)")
            print(f"  plan  {describe_plan(dict(result.plan))}")
            print(f"  time  {describe_timings(dict(result.timings), round_trip_ms)}", flush=True)
            written.append(request.path)
    return written


def shown(path: Path) -> Path:
    """A path as a person at the repository's root would type it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode the sample latents with a service of its own.")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output", help="folder for pictures and the log")
    parser.add_argument("--port", type=int, default=None, help="default: the configured one, or a free one; 0: any")
    parser.add_argument("--proxy", choices=("auto", "haproxy", "python"), default="auto")
    parser.add_argument("--timeout", type=float, default=START_TIMEOUT_S, help="seconds to wait for the service")
    parser.add_argument("--keep", action="store_true", help="leave the service running until Ctrl-C")
    options = parser.parse_args()
    exit_on_signals()
    folder = options.output.resolve()
    log_path = folder / "service.log"
    haproxy = {"auto": None, "haproxy": True, "python": False}[options.proxy]
    service: LocalService | None = None
    try:
        # Loopback only: a demo is nobody else's business.
        service = LocalService(options.config, port=options.port, host="127.0.0.1", haproxy=haproxy, log_path=log_path)
        if service.port_note:
            print(service.port_note)
        print(f"starting the service at {service.url} (log: {shown(log_path)}) ...", flush=True)
        with service:
            took_s = service.wait_until_ready(options.timeout)
            print(f"ready after {took_s:.0f} s")
            decode_samples(service.url, folder)
            print(f"\nThe pictures are in {shown(folder)}/")
            if options.keep:
                print(f"The service answers at {service.url} (docs: {service.url}/docs); Ctrl-C ends it", flush=True)
                return service.wait()
        print("The service has stopped.")
        return 0
    except KeyboardInterrupt:
        print("\nstopped")
        return 0 if options.keep else 130
    except (ServiceFailed, DecodeError) as error:
        if service is not None and (tail := service.log_tail()):
            print(f"\n--- end of {shown(log_path)} ---\n{tail}\n---", file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
