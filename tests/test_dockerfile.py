"""The Dockerfile fits the repository: no container engine is needed to find a path that moved."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) in order, continuation lines joined."""
    text = (ROOT / "Dockerfile").read_text()
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def of_kind(kind: str) -> list[str]:
    return [arguments for word, arguments in instructions() if word == kind]


def copied_from_the_repository() -> list[str]:
    return [source for line in of_kind("COPY") if not line.startswith("--from") for source in line.split()[:-1]]


def ignored(path: str) -> bool:
    """By .dockerignore: the last rule that matches the path or a folder above it decides."""
    parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    result = False
    for rule in (ROOT / ".dockerignore").read_text().split("\n"):
        if rule and not rule.startswith("#"):
            keep = rule.startswith("!")
            if any(fnmatch(each, rule.lstrip("!")) for each in parents):
                result = not keep
    return result


@pytest.mark.parametrize("source", copied_from_the_repository())
def test_what_is_copied_exists_and_is_in_the_build_context(source: str) -> None:
    assert (ROOT / source).exists()
    assert not ignored(source)


def test_nothing_else_is_in_the_build_context() -> None:
    for path in (".git", ".venv", "tests", "README.md", ".ci", "demo-output", "clients/other"):
        assert ignored(path), path


def test_each_stage_builds_on_an_earlier_one() -> None:
    known = {"${BASE_IMAGE}"}
    for line in of_kind("FROM"):
        base, _, name = line.partition(" AS ")
        assert base in known
        known.add(name)
    assert {"cpu", "cuda"} <= known
    for line in of_kind("COPY"):
        if match := re.match(r"--from=(\S+)", line):
            assert match.group(1) in known


def test_the_last_user_of_every_target_is_not_root() -> None:
    stage_user: dict[str, str] = {}
    stage = ""
    for word, arguments in instructions():
        if word == "FROM":
            base, _, stage = arguments.partition(" AS ")
            stage_user[stage] = stage_user.get(base, "root")
        elif word == "USER":
            stage_user[stage] = arguments
    assert stage_user["cpu"] == stage_user["cuda"] == "decode"


def test_the_command_runs_a_config_that_is_copied_and_the_ports_agree() -> None:
    *command, config_path = json.loads(of_kind("CMD")[-1])
    assert command == ["serve", "run"]
    assert any(Path(config_path).is_relative_to(source) for source in copied_from_the_repository())
    config = yaml.safe_load((ROOT / config_path).read_text())
    (port,) = of_kind("EXPOSE")
    assert config["http_options"]["port"] == int(port)
    # Inside a container the loopback address reaches nobody.
    assert config["http_options"]["host"] == "0.0.0.0"
    (health,) = of_kind("HEALTHCHECK")
    assert f":{port}/healthz" in health


@pytest.mark.parametrize(
    "script", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda p: p.name
)
def test_shell_scripts_parse_and_can_be_run(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    bash = shutil.which("bash")
    assert bash
    subprocess.run([bash, "-n", str(script)], check=True)
