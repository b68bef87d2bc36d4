"""What every test shares: no network, the same examples in CI each time, and GPU tests skipped where there is no GPU.

Neither torch nor Ray is imported here unless a selected test needs to know.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports the libraries that read them. A test that needs a file makes it or ships it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A Ray on this host that is not ours must not be joined by accident.
os.environ.pop("RAY_ADDRESS", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each of the processes that share the tests has a core to itself. Tiny models gain nothing from two, and where there
    # are not as many, one thread waits for another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: an example's time says more about the machine's other work than about the code.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out whole files, for their fixtures, and those that start Ray to one process: each of these needs every core.

    xdist's own groups (3.8) do nothing under pytest 9.2, where a test's name no longer changes once it is collected.
    """
    from xdist.scheduler import LoadFileScheduling

    class WholeFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path: str = super()._split_scope(nodeid)
            starts_ray = re.search(
                r"^pytestmark = .*pytest\.mark\.ray", (config.rootpath / path).read_text(), re.MULTILINE
            )
            return "ray" if starts_ray else path

    return WholeFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU, and run the Ray tests last: what is quick to fail fails first."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)
