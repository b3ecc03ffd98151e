#!/usr/bin/env bash
# Installs torch for CPUs, 200 MB, into the environment of an interpreter, unless it has a torch or the machine has an NVIDIA driver:
# the torch of the ordinary index is made for CUDA, 3 GB with its libraries. Where PyTorch's index of CPU builds does not answer, it
# says so and installs nothing; pip then takes torch from the ordinary index.
#   requirements/cpu_torch.sh .venv/bin/python          that of constraints.txt
#   requirements/cpu_torch.sh .venv/bin/python torch    the newest
set -euo pipefail

python=$1
index=${CPU_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
pin=${2:-$(grep '^torch==' "$(dirname "$0")/../constraints.txt")}
find_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'

if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null || "$python" -c "$find_torch"; then exit 0; fi
"$python" -m pip install --quiet --disable-pip-version-check --retries 0 --timeout 15 --no-deps --index-url "$index" "$pin" 2>/dev/null ||
    echo "$index has no $pin for this machine or does not answer; pip now downloads a torch for CUDA, about 3 GB" >&2
