"""Stream sockets between the ranks of one host: what carries halos on CPUs.

gloo hands every message to a thread of its own, on either side, and has the receiver ask for it first. On CPUs every core has
a rank that computes, so those threads wait for their turn: a row of a few kilobytes then takes one to four milliseconds
instead of a tenth of one, and a decode exchanges rows dozens of times. Here the ranks read and write by themselves, and what
the kernel's buffers hold travels while they compute.

Every pair of ranks has one stream. A message is its length and its bytes; both sides know what comes next, and a length
that is not the expected one is an error, not a wrong picture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import select
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from decode_service.decoding.communicator import CommunicatorAborted, Messages

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_RANK = struct.Struct("<I")
# More than the kernel allows unprivileged processes is cut down to what it does allow.
_BUFFER_BYTES = 4 << 20
# A send takes so many pieces at most (IOV_MAX of Linux).
_MOST_PIECES = 1024


def host_identity() -> str | None:
    """What processes have in common that see one file system of one running kernel; None where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        mounts = os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return None
    return f"{boot}/{mounts}/{os.getuid()}"


class LocalSockets:
    """One rank's streams to all of its peers. One exchange at a time, from one thread; ``abort`` from any.

    Args:
        streams: by peer; taken over.
        timeout_s: longest wait for a peer within one exchange.
    """

    def __init__(self, streams: dict[int, socket.socket], timeout_s: float) -> None:
        self._channels = {peer: _Channel(peer, stream) for peer, stream in streams.items()}
        self._timeout_s = timeout_s
        self._aborted = False
        # The tensors of an exchange, from its begin until it is finished.
        self._under_way: list[torch.Tensor] | None = None
        # Held while streams are used, so that none is closed, and its number given to another file, meanwhile.
        self._in_use = threading.Lock()

    @classmethod
    def connect(cls, store: dist.Store, rank: int, size: int, timeout_s: float) -> LocalSockets | None:
        """Streams between all ``size`` ranks, which must call this together; None on all of them if they are not on one host.

        Args:
            store: reachable by all ranks, with no keys but those of this group.

        Raises:
            OSError: if a peer on this host does not answer.
        """
        with contextlib.ExitStack() as cleanup:
            identity, folder = host_identity(), ""
            listener = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                # Only processes of this user can reach what is in it.
                folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="decode-"))
                listener.bind(_address(folder))
                listener.listen(size)
            except OSError as error:
                logger.warning("rank %d cannot have a socket in %s: %s", rank, folder or tempfile.gettempdir(), error)
                identity = None
            store.set(f"sockets-{rank}", f"{identity or ''}|{folder}")
            places = [store.get(f"sockets-{peer}").decode().split("|", 1) for peer in range(size)]
            if any(not place[0] or place[0] != places[0][0] for place in places):
                return None
            streams: dict[int, socket.socket] = {}
            for peer in range(rank):
                stream = streams[peer] = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                stream.settimeout(timeout_s)
                stream.connect(_address(places[peer][1]))
                stream.sendall(_RANK.pack(rank))
            listener.settimeout(timeout_s)
            while len(streams) < size - 1:
                stream = cleanup.enter_context(listener.accept()[0])
                stream.settimeout(timeout_s)
                head = stream.recv(_RANK.size, socket.MSG_WAITALL)
                if len(head) < _RANK.size:
                    raise ConnectionError("a peer on this host ended while it joined")
                streams[_RANK.unpack(head)[0]] = stream
            # All who want to connect have: the address is not needed any more, the streams are.
            return cls({peer: stream.dup() for peer, stream in streams.items()}, timeout_s)

    def begin(self, sends: Messages, receives: Messages) -> None:
        """Begin an exchange, and send as much as goes without waiting; see ``Communicator.begin_exchange``.

        Raises:
            CommunicatorAborted: if a peer is gone, or ``abort`` was called.
        """
        with self._in_use:
            self._check()
            if self._under_way is not None:
                raise CommunicatorAborted(
                    "an exchange was begun and never finished: messages would not pair up any more"
                )
            self._under_way = [tensor for _, tensor in (*sends, *receives)]
            # Whatever else goes on in this thread, these are no operations of a decoder.
            with torch._C.DisableTorchFunction():
                for peer, tensor in sends:
                    self._channels[peer].queue(tensor)
                for peer, buffer in receives:
                    self._channels[peer].expect(buffer)
            for peer in {peer for peer, _ in sends}:
                self._channels[peer].send()

    def finish(self) -> None:
        """Wait until all of the exchange that was begun is sent and received.

        Raises:
            CommunicatorAborted: if a peer is gone, did not come in time or is not in step, or ``abort`` was called.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._in_use:
            self._check()
            busy = [channel for channel in self._channels.values() if channel.advance()]
            while busy:
                left_s = deadline - time.monotonic()
                waiting = select.poll()
                for channel in busy:
                    waiting.register(channel.stream, channel.events())
                answered = left_s > 0 and waiting.poll(left_s * 1e3)
                self._check()
                if not answered:
                    peers = ", ".join(str(channel.peer) for channel in busy)
                    raise CommunicatorAborted(f"no word from rank {peers} within {self._timeout_s:g} s")
                busy = [channel for channel in busy if channel.advance()]
            self._under_way = None

    def _check(self) -> None:
        if self._aborted:
            raise CommunicatorAborted("the group was aborted")

    def abort(self) -> None:
        """Make exchanges of this rank, and so of its peers, fail at once."""
        self._aborted = True
        for channel in self._channels.values():
            # Wakes whoever waits, on both sides; the streams themselves stay for the thread that uses them.
            with contextlib.suppress(OSError):
                channel.stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Abort and release the streams. Callable twice."""
        self.abort()
        with self._in_use:
            for channel in self._channels.values():
                channel.stream.close()
            self._under_way = None


