"""The README's support matrix, from what families declare and what their checks measured.

    python -m tests.decoding.support_matrix                       measure, write measured.json and the README (minutes)
    python -m tests.decoding.support_matrix --without-measuring   write the README from measured.json
    python -m tests.decoding.support_matrix --check               say what is stale or missing; status 1 if anything is

It needs the tiny models of the tests, so it is here and not in ``scripts``. ``make support-matrix ARGS=...`` runs it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from decode_service.decoding.families import FAMILIES, Family
from decode_service.planning.spec import ModelSpec
from decode_service.planning.temporal import ClipFrames, FadedFrames, OverlapFrames, SingleFrame
from tests.decoding import measurements
from tests.decoding.measurements import ClassMeasurement
from tests.decoding.tiny_models import TINY, tiny_family

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BEGIN = "<!-- support matrix: written by make support-matrix -->"
END = "<!-- end of the support matrix -->"
COMMAND = "run make support-matrix"

HEADER = (
    "diffusers class",
    "models",
    "latents",
    "time",
    "direct",
    "height",
    "width",
    "tile",
    "raw from normalized `z`",
)
COLUMN_MODES = ("direct", "spatial_shard_height", "spatial_shard_width", "tile")
#: Measures again what other tests measure.
MEASURE_NOTHING = ("test_rewrites.py",)
GROUP_OF = 2  # modes are those of a group; one rank cannot divide anything

Measured = Mapping[str, ClassMeasurement]


@dataclass(frozen=True)
class Declared:
    """What the code says of one class."""

    class_name: str
    family: Family

    @property
    def spec(self) -> ModelSpec:
        return self.family.spec

    @property
    def modes(self) -> tuple[str, ...]:
        return self.spec.modes(GROUP_OF)

    @property
    def latents(self) -> str:
        held = " or ".join(f"{ndim}-D" for ndim in self.spec.latent_ndims())
        if self.spec.fixed_cells:
            held += ", of one size"
        return held + (", packed" if self.spec.packing else "")

    @property
    def time(self) -> str:
        """How the decoder takes latent frames."""
        rule = self.spec.frame_rule
        if rule is None:
            return "none"
        if isinstance(rule, SingleFrame):
            return "one frame"
        if self.spec.chunked:
            return "any chunk"
        if isinstance(rule, (ClipFrames, FadedFrames, OverlapFrames)):
            return "cross-faded clips"
        # Decoders without a choice of chunk take either all frames or groups of a size of their own.
        return "its own chunks" if hasattr(rule, "chunk_frames") else "whole"


def missing_declarations() -> list[str]:
    """What the matrix needs of a class and does not find."""
    problems = []
    for class_name, family in FAMILIES.items():
        if class_name not in TINY:
            problems.append(f"{class_name} has no tiny model in tests/decoding/tiny_models.py")
        if not getattr(family, "serves", ""):
            problems.append(f"{family.__name__} does not say what it `serves` (see Family in families/base.py)")
    return problems


def declared() -> list[Declared]:
    """Every class, in the order of ``FAMILIES``."""
    return [Declared(name, tiny_family(name)) for name in FAMILIES]


def missing_measurements(classes: Iterable[Declared], measured: Measured) -> list[str]:
    """Declared modes that no check tried, and classes that are measured and not declared."""
    problems = []
    for entry in classes:
        tried = measured[entry.class_name]["modes"] if entry.class_name in measured else {}
        problems += [
            f"{entry.class_name}: {mode} is declared and was not measured; hold it to family_checks and {COMMAND}"
            for mode in entry.modes
            if mode not in tried
        ]
    problems += [f"measured.json has {name}, which no family decodes; {COMMAND}" for name in measured.keys() - FAMILIES]
    return problems


def render(classes: list[Declared], measured: Measured) -> str:
    """The table and its notes."""
    usual = {
        mode: Counter(
            tuple(measured[entry.class_name]["modes"][mode]["ranks"]) for entry in classes if mode in entry.modes
        ).most_common(1)[0][0]
        for mode in (*COLUMN_MODES, "batch")
    }

    def cell(entry: Declared, mode: str) -> str:
        if mode not in entry.modes:
            return "no"
        found = measured[entry.class_name]["modes"][mode]
        ranks = tuple(found["ranks"])
        note = "" if ranks == usual[mode] else f" ({_and(map(str, ranks))} ranks)"
        return shown(found["difference"]) + note

    rows = [
        (
            f"`{entry.class_name}`",
            entry.family.serves,
            entry.latents,
            entry.time,
            *(cell(entry, mode) for mode in COLUMN_MODES),
            entry.family.denormalization().replace("latents_", "").replace("latents", "z"),
        )
        for entry in classes
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (HEADER, ("---",) * len(HEADER), *rows)]
    notes = [
        textwrap.fill(note, 120, break_on_hyphens=False, break_long_words=False)
        for note in _notes(classes, measured, usual)
    ]
    return "\n".join(lines) + "\n\n" + "\n\n".join(notes) + "\n"


def _notes(classes: list[Declared], measured: Measured, usual: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    bounds = Counter(measured[entry.class_name]["bound"] for entry in classes)
    common = bounds.most_common(1)[0][0]
    others = [entry for entry in classes if measured[entry.class_name]["bound"] != common]
    held = f"Tests hold every class to {shown(common)}"
    if others:
        held += "; " + ", ".join(
            f"`{entry.class_name}` to {shown(measured[entry.class_name]['bound'])}" for entry in others
        )
    spatial = _and(map(str, usual["spatial_shard_height"]))
    yield (
        f"Numbers are the largest absolute difference from diffusers that the tests saw, in float32, rounded up to one "
        f"digit: height and width sharded over {spatial} ranks, tiles over {_and(map(str, usual['tile']))}. {held}."
    )
    batch = max(
        measured[entry.class_name]["modes"]["batch"]["difference"] for entry in classes if "batch" in entry.modes
    )
    yield (
        f"A batch is divided over the ranks item by item (mode batch, measured on {_and(map(str, usual['batch']))} ranks): its "
        f"items differ from the same ones decoded alone by {shown(batch)}."
    )
    for entry in classes:
        if entry.spec.tile_only:
            yield f"`{entry.class_name}` is decoded by its own tiles only, and exactly so: {entry.spec.no_exact_axes_reason}."
    for entry in classes:
        if not entry.spec.tile_only and not entry.spec.exact_axes:
            yield f"`{entry.class_name}` cannot be sharded: {entry.spec.no_exact_axes_reason}."
    for entry in classes:
        if entry.spec.tiles is None:
            yield f"`{entry.class_name}` has no tiles: {entry.spec.no_tiles_reason}."
    approximate = [entry for entry in classes if "tile" in entry.modes and not entry.spec.tile_only]
    reasons = dict.fromkeys(entry.spec.tile_difference for entry in approximate)
    parts = [
        f"{reason} (" + ", ".join(f"`{e.class_name}`" for e in approximate if e.spec.tile_difference == reason) + ")"
        for reason in reasons
    ]
    yield (
        "Tiles of all other classes only approximate the undivided frame; their number is the difference from the same tiles "
        "of the reference. Why they differ: " + "; ".join(parts) + "."
    )
    foreign = [entry for entry in classes if entry.family.tile_geometry != "diffusers"]
    if foreign:
        yield (
            "Tiles are those of diffusers, but where diffusers has none or wrong ones: "
            + "; ".join(f"`{entry.class_name}` ({entry.family.tile_geometry})" for entry in foreign)
            + "."
        )
    eager = [entry for entry in classes if not entry.family.compiles]
    if eager:
        names = _and(f"`{entry.class_name}`" for entry in eager)
        yield f"`compile.enabled` compiles every decoder but {names}, which torch cannot trace."


def shown(difference: float) -> str:
    """``2e-6``, or ``0``."""
    digits, _, exponent = f"{difference:.0e}".partition("e")
    return f"{digits}e{int(exponent)}" if difference else "0"


def _and(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def with_matrix(readme: str, matrix: str) -> str:
    """``readme`` with what is between the markers replaced."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md needs the lines {BEGIN!r} and {END!r}")
    return f"{head}{begin}\n\n{matrix}\n{end}{tail}"


