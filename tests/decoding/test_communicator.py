"""Process groups: a failure on one rank reaches the others at once, and the same ranks join again afterwards."""

from __future__ import annotations

import functools

import pytest

from tests.decoding import communicator_ranks
from tests.decoding.harness import RankProcesses


@pytest.mark.parametrize("one_host", [True, False], ids=["one host", "several hosts"])
def test_a_group_is_aborted_and_formed_again_on_the_same_ranks(rank_processes: RankProcesses, one_host: bool) -> None:
    for waited_s, aborted_s in rank_processes.run(3, functools.partial(communicator_ranks.run, one_host)):
        limit_s = communicator_ranks.TIMEOUT_S / 2
        assert waited_s < limit_s, "a failed peer must be noticed long before the timeout"
        assert aborted_s < limit_s
