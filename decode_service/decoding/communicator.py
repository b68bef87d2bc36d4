"""How ranks talk: one small abstract class, and its implementation for threads of one process.

Everything that sharding needs is built from two primitives, ``exchange`` (point to point) and ``all_gather`` (equal
shapes), so that another transport is a page of code. ``process_group`` has those of real processes.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch


class CommunicatorAborted(RuntimeError):
    """A collective was interrupted because the group was aborted or a peer is gone."""


#: Ranks, and what goes to each or comes from each.
Messages: TypeAlias = Sequence[tuple[int, torch.Tensor]]


class Communicator(ABC):
    """The ranks of one group, as seen by one of them. Not re-entrant: one collective at a time.

    Attributes:
        rank: this rank, 0-based.
        size: number of ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def begin_exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        """Begin to send and receive all at once: ``sends`` are (peer, tensor), ``receives`` are (peer, buffer to fill).

        Tensors must be contiguous; both sides must agree on shapes and on the order of messages between a pair.

        Returns:
            What waits for the end of it. To be called once, before anything else is asked of the communicator; until then
            the tensors must stay as they are, and the buffers hold nothing yet.
        """

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """``begin_exchange``, and wait for its end."""
        self.begin_exchange(sends, receives)()

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

    def begin_exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        if sends or receives:
            raise ValueError("a group of one has no peers")
        return lambda: None

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


class PairwiseCommunicator(Communicator):
    """A communicator whose collectives are made of exchanges."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        others = [peer for peer in range(self.size) if peer != self.rank]
        gathered = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)]
        self.exchange([(peer, tensor) for peer in others], [(peer, gathered[peer]) for peer in others])
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if self.rank == source:
            self.exchange([(peer, tensor) for peer in range(self.size) if peer != source], [])
        else:
            self.exchange([], [(source, tensor)])


class ThreadCommunicator(PairwiseCommunicator):
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

    def begin_exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        for peer, tensor in sends:
            self._mailboxes[self.rank][peer].put(tensor.clone())

        def finish() -> None:
            for peer, buffer in receives:
                buffer.copy_(self._take(peer))

        return finish

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
