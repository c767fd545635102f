# Everything runs in the project's own virtual environment. Needs Python >= 3.11, git and make, nothing else.
PYTHON ?= python3
# Extra arguments of pip, e.g. the index of PyTorch's CPU wheels where the default one brings CUDA.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install demo test docs test-sglang bench-learning bench-transport bench-overlap bench-scale bench-router lint format clean

help:
	@echo "make demo   train a small text-to-image model to write digits (about 5 to 8 minutes on two CPU cores)"
	@echo "make test   lint, types and all tests (WITH_SGLANG=1: also against SGLang-Diffusion itself, 2.7 GB)"
	@echo "make docs   the documentation as a site in build/docs; warnings are errors"
	@echo "make test-sglang   compare with SGLang-Diffusion itself (2.7 GB into build/sglang, once; then a minute or two)"
	@echo "make bench-learning   every online algorithm on the glyph model, three seeds each (hours on two cores)"
	@echo "make bench-transport   samples from engine to driver: shared memory, msgpack, JSON (a few minutes, 6 GB)"
	@echo "make bench-overlap   a rollout against the longest of its stages, and the simulation of it (about ten minutes)"
	@echo "make bench-scale   what a microgroup costs the driver in rollouts of 100 to 10,000 (about ten minutes)"
	@echo "make bench-router   10,000 requests and sixteen gigabyte answers through the router (a few minutes)"
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

# A Chromium for the dashboard's tests; one that is installed is taken, else Debian's is unpacked here.
build/browser/.ready: scripts/browser.py $(VENV)/.dev
	$(BIN)/python scripts/browser.py
	mkdir -p $(@D)
	touch $@

test: $(VENV)/.dev build/browser/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest
ifdef WITH_SGLANG
	$(MAKE) test-sglang
endif

# Not --quiet: MkDocs would then count no warnings, and none would be an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/docs/index.html"

# SGLang-Diffusion as an oracle. Its wheel is for CPython 3.11; torch is verst's own, because equal bits need one torch.
SGLANG := build/sglang
ORACLE := tests/sglang_oracle
SGLANG_PIP := $(SGLANG)/venv/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)

$(SGLANG)/.wheel: $(ORACLE)/wheel.txt $(VENV)/.dev
	rm -rf $(SGLANG)/wheel $(SGLANG)/download
	$(BIN)/python -m pip download --disable-pip-version-check --quiet $(PIP_ARGS) --no-deps --dest $(SGLANG)/download -r $<
	$(BIN)/python -m zipfile -e $(SGLANG)/download/sglang-*.whl $(SGLANG)/wheel
	touch $@

$(SGLANG)/.server: $(SGLANG)/.wheel $(ORACLE)/requirements-server.txt $(ORACLE)/requirements-pinned.txt
	test -x $(SGLANG)/venv/bin/python || $(BIN)/python -m venv $(SGLANG)/venv
	grep '^torch==' requirements.txt > $(SGLANG)/constraints.txt
	$(SGLANG_PIP) -c $(SGLANG)/constraints.txt torch
	$(SGLANG_PIP) -c $(SGLANG)/constraints.txt -r $(ORACLE)/requirements-server.txt
	$(SGLANG_PIP) --no-deps -r $(ORACLE)/requirements-pinned.txt $(SGLANG)/download/sglang-*.whl
	touch $@

test-sglang: $(SGLANG)/.server
	$(BIN)/python -m pytest -m sglang $(ORACLE)

bench-learning: $(VENV)/.runtime
	$(BIN)/python benchmarks/learning.py

bench-transport: $(VENV)/.runtime
	$(BIN)/python benchmarks/transport.py

bench-overlap: $(VENV)/.runtime
	$(BIN)/python benchmarks/overlap.py

bench-scale: $(VENV)/.runtime
	$(BIN)/python benchmarks/scale.py

bench-router: $(VENV)/.runtime
	$(BIN)/python benchmarks/router.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist
