"""What the commands accept, and the report that they write."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import decode, report, service, sharding
from benchmarks.report import Report, table

COMMANDS = (decode.main, sharding.main, service.main)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "wan_21"], "unknown model 'wan_21': did you mean wan21?"),
        (["--models", "%"], "unknown model '%': known are autoencoder_kl, qwen_image, wan21, wan22"),
        (["--dtypes", "float16"], "unknown dtype 'float16': did you mean bfloat16?"),
        (["--repeats", "0"], "expected a whole number of at least 1, got '0'"),
        (["--models", "wan22", "--size", "40"], "--size: wan22 decodes multiples of 16 pixels, not 40; try 32"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_measured(
    command: object, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(arguments)  # type: ignore[operator]
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_more_ranks_than_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sharding.main(["--models", "wan21", "--size", "16", "--ranks", "3"])
    assert "wan21 has fewer latent rows than 3 ranks" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_that_is_not_there_is_refused(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(["--device", "cuda"])  # type: ignore[operator]
    assert "torch sees no CUDA device" in capsys.readouterr().err


def make_report(target: str | None) -> Report:
    options = report.parser("decode", "", models=["wan21"], repeats=2).parse_args([])
    options.json = target
    return Report("decode", options, torch.device("cpu"), threads=2)


def test_a_report_says_on_what_and_with_what_it_was_made(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report.json"
    out = make_report(str(target))
    out.add({"case": "first"})
    out.add({"case": "second"})
    unfinished = json.loads(target.read_text())
    assert (unfinished["complete"], len(unfinished["results"])) == (False, 2)

    assert out.finish() == json.loads(target.read_text())
    written = json.loads(target.read_text())
    assert written["complete"] is True
    assert {"benchmark", "version", "date", "machine", "options", "notes", "results"} <= written.keys()
    machine = written["machine"]
    assert machine["cpu"] and machine["cores"] >= 1 and machine["threads"] == 2
    assert machine["torch"] == torch.__version__
    assert written["options"]["repeats"] == 2 and "json" not in written["options"]
    assert [result["case"] for result in written["results"]] == ["first", "second"]


def test_standard_output_holds_the_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    out = make_report("-")
    out.say("for people")
    out.finish()
    printed = capsys.readouterr()
    assert json.loads(printed.out)["benchmark"] == "decode"
    assert "for people" in printed.err


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table(["name", "s"], [["a", "1.00"], ["longer", "2"]]).splitlines() == [
        "name       s",
        "------  ----",
        "a       1.00",
        "longer     2",
    ]
    with pytest.raises(ValueError, match="expected 2 cells"):
        table(["name", "s"], [["a"]])


def test_amounts_are_shown_in_units_that_fit() -> None:
    assert (report.seconds(2.314), report.seconds(0.0451)) == ("2.31 s", "45.1 ms")
    assert (report.mebibytes(3 << 19), report.mebibytes(600 << 20)) == ("1.50 MiB", "600 MiB")
    assert report.times(1.826) == "1.83x"


def test_only_whole_positive_numbers_count() -> None:
    assert report.positive("3") == 3
    for wrong in ("0", "-1", "2.5", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
            report.positive(wrong)


@pytest.mark.parametrize(
    "path", sorted((Path(report.__file__).parent / "results").glob("*.json")), ids=lambda p: p.stem
)
def test_committed_results_are_complete_and_of_the_present_form(path: Path) -> None:
    written = json.loads(path.read_text())
    assert path.stem == f"{written['benchmark']}-{written['machine']['device']}"
    assert written["version"] == report.SCHEMA_VERSION
    assert written["complete"] and written["results"]
