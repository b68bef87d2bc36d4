"""Side-by-side measurements: every number is a ratio, measured in one run against what a user would otherwise use.

Three commands, each with ``--help``:

    python -m benchmarks.decode      one rank's decode against diffusers, eager and compiled
    python -m benchmarks.sharding    one decode on several ranks against one rank, and against what the machine can give
    python -m benchmarks.service     the whole service over HTTP against the bare decode

What is compared is measured in turn (A, B, C, A, B, C, ...), so that a machine that slows down slows all of it. Nothing
imports this package, and no wheel holds it: it is run from the root of the repository.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The scripts are no package: `local_service` is imported by its name, as the other scripts and the tests do it.
_SCRIPTS = str(ROOT / "scripts")
if _SCRIPTS not in sys.path:
    sys.path.append(_SCRIPTS)

# The profiler, which counts memory here, otherwise prints a line whenever it starts or stops. Read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
