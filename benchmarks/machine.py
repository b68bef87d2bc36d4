"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import diffusers
import torch

from benchmarks import ROOT

# Instructions that decide how fast a CPU multiplies in half precision.
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine(device: torch.device, threads: int) -> dict[str, Any]:
    """CPU, devices, versions, threads, and how busy the machine was before the measurement.

    Args:
        threads: torch threads of what was measured, as the benchmark set them.
    """
    described: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cpu_flags": [flag for flag in _TELLING_FLAGS if flag in _cpu_flags()],
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "diffusers": diffusers.__version__,
        "commit": _commit(),
        "device": device.type,
        "threads": threads,
    }
    if device.type == "cuda":
        described["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        described["cuda"] = torch.version.cuda
    return described


def _cpuinfo() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]


def _cpu_model() -> str:
    fields = dict(reversed(_cpuinfo()))
    named = fields.get("model name") or platform.processor() or platform.machine()
    # Virtual machines hide the name of the model, but not its numbers.
    numbers = [fields[key] for key in ("cpu family", "model", "stepping") if key in fields]
    return f"{named} (family/model/stepping {'/'.join(numbers)})" if numbers else named


def _cpu_flags() -> set[str]:
    fields = dict(reversed(_cpuinfo()))
    return set((fields.get("flags") or fields.get("Features") or "").split())


def _commit() -> str | None:
    """The commit that is checked out, with ``-dirty`` where files differ from it, or None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
