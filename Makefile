# `make demo` and `make test` need Python 3.11 to 3.13 and nothing else: the environment is made in .venv.

PYTHON ?= $(firstword $(foreach python,python3.13 python3.12 python3.11 python3, \
	$(shell $(python) -c 'import sys, ensurepip; (3, 11) <= sys.version_info < (3, 14) and print("$(python)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
OUT ?= demo-out
VALIDATION ?= validation

.PHONY: demo test validate check format install clean

demo: $(READY)
	$(BIN)/oled demo out=$(OUT)

test: $(READY)
	$(BIN)/python -m pytest -n 2

validate: $(READY)
	$(BIN)/oled validate out=$(VALIDATION)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(READY)

$(READY): pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 with its venv module was found: install one, or say make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (PyTorch is large: this takes minutes)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
