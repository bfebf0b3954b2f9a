# `make train` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A line for each large download: the first installation takes minutes.
INSTALL := $(BIN)/python .ci/install.py $(PIP_OPTIONS) -c constraints.txt

.PHONY: train test test-all test-oldest check lint types setup chaos soak bench bench-lab bench-slow docs clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "terrace needs Python 3.11 or newer; run: make PYTHON=python3.11 ..."; exit 1; }
	@echo "making $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[train,hf,data,metrics,dev]'
	@touch $(STAMP)

setup: $(STAMP)

train: setup
	$(BIN)/terrace train --train.prompt 'def ' --train.target_loss 2.1

check: lint types

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy
	$(BIN)/lint-imports

# Bytecode is kept even where the caller's environment says not to: hundreds of processes would compile the same files.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --workers 3

# Types are checked beside the tests, on one core for half a minute; what that says is printed after them.
TYPES_BESIDE := $(MAKE) --no-print-directory types > $(VENV)/types.log 2>&1 & types=$$!; trap "kill $$types" INT TERM;
TYPES_JOINED := ; tests=$$?; wait $$types; types=$$?; cat $(VENV)/types.log; exit $$((tests | types))

test: lint
	@$(TYPES_BESIDE) $(PYTEST) -m "not nightly" $(TYPES_JOINED)

test-all: lint
	@$(TYPES_BESIDE) $(PYTEST) $(TYPES_JOINED)

# Tests that use torch, with the lowest versions that pyproject.toml accepts; not in CI.
OLDEST := .venv-oldest
TEST_TOOLS := pytest pytest-timeout pytest-xdist hypothesis
USES_TORCH := $(addprefix tests/,checkpoint comm data generation launch model probe rl runtime system train virtual_cuda)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	@echo "making $(OLDEST)"
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python .ci/install.py -c constraints-oldest.txt -e '.[train,hf,data,metrics,liger]' $(TEST_TOOLS)
	@touch $@

test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest --workers 3 -m "not nightly" $(USES_TORCH)

# ARGS="--cases 20 --seed 3", or --minutes 5 for the soak; not in CI.
CHAOS := OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos

chaos: setup
	$(CHAOS) $(ARGS)
	$(CHAOS).feedback
	$(CHAOS).disks
	$(CHAOS).damage
	$(CHAOS).wrong_inputs

soak: setup
	$(CHAOS).soak $(ARGS)

# Every benchmark that needs no root, into docs/benchmarks/summary.md; ARGS="--only planner,codecs".
bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m bench $(ARGS)

INSTALL_RIVALS := DS_BUILD_OPS=0 $(INSTALL) -e '.[train,lab]'

bench-lab: setup
	$(INSTALL_RIVALS)
	$(BIN)/python -m bench.lab $(ARGS)
	$(BIN)/python -m bench.lab.report runs/lab.jsonl

# Rivals across one slow link, into docs/benchmarks/slow.md; as root.
bench-slow: setup
	$(INSTALL_RIVALS)
	$(BIN)/python -m bench.slow $(ARGS)

# The documents and the reference of the public modules as a site, into site/; fails on a warning. Not in CI.
docs: setup
	$(INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open site/index.html"

clean:
	rm -rf $(VENV) $(OLDEST) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache site
