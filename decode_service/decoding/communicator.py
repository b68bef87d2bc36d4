"""How ranks talk: one small abstract class and two implementations, real process groups and threads of one process.

Everything that sharding needs is built from two primitives, ``exchange`` (point to point) and ``all_gather`` (equal
shapes), so that a third transport is a page of code.
"""

from __future__ import annotations

import datetime
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist


class CommunicatorAborted(RuntimeError):
    """A collective was interrupted because the group was aborted or a peer is gone."""


class Communicator(ABC):
    """The ranks of one group, as seen by one of them. Not re-entrant: one collective at a time.

    Attributes:
        rank: this rank, 0-based.
        size: number of ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Send and receive all at once: ``sends`` are (peer, tensor), ``receives`` are (peer, buffer to fill).

        Tensors must be contiguous; both sides must agree on shapes and on the order of messages between a pair.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """``tensor`` of every rank, in rank order; all ranks pass the same shape and dtype."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` with that of rank ``source``."""

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.all_gather(torch.zeros(1))

    @abstractmethod
    def abort(self) -> None:
        """Make pending and later collectives of this rank, and so of its peers, fail soon. Callable from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held. Callable twice."""


class SoloCommunicator(Communicator):
    """A group of one."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        if sends or receives:
            raise ValueError("a group of one has no peers")

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        return

    def abort(self) -> None:
        return

    def close(self) -> None:
        return


class ThreadCommunicator(Communicator):
    """Ranks that are threads of one process and pass tensors through queues."""

    _POLL_S = 0.05

    def __init__(self, rank: int, mailboxes: list[list[queue.Queue[torch.Tensor]]], aborted: threading.Event) -> None:
        self.rank, self.size = rank, len(mailboxes)
        self._mailboxes = mailboxes
        self._aborted = aborted

    @classmethod
    def create(cls, size: int) -> list[ThreadCommunicator]:
        """One communicator for each of ``size`` threads."""
        mailboxes: list[list[queue.Queue[torch.Tensor]]] = [[queue.Queue() for _ in range(size)] for _ in range(size)]
        aborted = threading.Event()
        return [cls(rank, mailboxes, aborted) for rank in range(size)]

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        for peer, tensor in sends:
            self._mailboxes[self.rank][peer].put(tensor.clone())
        for peer, buffer in receives:
            buffer.copy_(self._take(peer))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        others = [peer for peer in range(self.size) if peer != self.rank]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        gathered[self.rank] = tensor
        self.exchange([(peer, tensor) for peer in others], [(peer, gathered[peer]) for peer in others])
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if self.rank == source:
            self.exchange([(peer, tensor) for peer in range(self.size) if peer != source], [])
        else:
            self.exchange([], [(source, tensor)])

    def _take(self, peer: int) -> torch.Tensor:
        while not self._aborted.is_set():
            try:
                return self._mailboxes[peer][self.rank].get(timeout=self._POLL_S)
            except queue.Empty:
                continue
        raise CommunicatorAborted("the group was aborted")

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self._aborted.set()


class TorchCommunicator(Communicator):
    """Ranks that are processes, over a ``torch.distributed`` process group of their own.

    The group must not be shared with other users: halo messages and somebody else's collectives on one communicator
    overtake each other.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        # Group ranks, not global ranks: a group need not start at rank 0.
        operations = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=peer) for peer, buffer in receives]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dist.broadcast(tensor, group=self._group, group_src=source)

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1, device=self._device))

    def abort(self) -> None:
        self._group._get_backend(self._device).abort()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def join_group(
    store: dist.Store, rank: int, size: int, device: torch.device, *, generation: int, timeout_s: float
) -> Communicator:
    """Form the group of ``size`` ranks over ``store``: NCCL on CUDA, gloo on the CPU. All ranks must call it together.

    ``generation`` counts the groups formed over one store, so that a re-formed group never reads keys of the last.
    No environment variables are used: two groups in one process tree cannot collide.
    """
    if size == 1:
        return SoloCommunicator()
    timeout = datetime.timedelta(seconds=timeout_s)
    scoped = dist.PrefixStore(f"group/{generation}", store)
    if not dist.is_initialized():
        raise RuntimeError("call init_control_group first")
    return TorchCommunicator(_new_group(scoped, rank, size, device, timeout), device)


def _new_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    raise NotImplementedError
