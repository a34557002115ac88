# One command per intention; each does its own set-up. VENV and PYTHON can be given: make test VENV=/tmp/venv
PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin
# Where torch comes from, if not from where all else does: https://download.pytorch.org/whl/cpu has it without CUDA.
TORCH_INDEX ?=
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run install hooks test coverage test-slow test-timm test-matrix test-all peers check lint types format clean

run: $(VENV)/.installed
	$(BIN)/profiling-agent run

install: $(VENV)/.installed

# Each commit is checked from then on, as .pre-commit-config.yaml says.
hooks: $(VENV)/.installed-dev
	$(BIN)/pre-commit install

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --durations=20 -q -n auto --dist loadfile

# The same tests, and what they reach of the package; it is an error where that falls below the floor. Half as long again, so not a part of test-all.
coverage: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered --durations=20 -q -n auto --dist loadfile

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --durations=30 -q -n auto --dist worksteal -m "slow and not gpu and not matrix"

# What needs timm, with it beside the environment and not in it: no torchvision on our index has operators that its torch can load
# (tests/torchvision_names.py), and all other tests have to pass where there is none.
test-timm: $(VENV)/timm/.installed
	PYTHONPATH=$(abspath $(VENV))/timm:$(CURDIR)/tests $(BIN)/python -m pytest --durations=20 -q -n auto --dist worksteal -m "timm and not gpu and not matrix"

# All families and recipes, where test-all has one of each kind: half an hour.
test-matrix: $(VENV)/timm/.installed
	PYTHONPATH=$(abspath $(VENV))/timm:$(CURDIR)/tests $(BIN)/python -m pytest --durations=20 -q -n auto --dist worksteal -m "matrix and not gpu"

test-all: test test-slow test-timm

check: lint types

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pre-commit validate-config

types: $(VENV)/.installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and pinned: PyPI's own brings gigabytes of CUDA packages, and of any looser requirement so does a mirror's.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once, a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev,all]"
	@touch $@

$(VENV)/timm/.installed: $(VENV)/.installed-dev
	$(PIP) --no-deps --target $(VENV)/timm timm torchvision
	@touch $@

# Tools that benchmarks/head_to_head.py compares with and that this environment can't hold, each in its own. What doesn't install is left out.
peers: $(VENV)/timm/.installed $(VENV)/peers/olive/.tried $(VENV)/peers/inc/.tried

$(VENV)/peers/%/.tried: benchmarks/peers/%.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	{ $(@D)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0 && \
	  $(@D)/bin/python -m pip install --quiet --requirement $<; } || { rm -rf $(@D)/bin; echo "$* does not install here and is left out"; }
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .coverage
