#!/bin/sh
# make_venv.sh PYTHON VENV: check PYTHON, then create VENV with it (or keep a VENV that works).
# Each check that fails prints the command that fixes it.
set -eu
python=$1
venv=$2

fail() {
    printf 'epcomm set-up: %s\n' "$1" >&2
    printf '  fix: %s\n' "$2" >&2
    exit 1
}

runs() { # a Python that is new enough
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

[ "$(uname -s)" = Linux ] || fail "this is $(uname -s); epcomm shares memory through Linux memfds" \
    "use a Linux machine, container or WSL 2"

if runs "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

command -v "$python" >/dev/null 2>&1 || fail "there is no '$python' on the PATH" \
    "install Python 3.10 or newer (Debian, Ubuntu: sudo apt install python3 python3-venv), or name one: make demo PYTHON=/path/to/python3"

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1) || fail "'$python' does not run: $version" \
    "name another: make demo PYTHON=/path/to/python3"

if ! runs "$python"; then
    for other in python3.13 python3.12 python3.11 python3.10; do
        if runs "$other"; then
            fail "'$python' is Python $version, epcomm needs 3.10 or newer" "make demo PYTHON=$other"
        fi
    done
    fail "'$python' is Python $version, epcomm needs 3.10 or newer" \
        "install one (for instance with https://docs.astral.sh/uv/: uv python install 3.12), then make demo PYTHON=/path/to/python3.12"
fi

"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || fail "'$python' (Python $version) has no working venv module" \
    "sudo apt install python$version-venv (Debian, Ubuntu), or name another Python: make demo PYTHON=/path/to/python3"

if [ -e "$venv" ]; then
    echo "epcomm set-up: $venv does not work; making it anew"
fi
"$python" -m venv --clear "$venv" || fail "'$python -m venv $venv' failed (message above)" \
    "check free space with 'df -h .'; if ensurepip is what failed: sudo apt install python$version-venv"
