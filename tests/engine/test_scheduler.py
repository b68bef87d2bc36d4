"""Who decodes when."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_service.engine.scheduler import Scheduler
from decode_service.errors import DeadlineExceededError, QueueFullError
from decode_service.planning.load import Load

from .scheduled_jobs import Jobs, run, settle


def test_small_jobs_run_one_per_rank_at_the_same_time() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(3, max_jobs=10)
        tasks = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False)) for name in "abcd"]
        await settle()
        assert jobs.started == ["a", "b", "c"]
        assert jobs.ranks == {"a": [0], "b": [1], "c": [2]}
        jobs.finish("b")
        await settle()
        assert jobs.ranks["d"] == [1]
        jobs.finish(*"acd")
        assert await asyncio.gather(*tasks) == list("abcd")
        assert scheduler.idle_ranks == 3

    run(test)


def test_a_gang_job_takes_all_ranks_and_is_not_overtaken() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=10)
        tasks = [
            asyncio.create_task(scheduler.run(jobs.job(name), gang=name == "gang"))
            for name in ("small", "gang", "later")
        ]
        await settle()
        # One rank is idle, but a small job that took it would keep the gang waiting for as long as small jobs come.
        assert jobs.started == ["small"]
        jobs.finish("small")
        await settle()
        assert jobs.started == ["small", "gang"]
        assert jobs.ranks["gang"] == [0, 1]
        jobs.finish("gang", "later")
        await asyncio.gather(*tasks)
        assert jobs.started == ["small", "gang", "later"]

    run(test)


def test_the_queue_is_bounded_and_says_so() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=2)
        tasks = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False)) for name in "ab"]
        await settle()
        with pytest.raises(QueueFullError, match="the limit is 2"):
            await scheduler.run(jobs.job("c"), gang=False)
        assert "c" not in jobs.started
        jobs.finish("a", "b")
        await asyncio.gather(*tasks)
        jobs.job("d")
        again = asyncio.create_task(scheduler.run(jobs.job("d"), gang=True))
        await settle()
        jobs.finish("d")
        assert await again == "d"

    run(test)


def test_a_cancelled_waiter_leaves_the_queue_at_once() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=2)
        first = asyncio.create_task(scheduler.run(jobs.job("first"), gang=False))
        waiter = asyncio.create_task(scheduler.run(jobs.job("waiter"), gang=True))
        await settle()
        waiter.cancel()
        await settle()
        assert scheduler.waiting == 0
        jobs.finish("first")
        assert await first == "first"
        assert jobs.started == ["first"]

    run(test)


def test_a_cancelled_gang_at_the_head_lets_the_next_start() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=5)
        small = asyncio.create_task(scheduler.run(jobs.job("small"), gang=False))
        gang = asyncio.create_task(scheduler.run(jobs.job("gang"), gang=True))
        later = asyncio.create_task(scheduler.run(jobs.job("later"), gang=False))
        await settle()
        assert jobs.started == ["small"]
        gang.cancel()
        await settle()
        assert jobs.started == ["small", "later"]
        jobs.finish("small", "later")
        await asyncio.gather(small, later)

    run(test)


def test_cancelling_the_caller_never_interrupts_a_running_job() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=5)
        caller = asyncio.create_task(scheduler.run(jobs.job("collective"), gang=True))
        following = asyncio.create_task(scheduler.run(jobs.job("following"), gang=False))
        await settle()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await settle()
        # Its ranks are still inside the collective, so nobody else may have them.
        assert (scheduler.running, scheduler.idle_ranks, jobs.started) == (1, 0, ["collective"])
        jobs.finish("collective", "following")
        assert await following == "following"

    run(test)


@pytest.mark.parametrize("waits", [True, False])
def test_a_deadline_ends_the_waiting(waits: bool) -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=5)
        first = asyncio.create_task(scheduler.run(jobs.job("first"), gang=False)) if waits else None
        await settle()
        where = "waiting for the ranks" if waits else "while decoding"
        with pytest.raises(DeadlineExceededError, match=where):
            await scheduler.run(jobs.job("late"), gang=True, deadline=time.monotonic() + 0.05)
        assert scheduler.waiting == 0
        assert scheduler.running == 1
        jobs.finish("first" if waits else "late")
        if first:
            await first
        await scheduler.drain()
        assert scheduler.idle_ranks == 1

    run(test)


def test_a_job_whose_deadline_has_passed_is_not_started() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=5)
        with pytest.raises(DeadlineExceededError):
            await scheduler.run(jobs.job("late"), gang=False, deadline=time.monotonic() - 1)
        await settle()
        assert jobs.started == []

    run(test)


def test_exclusive_work_goes_first_and_alone() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=5)
        tasks = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False)) for name in "abc"]
        await settle()
        alone = jobs.job("exclusive")
        done = scheduler.exclusive(lambda: alone([]))
        await settle()
        assert jobs.started == ["a", "b"]
        jobs.finish("a")
        await settle()
        assert jobs.started == ["a", "b"]
        jobs.finish("b")
        await settle()
        assert jobs.started == ["a", "b", "exclusive"]
        jobs.finish("exclusive", "c")
        assert await done == "exclusive"
        await asyncio.gather(*tasks)

    run(test)


def test_a_retry_goes_to_the_head_and_is_always_admitted() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=2)
        tasks = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False)) for name in ("running", "waiting")]
        await settle()
        tasks.append(asyncio.create_task(scheduler.run(jobs.job("retry"), gang=False, admitted=True)))
        await settle()
        jobs.finish("running", "waiting", "retry")
        await asyncio.gather(*tasks)
        assert jobs.started == ["running", "retry", "waiting"]

    run(test)


def test_a_failed_job_releases_its_ranks() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=5)

        async def fail(ranks: Sequence[int]) -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await scheduler.run(fail, gang=True)
        assert scheduler.idle_ranks == 2

    run(test)


# ---- what load decides ---------------------------------------------------------------------------------------------


def test_a_job_that_can_do_with_either_is_asked_when_it_starts_not_when_it_comes() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=10)
        loads: list[Load] = []

        def gang(load: Load) -> bool:
            loads.append(load)
            return load.one_rank_each(2) is None

        tasks = [asyncio.create_task(scheduler.run(jobs.job("first"), gang=gang))]
        await settle()
        assert jobs.ranks["first"] == [0, 1] and loads == [Load()], "nothing else to do: all ranks"
        tasks += [asyncio.create_task(scheduler.run(jobs.job(name), gang=gang)) for name in "abc"]
        await settle()
        assert len(loads) == 1, "no rank is idle, so nothing is decided"
        jobs.finish("first")
        await settle()
        assert (jobs.ranks["a"], jobs.ranks["b"]) == ([0], [1])
        assert loads[1:] == [Load(waiting=2), Load(waiting=1, running=1)]
        jobs.finish("a", "b")
        await settle()
        assert jobs.ranks["c"] == [0] and loads[3:] == [Load(running=1)]
        jobs.finish("c")
        tasks.append(asyncio.create_task(scheduler.run(jobs.job("last"), gang=gang)))
        await settle()
        assert jobs.ranks["last"] == [0, 1], "it has the group for itself again"
        jobs.finish("last")
        assert await asyncio.gather(*tasks) == ["first", "a", "b", "c", "last"]

    run(test)


def test_a_job_that_waits_for_all_ranks_changes_its_mind_when_others_come() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(3, max_jobs=10)

        def gang(load: Load) -> bool:
            return load.one_rank_each(3) is None

        tasks = [asyncio.create_task(scheduler.run(jobs.job("small"), gang=False, pixels=10))]
        tasks += [asyncio.create_task(scheduler.run(jobs.job("large"), gang=gang, pixels=100))]
        await settle()
        assert jobs.started == ["small"], "a small job will soon be done"
        tasks += [asyncio.create_task(scheduler.run(jobs.job(name), gang=gang, pixels=100)) for name in "ab"]
        await settle()
        assert jobs.started == ["small", "large", "a"]
        jobs.finish("small", "large", "a", "b")
        await asyncio.gather(*tasks)

    run(test)


def test_jobs_that_need_all_ranks_leave_none_to_share_and_do_not_count() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=10)
        loads: list[Load] = []

        def gang(load: Load) -> bool:
            loads.append(load)
            return False

        tasks = [asyncio.create_task(scheduler.run(jobs.job("running"), gang=True))]
        tasks += [asyncio.create_task(scheduler.run(jobs.job("either"), gang=gang))]
        tasks += [asyncio.create_task(scheduler.run(jobs.job("later"), gang=True))]
        await settle()
        jobs.finish("running")
        await settle()
        assert loads == [Load()]
        jobs.finish("either", "later")
        await asyncio.gather(*tasks)

    run(test)


def test_a_decision_that_fails_fails_its_own_job_only() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=10)

        def gang(load: Load) -> bool:
            raise ValueError("no plan")

        first = asyncio.create_task(scheduler.run(jobs.job("first"), gang=True))
        broken = asyncio.create_task(scheduler.run(jobs.job("broken"), gang=gang))
        last = asyncio.create_task(scheduler.run(jobs.job("last"), gang=True))
        await settle()
        jobs.finish("first", "last")
        with pytest.raises(ValueError, match="no plan"):
            await broken
        assert await asyncio.gather(first, last) == ["first", "last"]

    run(test)


# ---- fairness ------------------------------------------------------------------------------------------------------


def test_callers_take_turns_and_jobs_of_one_start_in_order() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=20)
        order = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        tasks = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False, caller=name[0])) for name in order]
        await settle()
        assert scheduler.callers == 3
        for name in order:
            jobs.finish(name)
        await asyncio.gather(*tasks)
        # Everything of "a" was there first, and still each other caller waits for one of them at a time.
        assert jobs.started == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
        assert scheduler.callers == 0

    run(test)


def test_a_job_that_leaves_costs_its_caller_no_turn() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=20)
        tasks = {
            name: asyncio.create_task(scheduler.run(jobs.job(name), gang=False, caller=name[0]))
            for name in ("a1", "b1", "b2", "c1")
        }
        await settle()
        tasks["b1"].cancel()
        await settle()
        assert scheduler.waiting == 2
        jobs.finish(*tasks)
        await asyncio.gather(*(task for name, task in tasks.items() if name != "b1"))
        assert jobs.started == ["a1", "b2", "c1"]

    run(test)


def test_in_a_full_queue_a_flood_gives_way_to_who_has_less() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=4)

        def submit(name: str) -> asyncio.Task[str]:
            return asyncio.create_task(scheduler.run(jobs.job(name), gang=False, caller=name[0]))

        flood = [submit(f"a{number}") for number in range(4)]
        await settle()
        with pytest.raises(QueueFullError, match="the limit is 4"):
            await submit("a4")
        others = [submit("b0"), submit("b1")]
        await settle()
        for late in flood[2:]:
            with pytest.raises(QueueFullError, match="gave way to another caller's"):
                await late
        assert scheduler.waiting + scheduler.running == 4
        # Two each: nobody has more than another, so the next one is refused, whoever it is, unless it has none.
        for name in ("b2", "a5"):
            with pytest.raises(QueueFullError, match="the limit is 4"):
                await submit(name)
        others.append(submit("c0"))
        await settle()
        jobs.finish("a0", "a1", "b0", "b1", "c0")
        done = await asyncio.gather(*flood[:2], *others, return_exceptions=True)
        assert sorted(map(str, done)) == sorted(["a0", "b0", "b1", "c0", str(done[1])])
        assert isinstance(done[1], QueueFullError), "of the two with most, the one whose job had not started"
        assert "a1" not in jobs.started

    run(test)


def test_what_runs_and_what_was_admitted_before_never_gives_way() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=3)
        running = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False, caller="a")) for name in ("a0", "a1")]
        retry = asyncio.create_task(scheduler.run(jobs.job("retry"), gang=False, caller="a", admitted=True))
        await settle()
        with pytest.raises(QueueFullError):
            await scheduler.run(jobs.job("b0"), gang=False, caller="b")
        jobs.finish("a0", "a1", "retry")
        assert await asyncio.gather(*running, retry) == ["a0", "a1", "retry"]

    run(test)


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["one rank", "all ranks", "either"]),
        st.integers(1, 100),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=40,
)


@given(arrivals=ARRIVALS, ranks=st.integers(1, 4), seed=st.integers(0, 2**16))
@settings(max_examples=100)
def test_no_job_starves_whatever_comes_in_whichever_order(
    arrivals: list[tuple[str, str, int, int]], ranks: int, seed: int
) -> None:
    """Every job runs, alone on its ranks, after at most one more turn of each other caller than it has jobs before it."""

    async def test(_: Jobs) -> None:
        scheduler = Scheduler(ranks, max_jobs=len(arrivals))
        chance = random.Random(seed)
        started: list[int] = []
        turns_allowed: dict[int, int] = {}
        starts_before: dict[int, int] = {}
        busy: set[int] = set()
        running: dict[int, asyncio.Event] = {}

        async def work(number: int, held: Sequence[int]) -> int:
            caller, kind, _, _ = arrivals[number]
            assert not busy & set(held)
            assert len(held) == {"one rank": 1, "all ranks": ranks}.get(kind, len(held))
            assert len(held) in (1, ranks)
            others = [arrivals[before][0] for before in started[starts_before[number] :]]
            for other in {*others} - {caller}:
                assert others.count(other) <= turns_allowed[number]
            started.append(number)
            busy.update(held)
            gate = running[number] = asyncio.Event()
            await gate.wait()
            busy.difference_update(held)
            return number

        async def end_one() -> None:
            number = chance.choice(sorted(running))
            running.pop(number).set()
            await settle()

        async def submit(number: int) -> int:
            caller, kind, pixels, _ = arrivals[number]
            waiting = [n for n in starts_before if n not in started and arrivals[n][0] == caller]
            turns_allowed[number], starts_before[number] = len(waiting) + 1, len(started)
            gang = {"one rank": False, "all ranks": True}.get(kind, lambda load: load.one_rank_each(ranks) is None)
            return await scheduler.run(lambda held: work(number, held), gang=gang, caller=caller, pixels=pixels)

        tasks = []
        for number, arrival in enumerate(arrivals):
            tasks.append(asyncio.create_task(submit(number)))
            await settle()
            for _ in range(arrival[3]):
                if running:
                    await end_one()
        while running:
            await end_one()
        assert await asyncio.gather(*tasks) == list(range(len(arrivals)))
        assert sorted(started) == list(range(len(arrivals)))
        assert (scheduler.waiting, scheduler.running, scheduler.idle_ranks) == (0, 0, ranks)

    run(test)
