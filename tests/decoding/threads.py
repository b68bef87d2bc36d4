"""A group of ranks that are threads, for what does not need processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from decode_service.decoding.communicator import Communicator, ThreadCommunicator

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """``work`` on every rank of a group, at the same time; its results in rank order. The first error is raised."""
    group = ThreadCommunicator.create(size)

    def run(communicator: ThreadCommunicator) -> T:
        try:
            with torch.inference_mode():
                return work(communicator)
        except BaseException:
            communicator.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, communicator) for communicator in group]
    errors = [future.exception() for future in futures if future.exception() is not None]
    for error in errors:
        if "aborted" not in str(error):
            raise error  # type: ignore[misc]
    return [future.result() for future in futures]
