"""What the families' checks measured: written down while ``make support-matrix`` runs them, and held to otherwise.

``measured.json`` beside this file has, for every class, the bound that its checks hold it to, and for every mode the largest
absolute difference that they saw (float32, rounded up to one significant digit) and the group sizes that they tried. The
README's support matrix shows it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TypedDict

FILE = Path(__file__).with_name("measured.json")

#: Names the file to which checks append what they measure, a JSON object on each line. Unset: nothing is written.
RECORD_TO = "DECODE_SERVICE_RECORD_MEASUREMENTS_TO"


class ModeMeasurement(TypedDict):
    """One mode of a class."""

    difference: float
    ranks: list[int]


class ClassMeasurement(TypedDict):
    """One class; ``bound`` is the largest tolerance of its checks."""

    bound: float
    modes: dict[str, ModeMeasurement]


def committed() -> dict[str, ClassMeasurement]:
    """What ``measured.json`` says, by class name."""
    measurements: dict[str, ClassMeasurement] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return measurements


def judge(class_name: str, mode: str, ranks: int, difference: float, tolerance: float) -> None:
    """Record a difference that a check found within its tolerance; while nothing is recorded, hold it to the file.

    Raises:
        AssertionError: the difference is above the bound that the README states for the class.
    """
    target = os.environ.get(RECORD_TO)
    if target:
        with open(target, "a") as file:
            file.write(json.dumps([class_name, mode, ranks, difference, tolerance]) + "\n")
        return
    known = committed().get(class_name)
    # A class that was never measured fails in test_readme, which names the command.
    assert known is None or difference <= known["bound"], (
        f"{class_name} {mode} on {ranks}: {difference:.2e} is above the {known['bound']:.0e} that the README states"
    )


def fold(lines: list[str]) -> dict[str, ClassMeasurement]:
    """The contents of ``measured.json`` from what checks recorded; sorted, so that it changes only where numbers do."""
    found: dict[str, Any] = {}
    for line in lines:
        class_name, mode, ranks, difference, tolerance = json.loads(line)
        entry = found.setdefault(class_name, {"bound": 0.0, "modes": {}})
        entry["bound"] = max(entry["bound"], tolerance)
        measured = entry["modes"].setdefault(mode, {"difference": 0.0, "ranks": []})
        measured["difference"] = max(measured["difference"], round_up(difference))
        measured["ranks"] = sorted({*measured["ranks"], ranks})
    return {
        class_name: {"bound": entry["bound"], "modes": dict(sorted(entry["modes"].items()))}
        for class_name, entry in sorted(found.items())
    }


def to_json(measured: dict[str, ClassMeasurement]) -> str:
    """The text of ``measured.json``: one line for each mode, so that a change shows which number changed."""
    classes = []
    for class_name, entry in measured.items():
        modes = ",\n".join(f"    {json.dumps(mode)}: {json.dumps(found)}" for mode, found in entry["modes"].items())
        classes.append(
            f'  {json.dumps(class_name)}: {{"bound": {json.dumps(entry["bound"])}, "modes": {{\n{modes}\n  }}}}'
        )
    return "{\n" + ",\n".join(classes) + "\n}\n"


def round_up(difference: float) -> float:
    """To one significant digit, away from zero."""
    if difference == 0:
        return 0.0
    exponent = math.floor(math.log10(difference))
    digit = math.ceil(difference / 10.0**exponent - 1e-9)
    return float(f"{digit}e{exponent}")
