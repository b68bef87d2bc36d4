"""``serve run`` as a process of its own, on free ports, driven over HTTP, and gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]

PROXIES: dict[str, dict[str, str]] = {
    "default": {"RAY_SERVE_ENABLE_HA_PROXY": "0"},
    "haproxy": {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Without these three a shutdown takes 30 s. For tests only: they drop requests that are still running.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "1",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
    },
}

# Ports that HAProxy mode fixes; two clusters on one machine would collide.
HAPROXY_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)


@dataclass
class Reply:
    """An HTTP reply."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class ServeProcess:
    """A running ``serve run``."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def request(self, path: str, body: bytes | None = None, *, timeout_s: float = 60, **headers: str) -> Reply:
        """GET ``path``, or POST ``body`` as msgpack."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            names.setdefault("Content-Type", "application/msgpack")
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=body, headers=names)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return Reply(reply.status, lower(reply.headers), reply.read())
        except urllib.error.HTTPError as error:
            return Reply(error.code, lower(error.headers), error.read())

    def probe(self, path: str) -> int:
        """Status of ``path``, or 0 while nobody listens."""
        try:
            return self.request(path, timeout_s=5).status
        except OSError:
            return 0

    def wait_for(self, path: str, status: int, *, limit_s: float = 150) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"serve run ended:\n{self.tail()}"
            if self.probe(path) == status:
                return
            time.sleep(0.3)
        raise AssertionError(f"{path} was not {status} within {limit_s:g} s:\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-8000:]

    def ranks(self) -> list[int]:
        """Processes of the rank actors."""
        return [pid for pid in descendants(self.process.pid) if command(pid).startswith("ray::RankActor")]


@contextlib.contextmanager
def serve_run(config: Path, proxy: str, folder: Path, **env: str) -> Iterator[ServeProcess]:
    """Run a copy of ``config`` on a free port, and leave no process behind."""
    port = free_port()
    values = yaml.safe_load(config.read_text())
    values["http_options"].update(host="127.0.0.1", port=port)
    copy = folder / "config.yaml"
    copy.write_text(yaml.safe_dump(values))
    log = folder / "serve.log"
    # Sockets of Ray live under it and may have no more than 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="ds-", dir="/tmp", ignore_cleanup_errors=True) as scratch,
        log.open("wb") as out,
    ):
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("serve")), "run", str(copy)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env={
                **os.environ,
                **PROXIES[proxy],
                **{name: str(free_port()) for name in HAPROXY_PORTS},
                "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{scratch}/admin.sock",
                "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{scratch}/metrics.sock",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")]),
                # A cluster of its own, never one that runs on this machine already.
                "RAY_ADDRESS": "local",
                "RAY_TMPDIR": scratch,
                "RAY_USAGE_STATS_ENABLED": "0",
                **env,
            },
        )
        family: set[int] = set()
        try:
            yield ServeProcess(process, port, log)
        finally:
            family = set(descendants(process.pid))
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            left = wait_until_gone(family, 30)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert not left, f"processes {sorted(left)} outlived serve run"


def wait_until_gone(pids: set[int], limit_s: float) -> set[int]:
    """Those of ``pids`` that still run after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while pids and time.monotonic() < deadline:
        pids = {pid for pid in pids if is_running(pid)}
        time.sleep(0.1)
    return pids


def is_running(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Children of ``pid``, their children, and so on."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lower(headers: Message) -> dict[str, str]:
    """Headers by lower-case name: servers differ in how they spell them."""
    return {name.lower(): value for name, value in headers.items()}
