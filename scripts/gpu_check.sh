#!/bin/sh
# Everything that only a GPU can show, in one command:   scripts/gpu_check.sh [RESULTS.json]
#
# Parity of every kernel with torch, compute-sanitizer if it is installed, bandwidth against a device copy, SDPA and (if
# installed) FlashInfer, the golden traces, a decoder with the default policy (costs measured as it starts), the time of a
# round and of attention with CUDA graphs off and on.
# Prints a table, writes the results as JSON. Exit code 0: all good; 1: something is wrong; 2: there is no GPU here.
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3); it needs torch and dspark. With
# DSPARK_CUDA_DRIVER naming the stand-in for the driver, the parts that make sense run on the CPU, on small shapes.
#
# Not yet run on a GPU: what it does there is untested.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || command -v "$python" >/dev/null || python=python3
exec "$python" benchmarks/gpu_check.py "$@"
