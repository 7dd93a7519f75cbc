# Two commands from a fresh clone: `make demo` and `make test`. Both set up .venv first; a second call is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
MUTATIONS ?= 100000
CASES ?= 2000
TORCH ?= 2.13.0

.PHONY: demo page site release-check wheel-check test test-extended setup lint fuzz fuzz-models fuzz-plans bench clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lowtide needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet 'torch==$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev,svg,torch]'
	touch $(READY)

demo: setup
	$(BIN)/python examples/show_documents.py
	$(BIN)/lowtide demo

page:
	cd web && npm ci && npm run build && npm test

site: setup
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . build/site
	@echo 'Wrote build/site/index.html'

release-check: setup
	$(BIN)/python tests/release_check.py

wheel-check: setup
	$(BIN)/python tests/release_check.py --install-torch 'torch==$(TORCH)' --demo ''

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

test-extended: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q -m extended

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: setup
	$(BIN)/python -m tests.fuzz --mutations $(MUTATIONS)
	$(BIN)/python -m tests.fuzz_commands --mutations $$(($(MUTATIONS) / 20))

fuzz-models: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_models --cases $(CASES)

fuzz-plans: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_plans --cases $(CASES)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_bounds --cases $(CASES)

bench: setup
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .demo
