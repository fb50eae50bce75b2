# `make demo` and `make test` need Python 3.11 to 3.13 and nothing else: the environment is made in .venv.

PYTHON ?= $(firstword $(foreach python,python3.13 python3.12 python3.11 python3, \
	$(shell $(python) -c 'import sys, ensurepip; (3, 11) <= sys.version_info < (3, 14) and print("$(python)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
OUT ?= demo-out
VALIDATION ?= validation
MACHINE ?= $(or $(shell nvidia-smi --query-gpu=name --format=csv,noheader --id=0 2>/dev/null | \
	tr 'A-Z ' 'a-z_' | tr -cd 'a-z0-9_'),unknown)
SLOTS ?= 40,70,100
REPORT = experiments/results/validate/$(MACHINE)

.PHONY: demo test validate validate-cuda check format install clean

demo: $(READY)
	$(BIN)/oled demo out=$(OUT)

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --random-order

validate: $(READY)
	$(BIN)/oled validate out=$(VALIDATION)

# A profile and two reports of this machine's GPU, to be committed: docs/gpu.md. A failed verdict does
# not keep the second from being made.
validate-cuda: $(READY)
	$(BIN)/oled profile backend=cuda model=llada2_mini out=$(REPORT)/mini.yaml
	-$(BIN)/oled validate backend=cuda trace=synthetic trace.geometry=llada2_mini trace.requests=1 \
		trace.horizons=2 trace.scores=32 \
		preset=full hardware=$(REPORT)/mini.yaml cost.geometry=llada2_mini \
		cache.slots=[$(SLOTS)] out=$(REPORT)/mini
	$(BIN)/oled profile backend=cuda model=llada2_flash top_k=4 out=$(REPORT)/flash.yaml
	$(BIN)/oled validate backend=cuda trace=demo preset=full hardware=$(REPORT)/flash.yaml \
		cost.geometry=llada2_flash cache.slots=[10,20,50] out=$(REPORT)/flash_cut

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
