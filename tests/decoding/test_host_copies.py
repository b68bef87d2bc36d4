"""Pixels travel to the host while the next pass is decoded, into memory that nobody else reads or writes."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from decode_service.decoding import host_copies
from decode_service.decoding.host_copies import MOST_UNDER_WAY, SMALLEST, HostBufferPool, HostCopies, Transfer
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.pixels import to_numpy
from decode_service.decoding.rank import RankDecoder, RankPart
from decode_service.planning.plan import PixelFormat
from tests.decoding.conftest import Zoo
from tests.decoding.harness import FLOAT, latents_of
from tests.decoding.test_rank import fail_at, load, plan_for
from tests.decoding.threads import on_ranks


class Late:
    """A copy that is carried out when somebody waits for it, as a device may. It does not hold what it reads."""

    def __init__(self, copier: LateCopier, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copier, self._done = copier, False
        self._pairs = [(target, weakref.ref(source)) for target, source in pairs]

    def query(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        if self._copier.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if not self._done:
            for target, held in self._pairs:
                source = held()
                assert source is not None, "the source's memory was given away before it was read"
                target.copy_(source)
            self._copier.under_way -= 1
        self._done = True


class LateCopier:
    """Copies as late as possible; ``most`` were under way at once."""

    def __init__(self) -> None:
        self.under_way = self.most = self.begun = 0
        self.broken = False

    def begin(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Late:
        assert all(target.is_contiguous() and source.is_contiguous() for target, source in pairs)
        self.under_way += 1
        self.begun += 1
        self.most = max(self.most, self.under_way)
        return Late(self, pairs)


@pytest.fixture
def pool() -> HostBufferPool:
    return HostBufferPool(pinned=False)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def arrived(pool: HostBufferPool, values: torch.Tensor) -> np.ndarray:
    return HostCopies(pool, LateCopier()).fetch(values)


def test_a_buffer_is_used_again_only_when_nobody_can_read_it_any_more(pool: HostBufferPool) -> None:
    first = arrived(pool, torch.arange(100, dtype=torch.uint8))
    where = address(first)
    # What a reply holds: a view of a view, as bytes.
    sending = memoryview(first.reshape(10, 10)[5:]).cast("B")
    del first
    gc.collect()
    second = arrived(pool, torch.zeros(100, dtype=torch.uint8))
    assert address(second) != where
    assert bytes(sending) == bytes(range(50, 100))
    sending.release()
    del sending
    gc.collect()
    third = arrived(pool, torch.ones(100, dtype=torch.uint8))
    assert address(third) == where
    assert pool.allocated == 2 and second.sum() == 0


def test_buffers_are_kept_up_to_a_bound_and_those_that_came_back_last() -> None:
    pool = HostBufferPool(pinned=False, kept_bytes=2 * SMALLEST)
    held = [pool.take(SMALLEST) for _ in range(4)]
    # Alive, so that no other buffer is made where one lies.
    buffers = [memory.buffer for memory in held]
    while held:
        del held[0]
    held = [pool.take(SMALLEST) for _ in range(4)]
    assert pool.allocated == 4 + 2
    again = [memory.buffer.data_ptr() for memory in held]
    assert again[:2] == [buffer.data_ptr() for buffer in buffers[2:]] and len(set(again)) == 4


def test_memory_of_any_size_is_large_enough_and_used_again_for_its_size_alone(pool: HostBufferPool) -> None:
    small = address(arrived(pool, torch.zeros(SMALLEST, dtype=torch.uint8)))
    large = torch.arange(SMALLEST + 1).to(torch.uint8)
    got = arrived(pool, large)
    assert pool.allocated == 2 and (got == large.numpy()).all()
    assert pool.take(SMALLEST + 1).buffer.numel() == 2 * SMALLEST
    assert address(arrived(pool, torch.zeros(SMALLEST // 2 + 1, dtype=torch.uint8))) == small and pool.allocated == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_pixels_arrive_as_they_are(pool: HostBufferPool, dtype: torch.dtype) -> None:
    pixels = (torch.rand(2, 3, 4, 5, 6) * 200).to(dtype).permute(0, 2, 3, 4, 1)
    got = arrived(pool, pixels)
    expected = to_numpy(pixels)
    assert got.dtype == expected.dtype and got.flags.c_contiguous and got.flags.writeable
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(got, protocol=5)), expected)
    assert arrived(pool, pixels[:0]).shape == (0, *pixels.shape[1:])


def test_a_source_lives_until_it_has_been_copied_and_no_more_than_a_few_wait(pool: HostBufferPool) -> None:
    copier = LateCopier()
    with Transfer(pool.take(10 * 4), (10, 4), torch.uint8, copier) as transfer:
        for index in range(10):
            source = torch.full((4,), index, dtype=torch.uint8)
            transfer.copy(transfer.target[index], source)
            del source
        got = transfer.finish()
        # Before the transfer is closed, which waits again.
        assert got.tolist() == [[index] * 4 for index in range(10)]
    assert copier.most == MOST_UNDER_WAY and copier.under_way == 0


def test_a_source_that_has_been_copied_is_let_go_of_at_the_next_copy(pool: HostBufferPool) -> None:
    landings: list[Late] = []

    class Watched(LateCopier):
        def begin(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Late:
            landings.append(super().begin(pairs))
            return landings[-1]

    with Transfer(pool.take(8), (2, 4), torch.uint8, Watched()) as transfer:
        source = torch.ones(4, dtype=torch.uint8)
        held = weakref.ref(source)
        transfer.copy(transfer.target[0], source)
        del source
        # The device has carried it out by itself.
        landings[0].synchronize()
        assert held() is not None
        transfer.copy(transfer.target[1], torch.ones(4, dtype=torch.uint8))
        assert held() is None


def test_an_abandoned_transfer_is_over_before_its_memory_is_used_again(pool: HostBufferPool) -> None:
    copier = LateCopier()
    transfer = Transfer(pool.take(4), (4,), torch.uint8, copier)
    transfer.copy(transfer.target, torch.ones(4, dtype=torch.uint8))
    transfer.close()
    transfer.close()
    assert copier.under_way == 0
    del transfer
    gc.collect()
    pool.take(4)
    assert pool.allocated == 1


def test_memory_that_a_broken_device_may_still_write_to_is_never_used_again(
    pool: HostBufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A record of the warning, which pytest keeps, holds the error, its frames and with them the memory.
    monkeypatch.setattr(host_copies.logger, "disabled", True)
    copier = LateCopier()
    transfer = Transfer(pool.take(4), (4,), torch.uint8, copier)
    where = transfer.target.data_ptr()
    source = torch.ones(4, dtype=torch.uint8)
    held = weakref.ref(source)
    transfer.copy(transfer.target, source)
    del source
    copier.broken = True
    transfer.close()
    transfer.close()
    assert held() is None
    # Whoever owns the memory in the end is somebody else here; what counts is that the pool does not.
    buffer = transfer.target
    del transfer
    gc.collect()
    assert pool.take(4).buffer.data_ptr() != where and pool.allocated == 2 and buffer.data_ptr() == where


def test_where_memory_cannot_be_pinned_ordinary_memory_serves_and_the_model_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = torch.empty

    def unpinnable(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand more lines")
        return make(*args, **options)

    monkeypatch.setattr(host_copies.torch, "empty", unpinnable)
    copies = HostCopies(HostBufferPool(pinned=True), LateCopier())
    assert copies.describe() == {"pinned": True, "problem": ""}
    assert copies.fetch(torch.arange(5, dtype=torch.uint8)).tolist() == [0, 1, 2, 3, 4]
    shown = copies.describe()
    assert not shown["pinned"] and shown["problem"].endswith("failed: CUDA error: out of memory")
    assert shown["problem"] in caplog.text


def test_on_the_cpu_pixels_are_not_copied_at_all(zoo: Zoo) -> None:
    assert load(zoo, "wan21").describe()["host_copies"] is None


# Whole decodes, as on a device


def with_copies(decoder: RankDecoder, pool: HostBufferPool) -> LateCopier:
    copier = LateCopier()
    decoder._host = HostCopies(pool, copier)
    return copier


PIXELS = [PixelFormat("uint8"), FLOAT, PixelFormat("bfloat16", "model"), PixelFormat("float16")]


@pytest.mark.parametrize("pixels", PIXELS, ids=lambda pixels: pixels.dtype)
def test_a_video_arrives_pass_by_pass(zoo: Zoo, pool: HostBufferPool, pixels: PixelFormat) -> None:
    z = latents_of((2, 4, 4, 4, 5))
    decoder = load(zoo, "wan21")
    plan = plan_for(decoder, z, chunk=1)

    def decode() -> RankPart:
        return decoder.decode(plan, z.numpy(), "float32", denormalize=False, pixels=pixels)

    expected = decode().array
    copier = with_copies(decoder, pool)
    got = decode()
    assert got.array is not None and got.array.flags.c_contiguous and got.array.dtype == expected.dtype
    np.testing.assert_array_equal(got.array, expected)
    assert copier.begun == 2 * 4 and copier.most == MOST_UNDER_WAY
    # The reply is still held by whoever sends it while the next request is decoded.
    sent = got.array.copy()
    decoder.decode(plan, -z.numpy(), "float32", denormalize=False, pixels=pixels)
    np.testing.assert_array_equal(got.array, sent)


@pytest.mark.parametrize("mode", ["batch", "spatial_shard_height", "tile"])
def test_parts_of_every_mode_arrive(zoo: Zoo, mode: str) -> None:
    z = latents_of((2, 4, 2, 3, 4) if mode == "batch" else (1, 4, 1, 7, 9))
    # Without rewrites, which take a second to be compared.
    decoders = [
        RankDecoder.load(ModelSource("tiny", str(zoo.folders["wan21"])), device="cpu", rewrites=()) for _ in range(2)
    ]

    def decode(collect: str) -> list[RankPart]:
        plan = plan_for(decoders[0], z, mode, 2, collect=collect)

        def work(communicator: Any) -> RankPart:
            decoder = decoders[communicator.rank]
            decoder.attach(communicator)
            return decoder.decode(plan, z.numpy(), "float32", denormalize=False, pixels=PixelFormat("uint8"))

        return on_ranks(2, work)

    for collect in ("shards", "rank0", "broadcast"):
        for decoder in decoders:
            decoder._host = None
        expected = decode(collect)
        copiers = [with_copies(decoder, HostBufferPool(pinned=False)) for decoder in decoders]
        for copier, got, want in zip(copiers, decode(collect), expected, strict=True):
            assert (got.array is None) == (want.array is None) and got.digest == want.digest
            assert copier.under_way == 0
            if got.array is not None and want.array is not None:
                assert copier.begun > 0
                np.testing.assert_array_equal(got.array, want.array)


def test_a_decode_that_fails_leaves_no_copy_behind(zoo: Zoo, pool: HostBufferPool) -> None:
    decoder = load(zoo, "wan21")
    copier = with_copies(decoder, pool)
    fail_at(decoder, 3)
    z = latents_of((1, 4, 4, 4, 4))
    with pytest.raises(RuntimeError, match="injected"):
        decoder.decode(plan_for(decoder, z, chunk=1), z.numpy(), "float32", denormalize=False, pixels=FLOAT)
    assert copier.begun == 2 and copier.under_way == 0
    gc.collect()
    pool.take(3 * 13 * 32 * 32 * 4)
    assert pool.allocated == 1
