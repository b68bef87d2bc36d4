"""What the commands have in common: their options, the report as JSON, and tables for people."""

from __future__ import annotations

import argparse
import datetime
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cores, describe_machine
from benchmarks.models import DTYPES, MODELS

#: Raised whenever a report's keys change their meaning.
SCHEMA_VERSION = 1


def parser(name: str, description: str, *, models: Sequence[str], repeats: int) -> argparse.ArgumentParser:
    """A command's parser with the options that all have.

    Args:
        models: what is measured by default.
        repeats: rounds by default.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to decode")
    made.add_argument(
        "--models",
        nargs="+",
        type=_known("model", MODELS),
        default=list(models),
        metavar="NAME",
        help=", ".join(MODELS),
    )
    made.add_argument(
        "--dtypes",
        nargs="+",
        type=_known("dtype", DTYPES),
        default=list(DTYPES),
        metavar="DTYPE",
        help=", ".join(DTYPES),
    )
    made.add_argument("--repeats", type=positive, default=repeats, metavar="N", help="rounds; medians are reported")
    made.add_argument("--size", type=positive, metavar="PIXELS", help="height and width, instead of each model's own")
    made.add_argument(
        "--narrow", action="store_true", help="narrow models, to try the command out: the numbers mean nothing"
    )
    made.add_argument("--json", metavar="FILE", help="write the report there; - for standard output")
    return made


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def _known(kind: str, names: Iterable[str]) -> Any:
    """A converter for argparse that takes one of ``names`` and says which was probably meant."""
    known = list(names)

    def check(text: str) -> str:
        if text in known:
            return text
        near = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"unknown {kind} {text!r}: {hint}")

    return check


def chosen_device(options: argparse.Namespace, arguments: argparse.ArgumentParser) -> torch.device:
    """The device that was asked for; ends the command where there is none."""
    if options.device == "cuda" and not torch.cuda.is_available():
        arguments.error("--device cuda: torch sees no CUDA device here")
    return torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")


def default_threads() -> int:
    """All cores: what torch takes by itself, unless the environment says otherwise."""
    return cores()


class Report:
    """A command's results, and where they go.

    The tables go to standard output, or to standard error where the JSON takes that place.
    """

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device, threads: int) -> None:
        self._target: str | None = options.json
        self._values: dict[str, Any] = {
            "benchmark": name,
            "version": SCHEMA_VERSION,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(device, threads),
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "complete": False,
            "notes": {},
            "results": [],
        }
        machine = self._values["machine"]
        where = ", ".join(machine.get("gpus") or [machine["cpu"]])
        self.say(
            f"{name}: {where}, {machine['cores']} cores, {threads} thread{'s' if threads > 1 else ''}, "
            f"torch {machine['torch']}, diffusers {machine['diffusers']}, load {machine['load_average_before']}"
        )

    @property
    def results(self) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = self._values["results"]
        return results

    def say(self, text: str = "") -> None:
        """Print a line for people, now."""
        print(text, file=sys.stderr if self._target == "-" else sys.stdout, flush=True)

    def note(self, key: str, text: str) -> None:
        """Say how something was measured, in the report and to people."""
        self._values["notes"][key] = text
        self.say(f"{key}: {text}")

    def add(self, result: dict[str, Any]) -> None:
        """Add one result. A file is written anew each time: a run that is interrupted leaves what it measured."""
        self.results.append(result)
        if self._target not in (None, "-"):
            self._save()

    def finish(self) -> dict[str, Any]:
        """Write the JSON where it was asked for, and return what it holds."""
        self._values["complete"] = True
        if self._target == "-":
            print(json.dumps(self._values, indent=2), flush=True)
        elif self._target:
            self._save()
            self.say(f"\nwritten to {self._target}")
        return self._values

    def _save(self) -> None:
        path = Path(str(self._target))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._values, indent=2) + "\n", encoding="utf-8")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right.

    Raises:
        ValueError: if a row has not as many cells as the header.
    """
    lines = [list(header), *(list(row) for row in rows)]
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"expected {len(header)} cells, got {line}")
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def spread(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(
        [spread(lines[0]), "  ".join("-" * width for width in widths), *(spread(line) for line in lines[1:])]
    )


def seconds(value: float) -> str:
    """A time for people: ``2.31 s``, ``45.2 ms``."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def mebibytes(value: float) -> str:
    """A size for people, in MiB."""
    return f"{value / 2**20:.0f} MiB" if value >= 10 * 2**20 else f"{value / 2**20:.2f} MiB"


def times(value: float) -> str:
    """A ratio for people: ``1.83x``."""
    return f"{value:.2f}x"
