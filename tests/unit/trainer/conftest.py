"""Leaves out what tests parts that are not installed here: extras, and what a newer torch has. And
a store for copies of runs."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from faulty_store import FaultyStore, faulty_store

collect_ignore = [
    file
    for module, files in {
        "peft": ["test_hub_runs.py"],
        "transformers": ["test_hub.py", "test_hub_runs.py", "test_export.py"],
        "torch.nn.attention.varlen": ["test_attention.py"],
    }.items()
    if find_spec(module) is None
    for file in files
]


@pytest.fixture
def store() -> Iterator[type[FaultyStore]]:
    """A store that does what the test says."""
    with faulty_store() as store:
        yield store


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies wait a hundredth of the time for a store that does not answer."""
    from tokenfeed.trainer.checkpoints import remote, uploads

    monkeypatch.setattr(remote, "PATIENCE_S", 0.2)
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(uploads, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(uploads, "LONGEST_WAIT_S", 0.05)
