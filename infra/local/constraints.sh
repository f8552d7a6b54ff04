#!/usr/bin/env bash
# Renews constraints.txt: the versions that `make setup` installs, for every platform and for CPU and GPU machines alike.
# Versions that are in the file stay unless an option asks for newer ones:
#   make constraints                        after a change of pyproject.toml
#   make constraints ARGS=--upgrade         newest of everything
#   make constraints ARGS='-P prefect'      newest of one package
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source infra/local/index.sh

compiled=$(mktemp)
trap 'rm -f "$compiled"' EXIT
cp constraints.txt "$compiled" 2>/dev/null || true
use_pip_settings .venv/bin/python
.venv/bin/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 \
    --no-annotate --no-header --quiet --output-file "$compiled" "$@"

# torch's build (+cpu, +cu130) and the CUDA packages that belong to it are the machine's business, not the file's.
sed -E -e '/^(cuda-|triton)/d' -e '/^nvidia-/{/^nvidia-(ml-py|nvml-dev)==/!d}' -e 's/\+(cpu|cu[0-9]+)//' "$compiled" >constraints.txt
echo "constraints.txt: $(wc -l <constraints.txt) packages"
