"""The most memory that tensors take while something runs, beyond what was taken before: the peak of its activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

#: How ``peak_memory`` measures, by type of device; reports say it.
METHODS = {
    "cpu": "torch's CPU allocator, every allocation and release, by the profiler (without the libraries' own scratch)",
    "cuda": "torch.cuda.max_memory_allocated beyond what was allocated before",
}


def peak_memory(work: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What ``work`` returns, and the peak in bytes of what was allocated on ``device`` meanwhile.

    On the CPU it is slower than without being watched: never time the same call.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        outcome = work()
        torch.cuda.synchronize(device)
        return outcome, torch.cuda.max_memory_allocated(device) - before
    # acc_events: without it torch warns that events are cleared between cycles; there is one cycle here.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        outcome = work()
    results: Any = profiler.profiler
    changes = [
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    taken = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        taken += change
        peak = max(peak, taken)
    return outcome, peak
