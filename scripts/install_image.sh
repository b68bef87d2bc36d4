#!/usr/bin/env bash
# Install the service into a new virtual environment, as the container images do: install_image.sh VENV cpu|cuda
#
#   PIP_ARGS   more arguments for pip, such as the index of torch's CPU wheels
#
# cpu takes the tested set, torch included. cuda takes the same set without its torch: the newest one, whose wheel brings
# its own CUDA libraries, or the one that PIP_ARGS names.
set -euo pipefail

venv="$1"
target="$2"
constraints="$(mktemp)"
trap 'rm -f "$constraints"' EXIT

case "$target" in
    cpu) cp constraints-cpu.txt "$constraints" ;;
    cuda) grep -v '^torch==' constraints-cpu.txt > "$constraints" ;;
    *) echo "the target is cpu or cuda, not '$target'" >&2; exit 2 ;;
esac

python3 -m venv "$venv"
# shellcheck disable=SC2086  # PIP_ARGS is a list
"$venv/bin/python" -m pip install ${PIP_ARGS:-} -c "$constraints" ./clients/python ".[media]"

# From another folder, so that what was installed is imported, not the sources beside this script.
cd /
"$venv/bin/python" -c "
import decode_client, decode_service.app, torch
from decode_service.demo import DEMO_VAE_DIR
assert (DEMO_VAE_DIR / 'config.json').exists(), DEMO_VAE_DIR
print('decode_service', decode_service.__version__, 'torch', torch.__version__)
"
test -x "$venv/bin/serve"
