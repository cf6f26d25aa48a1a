# `make demo` and `make test` need Python >= 3.11, Rust >= 1.89 and make; everything else is installed into
# a virtual environment here. Each step leaves a stamp in it, so a second run starts at once.

# Yours to set, as in `make demo MODEL=tiny VENV=/path/to/env`:
VENV        ?= .venv
# auto: SmolLM2 (93 MB are fetched once), or the embedded pair where it cannot be fetched.
MODEL       ?= auto
# The interpreter to build VENV with (by default the first python3 that is new enough).
PYTHON      ?=
# `--system-site-packages` lets VENV use a torch that your Python already has.
VENV_ARGS   ?=
# Another package index for torch alone, such as one of CPU-only wheels.
TORCH_INDEX ?=
PIP_ARGS    ?=
# uv installs many times faster than pip and is used where it is found; `make UV= ...` goes without it.
UV          ?= $(shell command -v uv 2>/dev/null)

BIN       := $(abspath $(VENV))/bin
STAMPS    := $(VENV)/.dspark
INSTALL    = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install) $(PIP_ARGS)
RUST      := Cargo.toml Cargo.lock $(shell find $(wildcard rust cuda) -type f -not -path '*/target/*')
EXTENSION := $(STAMPS)/extension
# Tests of a file stay together, for they share its models; a worker takes up to 2 GB.
SPREAD    := --numprocesses auto --maxprocesses 4 --dist loadfile
SOURCES   := python tests benchmarks examples scripts

# Tools of the environment come first; cargo has to find its Python too.
export PATH := $(BIN):$(PATH)
export VIRTUAL_ENV := $(abspath $(VENV))
export PYO3_PYTHON := $(BIN)/python

.PHONY: help demo test test-long lint bench wheel sdist format clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo [MODEL=smollm2|tiny]   speculative text beside plain text, with a table'
	@echo 'make test                        every check; make test-long: the statistics that take minutes'
	@echo 'make bench                       the short measurements of docs/benchmarks.md'
	@echo 'make wheel                       the wheel to publish, in dist/'
	@echo 'make lint, format, clean'

demo: $(EXTENSION)
	@$(if $(filter tiny,$(MODEL)),,$(MAKE) --no-print-directory $(STAMPS)/extra-gguf || true)
	@$(BIN)/python -m dspark.cli.demo --model $(MODEL)

test: lint
	cargo test --quiet --locked --features mutants,cuda
	$(BIN)/python -m pytest $(SPREAD)

test-long: $(EXTENSION) $(STAMPS)/extra-test
	$(BIN)/python -m pytest $(SPREAD) -m long

# The cheap checks come first, so that a slip shows within seconds.
lint: $(EXTENSION) $(STAMPS)/extra-test
	cargo fmt --check
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest dspark._core
	cargo clippy --quiet --locked --lib --features python -- -D warnings
	cargo clippy --quiet --locked --all-targets --features mutants,cuda -- -D warnings

format: $(STAMPS)/extra-test
	cargo fmt
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(EXTENSION) $(STAMPS)/extra-test
	$(BIN)/python benchmarks/run.py

# Built against an old glibc, so that it runs on any Linux of the last ten years: zig brings that glibc.
ZIG := $(if $(filter Linux,$(shell uname -s)),--zig --compatibility manylinux2014)
wheel: $(STAMPS)/packages $(if $(ZIG),$(STAMPS)/ziglang)
	$(BIN)/python scripts/notices.py python/dspark/NOTICES.txt
	$(BIN)/maturin build --release --locked $(ZIG) --out dist

sdist: $(STAMPS)/packages
	$(BIN)/maturin sdist --out dist

# The environment stays: it is gigabytes to fetch again. Remove it with `rm -r .venv`.
clean:
	rm -rf target dist python/dspark/_core*.so $(EXTENSION) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/python:
	@sh scripts/venv.sh '$(VENV)' '$(PYTHON)' '$(UV)' $(VENV_ARGS)
	@mkdir -p $(STAMPS) && touch $@

# The stamp is the list of packages itself, taken from pyproject.toml; if the installation fails, make removes it.
$(STAMPS)/packages: pyproject.toml | $(STAMPS)/python
	@echo '==> installing the Python packages (torch alone is several GB)'
	@$(BIN)/python scripts/requirements.py >$@
	$(if $(TORCH_INDEX),$(INSTALL) --index-url $(TORCH_INDEX) "$$(grep '^torch' $@)")
	$(INSTALL) -r $@

$(STAMPS)/extra-%: pyproject.toml | $(STAMPS)/packages
	@echo '==> installing the packages of the extra `$*`'
	@$(BIN)/python scripts/requirements.py $* >$@
	$(INSTALL) -r $@

$(STAMPS)/ziglang: | $(STAMPS)/packages
	$(INSTALL) ziglang
	@touch $@

# Editable: changed Python files are live, and only changed Rust files bring us here again.
$(EXTENSION): $(RUST) pyproject.toml $(STAMPS)/packages
	@command -v cargo >/dev/null || { echo 'dspark needs Rust 1.89 or later: see https://rustup.rs' >&2; exit 1; }
	@echo '==> building the Rust core (half a minute the first time)'
	$(BIN)/maturin develop --release --locked $(if $(UV),--uv)
	@touch $@
