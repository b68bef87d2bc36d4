"""Exchanges between ranks as operators of torch, so that they can be part of a compiled graph.

A graph knows no communicator: an operator takes that of the frame which this thread decodes a band of, so that compiled code
goes on unchanged after the ranks have formed a new group.

Every exchange takes a token from the one before it and gives one to the next. A compiler may move what does not depend on
each other and leave out what nobody uses; with the last token among the outputs of a graph all exchanges stay, in the order
in which the decoder makes them, which must be that of the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from decode_service.decoding.communicator import Communicator, Messages
from decode_service.decoding.sharding import ShardedFrame

T = TypeVar("T")

# Lives as long as the process: with it the operators would go.
_library = torch.library.Library("decode_service", "DEF")
_library.define(
    "exchange(Tensor token, Tensor[] sends, int[] destinations, int[] sources, int[] dims, int[] extents, "
    "ScalarType[] dtypes) -> Tensor[]"
)
_library.define("all_gather(Tensor token, Tensor mine, int size) -> Tensor[]")


def first_token(device: torch.device) -> torch.Tensor:
    """What the first exchange of a graph takes."""
    return torch.zeros(1, dtype=torch.uint8, device=device)


class TracedCommunicator(Communicator):
    """Stands in for the communicator of a frame while a decoder is traced: exchanges become nodes of the graph.

    Args:
        rank, size: those of the communicator that it stands in for.
        device: where the decoder runs.

    Attributes:
        token: what the last exchange gave; the graph must return it.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.token = first_token(device)

    # The operators are the communicator's, and not operations that the halo rule has a say in.

    def begin_exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        with torch._C.DisableTorchFunction():
            self.token, *received = torch.ops.decode_service.exchange(
                self.token,
                [tensor for _, tensor in sends],
                [peer for peer, _ in sends],
                [peer for peer, _ in receives],
                [buffer.dim() for _, buffer in receives],
                [extent for _, buffer in receives for extent in buffer.shape],
                [buffer.dtype for _, buffer in receives],
            )
            for (_, buffer), tensor in zip(receives, received, strict=True):
                buffer.copy_(tensor)
        return lambda: None

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        with torch._C.DisableTorchFunction():
            self.token, *others = torch.ops.decode_service.all_gather(self.token, tensor, self.size)
        return [*others[: self.rank], tensor, *others[self.rank :]]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        raise NotImplementedError("no decoder broadcasts inside of a call")

    def agree(self, status: int) -> list[int]:
        raise NotImplementedError("no decoder agrees on anything inside of a call")

    def abort(self) -> None:
        return

    def close(self) -> None:
        return


class WatchedCommunicator(Communicator):
    """A communicator that remembers what went through it, and whether it failed.

    Attributes:
        made: every exchange so far, as all that its peers must agree with: kind, ranks, shapes and dtypes.
        failure: what the communicator raised, which is no fault of the code that called it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.made: list[tuple[object, ...]] = []
        self.failure: Exception | None = None

    def begin_exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        described = [[(peer, tuple(x.shape), x.dtype) for peer, x in part] for part in (sends, receives)]
        self.made.append(("exchange", *described))
        finish = self._watched(lambda: self._communicator.begin_exchange(sends, receives))
        return lambda: self._watched(finish)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.made.append(("all_gather", tuple(tensor.shape), tensor.dtype))
        return self._watched(lambda: self._communicator.all_gather(tensor))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self.made.append(("broadcast", tuple(tensor.shape), tensor.dtype, source))
        self._watched(lambda: self._communicator.broadcast(tensor, source))

    def agree(self, status: int) -> list[int]:
        return self._watched(lambda: self._communicator.agree(status))

    def abort(self) -> None:
        self._communicator.abort()

    def close(self) -> None:
        self._communicator.close()

    def _watched(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except Exception as error:
            self.failure = error
            raise


def _shapes(dims: Sequence[int], extents: Sequence[int]) -> Iterator[list[int]]:
    start = 0
    for count in dims:
        yield list(extents[start : start + count])
        start += count


def _frame() -> ShardedFrame:
    frame = ShardedFrame.current()
    if frame is None:
        raise RuntimeError("an exchange between ranks outside of a ShardedFrame")
    return frame


def _exchange(
    token: torch.Tensor,
    sends: Sequence[torch.Tensor],
    destinations: Sequence[int],
    sources: Sequence[int],
    dims: Sequence[int],
    extents: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> list[torch.Tensor]:
    received = _received(token, sends, destinations, sources, dims, extents, dtypes)
    frame = _frame()
    frame.communicator.exchange(
        # A compiler may have laid them out otherwise in memory.
        [(peer, tensor.contiguous()) for peer, tensor in zip(destinations, sends, strict=True)],
        list(zip(sources, received[1:], strict=True)),
    )
    frame.exchanges += 1
    return received


def _received(
    token: torch.Tensor,
    sends: Sequence[torch.Tensor],
    destinations: Sequence[int],
    sources: Sequence[int],
    dims: Sequence[int],
    extents: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> list[torch.Tensor]:
    """A new token and the buffers of an exchange."""
    buffers = [token.new_empty(shape, dtype=dtype) for shape, dtype in zip(_shapes(dims, extents), dtypes, strict=True)]
    return [torch.empty_like(token), *buffers]


def _all_gather(token: torch.Tensor, mine: torch.Tensor, size: int) -> list[torch.Tensor]:
    frame = _frame()
    gathered = frame.communicator.all_gather(mine.contiguous())
    frame.exchanges += 1
    del gathered[frame.communicator.rank]
    return [torch.empty_like(token), *gathered]


def _gathered(token: torch.Tensor, mine: torch.Tensor, size: int) -> list[torch.Tensor]:
    """A new token and the tensors of the other ranks."""
    others = [mine.new_empty(mine.shape) for _ in range(size - 1)]
    return [torch.empty_like(token), *others]


for _name, _run, _shaped in (("exchange", _exchange, _received), ("all_gather", _all_gather, _gathered)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"decode_service::{_name}", _shaped, lib=_library)
