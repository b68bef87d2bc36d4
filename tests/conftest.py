"""What every test shares: no network, the same examples in CI each time, and GPU tests skipped where there is no GPU.

Neither torch nor Ray is imported here unless a selected test needs to know.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports the libraries that read them. A test that needs a file makes it or ships it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A Ray on this host that is not ours must not be joined by accident.
os.environ.pop("RAY_ADDRESS", None)
#: This process is one of several that share the tests (pytest-xdist).
SHARED = "PYTEST_XDIST_WORKER" in os.environ
if SHARED:
    # Each has a core to itself. Tiny models gain nothing from two, and wait for each other's threads where there are none.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: an example's time says more about the machine's other work than about the code.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU, and run the Ray tests last: what is quick to fail fails first."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)
    if SHARED:
        for item in items:
            # A file stays in one process, for its fixtures. So do all that start Ray, one after the other: each needs every core.
            group = "ray" if item.get_closest_marker("ray") else item.path.relative_to(item.config.rootpath).as_posix()
            item.add_marker(pytest.mark.xdist_group(group))
