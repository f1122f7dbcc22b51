# The commands of developers and CI. PYTHON is any Python 3.11 or later; .venv has everything else.
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
RUN_CHECKS := $(BIN)/python -m
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder    # files with slow tests first: see conftest
# Tests of commands wait half of the time, so use one process more than cores.
MORE := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
STEPS := 200

.PHONY: setup dev demo test test-fast test-slow test-mission test-long gpu check lint types editor package matrix fmt bench docs docs-serve map clean

# Create .venv, with everything that the targets below need.
setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenfeed needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(INSTALL) 'pip>=25.1'    # knows dependency groups
	$(INSTALL) torch
	$(INSTALL) -e '.[dask,examples,hub,lora,remote]' --group dev
	touch $@

# Create .venv for developers, with git hooks: lint before a commit, mypy before a push.
dev: setup
	$(BIN)/pre-commit install

# Tokenize the source of Python's standard library, train a model on it, and make the picture of the README.
demo: setup
	rm -rf demo
	$(BIN)/pretokenize "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" demo/shards \
		--exclude site-packages --vocab-size 8192
	$(BIN)/shards inspect demo/shards
	$(BIN)/train --shards demo/shards --run-dir demo/run --steps $(STEPS)
	$(BIN)/python docs/demo_picture.py demo/picture.svg

# Run all tests but those that take minutes.
test: setup
	$(RUN_CHECKS) pytest -q -m 'not long' $(PARALLEL) -n $(MORE)

# Run the tests of what users are promised (docs/mission.md).
test-mission: setup
	$(RUN_CHECKS) pytest -q tests/mission -n $(MORE)

# Run the fast unit tests, which start no processes: under 90 s on two cores.
test-fast: setup
	$(RUN_CHECKS) pytest -q tests/unit -m 'not slow' $(PARALLEL)

# Run the other tests: those that start processes, and those that are slow.
test-slow: setup
	$(RUN_CHECKS) pytest -q -m '(slow or commands) and not long' $(PARALLEL) -n $(MORE)

# Before a release: run the tests that take minutes, and over ten times as many random examples of each property.
test-long: setup
	$(RUN_CHECKS) pytest -q -m 'long or hypothesis' --hypothesis-profile long $(PARALLEL) -n $(MORE)

# Needs a CUDA device: run its tests, checks and benchmarks.
gpu: setup
	$(BIN)/python -m benchmarks.gpu

check: lint types editor

lint: setup
	$(RUN_CHECKS) ruff check .
	$(RUN_CHECKS) ruff format --check .

types: setup
	$(RUN_CHECKS) mypy

# Check what an editor shows to users of the package.
editor: setup
	$(RUN_CHECKS) pyright --pythonpath $(BIN)/python

# Build sdist and wheel into dist/, and test the wheel in an empty environment.
package: setup
	rm -rf build dist
	$(BIN)/python .ci/package.py --quiet
	$(RUN_CHECKS) pytest -q tests/commands/test_wheel.py

# Test with each installed Python, and with the lowest versions of dependencies. Not in CI: half an hour and 15 GB.
matrix:
	.ci/matrix

fmt: setup
	$(RUN_CHECKS) ruff check --fix .
	$(RUN_CHECKS) ruff format .

bench: setup
	$(BIN)/python -m benchmarks.text_loaders

# Build the documentation into site/, which needs no network. Its tools have their own environment, without torch.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

docs-serve: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve

.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'    # knows groups
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --group docs -c constraints.txt
	touch $@

# Print the purpose of each file: the first line of its docstring, by room.
map:
	@$(PYTHON) docs/map.py

clean:
	rm -rf .venv .venv-docs .venv-matrix demo build dist site
