# Everything a person or CI runs. PYTHON is any Python 3.11 or later; all else is set up in .venv.
PYTHON ?= python3
BIN := .venv/bin
RUN_CHECKS := $(BIN)/python -m
PARALLEL := -n auto --dist loadfile

.PHONY: setup demo test test-fast gpu check fmt bench docs docs-serve clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenfeed needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,examples]' -c constraints.txt
	touch $@

# The main job on real input: the standard library's own source becomes a trained model.
demo: setup
	rm -rf demo
	$(BIN)/pretokenize "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" demo/shards \
		--exclude site-packages --vocab-size 8192
	$(BIN)/shards inspect demo/shards
	$(BIN)/train --shards demo/shards --run-dir demo/run

test: setup
	$(RUN_CHECKS) pytest -q $(PARALLEL)

test-fast: setup
	$(RUN_CHECKS) pytest -q -m 'not slow' $(PARALLEL)

# What needs a CUDA device, for who has one; elsewhere all of it is skipped.
gpu: setup
	$(RUN_CHECKS) pytest -q -m cuda -rs

check: setup
	$(RUN_CHECKS) ruff check .
	$(RUN_CHECKS) ruff format --check .
	$(RUN_CHECKS) mypy

fmt: setup
	$(RUN_CHECKS) ruff check --fix .
	$(RUN_CHECKS) ruff format .

bench: setup
	$(BIN)/python benchmarks/loader.py

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

clean:
	rm -rf .venv .venv-docs demo build site
