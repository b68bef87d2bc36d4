"""Pixels from the device into host memory, chunk by chunk while the next chunk is decoded.

A copy runs beside the decoder only if the host's memory is pinned and the copy has a stream of its own. Pinning is slow, so
buffers are used again, but never while anybody can still read one: a buffer comes back when the last array over it is gone,
which for a reply is after it has been sent. Buffers, and the order of copies, know nothing of CUDA.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch

logger = logging.getLogger(__name__)

#: Bytes of the smallest buffer. Sizes are powers of two, as those of torch's own pinned memory are.
SMALLEST = 1 << 16
#: Bytes of buffers that wait to be used again; more are given back, pinned ones to torch, which keeps them for whatever pins next.
KEPT_BYTES = 2 << 30
#: Chunks whose copies may be under way at once: their pixels stay on the device until they have landed.
MOST_UNDER_WAY = 2

_CARRIERS: dict[torch.dtype, Any] = {
    torch.uint8: np.uint8,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
}


class HostMemory:
    """A buffer for as long as somebody holds it: this object, or an array made of it, or a view of that.

    Attributes:
        buffer: (size,), uint8; ``nbytes`` of it are in use.
    """

    def __init__(self, buffer: torch.Tensor, nbytes: int, give_back: Callable[[torch.Tensor], None]) -> None:
        self.buffer = buffer
        self.nbytes = nbytes
        self._returning = weakref.finalize(self, give_back, buffer)
        self._returning.atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What numpy makes an array of, whose ``base`` is this object: so the buffer is held as long as the array."""
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.buffer.data_ptr(), False)}

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The memory as a tensor, to be used no longer than this object."""
        return self.buffer[: self.nbytes].view(dtype).view(tuple(shape))

    def array(self, shape: Sequence[int], dtype: torch.dtype) -> np.ndarray:
        """The memory as the C-contiguous array that carries pixels of ``dtype``; it holds the memory."""
        return np.asarray(self).view(_CARRIERS[dtype]).reshape(tuple(shape))

    def abandon(self) -> None:
        """Never use the buffer again: something may still write to it."""
        self._returning.detach()


class HostBufferPool:
    """Host buffers that are used again once nobody holds them.

    Args:
        pinned: whether the device may copy into them by itself.
        kept_bytes: of buffers that wait to be used again.

    Attributes:
        problem: why memory is not pinned though it should be; empty where all is well.
        allocated: how many buffers have been made.
    """

    def __init__(self, *, pinned: bool, kept_bytes: int = KEPT_BYTES) -> None:
        self._pinned = pinned
        self._kept_bytes = kept_bytes
        # Finalizers append, in whatever thread and moment they run; a lock that ``take`` holds then would never be free.
        self._returned: deque[torch.Tensor] = deque()
        self._free: deque[torch.Tensor] = deque()
        self.problem = ""
        self.allocated = 0

    @property
    def pinned(self) -> bool:
        return self._pinned and not self.problem

    def take(self, nbytes: int) -> HostMemory:
        """Memory of ``nbytes`` that nobody else holds; its contents are arbitrary. One thread at a time."""
        self._sort_returned()
        size = max(SMALLEST, 1 << max(0, nbytes - 1).bit_length())
        for index, buffer in enumerate(self._free):
            if buffer.numel() == size:
                del self._free[index]
                break
        else:
            buffer = self._allocate(size)
        return HostMemory(buffer, nbytes, self._returned.append)

    def _sort_returned(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        # The ones that have waited longest go first.
        while sum(buffer.numel() for buffer in self._free) > self._kept_bytes:
            self._free.popleft()

    def _allocate(self, size: int) -> torch.Tensor:
        self.allocated += 1
        if self.pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.problem = f"pinning {size} bytes failed: {error}".splitlines()[0]
                logger.warning(
                    "pixels go through pageable memory from now on, which decoding waits for: %s", self.problem
                )
        return torch.empty(size, dtype=torch.uint8)


class Landing(Protocol):
    """Copies under way. ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether they are done."""

    def synchronize(self) -> None:
        """Wait until they are."""


class Copier(Protocol):
    """Begins copies, in order."""

    def begin(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Landing:
        """Copy each (target, source), both dense, once the work that makes the sources is done."""


class CudaCopier:
    """Copies on a stream of its own, beside the decoder's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Landing:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            landed = torch.cuda.Event()
            landed.record(self._stream)
        return landed


