# Everything that a person or CI does with this repository. Needs Python 3.11 or later with venv, and make.
#
#   make demo PYTHON=python3.12                       another interpreter
#   make test ARGS="-k planner -x"                    more arguments for pytest (or for the demo, or for serve)
#   make test WORKERS=0                               all tests in one process, for a debugger
#   make bench BENCH=decode ARGS="--models wan21 --no-compile"     one of the benchmarks, with more arguments
#   make .venv PIP_ARGS="--extra-index-url URL"       where the CPU wheels of torch are, if not the default index

PYTHON   ?= python3
PIP_ARGS ?=
ARGS     ?=
WORKERS  ?= 2
BENCH    ?= decode sharding service
DEVICE   ?= cpu

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-fast bench lint format support-matrix clean

help:
	@echo "make demo       decode the sample latents on this machine's CPU and write pictures to demo-output/"
	@echo "make serve      run the service in the foreground (deploy/config.yaml) until Ctrl-C"
	@echo "make test       the whole test suite"
	@echo "make test-fast  without the tests that start Ray or take long"
	@echo "make bench      the benchmarks, in about half an hour; their reports go to benchmarks/results/"
	@echo "make lint       ruff, mypy and the import arrows"
	@echo "make format     ruff, in place"
	@echo "make support-matrix  run the VAE families' tests and write the README's table of them (ARGS=--check: only compare)"
	@echo "make clean      remove what these commands made, the virtual environment included"

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py $(ARGS)

serve: $(STAMP)
	@$(BIN)/python scripts/local_service.py $(ARGS)

# Whole files are dealt out, in their order, Ray's last and to one process: see tests/conftest.py.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) $(ARGS)

test-fast: $(STAMP)
	$(PYTEST) -m "not ray and not slow" $(ARGS)

# The reports are named after the device; ones that were committed are written over.
bench: $(STAMP)
	@set -e; for name in $(BENCH); do \
		$(BIN)/python -m benchmarks.$$name --device $(DEVICE) --json benchmarks/results/$$name-$(DEVICE).json $(ARGS); \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

support-matrix: $(STAMP)
	$(BIN)/python -m tests.decoding.support_matrix $(ARGS)

clean:
	rm -rf $(VENV) demo-output build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: .venv
.venv: $(STAMP)

# The stamp is written last, so that an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints-cpu.txt clients/python/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or later is needed; say which: make PYTHON=python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "cannot make $(VENV): on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-cpu.txt -e clients/python -e ".[media,dev]"
	@touch $@
