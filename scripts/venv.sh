#!/bin/sh
# Make the virtual environment: venv.sh DIRECTORY [PYTHON [UV [ARGUMENTS OF venv...]]]
# An environment that is there already is used as it is.
set -eu

venv=$1 python=${2-} uv=${3-}
shift "$(($# < 3 ? $# : 3))"

fail() {
    echo "dspark: $1" >&2
    exit 1
}

new_enough() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if [ -x "$venv/bin/python" ]; then
    new_enough "$venv/bin/python" || fail "the Python in $venv is older than 3.11: name another VENV"
    exit 0
fi

if [ -n "$python" ]; then
    new_enough "$python" || fail "PYTHON=$python is not a Python of version 3.11 or later"
else
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || fail "no Python of version 3.11 or later was found: name one with PYTHON="
fi

# Checked before, because running out half way through torch leaves gigabytes of debris and an odd message.
mkdir -p "$(dirname "$venv")"
need=${DSPARK_DISK_GB:-6}
free=$(($(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print $4 }') / 1048576))
[ "$free" -ge "$need" ] || fail "torch takes about $need GB and $(dirname "$venv") has $free GB free; make room, \
name another place with VENV=, or a smaller torch with TORCH_INDEX= and DSPARK_DISK_GB=1"

echo "==> creating $venv with $("$python" --version) ($free GB free, about $need needed)"
if [ -n "$uv" ]; then
    "$uv" venv --quiet --python "$(command -v "$python")" "$@" "$venv"
else
    # One that is made by halves has an interpreter and no pip, and would be taken for whole the next time. A
    # directory that was there before is its owner's.
    [ -e "$venv" ] || trap 'rm -rf "$venv"' EXIT
    trap 'exit 130' INT TERM
    "$python" -m venv "$@" "$venv" || fail "$python cannot make environments (Debian: apt install python3-venv)"
    trap - EXIT
fi
