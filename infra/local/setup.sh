#!/usr/bin/env bash
# Builds .venv with the `unicron` command and the tools of `make test` in it; quick when nothing has changed.
#   PYTHON=...              the Python 3.11 to use (default: python3.11, else a python3 that is one)
#   UV_TORCH_BACKEND=...    the build of torch: cpu, cu130, ... (default: what the machine has)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source infra/local/index.sh

here=$(pwd -P)
venv=.venv
stamp=$venv/.unicron-setup

say() { printf '%s\n' "setup: $*" >&2; }
fail() {
    say "$@"
    exit 1
}

fingerprint() {
    printf '%s\n' "$here" "torch ${UV_TORCH_BACKEND:-auto}" "$(cat pyproject.toml constraints.txt infra/local/*.sh | cksum)"
}

is_python_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    local candidates=(python3.11 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if is_python_311 "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 found (tried: ${candidates[*]}). Install it, or say where it is: make setup PYTHON=/path/to/python3.11"
}

create_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python comes without venv and ensurepip. Install them (Debian and Ubuntu: the package python3.11-venv) and try again."
    rm -rf "$venv"
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
}

# Prints uv's option for torch. A folder of wheels that has torch decides by itself; else uv looks for a GPU and takes the
# build for it, or the small CPU build, from PyTorch's own index; out of reach of that, the package index has to do.
torch_option() {
    if [ -n "${UV_TORCH_BACKEND:-}" ] || find_links_offer_torch; then
        return
    fi
    if "$venv/bin/uv" pip install --python "$venv/bin/python" --quiet --dry-run --no-deps -c constraints.txt --torch-backend=auto torch 2>/dev/null; then
        printf '%s' --torch-backend=auto
    else
        say "PyTorch's own index is out of reach: torch comes from the package index, on Linux with CUDA (some GB)."
        say "For a smaller one stop this and point UV_FIND_LINKS to a folder with a CPU wheel of torch."
    fi
}

install_packages() {
    local option
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
    use_pip_settings "$venv/bin/python"
    option=$(torch_option)
    say "installing the pinned packages (half a minute when they are near, some minutes when they are not)"
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" -c constraints.txt ${option:+"$option"} --editable . --group dev
}

if [ -x "$venv/bin/unicron" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
    exit 0
fi
# What is there can be brought up to date, unless it broke or moved with the checkout: its scripts hold its path.
is_python_311 "$venv/bin/python" && grep -qF "$here/$venv" "$venv/bin/activate" 2>/dev/null || create_venv
rm -f "$stamp"
install_packages
fingerprint >"$stamp"
say "done: $venv/bin/unicron"
