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
    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send and receive all at once: ``sends`` are (peer, tensor), ``receives`` are (peer, buffer to fill).

        Tensors must be contiguous; both sides must agree on shapes and on the order of messages between a pair.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """``tensor`` of every rank, in rank order; all ranks pass the same shape and dtype."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` with that of rank ``source``."""

    @abstractmethod
    def agree(self, status: int) -> list[int]:
        """``status`` of every rank, in rank order, over the control path: works when the device is out of memory."""

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

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        if sends or receives:
            raise ValueError("a group of one has no peers")

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        return

    def agree(self, status: int) -> list[int]:
        return [status]

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

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
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

    def agree(self, status: int) -> list[int]:
        return [int(entry) for entry in self.all_gather(torch.tensor([status]))]

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
    """Ranks that are processes, over ``torch.distributed`` process groups of their own.

    The tensor group carries halos and pixels only: on a communicator shared with other work, halo messages and somebody
    else's collectives overtake each other. The control group (gloo, CPU) carries agreements.
    """

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup, device: torch.device) -> None:
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = (group, control)
        self._closing = threading.Lock()
        self._device = device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def _live(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The tensor group and the control group."""
        groups = self._groups
        if groups is None:
            raise CommunicatorAborted("the group was aborted")
        return groups

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        group, _ = self._live()
        # Group ranks, not global ranks: a group need not start at rank 0.
        operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer) for peer, buffer in receives]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        group, _ = self._live()
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=group)
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        group, _ = self._live()
        dist.broadcast(tensor, group=group, group_src=source)

    def agree(self, status: int) -> list[int]:
        _, control = self._live()
        mine = torch.tensor([status], dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=control)
        return [int(entry) for entry in gathered]

    def abort(self) -> None:
        groups = self._groups
        if groups is not None and self._device.type == "cuda":
            groups[0]._get_backend(self._device).abort()
        del groups
        self.close()

    def close(self) -> None:
        # gloo has no abort of its own: its connections close, and the peers' waits end at once, when the last
        # reference to the group goes. torch has one default group per process, so only the communicator that still holds
        # groups may destroy it: another one may have been formed since.
        with self._closing:
            groups, self._groups = self._groups, None
            if groups is not None and dist.is_initialized():
                del groups
                dist.destroy_process_group()


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
    """Form the group of ``size`` ranks over ``store``: NCCL on CUDA, gloo on the CPU. All ranks must call it together.

    No environment variables are read, so two groups in one process tree cannot collide. After ``abort`` and ``close``
    the same healthy ranks can join again under the next ``generation``; their weights stay where they are.

    Args:
        store: reachable by all ranks; one of them hosts it.
        generation: counts the groups formed over one store, so that a new group never reads the keys of the last.
        timeout_s: longest wait inside one collective of the tensor group, where ranks work in step.
        agreement_timeout_s: longest wait for the others to agree, which includes all the work that they do alone (their
            tiles, their items of a batch); None for ``timeout_s``. A peer that dies is noticed at once either way.
    """
    if size == 1:
        return SoloCommunicator()
    timeout = datetime.timedelta(seconds=timeout_s)
    patience = datetime.timedelta(seconds=max(timeout_s, agreement_timeout_s or 0.0))
    scoped = dist.PrefixStore(f"generation-{generation}", store)
    dist.init_process_group("gloo", store=scoped, rank=rank, world_size=size, timeout=timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(backend=backend, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=patience)
    communicator = TorchCommunicator(group, control, device)
    communicator.agree(0)
    communicator.all_gather(torch.zeros(1, device=device))
    return communicator
