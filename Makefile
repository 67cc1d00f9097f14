# Both targets set themselves up: they need make and Python 3.10 or newer, and nothing else.
#   make demo      install into .venv, then answer PROMPT with the demo pair
#   make test      install into .venv with the tools for development, then check everything
# Options: PYTHON=/path/to/python3  VENV=folder  PROMPT="..."  PYTEST="options for pytest"

VENV ?= .venv
PROMPT ?= Write a Python function that checks whether a string is a palindrome, and explain how it works.
PYTEST ?=
export VENV PYTHON PROMPT

.PHONY: help demo test setup setup-dev format clean

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

setup:
	@sh scripts/setup.sh

setup-dev:
	@sh scripts/setup.sh --dev

demo: setup
	@echo "==> dflash-mlx generate \"$$PROMPT\" --pair demo" >&2
	@"$(VENV)/bin/dflash-mlx" generate "$$PROMPT" --pair demo

test: setup-dev
	@echo "==> ruff, mypy" >&2
	@"$(VENV)/bin/ruff" check .
	@"$(VENV)/bin/ruff" format --check .
	@sh scripts/typecheck.sh
	@echo "==> pytest" >&2
	@"$(VENV)/bin/python" -m pytest $(PYTEST)

format: setup-dev
	@"$(VENV)/bin/ruff" check --fix .
	@"$(VENV)/bin/ruff" format .

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
