# Every target works from any directory (make -C path), and twice in a row.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
JOBS ?= 2

.PHONY: help demo example shop test check format docs bench services clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: .venv/.stamp-core ## See the promise kept in one minute; needs nothing but Python
	@$(BIN)/outrider demo $(ARGS)

example: .venv/.stamp-core ## Orders over four services as a saga; ARGS="--fail payment" lets some fail
	@$(BIN)/python -m examples.order_saga $(ARGS)

shop: .venv/.stamp ## A FastAPI application that tells of its orders
	@$(BIN)/python -m examples.fastapi_shop $(ARGS)

test: .venv/.stamp ## Run the tests; ARGS="-k name" picks some
	@scripts/ensure_servers.sh
	@$(BIN)/python -m outrider.testing.servers --fetch
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadscope $(ARGS)

check: .venv/.stamp ## Lint, format, types, import rules, links in the docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(wildcard outrider tests bench scripts examples)
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/write_docs.py --check
	@$(BIN)/python scripts/check_links.py

format: .venv/.stamp ## Rewrite the code in the house format
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: .venv/.stamp ## Write the pages that come from the code
	@$(BIN)/python scripts/write_docs.py

bench: .venv/.stamp ## Measure throughput and latency
	@scripts/ensure_servers.sh
	@$(BIN)/python -m bench $(ARGS)

services: .venv/.stamp ## Start throw-away servers, print their URLs, stop on Ctrl-C
	@scripts/ensure_servers.sh
	@$(BIN)/python -m outrider.testing.servers $(ARGS)

clean: ## Remove everything that make created
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
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
