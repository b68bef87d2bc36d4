"""One rank as a Ray actor: a thin shell around ``RankWorker``, in a process with one device of its own.

torch is imported in the methods only, because the coordinator imports this module too.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import ray

from decode_service.config import ServiceConfig
from decode_service.engine.places import RankEnvironment, RankPlace
from decode_service.engine.protocol import GroupInfo, RankFailure, RankPixels, RankTask

if TYPE_CHECKING:
    import torch.distributed as dist

    from decode_service.engine.rank_worker import RankWorker

MakeWorker = Callable[[ServiceConfig, RankPlace], "RankWorker"]

STORE_TIMEOUT_S = 60.0


# Methods are plain functions, not coroutines: Ray cancels the coroutines of a cancelled request's children, but a
# function that runs is left alone, and a rank must never leave a collective half-way.
# The default concurrency group has one thread, so that decodes never overlap; "control" has its own, so that a decode
# which is stuck in a collective can still be aborted, and the rank still answers a ping.
@ray.remote(concurrency_groups={"control": 2})
class RankActor:
    """One rank. Failures come back as ``RankFailure`` values; an exception here means that the process is gone."""

    def __init__(self, config: ServiceConfig, place: RankPlace, make_worker: MakeWorker | None) -> None:
        from decode_service.engine.rank_worker import RankWorker

        self._worker = (make_worker or RankWorker)(config, place)
        self._store: dist.TCPStore | None = None

    def load(self, compile_enabled: bool, measure: bool, without: frozenset[str]) -> GroupInfo | RankFailure:
        """See ``RankWorker.load``."""
        try:
            return self._worker.load(compile_enabled, measure, without)
        except Exception as error:
            return _failure(error)

    def host_store(self) -> tuple[str, int]:
        """Host the store over which the group forms; called on rank 0 only.

        Returns:
            (address of this node, port). The system picks the port and the store reports it: a port that somebody
            picked beforehand, or on another node, could be taken by now.
        """
        import torch.distributed as dist

        self._store = dist.TCPStore(
            "0.0.0.0",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
        )
        return ray.util.get_node_ip_address(), self._store.port

    def join(self, host: str, port: int, generation: int) -> RankFailure | None:
        """Form the communicator of ``generation`` with all other ranks, which are told the same."""
        import torch.distributed as dist

        try:
            if self._store is None:
                # The address is explicit. MASTER_ADDR and MASTER_PORT belong to the whole process tree, so that two
                # groups on one machine would meet in one store.
                self._store = dist.TCPStore(
                    host,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
                )
            self._worker.join(self._store, generation)
        except Exception as error:
            return _failure(error)
        return None

    def decode(self, task: RankTask, latents: np.ndarray, dtype: str) -> RankPixels | RankFailure:
        """See ``RankWorker.decode``."""
        return self._worker.decode(task, latents, dtype)

    def disable_compile(self, reason: str) -> None:
        self._worker.disable_compile(reason)

    def use_compiled(self, keys: frozenset[str]) -> None:
        self._worker.use_compiled(keys)

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Make pending collectives fail, also while ``decode`` is stuck in one."""
        self._worker.abort()

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer, which a frozen process doesn't."""

    @ray.method(concurrency_group="control")
    def environment(self) -> RankEnvironment:
        return RankEnvironment(
            os.getpid(), ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")
        )


def _failure(error: Exception) -> RankFailure:
    from decode_service.engine.failures import describe_failure

    return describe_failure(error)
