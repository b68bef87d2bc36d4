"""The support matrix cannot be stale, nor leave out a family, a mode or a number."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from decode_service.decoding.families import FAMILIES
from tests.decoding import measurements, support_matrix
from tests.decoding.support_matrix import README, problems, shown


def test_what_is_committed_has_no_problems_and_changes_do() -> None:
    readme, measured = README.read_text(), measurements.committed()
    assert problems(readme, measured) == []

    assert "stale" in problems(readme.replace("| `AutoencoderKLWan` |", "| `AutoencoderKLWan2` |"), measured)[0]

    changed = copy.deepcopy(measured)
    changed["AutoencoderKLWan"]["modes"]["direct"]["difference"] = 9e-6
    assert "stale" in problems(readme, changed)[0]

    unmeasured = copy.deepcopy(measured)
    del unmeasured["AutoencoderKLMochi"]["modes"]["spatial_shard_width"]
    del unmeasured["AutoencoderDC"]
    found = problems(readme, unmeasured)
    assert any(line.startswith("AutoencoderKLMochi: spatial_shard_width") for line in found)
    assert sum(line.startswith("AutoencoderDC: ") for line in found) == 5

    extra = {**measured, "AutoencoderKLUnknown": measured["AutoencoderDC"]}
    assert "AutoencoderKLUnknown" in problems(readme, extra)[0]


def test_a_family_that_says_too_little_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["AutoencoderDC"]
    monkeypatch.setattr(family, "serves", "")
    monkeypatch.delitem(support_matrix.TINY, "AutoencoderKLWan")
    found = problems(README.read_text(), measurements.committed())
    assert [line.split()[0] for line in found] == ["AutoencoderKLWan", "AutoencoderDCFamily"]


def test_a_difference_above_what_the_readme_states_fails_whatever_the_check_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(measurements.RECORD_TO, raising=False)
    measurements.judge("AutoencoderKL", "direct", 1, 9e-6, tolerance=1.0)
    with pytest.raises(AssertionError, match=r"tile on 3: 2\.00e-05 is above the 1e-05"):
        measurements.judge("AutoencoderKL", "tile", 3, 2e-5, tolerance=1.0)
    measurements.judge("never measured", "tile", 3, 2e-5, tolerance=1.0)


def test_what_checks_record_is_folded_to_the_worst(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "record"
    monkeypatch.setenv(measurements.RECORD_TO, str(target))
    measurements.judge("B", "tile", 3, 0.0, 1e-5)
    measurements.judge("A", "direct", 1, 1.1e-6, 1e-5)
    measurements.judge("B", "tile", 1, 4.01e-7, 3e-5)
    folded = measurements.fold(target.read_text().splitlines())
    assert list(folded) == ["A", "B"]
    assert folded["A"] == {"bound": 1e-5, "modes": {"direct": {"difference": 2e-6, "ranks": [1]}}}
    assert folded["B"] == {"bound": 3e-5, "modes": {"tile": {"difference": 5e-7, "ranks": [1, 3]}}}
    assert json.loads(measurements.to_json(folded)) == folded


@pytest.mark.parametrize(
    ("difference", "rounded", "text"),
    [(0.0, 0.0, "0"), (1e-6, 1e-6, "1e-6"), (1.001e-6, 2e-6, "2e-6"), (9.3e-7, 1e-6, "1e-6"), (0.012, 0.02, "2e-2")],
)
def test_numbers_are_rounded_up_to_one_digit(difference: float, rounded: float, text: str) -> None:
    assert measurements.round_up(difference) == rounded
    assert shown(rounded) == text
