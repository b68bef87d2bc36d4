"""A group whose ranks are Ray actors: one process and one device each, in the bundles of one placement group.

The actors are children of the process that starts them and not detached, so they die with it: a replica that goes leaves
no orphans behind. torch is not imported here, only in the ranks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from decode_client.wire import WireTensor
from ray.exceptions import RayActorError, RayTaskError
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from decode_service.config import ServiceConfig
from decode_service.engine.agreement import Agreement
from decode_service.engine.outcomes import settle
from decode_service.engine.places import RankEnvironment, RankPlace, allocator_variables
from decode_service.engine.protocol import GroupInfo, RankError, RankFailure, RankPixels, RankTask
from decode_service.engine.rank_actor import MakeWorker, RankActor
from decode_service.errors import ConfigError

logger = logging.getLogger("decode_service.engine")

PING_PERIOD_S = 5.0
ABORT_LIMIT_S = 5.0
EXIT_LIMIT_S = 15.0
#: Latents up to so many bytes are part of the call; beyond 100 KiB Ray would put them into its store, once for each rank.
IN_CALL_BYTES = 64 << 10
"""A killed process is gone in 0.05 s, one that was frozen in 5 s (measured on Ray 2.60)."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """One running rank."""

    actor: Any
    environment: RankEnvironment


class RayGroup:
    """A ``RankGroup`` of Ray actors.

    Args:
        config: the settings of the application.
        make_worker: builds one rank inside its process; None for the real one. For tests that need ranks which fail.
    """

    def __init__(self, config: ServiceConfig, make_worker: MakeWorker | None = None) -> None:
        self._config = config
        self._make_worker = make_worker
        self._started = False
        self._compile_off: str | None = None if config.compile_enabled() else "compile.enabled is off"
        self._placement: PlacementGroup | None = None
        self._owns_placement = False
        self._ranks: list[_Rank] = []
        self._store_address: tuple[str, int] | None = None
        self._generation = 0
        self._agreement = Agreement()

    @property
    def size(self) -> int:
        return self._config.group.ranks

    @property
    def environments(self) -> list[RankEnvironment]:
        """Process, machine and devices of each rank."""
        return [rank.environment for rank in self._ranks]

    # ---- RankGroup -------------------------------------------------------------------------------------------------

    async def start(self) -> GroupInfo:
        """Start the ranks, load the model on each and join them; see ``RankGroup``."""
        try:
            # Step 1: the bundles to run in: those of the replica, or own ones outside Serve.
            await self.place()
            # Step 2: one process in each bundle.
            await self.spawn()
            # Step 3: the weights, on all ranks at once. Before joining, because it takes longer than a collective may.
            info = await self._load()
            # Step 4: rank 0 hosts the store on its own node; all ranks meet there.
            self._store_address = await self._call(0, "host_store")
            # Step 5: the communicator.
            await self._join()
        except BaseException:
            await self._kill_all()
            raise
        self._started = True
        return info

    async def run(self, task: RankTask, latents: WireTensor, ranks: Sequence[int]) -> list[RankPixels]:
        """Carry out ``task`` on ``ranks``; see ``RankGroup``."""
        begun = time.monotonic()
        # numpy, because a torch tensor would be pickled (3.6 times slower), and put once for all ranks: each maps the
        # same memory, read-only. In a thread, because put copies. What is small travels with the call.
        carrier = latents.carrier()
        given = carrier if latents.nbytes <= IN_CALL_BYTES else await asyncio.to_thread(ray.put, carrier)
        put_ms = (time.monotonic() - begun) * 1e3

        async def answer(rank: int) -> RankPixels:
            answered: RankPixels = await self._call(rank, "decode", task, given, latents.dtype)
            return replace(answered, timings_ms={**answered.timings_ms, "put": put_ms})

        async def abort() -> Sequence[int]:
            # A run on one rank uses no communicator; aborting that of all would break nothing but the next run.
            if len(ranks) == 1:
                return ()
            aborts = {asyncio.ensure_future(self._call(rank, "abort")): rank for rank in ranks}
            await asyncio.wait(aborts, timeout=ABORT_LIMIT_S)
            for future in aborts:
                future.add_done_callback(_read)
            return [rank for future, rank in aborts.items() if not future.done() or future.exception()]

        return await settle(
            {rank: answer(rank) for rank in ranks},
            limit_s=self._config.run_limit_s(measure=task.measure),
            grace_s=self._config.group.abort_grace_s,
            abort=abort,
            watch=self._watch(ranks),
        )

    async def recover(self, error: RankError) -> None:
        """Join the ranks anew, in new processes where one is lost; see ``RankGroup``."""
        if not error.needs_new_processes:
            await self._join()
            return
        # All of them: survivors of a broken NCCL communicator can sit in a kernel that nothing ends.
        await self._kill_all()
        for warning in (await self.start()).warnings:
            logger.warning("after the group was started anew: %s", warning)

    async def set_compile(self, enabled: bool, reason: str) -> None:
        """Switch compilation off on all ranks; see ``RankGroup``."""
        if enabled:
            raise ValueError("compilation can only be switched off")
        self._compile_off = reason
        await self._on_all("disable_compile", reason, limit_s=self._config.group.collective_timeout_s)

    async def use_compiled(self, keys: frozenset[str]) -> None:
        """Tell all ranks what runs compiled; see ``RankGroup``."""
        await self._on_all("use_compiled", keys, limit_s=self._config.group.collective_timeout_s)

    async def close(self) -> None:
        """Kill the ranks; see ``RankGroup``."""
        await self._kill_all()
        if self._placement is not None and self._owns_placement:
            remove_placement_group(self._placement)
        self._placement = None

    # ---- start-up --------------------------------------------------------------------------------------------------

    async def place(self) -> None:
        """Find the placement group of the replica, or make one.

        Raises:
            ConfigError: if the cluster has no room for it.
        """
        if self._placement is not None:
            return
        self._placement = ray.util.get_current_placement_group()
        if self._placement is not None:
            return
        bundles = self._config.group.placement_bundles()
        own = placement_group(bundles, strategy=self._config.group.placement)
        if not await asyncio.to_thread(own.wait, self._config.group.start_timeout_s):
            remove_placement_group(own)
            raise ConfigError(f"the cluster has no room for {bundles} with placement {self._config.group.placement}")
        self._placement, self._owns_placement = own, True

    async def spawn(self) -> None:
        """Start one process in each bundle, ranks in the order of machines."""
        nodes: dict[int, str] = placement_group_table(self._placement)["bundles_to_node_id"]
        bundles = _in_order_of_nodes(nodes, self.size)
        on_node = Counter(nodes[bundle] for bundle in bundles)
        resources = self._config.group.rank_resources()
        # From the start of its process: glibc reads them once.
        variables = (
            allocator_variables(self._config.group.device, os.environ) if self._config.group.keep_freed_memory else {}
        )
        actor_class: Any = RankActor
        actors = [
            actor_class.options(
                num_cpus=resources.get("CPU", 0),
                # Explicit, also inside a GPU bundle: an actor that does not ask for a GPU sees none.
                num_gpus=resources.get("GPU", 0),
                # A restarted process would have lost its weights and its place in the group without anybody noticing.
                max_restarts=0,
                max_task_retries=0,
                # Ray adds them to those of the deployment.
                runtime_env={"env_vars": variables} if variables else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=bundle
                ),
            ).remote(self._config, RankPlace(rank, self.size, on_node[nodes[bundle]]), self._make_worker)
            for rank, bundle in enumerate(bundles)
        ]
        # Known before their environments are, so that a failure in between still kills them.
        self._ranks = [_Rank(actor, RankEnvironment()) for actor in actors]
        environments = await self._on_all("environment", limit_s=self._config.group.start_timeout_s)
        self._ranks = [_Rank(actor, where) for actor, where in zip(actors, environments, strict=True)]

    async def _load(self) -> GroupInfo:
        async def load(without: frozenset[str]) -> list[GroupInfo]:
            return await self._on_all(
                "load",
                self._compile_off is None,
                not self._started,
                without,
                limit_s=self._config.group.start_timeout_s,
            )

        return await self._agreement.load(load)

    async def _join(self) -> None:
        assert self._store_address is not None
        # The store outlives communicators: each forms under keys of its own.
        self._generation += 1
        await self._on_all(
            "join", *self._store_address, self._generation, limit_s=self._config.group.collective_timeout_s * 2
        )

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def _call(self, rank: int, method: str, *arguments: object) -> Any:
        """Call ``method`` of ``rank``.

        Raises:
            RankError: ``died`` if the process is gone, otherwise what the rank reported.
        """
        try:
            answer = await getattr(self._ranks[rank].actor, method).remote(*arguments)
        except RayActorError as error:
            raise RankError("died", rank, _first_line(error), lost=(rank,)) from None
        except RayTaskError as error:
            raise RankError("raised", rank, _first_line(error.cause or error)) from None
        if isinstance(answer, RankFailure):
            logger.warning("rank %d, %s: %s%s", rank, method, answer.message, answer.trace)
            raise answer.error(rank)
        return answer

    async def _on_all(self, method: str, *arguments: object, limit_s: float) -> list[Any]:
        """Call ``method`` of every rank at once.

        Raises:
            RankError: if one fails or does not answer within ``limit_s``.
        """

        async def nothing() -> Sequence[int]:
            return ()

        calls: dict[int, Coroutine[Any, Any, Any]] = {
            rank: self._call(rank, method, *arguments) for rank in range(self.size)
        }
        return await settle(calls, limit_s=limit_s, grace_s=self._config.group.abort_grace_s, abort=nothing)

    async def _watch(self, ranks: Sequence[int]) -> None:
        """Ping ``ranks`` until cancelled.

        A dead process is reported by Ray; one that is frozen, or that holds the interpreter in a call that never ends,
        is not.

        Raises:
            RankError: if a rank does not answer for as long as a collective may take.
        """
        limit_s = self._config.group.collective_timeout_s
        while True:
            await asyncio.sleep(PING_PERIOD_S)
            pings = {asyncio.ensure_future(self._call(rank, "ping")): rank for rank in ranks}
            for ping in pings:
                # Only the first that fails is told of, and none once this is cancelled.
                ping.add_done_callback(_read)
            _, silent = await asyncio.wait(pings, timeout=limit_s)
            for ping, rank in pings.items():
                if ping in silent:
                    raise RankError("stalled", rank, f"no answer to a ping for {limit_s:g} s", lost=(rank,))
                ping.result()

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def _kill_all(self) -> None:
        """Kill every rank and wait until its process is gone, so that its device's memory is free for the next."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank.actor, no_restart=True)
        here = ray.get_runtime_context().get_node_id() if ranks else ""
        pids = {rank.environment.pid for rank in ranks if rank.environment.node_id == here and rank.environment.pid}
        deadline = time.monotonic() + EXIT_LIMIT_S
        while pids and time.monotonic() < deadline:
            pids = {pid for pid in pids if _is_running(pid)}
            await asyncio.sleep(0.05 if pids else 0)
        # Processes on other machines: the bundles are exactly as large as a rank, so Ray starts the next one in a bundle
        # only when it has got the resources of the last one back.
        if pids:
            logger.error("processes %s of killed ranks still run after %g s", sorted(pids), EXIT_LIMIT_S)


def _in_order_of_nodes(nodes: dict[int, str], size: int) -> list[int]:
    """Bundles, those of one machine together, the machine of bundle 0 first.

    Neighbouring bundles need not lie on one machine, but neighbouring ranks talk most.
    """
    bundles = sorted(nodes)[:size]
    machines = list(dict.fromkeys(nodes[bundle] for bundle in bundles))
    return sorted(bundles, key=lambda bundle: (machines.index(nodes[bundle]), bundle))


def _read(late: asyncio.Future[Any]) -> None:
    """Take note of an answer that nobody waits for any more, lest asyncio complain that it was never read."""
    if not late.cancelled():
        late.exception()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
