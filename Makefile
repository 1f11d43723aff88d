# Every target works from any directory (make -C path), and twice in a row.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
JOBS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Tests and examples start hundreds of processes, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo example shop test test-quick prove coverage check audit format docs bench services clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: .venv/.stamp-core ## See the promise kept in one minute; needs nothing but Python
	@$(BIN)/outrider demo $(ARGS)

example: .venv/.stamp-core ## Orders over four services as a saga; ARGS="--fail payment" lets some fail
	@$(BIN)/python -m examples.order_saga $(ARGS)

shop: .venv/.stamp ## A FastAPI application that publishes its orders
	@$(BIN)/python -m examples.fastapi_shop $(ARGS)

test: servers ## Run all tests, with real servers; ARGS="-k name" picks some
	@$(PYTEST) $(ARGS)

test-quick: .venv/.stamp ## Run the tests that need no server and take no time
	@OUTRIDER_TEST_SIZE=quick $(PYTEST) --quick tests/unit tests/contract tests/simulation tests/integration/repository $(ARGS)

prove: servers ## Run all tests, the long ones in full; takes an hour
	@OUTRIDER_TEST_SIZE=full $(PYTEST) $(ARGS)

coverage: .venv/.stamp ## Measure what the quick tests cover; fails below the floor in pyproject.toml
	@OUTRIDER_TEST_SIZE=quick $(BIN)/python -m coverage run -m pytest --quick tests/unit tests/contract tests/integration/repository $(ARGS)
	@$(BIN)/python -m coverage report

.PHONY: servers
servers: .venv/.stamp
	@scripts/ensure_servers.sh
	@$(BIN)/python -m outrider.testing.servers --fetch

check: .venv/.stamp ## Lint, format, types, import rules, links in the docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(wildcard outrider tests bench scripts examples)
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/write_docs.py --check
	@$(BIN)/python scripts/check_links.py
	@$(BIN)/python scripts/check_house.py
	@$(BIN)/python -m pip check --quiet

audit: .venv/.stamp ## Look for known vulnerabilities in the installed packages; asks the package index
	@test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && build/audit/bin/pip install --quiet pip-audit; }
	@build/audit/bin/pip-audit --strict $(addprefix --path ,$(wildcard .venv/lib/python3*/site-packages))

format: .venv/.stamp ## Rewrite the code in the house format
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: .venv/.stamp ## Write the pages that come from the code, build the site into build/site
	@$(BIN)/python scripts/write_docs.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

bench: .venv/.stamp ## Measure throughput and latency
	@scripts/ensure_servers.sh
	@$(BIN)/python -m bench $(ARGS)

services: .venv/.stamp ## Start throw-away servers, print their URLs, stop on Ctrl-C
	@scripts/ensure_servers.sh
	@$(BIN)/python -m outrider.testing.servers $(ARGS)

clean: ## Remove everything that make created
	@rm -rf .venv .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage build dist
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

.venv/bin/python:
	@scripts/make_venv.sh $(PYTHON)

.venv/.stamp-core: pyproject.toml | .venv/bin/python
	@echo "Installing Outrider into .venv ..." >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/.stamp: pyproject.toml | .venv/bin/python
	@echo "Installing Outrider, its drivers and its tools into .venv ..." >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev]'
	@touch $@ .venv/.stamp-core