class _Channel:
    """The stream to one peer, what is to be sent over it and what is expected from it."""

    def __init__(self, peer: int, stream: socket.socket) -> None:
        self.peer, self.stream = peer, stream
        stream.setblocking(False)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._out: list[memoryview] = []
        self._in: list[memoryview] = []
        # Of the messages whose length has not come yet: where it is written, and what it must be.
        self._lengths: list[tuple[bytearray, int]] = []

    def queue(self, tensor: torch.Tensor) -> None:
        contents = _bytes_of(tensor)
        self._out += [memoryview(_LENGTH.pack(len(contents))), contents]

    def expect(self, buffer: torch.Tensor) -> None:
        length, contents = bytearray(_LENGTH.size), _bytes_of(buffer)
        self._lengths.append((length, len(contents)))
        self._in += [memoryview(length), contents]

    def events(self) -> int:
        """What ``poll`` should wait for."""
        return (select.POLLIN if self._in else 0) | (select.POLLOUT if self._out else 0)

    def advance(self) -> bool:
        """Send and receive what goes without waiting; returns whether something is left."""
        self.send()
        self.receive()
        return bool(self._out or self._in)

    def send(self) -> None:
        """Send what goes without waiting."""
        while self._out:
            try:
                done = self.stream.sendmsg(self._out[:_MOST_PIECES], [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._closed(error) from None
            self._out = _rest(self._out, done)

    def receive(self) -> None:
        """Receive what is there."""
        while self._in:
            try:
                done = self.stream.recvmsg_into(self._in[:_MOST_PIECES])[0]
            except BlockingIOError:
                return
            except OSError as error:
                raise self._closed(error) from None
            if done == 0:
                raise self._closed("end of stream")
            self._in = _rest(self._in, done)
            # Two pieces for every message whose length is still to come.
            while len(self._lengths) > len(self._in) // 2:
                length, expected = self._lengths.pop(0)
                (actual,) = _LENGTH.unpack(length)
                if actual != expected:
                    raise CommunicatorAborted(
                        f"rank {self.peer} sent {actual} bytes where {expected} were expected: the ranks are not in step"
                    )

    def _closed(self, why: object) -> CommunicatorAborted:
        return CommunicatorAborted(f"connection closed by peer, rank {self.peer}: {why}")


def _address(folder: str) -> str:
    return f"{folder}/socket"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous ``tensor`` on the CPU, which has to outlive the view."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"sockets carry contiguous tensors of the CPU, got strides {tensor.stride()} on {tensor.device}"
        )
    return memoryview(_bytes_type(tensor.numel() * tensor.element_size()).from_address(tensor.data_ptr())).cast("B")


@functools.lru_cache(maxsize=1024)
def _bytes_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Making such a type takes longer than all else that is done for a message."""
    return ctypes.c_char * nbytes


def _rest(pieces: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``pieces`` after their first ``done`` bytes."""
    index = 0
    while index < len(pieces) and done >= len(pieces[index]):
        done -= len(pieces[index])
        index += 1
    rest = pieces[index:]
    if done:
        rest[0] = rest[0][done:]
    return rest
