"""What the environment of a rank says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from decode_service.engine.places import allocator_variables

# Maps of 40 MB, larger than any that glibc keeps by default, written in a thread that is not the first.
MAPS = """
import resource, threading, torch
torch.set_num_threads(1)
def work():
    faults = []
    for round in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        (torch.ones(10_000_000) + 1).sum()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(min(faults))
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def page_faults(variables: dict[str, str]) -> int:
    """Pages that a round had to ask the kernel for, at least: between some, the heap grows a last time."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", MAPS], env=environment | variables, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_ranks_on_cpus_keep_what_they_free() -> None:
    if sys.platform != "linux" or os.environ.get("LD_PRELOAD"):
        pytest.skip("the settings are those of glibc")
    # Two maps of 9766 pages each, which the process asks for in every round, or has.
    assert page_faults({}) > 9766
    assert page_faults(allocator_variables("cpu", {})) < 1000


@pytest.mark.parametrize("chosen", ["LD_PRELOAD", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_an_allocator_that_somebody_chose_stands(chosen: str) -> None:
    assert allocator_variables("cpu", {chosen: "x"}) == {}
    assert allocator_variables("cuda", {}) == {}
