# Two commands matter: `make demo` and `make test`. Both prepare .venv first.
#
#   PYTHON       the Python 3.11 that makes .venv          (default: python3.11, else python3)
#   TORCH_INDEX  a package index with CPU wheels of torch  (only needed where pip finds a CUDA build; see README.md)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help venv demo serve test test-faults test-gpu check bench protos lock clean

PYTHON ?= $(shell command -v python3.11 || echo python3)
TORCH_INDEX ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' requirements/cpu.txt)
TYPED := cluster kvstore prefill_worker decode_worker scripts tests $(wildcard benchmarks)

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: .venv/runtime  ## create .venv and install the runtime (about 5 minutes, 1.5 GB of downloads)

demo: .venv/runtime  ## start a cluster, chat, prove exactness, replay a trace, stop
	@$(PY) -m cluster.demo

serve: .venv/runtime  ## start a cluster and stay; Ctrl-C ends it
	@.venv/bin/moonpool up

test: .venv/dev  ## run the whole test suite
	@$(PY) -m pytest

test-faults: .venv/dev  ## the fault tests with their full counts (minutes)
	@MOONPOOL_FAULTS=full $(PY) -m pytest tests/faults tests/integration/test_tensor_parallel.py --timeout 3600

test-gpu: .venv/dev  ## what needs an NVIDIA GPU; skips with a reason where there is none
	@$(PY) -m pytest tests/gpu

check: .venv/dev  ## linters, formatting, types, import contracts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy $(TYPED)
	@.venv/bin/lint-imports

bench: .venv/dev  ## run every benchmark
	@$(PY) -m benchmarks

protos: .venv/dev  ## regenerate the committed code of every .proto file
	@$(PY) scripts/protos.py

lock: .venv/dev  ## rewrite requirements/*.txt from what .venv holds
	@$(PY) scripts/lock.py

clean:  ## remove .venv and every cache of this folder (the model cache stays)
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/runtime and .venv/dev are stamps, touched last. An installation that was cut short may have left half a
# package that pip takes for a whole one, so .venv/unfinished makes the next try start over (pip's cache has the wheels).

ifneq ($(wildcard .venv/unfinished),)
.PHONY: .venv/runtime
endif

.venv/runtime: requirements/cpu.txt pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || \
	    { echo "preflight: there is no Python here: install Python 3.11 with venv, or set PYTHON=path." >&2; exit 1; }
	@"$(PYTHON)" scripts/preflight.py before
	@if [ -e .venv/unfinished ]; then echo "The last installation was cut short: starting over."; rm -rf .venv; fi
	@echo "[1/4] .venv"
	@mkdir -p .venv && touch .venv/unfinished
	@"$(PYTHON)" -m venv .venv
	@echo "[2/4] $(TORCH)"
	@$(PIP) install --no-deps $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@$(PY) scripts/preflight.py torch
	@echo "[3/4] $$(grep -c == requirements/cpu.txt) packages"
	@$(PIP) install --no-deps -r requirements/cpu.txt
	@$(PY) scripts/preflight.py after
	@echo "[4/4] moonpool"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@rm .venv/unfinished
	@touch $@

.venv/dev: requirements/dev.txt .venv/runtime
	@touch .venv/unfinished
	@$(PIP) install --no-deps -r requirements/dev.txt
	@rm .venv/unfinished
	@touch $@