def problems(readme: str, measured: Measured) -> list[str]:
    """Everything that makes the matrix in ``readme`` untrue; empty if it is as it should be."""
    found = missing_declarations()
    if found:
        return found
    classes = declared()
    found = missing_measurements(classes, measured)
    if not found and with_matrix(readme, render(classes, measured)) != readme:
        found = [f"the support matrix in README.md is stale; {COMMAND}"]
    return found


def measure() -> dict[str, ClassMeasurement]:
    """Run the tests that use the checks of ``family_checks``; what they measured."""
    here = Path(__file__).parent
    files = [
        path
        for path in sorted(here.glob("test_*.py"))
        if re.search(r"check_(batch|exact_modes|tiles)\(", path.read_text()) and path.name not in MEASURE_NOTHING
    ]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "measurements"
        environment = {**os.environ, measurements.RECORD_TO: str(record), "CI": "1"}
        shared = ["-n", "2", "--dist", "loadfile"]
        command = [sys.executable, "-m", "pytest", "-q", *shared, *map(str, files)]
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            raise SystemExit("the families' tests fail, so nothing was written")
        return measurements.fold(record.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description="the README's support matrix")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="write nothing; fail if anything is stale or missing")
    choice.add_argument("--without-measuring", action="store_true", help="take the numbers from measured.json")
    arguments = parser.parse_args()

    if arguments.check:
        found = problems(README.read_text(), measurements.committed())
        raise SystemExit("\n".join(found) if found else 0)
    found = missing_declarations()
    if found:
        raise SystemExit("\n".join(found))
    measured = measurements.committed() if arguments.without_measuring else measure()
    classes = declared()
    found = missing_measurements(classes, measured)
    if found:
        raise SystemExit("\n".join(found))
    if not arguments.without_measuring:
        measurements.FILE.write_text(measurements.to_json(measured))
    README.write_text(with_matrix(README.read_text(), render(classes, measured)))


if __name__ == "__main__":
    main()
