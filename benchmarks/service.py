"""The whole service over HTTP against the bare decode: ``python -m benchmarks.service``.

The service is the real one (`serve run` on a Ray of its own, on free ports), with a model written for the occasion. In
turn with it, in this process and with the same number of threads, runs what it should cost no more than. Three parts:

- ``overhead``: a large and the smallest request at concurrency 1, 4 and 16 on one rank, against as many bare decodes
  (``RankDecoder``, the same plan) one after the other;
- ``reply``: a request whose reply is large and whose decode is quick, less what its rank spent on the decode, against
  plain uvicorn that sends as many bytes;
- ``group``: sixteen small requests at once on a group of two ranks, which then decode one each, against the same requests
  one at a time, each divided over both ranks; and where several may be decoded in one pass (``policy.batch``).

The client takes its share of the same cores. A machine that others use, too, is no good for this: Linux shares processor
time out by session, and the service's processes have other sessions than this one.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import httpx2
import msgpack
import numpy as np
import torch
from decode_client import DecodeClient

from benchmarks import ROOT, models, report
from benchmarks.models import MODELS
from benchmarks.ranks import Loaded, Ranks
from benchmarks.report import Report
from benchmarks.timing import Timing, interleave, percentile
from decode_service.config import ServiceConfig
from decode_service.planning.plan import PixelFormat
from decode_service.planning.planner import Policy, make_plan
from local_service import LocalService, exit_on_signals, free_ports

PARTS = ("overhead", "reply", "group")
AT_ONCE = 16
PLAIN_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A model and the group that serves it, which may decode several requests in one pass."""

    folder: Path
    dtype_name: str
    device: torch.device
    ranks: int
    threads: int
    together: int = 1

    def arguments(self) -> dict[str, Any]:
        """The application's ``args``."""
        return {
            "model": {"name": "benchmark", "source": str(self.folder), "dtype": self.dtype_name},
            "group": {"ranks": self.ranks, "device": self.device.type, "threads": self.threads},
            "policy": {"batch": {"max_items": self.together}},
        }

    def config(self) -> dict[str, Any]:
        """A Serve config with this model alone, and the readiness probe."""
        return {
            "proxy_location": "EveryNode",
            "http_options": {"host": "127.0.0.1", "request_timeout_s": 600},
            "applications": [
                {
                    "name": "benchmark",
                    "route_prefix": "/",
                    "import_path": "decode_service.app:build",
                    "args": self.arguments(),
                },
                {
                    "name": "readyz",
                    "route_prefix": "/readyz",
                    "import_path": "decode_service.app:build_status",
                    "args": {"probe": "readyz"},
                },
            ],
        }

    def bare(self) -> Ranks:
        """The same model in a process like that of a rank, loaded as a rank of the service loads it."""
        compiled = ServiceConfig(**self.arguments()).compile_enabled()
        return Ranks(1, Loaded(self.folder, self.dtype_name, self.device.type, self.threads, compiled))

    @contextlib.contextmanager
    def running(self, out: Report, haproxy: bool | None) -> Iterator[str]:
        """The service from its start to its end; its address."""
        with tempfile.TemporaryDirectory(prefix="benchmark-log-") as folder:
            log = Path(folder) / "service.log"
            with LocalService(self.config(), port=0, host="127.0.0.1", haproxy=haproxy, log_path=log) as service:
                try:
                    took_s = service.wait_until_ready()
                    out.say(f"\nservice on {self.ranks} rank{'s' if self.ranks > 1 else ''} ready after {took_s:.0f} s")
                    yield service.url
                except Exception:
                    out.say(service.log_tail())
                    raise


def bare_decode(decoder: Ranks, latents: np.ndarray, dtype: str) -> Callable[[], None]:
    """A call that decodes ``latents`` directly to pixels of ``dtype``, as the service does for a request."""
    plan = make_plan(decoder.spec, tuple(latents.shape), group_size=1, policy=Policy(), mode="direct", strict=True)
    decoder.prepare(plan, latents, PixelFormat(dtype), compiled=True)
    return decoder.decode


