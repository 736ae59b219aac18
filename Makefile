# Every target does its own set-up in .venv; nothing outside this folder is touched.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
WARM := $(VENV)/.warm

.DEFAULT_GOAL := help
.PHONY: help demo test simulate check bench chaos fmt clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) $(WARM) ## Train on real ratings alone and as a job that is hurt; compare both models to the bit
	@$(PY) tools/demo.py

test: $(READY) $(WARM) ## All tests
	@$(PY) -m pytest -q --numprocesses logical --maxprocesses 4 --dist worksteal

N ?= 1000
SEED ?= 0
simulate: $(READY) $(WARM) ## N=10000 SEED=0: whole jobs simulated, each of another shape and hurt in other ways
	@$(PY) tools/simulate.py --count $(N) --seed $(SEED)

check: $(READY) ## Format, lint, types, direction of imports
	@$(PY) -m ruff format --check --quiet . || { echo "Some files are not formatted: run 'make fmt'."; exit 1; }
	@$(PY) -m ruff check --quiet .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

bench: $(READY) $(WARM) ## Measure against plain PyTorch; one table, and JSON
	@$(PY) benchmarks/run.py

chaos: $(READY) $(WARM) ## Kill trainers, pservers and masters of real jobs at random, freeze, slow and add some; check promises
	@$(PY) tools/chaos.py

fmt: $(READY) ## Format the code and fix what can be fixed by itself
	@$(PY) -m ruff check --quiet --fix-only .
	@$(PY) -m ruff format --quiet .

clean: ## Remove .venv, caches and logs
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache evergrad-logs demo-out
	@rm -rf src/*.egg-info
	@find src tests examples tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Evergrad needs Python 3.11 or newer and '$(PYTHON)' is not: say which with 'make PYTHON=/path/to/python3.11'." >&2; \
	  exit 1; }
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

# Behind `|` because the link of the interpreter has an old date that means nothing here.
$(READY): pyproject.toml constraints.txt | $(PY)
	@echo "Installing Evergrad and its tools into $(VENV) (the first time this fetches PyTorch) ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore -c constraints.txt -e '.[dev]'
	@touch $@

# Compiled once here, so that no test or process has to wait for it.
$(WARM): $(READY) $(wildcard src/evergrad/kernels/*.py)
	@$(PY) -m evergrad.kernels.warm
	@touch $@
