"""Sockets between ranks: whatever the messages, they arrive; what cannot arrive ends in an error, and soon."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from decode_service.decoding import local_sockets
from decode_service.decoding.communicator import CommunicatorAborted
from decode_service.decoding.local_sockets import LocalSockets


def connected(size: int, timeout_s: float = 30.0) -> list[LocalSockets]:
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(LocalSockets.connect, store, rank, size, timeout_s) for rank in range(size)]
        ranks = [future.result() for future in futures]
    return [rank for rank in ranks if rank is not None]


@pytest.fixture
def pair() -> Iterator[list[LocalSockets]]:
    ranks = connected(2)
    yield ranks
    for rank in ranks:
        rank.close()


def on_both(pair: list[LocalSockets], act: Callable[[int, LocalSockets], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(act, rank, sockets) for rank, sockets in enumerate(pair)]:
            future.result()


def swap(sockets: LocalSockets, peer: int, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    sockets.begin([(peer, x) for x in mine], [(peer, x) for x in theirs])
    sockets.finish()


def test_messages_larger_than_all_buffers_and_smaller_than_a_byte_pass_each_other(pair: list[LocalSockets]) -> None:
    def act(rank: int, sockets: LocalSockets) -> None:
        shapes = [(3_000_000,), (0,), (2, 3), (5_000_001,), ()]
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            mine = [torch.full(shape, 10 * rank + index, dtype=dtype) for index, shape in enumerate(shapes)]
            theirs = [torch.zeros_like(x) for x in mine]
            swap(sockets, 1 - rank, mine, theirs)
            for index, x in enumerate(theirs):
                assert x.eq(10 * (1 - rank) + index).all()

    on_both(pair, act)


def test_more_messages_than_one_call_takes_arrive_in_order_however_they_are_grouped(pair: list[LocalSockets]) -> None:
    count = local_sockets._MOST_PIECES + 10

    def act(rank: int, sockets: LocalSockets) -> None:
        if rank == 0:
            for index in range(count):
                swap(sockets, 1, [torch.tensor([index])], [])
        else:
            theirs = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
            swap(sockets, 0, [], theirs)
            assert [int(x) for x in theirs] == list(range(count))
            swap(sockets, 0, theirs, [])
        if rank == 0:
            back = torch.zeros(1, dtype=torch.int64)
            for index in range(count):
                swap(sockets, 1, [], [back])
                assert int(back) == index

    on_both(pair, act)


def test_what_the_buffers_hold_travels_before_anybody_waits(pair: list[LocalSockets]) -> None:
    pair[0].begin([(1, torch.arange(1000))], [])
    received = torch.zeros(1000, dtype=torch.int64)
    swap(pair[1], 0, [], [received])
    assert received[-1] == 999
    pair[0].finish()


@pytest.mark.parametrize("sent", [3, 5])
def test_a_message_of_another_size_is_an_error_and_nothing_is_exchanged_any_more(
    pair: list[LocalSockets], sent: int
) -> None:
    swap(pair[0], 1, [torch.zeros(sent, dtype=torch.uint8)], [])
    with pytest.raises(CommunicatorAborted, match=f"rank 0 sent {sent} bytes where 4 were expected"):
        swap(pair[1], 0, [], [torch.zeros(4, dtype=torch.uint8)])
    with pytest.raises(CommunicatorAborted, match="never finished"):
        swap(pair[1], 0, [torch.zeros(1)], [])


def test_a_peer_that_closes_or_does_not_come_is_noticed() -> None:
    a, b = connected(2, timeout_s=0.2)
    with pytest.raises(CommunicatorAborted, match="no word from rank 1 within"):
        swap(a, 1, [], [torch.zeros(1)])
    a.close()
    a.close()
    with pytest.raises(CommunicatorAborted, match="rank 0"):
        swap(b, 0, [], [torch.zeros(1)])
    with pytest.raises(CommunicatorAborted, match="aborted"):
        swap(a, 1, [], [])
    b.close()


def test_what_was_sent_before_a_peer_closed_arrives(pair: list[LocalSockets]) -> None:
    swap(pair[0], 1, [torch.ones(5)], [])
    pair[0].close()
    received = torch.zeros(5)
    swap(pair[1], 0, [], [received])
    assert received.eq(1).all()


@pytest.mark.parametrize("aborting", [0, 1])
def test_abort_frees_a_rank_that_waits(pair: list[LocalSockets], aborting: int) -> None:
    timer = threading.Timer(0.2, pair[aborting].abort)
    timer.start()
    begun = time.monotonic()
    with pytest.raises(CommunicatorAborted):
        swap(pair[0], 1, [], [torch.zeros(1)])
    assert time.monotonic() - begun < 10
    timer.join()


@pytest.mark.parametrize("wrong", [torch.zeros(4, 4).t()[:, :2], torch.zeros(2, device="meta")])
def test_only_contiguous_tensors_of_the_cpu_are_taken(pair: list[LocalSockets], wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous tensors of the CPU"):
        pair[0].begin([(1, wrong)], [])


def test_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = connected(3)
    assert len(ranks) == 3 and list(tmp_path.iterdir()) == []
    for rank in ranks:
        rank.close()


def test_ranks_that_cannot_have_a_socket_all_learn_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ("so-long-a-name" * 10)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert connected(3) == []
    assert "cannot have a socket in" in caplog.text
