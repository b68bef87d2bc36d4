"""Each layer can be imported on a machine that has only what this layer needs.

`make lint` checks the arrows in the source text. This checks what really happens at import, third parties included, with
the packages blocked as if they were not installed.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

RAY_AND_WEB = ("ray", "fastapi", "starlette", "uvicorn")

BLOCKER = """
import importlib, sys

blocked = set({blocked!r})

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
        return None

sys.meta_path.insert(0, Blocker())
module = importlib.import_module({module!r})
{then}
present = blocked & {{name.partition(".")[0] for name in sys.modules}}
assert not present, present
"""

IMPORT_SUBMODULES = """
import pkgutil
for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
    # The kernels for CUDA are all that needs Triton, and are imported where they run.
    if found.name != "decode_service.decoding.triton_kernels":
        importlib.import_module(found.name)
"""


def import_without(module: str, blocked: tuple[str, ...], then: str = "") -> subprocess.CompletedProcess[str]:
    code = BLOCKER.format(blocked=blocked, module=module, then=then)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("decode_client", ("torch", "diffusers", "PIL", *RAY_AND_WEB, "decode_service")),
        ("decode_client.wire", ("torch", "diffusers", "PIL", *RAY_AND_WEB, "decode_service")),
        ("decode_service.config", ("torch", "diffusers", *RAY_AND_WEB)),
        ("decode_service.demo", ("torch", "diffusers", "numpy", "PIL", *RAY_AND_WEB)),
        ("decode_service.engine.protocol", ("torch", "diffusers", *RAY_AND_WEB)),
    ],
)
def test_a_module_needs_no_more_than_it_says(module: str, blocked: tuple[str, ...]) -> None:
    result = import_without(module, blocked)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("package", "blocked"),
    [
        ("decode_service.planning", ("torch", "diffusers", *RAY_AND_WEB)),
        ("decode_service.media", ("torch", "diffusers", "ray")),
        ("decode_service.decoding", (*RAY_AND_WEB, "triton")),
        ("decode_service.http", ("torch", "diffusers", "ray")),
    ],
)
def test_a_layer_needs_no_later_layers_packages(package: str, blocked: tuple[str, ...]) -> None:
    """All of its modules, not only what its `__init__` happens to import."""
    result = import_without(package, blocked, IMPORT_SUBMODULES)
    assert result.returncode == 0, result.stderr


def test_the_blocker_blocks() -> None:
    result = import_without("decode_service.decoding", ("torch",), IMPORT_SUBMODULES)
    assert result.returncode != 0
    assert "No module named 'torch' (blocked)" in result.stderr