class Transfer:
    """Pixels of one request on their way into host memory.

    To be closed, also after an error: only then nothing writes to the memory any more.

    Args:
        memory: where they go.
        shape: that of all pixels.

    Attributes:
        target: the pixels in host memory, whole; not to be read before ``finish``.
    """

    def __init__(
        self,
        memory: HostMemory,
        shape: Sequence[int],
        dtype: torch.dtype,
        copier: Copier,
        most_under_way: int = MOST_UNDER_WAY,
    ) -> None:
        self._memory: HostMemory | None = memory
        self._shape, self._dtype = tuple(shape), dtype
        self._copier = copier
        self._most_under_way = most_under_way
        # With their sources: the device's allocator gives memory away as soon as nobody holds it, read or not.
        self._under_way: deque[tuple[Landing, list[tuple[torch.Tensor, torch.Tensor]]]] = deque()
        self.target = memory.tensor(shape, dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy ``source`` to ``target``, a part of ``self.target``; wait only where too many are under way."""
        while len(self._under_way) >= self._most_under_way or (self._under_way and self._under_way[0][0].query()):
            self._under_way[0][0].synchronize()
            self._under_way.popleft()
        pairs = list(_dense_pairs(target, source.contiguous()))
        self._under_way.append((self._copier.begin(pairs), pairs))

    def finish(self) -> np.ndarray:
        """The pixels, all arrived, as ``pixels.to_numpy`` would give them. The array holds its memory."""
        assert self._memory is not None
        self._wait()
        memory, self._memory = self._memory, None
        return memory.array(self._shape, self._dtype)

    def close(self) -> None:
        """Wait for copies that are still under way. Where that fails the memory is never used again. Can be called twice."""
        memory, self._memory = self._memory, None
        try:
            self._wait()
        except Exception as error:  # noqa: BLE001 - the device is broken; whoever decodes hears of it from there
            logger.warning("copies of pixels did not end: %s", error)
            if memory is not None:
                memory.abandon()
            self._under_way.clear()

    def _wait(self) -> None:
        while self._under_way:
            self._under_way[0][0].synchronize()
            self._under_way.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HostCopies:
    """One device's way of getting pixels into host memory."""

    def __init__(self, pool: HostBufferPool, copier: Copier) -> None:
        self._pool = pool
        self._copier = copier

    @classmethod
    def of(cls, device: torch.device) -> HostCopies | None:
        """Those of ``device``; None on the CPU, where pixels are in host memory from the start."""
        if device.type != "cuda":
            return None
        pool = HostBufferPool(pinned=True)
        # What cannot be pinned is known when the model is loaded, not at the first request.
        pool.take(SMALLEST)
        return cls(pool, CudaCopier(device))

    def transfer(self, shape: Sequence[int], dtype: torch.dtype) -> Transfer:
        """A transfer of pixels of ``shape``, which come in parts."""
        nbytes = int(np.prod(tuple(shape), dtype=np.int64)) * dtype.itemsize
        return Transfer(self._pool.take(nbytes), shape, dtype, self._copier)

    def fetch(self, pixels: torch.Tensor) -> np.ndarray:
        """``pixels`` as ``pixels.to_numpy`` would give them, in one go."""
        with self.transfer(pixels.shape, pixels.dtype) as transfer:
            transfer.copy(transfer.target, pixels)
            return transfer.finish()

    def describe(self) -> dict[str, Any]:
        """As ``/v1/models/{name}`` shows it."""
        return {"pinned": self._pool.pinned, "problem": self._pool.problem}


def _dense_pairs(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both cut into parts that are dense in ``target``: a copy between those is one of memory, without kernels or buffers."""
    if target.is_contiguous():
        yield target, source
        return
    for part, own in zip(target.unbind(0), source.unbind(0), strict=True):
        yield from _dense_pairs(part, own)
