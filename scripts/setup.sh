#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv with everything that `make demo` and `make test` need, and builds the C++ extension into it.
#
# Each step leaves a stamp in .venv when it has ended well, so a second run is instant, an interrupted one goes on
# where it stopped, and a changed requirement or source file repeats only what depends on it.
#
#   PYTHON=/path/to/python3.12   uses that interpreter instead of searching for one
#   CXX=/path/to/compiler        uses that C++ compiler instead of g++
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
# megatron-core 0.19.2 is the version the demo and the end-to-end tests train with; it needs Python 3.12 or newer, and
# its compiled dataset helper is made for 3.12.
PYTHON_VERSION=3.12
# einops: Megatron asks for it, without declaring it, when it makes several instances of the distributed optimizer.
# multi-storage-client: what Megatron's --enable-msc reads and writes checkpoints with; only tests use it here.
REQUIREMENTS=(
    "torch>=2.4" "megatron-core==0.19.2" "numpy" "psutil" "pybind11>=2.12" "setuptools>=70" "wheel"
    "pytest" "hypothesis" "ruff" "mypy>=2.4,<2.5" "matplotlib" "tensorboard" "tqdm" "pyyaml" "einops"
    "multi-storage-client"
)

say() { printf '== %s\n' "$*"; }
die() { printf 'setup failed: %s\n' "$*" >&2; exit 1; }

# Prints why the interpreter $1 will not do, or nothing when it will.
python_fault() {
    "$1" - "$PYTHON_VERSION" 2>/dev/null <<'PY' || echo "does not run"
import importlib.util, os, sys, sysconfig
wanted = sys.argv[1]
found = "%d.%d" % sys.version_info[:2]
if found != wanted:
    print("is Python " + found)
elif not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
    print("cannot make virtual environments (Debian and Ubuntu: apt-get install python%s-venv)" % wanted)
elif not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    print("has no Python.h to build the C++ extension with (Debian and Ubuntu: apt-get install python%s-dev)" % wanted)
PY
}

