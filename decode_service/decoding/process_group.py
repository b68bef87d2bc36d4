"""Ranks that are processes: how they form a group, and how they talk in it.

NCCL on CUDA. On CPUs, sockets of their own where all are processes of one host, and gloo otherwise. Agreements always go
over gloo, on the CPU, so that they work when a device is out of memory.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from decode_service.decoding.communicator import (
    Communicator,
    CommunicatorAborted,
    Messages,
    PairwiseCommunicator,
    SoloCommunicator,
)
from decode_service.decoding.local_sockets import LocalSockets

logger = logging.getLogger(__name__)


class _ProcessCommunicator(Communicator):
    """What all ranks that are processes share: a gloo group for agreements, and the default group of the process."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        self._control: dist.ProcessGroup | None = control
        self._closing = threading.Lock()
        self.rank, self.size = dist.get_rank(control), dist.get_world_size(control)

    def agree(self, status: int) -> list[int]:
        control = self._control
        if control is None:
            raise CommunicatorAborted("the group was aborted")
        mine = torch.tensor([status], dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=control)
        return [int(entry) for entry in gathered]

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        # gloo has no abort of its own: its connections close, and the peers' waits end at once, when the last
        # reference to the group goes. torch has one default group per process, so only the communicator that still holds
        # groups may destroy it: another one may have been formed since.
        with self._closing:
            control, self._control = self._control, None
            self._release()
            if control is not None and dist.is_initialized():
                del control
                dist.destroy_process_group()

    def _release(self) -> None:
        """Let go of what carries tensors."""


class TorchCommunicator(_ProcessCommunicator):
    """Tensors travel by a ``torch.distributed`` process group, NCCL or gloo.

    It carries halos and pixels only: on a group shared with other work, halo messages and somebody else's collectives
    overtake each other.
    """

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(control)
        self._group: dist.ProcessGroup | None = group
        self._device = device

    def _live(self) -> dist.ProcessGroup:
        group = self._group
        if group is None:
            raise CommunicatorAborted("the group was aborted")
        return group

    def begin_exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        group = self._live()
        # Group ranks, not global ranks: a group need not start at rank 0.
        operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer) for peer, buffer in receives]
        works = dist.batch_isend_irecv(operations) if operations else []

        def finish() -> None:
            for work in works:
                work.wait()
            # What is sent and received had to live until here.
            operations.clear()

        return finish

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self._live())
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dist.broadcast(tensor, group=self._live(), group_src=source)

    def abort(self) -> None:
        group = self._group
        if group is not None and self._device.type == "cuda":
            group._get_backend(self._device).abort()
        del group
        self.close()

    def _release(self) -> None:
        self._group = None


class SocketCommunicator(PairwiseCommunicator, _ProcessCommunicator):
    """Tensors, on the CPU, travel by sockets between processes of one host."""

    def __init__(self, sockets: LocalSockets, control: dist.ProcessGroup) -> None:
        super().__init__(control)
        self._sockets = sockets

    def begin_exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        self._sockets.begin(sends, receives)
        return self._sockets.finish

    def _release(self) -> None:
        self._sockets.close()


def join_group(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    *,
    generation: int,
    timeout_s: float,
    agreement_timeout_s: float | None = None,
) -> Communicator:
    """Form the group of ``size`` ranks over ``store``. All ranks must call it together.

    No environment variables are read, so two groups in one process tree cannot collide. After ``abort`` and ``close``
    the same healthy ranks can join again under the next ``generation``; their weights stay where they are.

    Args:
        store: reachable by all ranks; one of them hosts it.
        device: of this rank, of one type on all of them.
        generation: counts the groups formed over one store, so that a new group never reads the keys of the last.
        timeout_s: longest wait inside one collective of tensors, where ranks work in step.
        agreement_timeout_s: longest wait for the others to agree, which includes all the work that they do alone (their
            tiles, their items of a batch); None for ``timeout_s``. A peer that dies is noticed at once either way.
    """
    if size == 1:
        return SoloCommunicator()
    timeout = datetime.timedelta(seconds=timeout_s)
    patience = datetime.timedelta(seconds=max(timeout_s, agreement_timeout_s or 0.0))
    scoped = dist.PrefixStore(f"generation-{generation}", store)
    dist.init_process_group("gloo", store=scoped, rank=rank, world_size=size, timeout=timeout)
    cuda = device.type == "cuda"
    sockets = None if cuda else LocalSockets.connect(scoped, rank, size, timeout_s)
    communicator: Communicator
    if sockets is not None:
        communicator = SocketCommunicator(sockets, dist.new_group(backend="gloo", timeout=patience))
    else:
        group = dist.new_group(backend="nccl" if cuda else "gloo", timeout=timeout)
        communicator = TorchCommunicator(group, dist.new_group(backend="gloo", timeout=patience), device)
    if rank == 0:
        transport = (
            "NCCL" if cuda else "gloo, since not all have a socket on one host" if sockets is None else "local sockets"
        )
        logger.info("%d ranks exchange tensors by %s", size, transport)
    communicator.agree(0)
    communicator.all_gather(torch.zeros(1, device=device))
    return communicator
