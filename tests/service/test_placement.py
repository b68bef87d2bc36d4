"""Where Ray puts the replica and its ranks, on a cluster with two GPUs that exist in Ray's books only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve

from decode_service.app import deployment_options
from decode_service.config import ServiceConfig
from tests.ray_cluster import two_gpus_on_paper

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_gpus_on_paper():
        # Nobody asks over HTTP.
        serve.start(proxy_location="Disabled")
        yield
        serve.shutdown()


def test_each_rank_has_a_gpu_and_the_replica_none(cluster: None) -> None:
    config = ServiceConfig.model_validate(
        {
            "model": {"name": "demo", "source": "builtin:demo"},
            "group": {"ranks": 2, "device": "cuda", "cpus_per_rank": 0.5},
        }
    )

    class Replica:
        """The group of ``DecodeService``, with the options of ``DecodeService``, up to where CUDA would be needed."""

        async def __init__(self) -> None:
            from decode_service.engine.ray_group import RayGroup

            self.group = RayGroup(config)
            await self.group.place()
            await self.group.spawn()

        async def where(self) -> dict[str, Any]:
            import os
            import sys

            ranks = self.group.environments
            return {
                "replica": os.environ.get("CUDA_VISIBLE_DEVICES") or None,
                "ranks": [rank.visible_devices for rank in ranks],
                "pids": [rank.pid for rank in ranks],
                "torch": "torch" in sys.modules,
            }

    options = {**deployment_options(config), "name": "Replica"}
    handle = serve.run(serve.deployment(Replica).options(**options).bind(), name="placement", route_prefix=None)
    where = handle.where.remote().result(timeout_s=60)
    assert sorted(where["ranks"]) == ["0", "1"]
    assert where["replica"] is None
    assert not where["torch"], "the coordinator does without torch"
    # All ranks go with their replica.
    serve.delete("placement")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in where["pids"])
