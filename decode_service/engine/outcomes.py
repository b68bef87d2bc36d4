"""Waiting for several ranks at once, and telling the root cause of a failure from its symptoms.

Used by every ``RankGroup``. Pure asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from decode_service.engine.protocol import RANK_ERROR_PRIORITY, RankError

T = TypeVar("T")

DIED_GRACE_S = 2.0
"""Seconds for which the others are awaited once a rank has died. All of them will be replaced, so it only has to be long
enough for a better explanation of the death (an allocation that failed) to arrive."""


async def settle(
    answers: Mapping[int, Coroutine[Any, Any, T]],
    *,
    limit_s: float,
    grace_s: float,
    abort: Callable[[], Awaitable[Sequence[int]]],
    watch: Coroutine[Any, Any, None] | None = None,
) -> list[T]:
    """Wait until every rank has answered; after the first failure, end the others' work and find the root cause.

    Args:
        answers: for each rank what it will return; raises ``RankError`` where the rank fails.
        limit_s: seconds for all of it.
        grace_s: seconds that the other ranks get to come back after ``abort``.
        abort: makes the pending collectives of the ranks fail, and returns the ranks that did not confirm it; must not
            raise. Such a rank might carry the abort out later, on the next communicator.
        watch: a watchdog that raises ``RankError`` when a rank no longer answers, and otherwise runs until cancelled.

    Returns:
        the answers, in the order of ``answers``.

    Raises:
        RankError: the root cause, with ``lost`` naming the ranks that died or never came back.
    """
    ranks: dict[asyncio.Future[T], int] = {asyncio.ensure_future(answer): rank for rank, answer in answers.items()}
    watchdog = None if watch is None else asyncio.ensure_future(watch)
    waited_for: set[asyncio.Future[Any]] = set(ranks) if watchdog is None else {*ranks, watchdog}
    deadline = asyncio.get_running_loop().time() + limit_s
    try:
        pending = set(ranks)
        while pending:
            left = deadline - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait(waited_for, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            waited_for -= done
            pending -= done
            if not done or any(future.exception() for future in done):
                break
        failures = _failures(ranks, watchdog)
        if not pending and not failures:
            return [future.result() for future in ranks]
        deaf = await abort()
        if pending:
            died = any(error.kind == "died" for error in failures)
            await asyncio.wait(pending, timeout=min(grace_s, DIED_GRACE_S) if died else grace_s)
        raise root_cause(ranks, watchdog, deaf, limit_s=limit_s)
    finally:
        if watchdog is not None:
            watchdog.cancel()
        everything: list[asyncio.Future[Any]] = [*ranks, *([watchdog] if watchdog else [])]
        for future in everything:
            # Answers that arrive later are nobody's, and asyncio must not complain that they were never read.
            future.add_done_callback(lambda late: late.cancelled() or late.exception())


def root_cause(
    ranks: Mapping[asyncio.Future[Any], int],
    watchdog: asyncio.Future[None] | None,
    deaf: Sequence[int],
    *,
    limit_s: float,
) -> RankError:
    """The error that explains the others, with ``lost`` filled in."""
    failures = _failures(ranks, watchdog)
    stuck = [rank for future, rank in ranks.items() if not future.done()]
    failures += [RankError("stalled", rank, f"no answer within {limit_s:g} s, nor after the abort") for rank in stuck]
    if not failures:
        # The limit passed and every rank came back right after.
        return RankError("stalled", 0, f"the ranks took longer than {limit_s:g} s", lost=sorted(ranks.values()))
    cause = min(failures, key=lambda error: (RANK_ERROR_PRIORITY.index(error.kind), error.rank))
    lost: Sequence[int] = sorted({*stuck, *deaf, *(error.rank for error in failures if error.needs_new_processes)})
    return RankError(cause.kind, cause.rank, cause.message, lost=lost, bucket=cause.bucket)


def _failures(ranks: Mapping[asyncio.Future[Any], int], watchdog: asyncio.Future[None] | None) -> list[RankError]:
    failures = []
    for future, rank in [*ranks.items(), *([(watchdog, 0)] if watchdog else [])]:
        if not future.done() or future.cancelled():
            continue
        error = future.exception()
        if isinstance(error, RankError):
            failures.append(error)
        elif error is not None:
            failures.append(RankError("raised", rank, f"{type(error).__name__}: {error}"))
    return failures
