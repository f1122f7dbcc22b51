"""Leaves out what tests parts that are not installed here: extras, and what a newer torch has. And
a store for copies of runs."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from support.stores import FaultyStore, faulty_store

collect_ignore = [
    file
    for module, files in {
        "peft": ["loop/test_hf_runs.py"],
        "transformers": [
            "models/test_hf_model.py",
            "loop/test_hf_runs.py",
            "loop/test_export.py",
        ],
        "torch.nn.attention.varlen": ["data/test_attention.py"],
    }.items()
    if find_spec(module) is None
    for file in files
]


@pytest.fixture
def store() -> Iterator[type[FaultyStore]]:
    """A store that does what the test says."""
    with faulty_store() as store:
        yield store
