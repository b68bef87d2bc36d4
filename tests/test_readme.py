"""What the documents say is so: the table of families, the settings, files and modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from decode_service.config import ServiceConfig
from tests.decoding import measurements, support_matrix

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_support_matrix_is_what_is_declared_and_measured() -> None:
    assert not support_matrix.problems(README, measurements.committed())


def test_the_settings_shown_are_settings() -> None:
    block = re.search(r"\n    applications:\n(?:    .*\n|\n)+", README)
    assert block is not None
    applications = yaml.safe_load(block[0])["applications"]
    for application in applications:
        ServiceConfig.model_validate(application["args"])


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_lead_to_files(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    missing = [target for target in targets if not (ROOT / target.partition("#")[0]).exists()]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`((?:decode_service|tests|scripts|deploy|clients|benchmarks)/[\w./-]+)`", text))
    missing = [name for name in sorted(named) if not (ROOT / name).exists() and "<" not in name]
    assert not missing


def test_every_module_has_its_place_in_the_architecture() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where things are")[2].partition("\n## ")[0]
    placed: list[str] = []
    for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE):
        first, *others = re.findall(r"`([\w/.]+)`", row)
        folder = first[: first.rfind("/") + 1]
        placed += [first, *(folder + other for other in others)]
    package = ROOT / "decode_service"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    # The families stand as one.
    modules = {module for module in modules if not module.startswith("decoding/families/")} | {"decoding/families/"}
    assert sorted(placed) == sorted(modules)
