"""Measuring in turn, and the statistics of what is measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory import peak_memory
from benchmarks.timing import Matmul, Timing, interleave, percentile


def test_contenders_take_turns_between_synchronizations() -> None:
    order: list[str] = []
    timings = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, synchronize=lambda: order.append("|")
    )
    assert "".join(order) == "|a||b|" * 3
    assert list(timings) == ["a", "b"]


def test_each_time_goes_to_the_contender_that_took_it() -> None:
    now = 0.0

    def taking(seconds: float) -> None:
        nonlocal now
        now += seconds

    durations = iter([1.0, 5.0, 3.0])
    timings = interleave({"even": lambda: taking(2.0), "odd": lambda: taking(next(durations))}, 3, clock=lambda: now)
    assert timings["even"].seconds == (2.0, 2.0, 2.0)
    assert timings["odd"].seconds == (1.0, 5.0, 3.0)
    assert (timings["odd"].median, timings["odd"].best) == (3.0, 1.0)
    assert timings["odd"].to_dict() == {"median_s": 3.0, "best_s": 1.0, "seconds": [1.0, 5.0, 3.0]}


def test_the_median_of_an_even_number_lies_between_the_middle_two() -> None:
    assert Timing((4.0, 1.0, 2.0, 100.0)).median == 3.0


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 5), (90, 9), (99, 10), (100, 10), (7, 1), (10, 1), (10.1, 2), (0.5, 1)]
)
def test_a_percentile_is_one_of_the_values(percent: float, expected: float) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == expected


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        interleave({"a": lambda: None}, 0)
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)
    with pytest.raises(ValueError, match="got 0"):
        percentile([1.0], 0)
    with pytest.raises(ValueError, match="at least one measurement"):
        Timing(())


def test_a_matrix_product_counts_its_arithmetic() -> None:
    product = Matmul(torch.float32, torch.device("cpu"), size=8)
    product()
    assert product.flops == 2 * 8**3


def test_the_peak_is_what_was_held_at_once_beyond_what_was_held_before() -> None:
    cpu, mebi = torch.device("cpu"), 1 << 20
    before = torch.empty(4 * mebi, dtype=torch.uint8)

    def work() -> int:
        first = torch.empty(3 * mebi, dtype=torch.uint8)
        del first
        second, third = (torch.empty(2 * mebi, dtype=torch.uint8) for _ in range(2))
        return len(second) + len(third) + len(before)

    outcome, peak = peak_memory(work, cpu)
    assert outcome == 8 * mebi
    assert peak == 4 * mebi
