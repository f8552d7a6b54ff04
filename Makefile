# The two commands of a new user: `make demo` and `make test`. Both set up what is missing.
SHELL := bash
BIN := .venv/bin
WORKERS ?= 0
.DEFAULT_GOAL := help
.PHONY: help setup demo check format test storm paper constraints clean

help: ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null || sed -nE 's/^([a-z]+):.*## (.*)/  make \1: \2/p' Makefile

setup: ## build .venv with the unicron command in it (PYTHON=... picks the Python 3.11)
	@PYTHON="$(PYTHON)" bash infra/local/setup.sh

demo: setup ## run the main job: two trainings, a crash and a node loss, healed (ARGS=--json, ARGS=--keep)
	@$(BIN)/unicron demo $(ARGS)

check: setup ## lint, format, types, import contracts, dependencies
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/deptry .

format: setup ## let ruff repair what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: check ## run every check and test (ARGS='-k planning' for some of them, WORKERS=3 for three processes)
	$(BIN)/pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

storm: setup ## storms of faults on clusters, in virtual time and on the planner, and properties on new examples: an hour
	$(BIN)/pytest -m storm $(ARGS)
	$(BIN)/pytest tests/property --hypothesis-profile=explore $(ARGS)

paper: setup ## the papers' figures into results/, a few minutes (ARGS='--seeds 50', ARGS='--trace FILE')
	@$(BIN)/unicron paper $(ARGS)

constraints: setup ## renew constraints.txt (ARGS=--upgrade for the newest versions)
	@bash infra/local/constraints.sh $(ARGS)

clean: ## remove .venv and what tools and tests left behind
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
