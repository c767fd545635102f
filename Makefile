# Everything runs in the project's own virtual environment. Needs Python >= 3.11, git and make, nothing else.
PYTHON ?= python3
# Extra arguments of pip, e.g. the index of PyTorch's CPU wheels where the default one brings CUDA.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install demo test lint format clean

help:
	@echo "make demo   train a small text-to-image model to write digits (about 5 to 8 minutes on two CPU cores)"
	@echo "make test   lint, types and all tests"
	@echo "make lint / make format / make clean"

$(VENV)/.runtime: requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps -e .
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.runtime
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -r requirements-dev.txt
	touch $@

install: $(VENV)/.runtime

demo: $(VENV)/.runtime
	$(BIN)/verst train recipes/glyphs_grpo.toml --if-complete new

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist
