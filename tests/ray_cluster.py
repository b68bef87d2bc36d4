"""A Ray cluster of this process's own, for tests that start actors or deployments in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import ray

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def two_gpus_on_paper() -> Iterator[None]:
    """A cluster with two cores, and two GPUs that exist in Ray's books only."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")])
    ray.init(
        # "local": never a cluster that somebody else runs on this machine.
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    try:
        yield
    finally:
        ray.shutdown()
