"""Check that built wheels hold what an installed service needs: `check_wheels.py FOLDER`."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

# One file of each kind that is not code, and that packaging could lose without anybody noticing.
NEEDED = {
    "decode_service": (
        "decode_service/app.py",
        "decode_service/py.typed",
        "decode_service/demo/vae/config.json",
        "decode_service/demo/vae/diffusion_pytorch_model.safetensors",
        "decode_service/demo/samples/still.safetensors",
        "decode_service/demo/samples/landscape.safetensors",
        "decode_service/demo/samples/portrait.safetensors",
        "decode_service/demo/photos/astronaut.jpg",
    ),
    "decode_client": ("decode_client/wire.py", "decode_client/py.typed"),
}


def missing(folder: Path) -> list[str]:
    """What is missing, one sentence each."""
    problems = []
    for package, paths in NEEDED.items():
        wheels = sorted(folder.glob(f"{package}-*.whl"))
        if len(wheels) != 1:
            problems.append(f"expected one wheel of {package}, found {len(wheels)}")
            continue
        with zipfile.ZipFile(wheels[0]) as wheel:
            held = set(wheel.namelist())
        problems += [f"{wheels[0].name} lacks {path}" for path in paths if path not in held]
        problems += [f"{wheels[0].name} holds {name}" for name in held if name.startswith("tests/")]
    return problems


def main() -> int:
    problems = missing(Path(sys.argv[1]))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
