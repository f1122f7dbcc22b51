# Everything a person or CI runs. PYTHON is any Python 3.11 or later; all else is set up in .venv.
PYTHON ?= python3
BIN := .venv/bin
RUN_CHECKS := $(BIN)/python -m
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder    # files with slow tests first: see conftest
# Tests of commands wait as long as they compute: one process more than cores.
MORE := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
STEPS := 200

.PHONY: setup dev demo test test-fast test-slow test-long gpu check lint types editor package matrix fmt bench docs docs-serve map clean

# .venv with everything that the targets below need.
setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenfeed needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(INSTALL) 'pip>=25.1'    # knows dependency groups
	$(INSTALL) torch
	$(INSTALL) -e '.[dask,examples,hub,lora,remote]' --group dev
	touch $@

# The environment to write code in: hooks refuse a commit that lint refuses, and a push that mypy refuses.
dev: setup
	$(BIN)/pre-commit install

# The main job on real input: the standard library's own source becomes a trained model.
demo: setup
	rm -rf demo
	$(BIN)/pretokenize "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" demo/shards \
		--exclude site-packages --vocab-size 8192
	$(BIN)/shards inspect demo/shards
	$(BIN)/train --shards demo/shards --run-dir demo/run --steps $(STEPS)

# What test-fast and test-slow run: all but what takes minutes.
test: setup
	$(RUN_CHECKS) pytest -q -m 'not long' $(PARALLEL) -n $(MORE)

# What runs in process and is not slow: under 90 s on two cores.
test-fast: setup
	$(RUN_CHECKS) pytest -q tests/unit -m 'not slow' $(PARALLEL)

# The rest: what starts processes, and what is slow.
test-slow: setup
	$(RUN_CHECKS) pytest -q -m '(slow or commands) and not long' $(PARALLEL) -n $(MORE)

# Before a release: kills by the dozen, every part of benchmarks/gpu/ on a CPU, launchers; and ten times as many
# random examples of each property.
test-long: setup
	$(RUN_CHECKS) pytest -q -m 'long or hypothesis' --hypothesis-profile long $(PARALLEL) -n $(MORE)

# For who has a CUDA device: the tests that need one, the checks that only it can make, and how fast it goes.
gpu: setup
	$(BIN)/python -m benchmarks.gpu

check: lint types editor

lint: setup
	$(RUN_CHECKS) ruff check .
	$(RUN_CHECKS) ruff format --check .

types: setup
	$(RUN_CHECKS) mypy

# What an editor shows a reader of the package.
editor: setup
	$(RUN_CHECKS) pyright --pythonpath $(BIN)/python

# What is uploaded: sdist and wheel into dist/, and the main job from such a wheel in an empty environment.
package: setup
	rm -rf build dist
	$(BIN)/python .ci/package.py --quiet
	$(RUN_CHECKS) pytest -q tests/commands/test_wheel.py

# Each Python that is here, and the lowest versions of what we depend on; not part of CI: half an hour and 15 GB.
matrix:
	.ci/matrix

fmt: setup
	$(RUN_CHECKS) ruff check --fix .
	$(RUN_CHECKS) ruff format .

bench: setup
	$(BIN)/python -m benchmarks.loader

# The documentation, as a site that needs no network; its tools need no torch, so they have an environment of their own.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

docs-serve: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve

.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'    # knows groups
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --group docs -c constraints.txt
	touch $@

# What each file is for: the first line of its docstring, room by room.
map:
	@$(PYTHON) docs/map.py

clean:
	rm -rf .venv .venv-docs .venv-matrix demo build dist site
