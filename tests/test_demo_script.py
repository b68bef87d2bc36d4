"""`make demo` as a person meets it: pictures, an account of each, and nothing left running, whichever way it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import demo
import pytest

import local_service
from decode_service.demo import SAMPLES
from local_service import LocalService, ServiceFailed, processes_of_session

pytestmark = pytest.mark.ray

SCRIPT = Path(local_service.__file__).with_name("demo.py")


def start_demo(output: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--output", str(output), "--port", "0", *arguments]
    # Also where the tests run in a shell's background, which ignores interrupts.
    with local_service.interrupts_heard_by_children():
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def wait_for_text(path: Path, text: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and text in path.read_text(errors="replace")):
        assert time.monotonic() < deadline, f"{text!r} did not appear in {path}"
        time.sleep(0.2)


def test_the_samples_become_pictures_and_the_plans_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = local_service.read_config(local_service.DEFAULT_CONFIG)
    # By the rules: on two cores that others use too, one rank may be as fast as two.
    config["applications"][0]["args"]["calibration"] = {"enabled": False}
    with LocalService(config, port=0, host="127.0.0.1", log_path=tmp_path / "service.log") as service:
        session = service.pid
        assert session
        try:
            service.wait_until_ready()
            written = demo.decode_samples(service.url, tmp_path)
        except Exception:
            print(service.log_tail())
            raise
        assert len(processes_of_session(session)) > 1
    told = capsys.readouterr().out

    assert {path.stem.removesuffix("-first-frame") for path in written} == set(SAMPLES)
    for path in written:
        head = path.read_bytes()[:12]
        assert head.startswith(b"\x89PNG") if path.suffix == ".png" else head[4:8] == b"ftyp"
    assert "direct on 1 rank;" in told
    assert "spatial_shard_width on 2 ranks, divided along the width (26 + 26)" in told
    assert "spatial_shard_height on 2 ranks, divided along the height (26 + 26)" in told
    assert processes_of_session(session) == []


def test_ctrl_c_while_it_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start_demo(tmp_path)
    # Ray's log line says that its processes run; the model does not yet.
    wait_for_text(tmp_path / "service.log", "Started a local Ray instance")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    sessions = [int(child) for child in children]
    assert any(processes_of_session(session) for session in sessions)

    process.send_signal(signal.SIGINT)

    assert process.wait(timeout=90) == 130
    assert [processes_of_session(session) for session in sessions] == [[] for _ in sessions]


def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = local_service.read_config(local_service.DEFAULT_CONFIG)
    del config["applications"][1:]
    config["applications"][0]["args"]["model"]["source"] = "/no/such/folder"
    with LocalService(config, port=0, host="127.0.0.1", log_path=tmp_path / "service.log") as service:
        with pytest.raises(ServiceFailed, match="/no/such/folder"):
            service.wait_until_ready(timeout_s=120)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    (taken,) = local_service.free_ports(1)
    with socket.socket() as other:
        other.bind(("", taken))
        other.listen()
        with pytest.raises(ServiceFailed, match=f"port {taken} is taken"):
            LocalService(port=taken)
        config = {**local_service.read_config(local_service.DEFAULT_CONFIG), "http_options": {"port": taken}}
        service = LocalService(config)
    assert service.port_note is not None
    assert service.url in f"http://127.0.0.1:{service.port_note.rsplit(' ', 1)[-1]}"
