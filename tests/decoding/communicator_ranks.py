"""What the ranks of ``test_communicator`` do; a module of its own because other processes import it."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from decode_service.decoding import local_sockets
from decode_service.decoding.communicator import Communicator
from decode_service.decoding.process_group import SocketCommunicator, TorchCommunicator, join_group

CPU = torch.device("cpu")
TIMEOUT_S = 60.0


def run(one_host: bool, rank: int, size: int, ports: Any) -> tuple[float, float]:
    """Fail, be aborted and join again; returns how long this rank waited for a failed and for an aborted peer.

    Args:
        one_host: whether the ranks may see that they are on one host.
    """
    with contextlib.ExitStack() as stack:
        if not one_host:
            stack.enter_context(mock.patch.object(local_sockets, "host_identity", return_value=f"host {rank}"))
        return fail_and_join_again(one_host, rank, ports)


def fail_and_join_again(one_host: bool, rank: int, ports: Any) -> tuple[float, float]:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
        for _ in range(2):
            ports.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", ports.get(), 3, is_master=False)

    group = join_group(store, rank, 3, CPU, generation=0, timeout_s=TIMEOUT_S)
    assert isinstance(group, SocketCommunicator if one_host else TorchCommunicator)
    check_all_operations(group)

    # Rank 1 fails: it aborts, and the two that wait for it are freed.
    waited_s = 0.0
    if rank == 1:
        group.abort()
    else:
        waited_s = time_until_it_fails(lambda: group.exchange([], [(1, torch.empty(2))]))
    group.close()
    group.close()

    # Nobody failed, but everybody waits (one for a message that never comes): another thread aborts one of them.
    group = join_group(store, rank, 3, CPU, generation=1, timeout_s=TIMEOUT_S)
    assert group.agree(rank) == [0, 1, 2]
    if rank == 2:
        threading.Timer(0.5, group.abort).start()
        time.sleep(1.0)
        aborted_s = 0.0
    else:
        aborted_s = time_until_it_fails(lambda: group.exchange([], [(2, torch.empty(2))]))
    group.close()

    # Ranks may be apart for longer than a collective may take, while each works on its own.
    group = join_group(store, rank, 3, CPU, generation=2, timeout_s=1.0, agreement_timeout_s=TIMEOUT_S)
    if rank == 1:
        time.sleep(3.0)
    assert group.agree(0) == [0, 0, 0]
    group.close()

    group = join_group(store, rank, 3, CPU, generation=3, timeout_s=TIMEOUT_S)
    check_all_operations(group)
    group.agree(0)
    group.close()
    return waited_s, aborted_s


def check_all_operations(group: Communicator) -> None:
    rank = group.rank
    mine = torch.full((2, 3), float(rank), dtype=torch.bfloat16)
    received = torch.empty_like(mine)
    group.exchange([((rank + 1) % 3, mine)], [((rank - 1) % 3, received)])
    assert received[0, 0] == (rank - 1) % 3
    assert [tensor[0, 0].item() for tensor in group.all_gather(mine)] == [0.0, 1.0, 2.0]
    pixels = torch.full((4,), rank, dtype=torch.uint8)
    # What was begun is sent and received at the latest when somebody waits for it.
    finish = group.begin_exchange([((rank + 1) % 3, mine)], [((rank - 1) % 3, received.zero_())])
    finish()
    assert received[1, 2] == (rank - 1) % 3
    group.broadcast(pixels, 2)
    assert pixels.tolist() == [2, 2, 2, 2]
    assert group.agree(10 * rank) == [0, 10, 20]


def time_until_it_fails(action: Any) -> float:
    start = time.monotonic()
    try:
        action()
    except RuntimeError:
        return time.monotonic() - start
    raise AssertionError("the collective should have failed")