class Requests:
    """``count`` requests at once, each from a thread of its own, and how long each took.

    Attributes:
        latencies_s: of every request since ``clear``.
        modes: of the plans that ran.
    """

    def __init__(self, client: DecodeClient, latents: np.ndarray, count: int, **wish: Any) -> None:
        self._client, self._latents, self._wish = client, latents, wish
        self._count = count
        self._threads = ThreadPoolExecutor(count)
        self.latencies_s: list[float] = []
        self.modes: set[str] = set()

    def at_once(self) -> None:
        """Send all of them, and wait for all replies."""
        for future in [self._threads.submit(self._one) for _ in range(self._count)]:
            future.result()

    def one_by_one(self) -> None:
        """Send each when the reply to the last has come."""
        for _ in range(self._count):
            self._one()

    def clear(self) -> None:
        """Forget what was measured, after warming up."""
        self.latencies_s.clear()

    def close(self) -> None:
        self._threads.shutdown()

    def _one(self) -> None:
        begun = time.perf_counter()
        result = self._client.decode(self._latents, **self._wish)
        self.latencies_s.append(time.perf_counter() - begun)
        self.modes.add(str(result.plan["mode"]))


def percentiles_ms(latencies_s: Sequence[float]) -> dict[str, float]:
    """The 50th, 90th and 99th percentile, in milliseconds."""
    return {f"p{percent}": percentile(latencies_s, percent) * 1e3 for percent in (50, 90, 99)}


def measure_overhead(
    url: str, decoder: Ranks, kind: str, latents: np.ndarray, concurrency: int, rounds: int
) -> dict[str, Any]:
    """``concurrency`` requests at once against as many bare decodes in a row."""
    decode = bare_decode(decoder, latents, "uint8")

    def bare() -> None:
        for _ in range(concurrency):
            decode()

    with DecodeClient(url, timeout=600, max_retries=0) as client:
        requests = Requests(client, latents, concurrency)
        try:
            decode()
            # At most a few, of a large request one: its connection and the rank's memory are warm then.
            requests.at_once() if kind == "small" else requests._one()
            requests.clear()
            timings = interleave({"bare": bare, "service": requests.at_once}, rounds)
        finally:
            requests.close()
    if requests.modes != {"direct"}:
        raise RuntimeError(f"expected direct plans, got {sorted(requests.modes)}")
    served, alone = timings["service"].median, timings["bare"].median
    return {
        "part": "overhead",
        "case": f"{kind} at concurrency {concurrency}",
        "latent_shape": list(latents.shape),
        "concurrency": concurrency,
        "requests": len(requests.latencies_s),
        "bare": timings["bare"].to_dict(),
        "service": timings["service"].to_dict(),
        "ratio": served / alone,
        "overhead_ms_per_request": (served - alone) / concurrency * 1e3,
        "latency_ms": percentiles_ms(requests.latencies_s),
    }


@dataclass
class Transfers:
    """Requests with large replies: when their head came, and when all of them was there."""

    http: httpx2.Client
    method: str
    url: str
    body: bytes
    head_s: list[float]
    total_s: list[float]
    decode_s: list[float]
    nbytes: int = 0

    def __call__(self) -> None:
        begun = time.perf_counter()
        with self.http.stream(
            self.method, self.url, content=self.body, headers={"Content-Type": "application/msgpack"}, timeout=600
        ) as response:
            head = time.perf_counter() - begun
            received = bytearray()
            for piece in response.iter_bytes():
                received += piece
        if response.status_code != 200:
            raise RuntimeError(f"{self.url} answered {response.status_code}: {bytes(received[:500])!r}")
        self.nbytes = len(received)
        self.decode_s.append(stage_s(response.headers.get("Server-Timing", ""), "decode"))
        self.head_s.append(head)
        self.total_s.append(time.perf_counter() - begun)

    def clear(self) -> None:
        """Forget what was measured, after warming up."""
        for measured in (self.head_s, self.total_s, self.decode_s):
            measured.clear()

    def body_timing(self) -> Timing:
        """From the reply's head to its end."""
        return Timing(tuple(total - head for total, head in zip(self.total_s, self.head_s, strict=True)))


def stage_s(server_timing: str, stage: str) -> float:
    """Seconds that a ``Server-Timing`` header gives for ``stage``; 0 where it does not name it."""
    found = re.search(rf"(?:^|,)\s*{re.escape(stage)};dur=([\d.]+)", server_timing)
    return float(found[1]) / 1e3 if found else 0.0


@contextlib.contextmanager
def plain_uvicorn(nbytes: int) -> Iterator[str]:
    """Uvicorn in a process of its own that answers with ``nbytes`` bytes; its address.

    Raises:
        RuntimeError: it does not start.
    """
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/"
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "benchmarks.plain_server:app",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [*command, "--log-level", "warning", "--lifespan", "off"],
        cwd=ROOT,
        env={**os.environ, "PLAIN_SERVER_BYTES": str(nbytes)},
        stdin=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + PLAIN_START_TIMEOUT_S
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"uvicorn ended with exit status {process.returncode} before it answered")
            with contextlib.suppress(httpx2.HTTPError):
                httpx2.get(url, timeout=30)
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"uvicorn did not answer within {PLAIN_START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_quick_model(folder: Path) -> None:
    """A model whose decode costs next to nothing per pixel, for large replies."""
    torch.manual_seed(7)
    diffusers.AutoencoderTiny(
        encoder_block_out_channels=(4, 4, 4, 4),
        decoder_block_out_channels=(4, 4, 4, 4),
        num_encoder_blocks=(1, 1, 1, 1),
        num_decoder_blocks=(1, 1, 1, 0),
    ).save_pretrained(folder)


