"""Waiting for ranks, and telling the cause of a failure from its symptoms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch

from decode_service.decoding.attempt import PeerFailedError, RankOutOfMemoryError
from decode_service.decoding.communicator import CommunicatorAborted
from decode_service.decoding.compilation import CompileFailedError
from decode_service.engine.failures import describe_failure, kind_of
from decode_service.engine.outcomes import settle
from decode_service.engine.protocol import RankError, RankErrorKind
from decode_service.engine.ray_group import _in_order_of_nodes


def outcome_of(
    *ranks: Callable[[asyncio.Event], Coroutine[Any, Any, str]], deaf: Sequence[int] = (), **options: Any
) -> list[str]:
    """``settle`` over ``ranks``, each given the event that ``abort`` sets."""

    async def test() -> list[str]:
        aborted = asyncio.Event()

        async def abort() -> Sequence[int]:
            aborted.set()
            return deaf

        answers = {number: rank(aborted) for number, rank in enumerate(ranks)}
        return await settle(answers, **{"limit_s": 5.0, "grace_s": 0.5, **options}, abort=abort)

    return asyncio.run(test())


async def good(aborted: asyncio.Event) -> str:
    return "pixels"


async def stuck(aborted: asyncio.Event) -> str:
    await asyncio.sleep(60)
    return "too late"


async def survivor(aborted: asyncio.Event) -> str:
    raise RankError("collective", 0, "connection closed by peer")


async def waits_for_peers(aborted: asyncio.Event) -> str:
    await aborted.wait()
    raise RankError("collective", 0, "the group was aborted")


def failing(
    kind: RankErrorKind, rank: int, after_s: float = 0.0
) -> Callable[[asyncio.Event], Coroutine[Any, Any, str]]:
    async def fail(aborted: asyncio.Event) -> str:
        await asyncio.sleep(after_s)
        raise RankError(kind, rank, f"{kind} here", lost=(rank,) if kind == "died" else ())

    return fail


def test_answers_come_in_the_order_of_ranks() -> None:
    assert outcome_of(good, good) == ["pixels", "pixels"]


@pytest.mark.parametrize("kind", ["compile", "out_of_memory", "died", "raised"])
def test_the_cause_is_found_behind_the_symptom_that_came_first(kind: RankErrorKind) -> None:
    with pytest.raises(RankError) as caught:
        outcome_of(survivor, failing(kind, 1, after_s=0.1))
    assert (caught.value.kind, caught.value.rank) == (kind, 1)
    assert caught.value.needs_new_processes == (kind == "died")


def test_memory_explains_a_death() -> None:
    with pytest.raises(RankError) as caught:
        outcome_of(failing("died", 0), failing("out_of_memory", 1, after_s=0.1))
    assert caught.value.kind == "out_of_memory"
    # The process is gone all the same.
    assert caught.value.lost == (0,)
    assert caught.value.needs_new_processes


def test_the_first_failure_aborts_the_others_at_once() -> None:
    with pytest.raises(RankError) as caught:
        outcome_of(waits_for_peers, failing("raised", 1))
    assert (caught.value.kind, caught.value.lost) == ("raised", ())


def test_a_rank_that_never_comes_back_needs_a_new_process() -> None:
    with pytest.raises(RankError) as caught:
        outcome_of(stuck, failing("compile", 1), grace_s=0.05)
    assert (caught.value.kind, caught.value.lost) == ("compile", (0,))
    with pytest.raises(RankError) as caught:
        outcome_of(stuck, good, limit_s=0.05, grace_s=0.05)
    assert (caught.value.kind, caught.value.rank) == ("stalled", 0)


def test_a_rank_that_did_not_hear_the_abort_is_not_trusted_again() -> None:
    with pytest.raises(RankError) as caught:
        outcome_of(good, failing("raised", 1), deaf=(0,))
    assert caught.value.lost == (0,)


def test_the_watchdog_ends_the_waiting() -> None:
    async def watch() -> None:
        await asyncio.sleep(0.05)
        raise RankError("stalled", 1, "no answer to a ping", lost=(1,))

    with pytest.raises(RankError) as caught:
        outcome_of(waits_for_peers, stuck, watch=watch(), grace_s=0.05)
    assert (caught.value.kind, caught.value.rank) == ("stalled", 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CompileFailedError("x"), "compile"),
        (torch.OutOfMemoryError("x"), "out_of_memory"),
        (RankOutOfMemoryError("x"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), "out_of_memory"),
        (CommunicatorAborted("x"), "collective"),
        (PeerFailedError("x"), "collective"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), "collective"),
        (RuntimeError("shape mismatch"), "raised"),
        (ValueError("x"), "raised"),
    ],
)
def test_what_an_exception_means_for_the_group(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind
    assert describe_failure(error).error(3).kind == kind


def test_ranks_follow_machines_even_where_bundles_do_not() -> None:
    assert _in_order_of_nodes({0: "a", 1: "b", 2: "a", 3: "b"}, 4) == [0, 2, 1, 3]
    assert _in_order_of_nodes({0: "a", 1: "a"}, 2) == [0, 1]
