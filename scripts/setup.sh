#!/bin/sh
# Make the virtual environment $VENV (default .venv) and install this project into it, editable.
# With --dev the tools for development come too. Quick when nothing has changed. Environment:
#   PYTHON   the Python to use; default: the newest one found, from 3.10 on
#   VENV     the folder of the environment
set -eu

cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
what=.
if [ "${1:-}" = --dev ]; then what='.[dev]'; fi

say() { printf '==> %s\n' "$*" >&2; }
fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

# Whether $1 is a Python that MLX has wheels for: 3.10 or newer, and on a Mac a native one, not one under Rosetta.
usable() {
    "$1" -c 'import platform, sys
ok = sys.version_info >= (3, 10) and sys.maxsize > 2**32 and sys.implementation.name == "cpython"
sys.exit(not (ok and (sys.platform != "darwin" or platform.machine() == "arm64")))' >/dev/null 2>&1
}

has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python this project can use." \
            "Expected: CPython 3.10 or newer; on a Mac one for Apple Silicon (arm64)."
        echo "$PYTHON"
        return
    fi
    # The newest that can make environments; failing that, the newest.
    for check in has_venv usable; do
        for name in python3.14 python3.13 python3.12 python3.11 python3.10 python3 python; do
            for folder in "" /opt/homebrew/bin/ /usr/local/bin/ /usr/bin/; do
                if usable "$folder$name" && $check "$folder$name"; then
                    echo "$folder$name"
                    return
                fi
            done
        done
    done
    case $(uname -s) in
        Darwin) hint="Install one, for instance with: brew install python@3.13   (or from https://www.python.org)" ;;
        *) hint="Install one, for instance with: apt-get install python3 python3-venv" ;;
    esac
    fail "no Python 3.10 or newer was found." "$hint" "Or name one: make demo PYTHON=/path/to/python3"
}

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }
apt_install() {
    say "apt-get install $*"
    # Waits where packages are being installed already.
    set -- -y --no-install-recommends -o DPkg::Lock::Timeout=600 "$@"
    DEBIAN_FRONTEND=noninteractive apt-get install "$@" >&2 && return
    # The package lists may be missing or old.
    apt-get update >&2 && DEBIAN_FRONTEND=noninteractive apt-get install "$@" >&2
}

# Debian and Ubuntu keep the venv module's pip in a package of its own.
make_venv() {
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! has_venv "$python"; then
        if can_apt; then apt_install "python$version-venv" || say "apt-get could not install python$version-venv"; fi
    fi
    say "making the environment $VENV with $("$python" --version 2>&1) ($(command -v "$python"))"
    if has_venv "$python"; then
        "$python" -m venv --clear "$VENV"
        return
    fi
    say "this Python lacks venv; trying virtualenv"
    boot=$(mktemp -d)
    made=no
    if "$python" -m virtualenv --clear "$VENV" >&2; then
        made=yes
    elif "$python" -m pip install --target "$boot" virtualenv >&2 &&
        PYTHONPATH=$boot "$python" -m virtualenv --clear "$VENV" >&2; then
        made=yes
    fi
    rm -rf "$boot"
    [ $made = yes ] || fail "cannot make a virtual environment: $python has neither venv nor pip." \
        "Run this and try again:  sudo apt-get install python$version-venv"
}

# MLX's Linux wheels are built for glibc 2.35 and newer; pip's own message for this is hard to read.
check_linux() {
    "$python" -c 'import os, sys
name, _, version = os.confstr("CS_GNU_LIBC_VERSION").partition(" ")
sys.exit(tuple(int(part) for part in version.split(".")[:2]) < (2, 35))' 2>/dev/null ||
        fail "MLX needs glibc 2.35 or newer (Debian 12, Ubuntu 22.04 or later)." "Found: $(ldd --version 2>&1 | head -1)"
}

# MLX's Linux wheel brings a slow BLAS; with OpenBLAS its float32 products are many times faster.
fast_blas() {
    # Read from the library itself, so that set-up and runs look in the same places.
    found=$("$VENV/bin/python" -c 'from dflash_mlx.runtime import load_fast_blas; print(load_fast_blas() or "")')
    if [ -n "$found" ]; then return; fi
    if can_apt; then
        apt_install libopenblas0-pthread || say "OpenBLAS could not be installed; going on without it"
    else
        say "for much faster answers on this CPU install OpenBLAS:  sudo apt-get install libopenblas0-pthread"
    fi
}

if [ "$(uname -s)" = Darwin ] && [ "$(sysctl -n hw.optional.arm64 2>/dev/null || echo 0)" != 1 ]; then
    fail "this Mac has no Apple Silicon; MLX needs it (M1 or newer)."
fi

# What the environment was made for: these dependencies, this extra, this place (scripts in it hold absolute paths).
stamp="$VENV/.installed-for"
wanted="$what $(pwd) $(cksum <pyproject.toml) $(cksum <scripts/setup.sh)"
dev_wanted=".[dev]${wanted#"$what"}"
if "$VENV/bin/python" -c '' >/dev/null 2>&1 && [ -f "$stamp" ]; then
    have=$(cat "$stamp")
    # An environment with the development tools serves for everything.
    if [ "$have" = "$wanted" ] || [ "$have" = "$dev_wanted" ]; then exit 0; fi
fi

# A run that was stopped half-way must not look finished.
rm -f "$stamp"
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    if [ -d "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
        fail "$VENV is a folder with something else in it; it would be emptied." "Name another: make demo VENV=folder"
    fi
    python=$(find_python)
    if [ "$(uname -s)" = Linux ]; then check_linux; fi
    make_venv
fi
# Another distribution with the same module dflash_mlx: another project's, or this one under the name that it had first.
if "$VENV/bin/python" -m pip show --quiet dflash-mlx >/dev/null 2>&1; then
    say "removing the distribution dflash-mlx from $VENV: it has the same module as this project, dflash-on-mlx"
    "$VENV/bin/python" -m pip uninstall --yes --quiet dflash-mlx >&2
fi
say "installing dflash-mlx and what it needs into $VENV (350 MB on disk)"
"$VENV/bin/python" -m pip install --disable-pip-version-check --editable "$what" >&2 ||
    fail "pip could not install the project; its own message is above." \
        "Behind a proxy or a mirror, set it up for pip as usual and run make again."
if [ "$(uname -s)" = Linux ]; then fast_blas; fi
printf '%s\n' "$wanted" >"$stamp"
say "ready: $VENV/bin/dflash-mlx"