def measure_reply(url: str, mebibytes: int, rounds: int) -> dict[str, Any]:
    """A float32 reply of at least ``mebibytes`` against plain uvicorn, for a model with 4 channels and 8 pixels a cell."""
    cells = math.ceil(math.sqrt(mebibytes * 2**20 / 4 / 3) / 8)
    latents = models.random_latents((1, 4, cells, cells)).numpy()
    body: bytes = msgpack.packb(
        {
            "latents": {"dtype": "float32", "shape": list(latents.shape), "data": latents.tobytes()},
            "mode": "direct",
            "strict": True,
            "output": {"dtype": "float32"},
        }
    )
    with httpx2.Client() as http:
        service = Transfers(http, "POST", f"{url}/decode", body, [], [], [])
        service()
        with plain_uvicorn(service.nbytes) as address:
            plain = Transfers(http, "GET", address, b"", [], [], [])
            plain()
            service.clear()
            plain.clear()
            timings = interleave({"service": service, "uvicorn": plain}, rounds)
    if not min(service.decode_s) > 0:
        raise RuntimeError("the service's replies do not say how long their decode took")
    # Of the very request: how long a decode takes varies by more than sending its pixels takes.
    beyond = Timing(tuple(total - decode for total, decode in zip(service.total_s, service.decode_s, strict=True)))
    plain_s = timings["uvicorn"].median
    bodies = {"service": service.body_timing(), "uvicorn": plain.body_timing()}
    return {
        "part": "reply",
        "case": f"reply of {service.nbytes / 2**20:.0f} MiB",
        "latent_shape": list(latents.shape),
        "reply_bytes": service.nbytes,
        **{name: timing.to_dict() for name, timing in timings.items()},
        "decode": Timing(tuple(service.decode_s)).to_dict(),
        "beyond_decode": beyond.to_dict(),
        "ratio": beyond.median / plain_s,
        "overhead_ms_per_request": (beyond.median - plain_s) * 1e3,
        "body": {name: timing.to_dict() for name, timing in bodies.items()},
        "body_ratio": bodies["service"].median / bodies["uvicorn"].median,
    }


def measure_group(url: str, latents: np.ndarray, rounds: int, together: int) -> dict[str, Any]:
    """Sixteen at once on two ranks, as the service decides, against one at a time on both.

    Args:
        together: requests that one pass may take there.
    """
    with DecodeClient(url, timeout=600, max_retries=0) as client:
        crowd = Requests(client, latents, AT_ONCE, mode="auto")
        row = Requests(client, latents, AT_ONCE, mode="spatial_shard_width", strict=True)
        try:
            # The crowd last: where HAProxy learns of a new replica it starts anew, and ends what takes longer than a second by then.
            for requests, warm in ((row, row.one_by_one), (crowd, crowd.at_once)):
                warm()
                requests.clear()
            timings = interleave({"at_once": crowd.at_once, "one_by_one_sharded": row.one_by_one}, rounds)
        finally:
            crowd.close()
            row.close()
    at_once, in_turn = timings["at_once"].median, timings["one_by_one_sharded"].median
    return {
        "part": "group",
        "case": f"{AT_ONCE} at once on 2 ranks" + (f", up to {together} in a pass" if together > 1 else ""),
        "latent_shape": list(latents.shape),
        "requests": AT_ONCE,
        "together": together,
        "modes": sorted(crowd.modes),
        **{name: timing.to_dict() for name, timing in timings.items()},
        "throughput_ratio": in_turn / at_once,
        "latency_ms": percentiles_ms(crowd.latencies_s),
        "latency_ms_one_by_one_sharded": percentiles_ms(row.latencies_s),
    }


