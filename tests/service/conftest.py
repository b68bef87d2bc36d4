"""``serve run`` as a process of its own, on free ports, driven over HTTP, and gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from local_service import LocalService, processes_of_session

#: Serve's own proxy, and the one that production uses.
PROXIES = ("default", "haproxy")


@dataclass
class Reply:
    """An HTTP reply."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class ServeProcess(LocalService):
    """A running ``serve run``, asked over plain HTTP."""

    def request(self, path: str, body: bytes | None = None, *, timeout_s: float = 60, **headers: str) -> Reply:
        """GET ``path``, or POST ``body`` as msgpack."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            names.setdefault("Content-Type", "application/msgpack")
        request = urllib.request.Request(f"{self.url}{path}", data=body, headers=names)
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
            assert self._process and self._process.poll() is None, f"serve run ended:\n{self.log_tail()}"
            if self.probe(path) == status:
                return
            time.sleep(0.3)
        raise AssertionError(f"{path} was not {status} within {limit_s:g} s:\n{self.log_tail()}")

    def variable(self, name: str) -> str:
        """A variable of the environment that ``serve run`` was started with."""
        variables = Path(f"/proc/{self.pid}/environ").read_text().split("\0")
        return next(value for key, _, value in (each.partition("=") for each in variables) if key == name)

    def ranks(self) -> list[int]:
        """Processes of the rank actors."""
        assert self.pid
        return [pid for pid in processes_of_session(self.pid) if command(pid).startswith("ray::RankActor")]


@contextlib.contextmanager
def serve_run(config: Path | dict[str, Any], proxy: str, folder: Path) -> Iterator[ServeProcess]:
    """Run ``config`` on a free port, and leave no process behind. Its output goes to ``folder``."""
    haproxy = proxy == "haproxy"
    log_path = folder / "serve.log"
    with ServeProcess(config, port=0, host="127.0.0.1", haproxy=haproxy, log_path=log_path) as service:
        yield service
    assert not service.killed, f"processes {service.killed} outlived serve run"


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def lower(headers: Message) -> dict[str, str]:
    """Headers by lower-case name: servers differ in how they spell them."""
    return {name.lower(): value for name, value in headers.items()}