# Prints every place where a Python 3.12 may be, one per line, whether or not it exists.
python_candidates() {
    local root
    # `command -v` may find a pyenv shim, which runs only if pyenv's default version is the right one: the versions
    # folders are searched too.
    command -v "python$PYTHON_VERSION" || true
    for root in "${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null || true)" "${HOME:-/root}/.pyenv" /opt/pyenv; do
        [ -z "$root" ] || printf '%s\n' "$root"/versions/"$PYTHON_VERSION"*/bin/python
    done
    printf '%s\n' "/usr/bin/python$PYTHON_VERSION" "/usr/local/bin/python$PYTHON_VERSION"
    command -v python3 || true
    uv python find --no-python-downloads "$PYTHON_VERSION" 2>/dev/null || true
    for root in "${CONDA_PREFIX:-}" "$(conda info --base 2>/dev/null || true)" \
        "${HOME:-/root}"/{miniconda3,miniforge3,mambaforge,anaconda3} /opt/conda; do
        [ -z "$root" ] || printf '%s\n' "$root/bin/python$PYTHON_VERSION" "$root"/envs/*/bin/python"$PYTHON_VERSION"
    done
}

# Sets BASE_PYTHON to the first usable interpreter.
find_python() {
    local candidate fault faults=""
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is not a program"
        fault=$(python_fault "$PYTHON")
        [ -z "$fault" ] || die "PYTHON=$PYTHON $fault; Python $PYTHON_VERSION is needed"
        BASE_PYTHON=$(command -v "$PYTHON")
        return
    fi
    while IFS= read -r candidate; do
        [ -x "$candidate" ] || continue
        fault=$(python_fault "$candidate")
        if [ -z "$fault" ]; then
            BASE_PYTHON=$candidate
            return
        fi
        faults+="  $candidate $fault"$'\n'
    done < <(python_candidates | awk '!seen[$0]++')
    die "no usable Python $PYTHON_VERSION was found (megatron-core 0.19 needs it).
${faults:+Looked at:
$faults}Install one, for example:
  uv python install $PYTHON_VERSION
  pyenv install $PYTHON_VERSION
  conda create -n py312 python=$PYTHON_VERSION
  apt-get install python$PYTHON_VERSION python$PYTHON_VERSION-venv python$PYTHON_VERSION-dev   (where the release has it)
or name one: make setup PYTHON=/path/to/python$PYTHON_VERSION"
}

# True when the stamp $1 holds exactly the text $2.
stamped() { [ -f "$VENV/.stamp-$1" ] && [ "$(cat "$VENV/.stamp-$1")" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$VENV/.stamp-$1"; }

# Prints a digest of everything the build of the package depends on.
package_digest() {
    find setup.py setup.cfg pyproject.toml megatron_dos/{supported,version}.py cpp_adam -type f \
        ! -path 'cpp_adam/tests/*' ! -name '*.o' -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
    printf '%s\n' "${CXX:-g++}" "${CXXFLAGS:-}"
}

make_venv() {
    # An interpreter that has been removed or exchanged since leaves a .venv that cannot start.
    if stamped venv "$BASE_PYTHON" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    say "making $VENV with $BASE_PYTHON"
    rm -rf "$VENV"
    "$BASE_PYTHON" -m venv "$VENV" || die "$BASE_PYTHON could not make $VENV (see above)"
    # Megatron's own makefile asks `python3-config` for the name of the helper it compiles: it must be the one of this
    # Python, not of whichever is the default here.
    local config
    config="$("$BASE_PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("BINDIR"))')/python$PYTHON_VERSION-config"
    if [ -x "$config" ]; then
        printf '#!/bin/sh\nexec "%s" "$@"\n' "$config" >"$VENV/bin/python3-config"
        chmod +x "$VENV/bin/python3-config"
    fi
    stamp venv "$BASE_PYTHON"
}

install_requirements() {
    if stamped requirements "${REQUIREMENTS[*]}"; then
        return
    fi
    say "installing ${REQUIREMENTS[*]} (torch is large: this takes minutes)"
    "$VENV/bin/python" -m pip install "${REQUIREMENTS[@]}" || die "pip could not install the requirements (its error is above)"
    # pip takes a package whose files were cut short by a crash for installed.
    "$VENV/bin/python" -c 'import torch, megatron, numpy, psutil, pybind11, setuptools, pytest, hypothesis, matplotlib, tensorboard, tqdm' ||
        die "an installed package does not load (its error is above); remove $VENV and run this again"
    stamp requirements "${REQUIREMENTS[*]}"
}

install_package() {
    local digest
    digest=$(package_digest)
    if stamped package "$digest" && ls megatron_dos/_cpp_adam*.so >/dev/null 2>&1; then
        return
    fi
    command -v "${CXX:-g++}" >/dev/null ||
        die "no C++ compiler: '${CXX:-g++}' is not on PATH (Debian and Ubuntu: apt-get install g++; or set CXX)"
    say "building cpp_adam and installing megatron-dos into $VENV"
    CXX="${CXX:-g++}" "$VENV/bin/python" -m pip install --no-build-isolation --no-deps -e . ||
        die "the package did not build (the compiler's or pip's error is above)"
    "$VENV/bin/python" -c 'import megatron_dos._cpp_adam' || die "the built extension megatron_dos._cpp_adam does not load"
    stamp package "$digest"
}

# Two set-ups at once (make demo beside make test) take turns.
if command -v flock >/dev/null; then
    mkdir -p .cache
    exec 9>.cache/setup.lock
    flock -n 9 || { say "waiting for another set-up to end"; flock 9; }
fi

BASE_PYTHON=""
# A working .venv needs no new search, unless the caller names an interpreter.
if [ -z "${PYTHON:-}" ] && [ -f "$VENV/.stamp-venv" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
    BASE_PYTHON=$(cat "$VENV/.stamp-venv")
else
    find_python
fi
make_venv
install_requirements
install_package