def describe(result: dict[str, Any]) -> str:
    """One result as a line."""
    if result["part"] == "group":
        return (
            f"{result['case']}: {report.seconds(result['at_once']['median_s'])}, one at a time and sharded "
            f"{report.seconds(result['one_by_one_sharded']['median_s'])}: {report.times(result['throughput_ratio'])}"
        )
    if result["part"] == "reply":
        return (
            f"{result['case']}: {report.seconds(result['beyond_decode']['median_s'])} beyond its decode of "
            f"{report.seconds(result['decode']['median_s'])}, plain uvicorn {report.seconds(result['uvicorn']['median_s'])}: "
            f"{report.times(result['ratio'])} ({report.times(result['body_ratio'])} from head to end)"
        )
    latency = ", ".join(f"{name} {report.seconds(value / 1e3)}" for name, value in result["latency_ms"].items())
    return (
        f"{result['case']}: {report.seconds(result['service']['median_s'])} against "
        f"{report.seconds(result['bare']['median_s'])}: {report.times(result['ratio'])}, "
        f"{result['overhead_ms_per_request']:.1f} ms more a request; {latency}"
    )


def measure_model(name: str, dtype_name: str, options: argparse.Namespace, device: torch.device, out: Report) -> None:
    """All parts for one model and dtype."""
    model = MODELS[name]
    haproxy = {"auto": None, "haproxy": True, "python": False}[options.proxy]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        folder = Path(scratch) / name
        channels = models.write(model, folder, narrow=options.narrow)

        def latents_of(size: int) -> np.ndarray:
            return models.random_latents(model.latent_shape(channels, size, 1)).numpy()

        def add(result: dict[str, Any]) -> None:
            out.add({"model": name, "dtype": dtype_name, **result})
            out.say(describe(result))

        if "overhead" in options.parts:
            served = Served(folder, dtype_name, device, 1, options.threads)
            decoder = served.bare()
            with served.running(out, haproxy) as url:
                for concurrency in options.concurrency:
                    latents = latents_of(model.ratio)
                    add(measure_overhead(url, decoder, "small", latents, concurrency, options.repeats))
                for concurrency in options.concurrency:
                    rounds = max(1, options.large_repeats // concurrency)
                    add(measure_overhead(url, decoder, "large", latents_of(options.size), concurrency, rounds))
            decoder.close()
        if "reply" in options.parts:
            quick = Path(scratch) / "quick"
            write_quick_model(quick)
            served = Served(quick, "float32", device, 1, options.threads)
            with served.running(out, haproxy) as url:
                add(measure_reply(url, options.reply_mib, options.repeats))
        if "group" in options.parts:
            if device.type == "cuda" and torch.cuda.device_count() < 2:
                out.note("group", "left out: it needs two devices")
                return
            for together in dict.fromkeys((1, options.together)):
                served = Served(folder, dtype_name, device, 2, max(1, options.threads // 2), together)
                with served.running(out, haproxy) as url:
                    add(measure_group(url, latents_of(options.small_size), max(1, options.repeats // 4), together))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command, and return its report."""
    parser = report.parser(
        "service", "The whole service over HTTP against the bare decode.", models=["autoencoder_kl"], repeats=12
    )
    parser.set_defaults(size=192, dtypes=["float32"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--threads", type=report.positive, default=report.default_threads(), help="threads of a group")
    parser.add_argument("--concurrency", nargs="+", type=report.positive, default=[1, 4, 16], metavar="N")
    parser.add_argument(
        "--large-repeats",
        type=report.positive,
        default=4,
        metavar="N",
        help="large requests at each concurrency, at least",
    )
    parser.add_argument(
        "--small-size", type=report.positive, default=64, metavar="PIXELS", help="height and width of the part `group`"
    )
    parser.add_argument(
        "--together", type=report.positive, default=8, metavar="N", help="requests in one pass, in the part `group`"
    )
    parser.add_argument("--reply-mib", type=report.positive, default=64, metavar="MIB", help="size of the large reply")
    parser.add_argument("--proxy", choices=("auto", "haproxy", "python"), default="auto", help="Serve's HTTP proxy")
    options = parser.parse_args(arguments)
    device = report.chosen_device(options, parser)
    for name in options.models:
        for flag in ("size", "small_size"):
            try:
                MODELS[name].latent_shape(1, getattr(options, flag), 1)
            except ValueError as error:
                parser.error(f"--{flag.replace('_', '-')}: {error}")
    out = Report("service", options, device, options.threads)
    out.note("bare", "RankDecoder in a process like a rank's, with its threads: as many decodes one after the other")
    out.note("small", "one latent cell")
    out.note("latency", "of single requests, in milliseconds, seen by the Python client")
    for name in options.models:
        for dtype_name in options.dtypes:
            measure_model(name, dtype_name, options, device, out)
    out.say("\n" + "\n".join(f"{result['model']}, {result['dtype']}, {describe(result)}" for result in out.results))
    return out.finish()


if __name__ == "__main__":
    # SIGTERM must unwind the stack: the service and uvicorn end with this process.
    exit_on_signals()
    main()
    sys.exit(0)
