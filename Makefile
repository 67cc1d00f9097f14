# The targets set themselves up: they need make and Python 3.10 or newer, and nothing else.
#   make demo      install into .venv, then answer PROMPT with the demo pair
#   make serve     install into .venv, then serve the demo pair, with a page for the browser
#   make test      install into .venv with the tools for development, then check everything, in a few minutes
#   make check     the same with the slow tests: what CI runs
#   make kernels   the numeric tests as on other kinds of processors, by OpenBLAS's kernels for them
#   make site      the documents as a website in build/site; a link that leads nowhere is an error
# Options: PYTHON=/path/to/python3  VENV=folder  PROMPT="..."  PYTEST="options for pytest"

VENV ?= .venv
PROMPT ?= Write a Python function that checks whether a string is a palindrome, and explain how it works.
PYTEST ?=
export VENV PYTHON PROMPT

# One process of tests a core, but no more than memory allows: each takes up to 1.5 GB. One that is done takes over tests
# from another.
run-pytest = "$(VENV)/bin/python" -m pytest -n auto --maxprocesses 4 --dist worksteal

# The tests whose outcome could depend most on how products of matrices are rounded. OpenBLAS rounds differently on each
# kind of processor, and any x86-64 processor of today can do as a Haswell does.
numeric = -m "not slow and not long and not model" \
	$(addprefix tests/,caches decoding drafters training test_lossless.py test_sampling.py)
KERNELS ?= Haswell Zen

.PHONY: help demo serve test check kernels site style setup setup-dev format clean

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

setup:
	@sh scripts/setup.sh

setup-dev:
	@sh scripts/setup.sh --dev

demo: setup
	@echo "==> dflash-mlx generate \"$$PROMPT\" --pair demo" >&2
	@"$(VENV)/bin/dflash-mlx" generate "$$PROMPT" --pair demo

serve: setup
	@"$(VENV)/bin/dflash-mlx" serve --pair demo

style: setup-dev
	@echo "==> ruff, mypy" >&2
	@"$(VENV)/bin/ruff" check .
	@"$(VENV)/bin/ruff" format --check .
	@sh scripts/typecheck.sh

test: style
	@echo "==> pytest" >&2
	@$(run-pytest) $(PYTEST)

check: style
	@echo "==> pytest, with the slow tests" >&2
	@$(run-pytest) -m "not long" $(PYTEST)

kernels: setup-dev
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then for kernel in $(KERNELS); do \
	  echo "==> pytest, the numeric tests with OpenBLAS's kernels for $$kernel" >&2; \
	  OPENBLAS_CORETYPE=$$kernel $(run-pytest) $(numeric) $(PYTEST) || exit; \
	done; fi

site: setup
	@"$(VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	@NO_MKDOCS_2_WARNING=1 "$(VENV)/bin/mkdocs" build --strict

format: setup-dev
	@"$(VENV)/bin/ruff" check --fix .
	@"$(VENV)/bin/ruff" format .

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
