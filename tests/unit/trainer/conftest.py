"""Leaves out what tests parts that are not installed here: extras, and what a newer torch has."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.data_sets import random_rows, write_rows
from support.training import write_labelled

collect_ignore = [
    file
    for module, files in {
        "peft": ["loop/test_hf_runs.py"],
        "transformers": [
            "models/test_hf_model.py",
            "loop/test_hf_runs.py",
            "loop/test_model_export.py",
        ],
        "torch.nn.attention.varlen": ["data/test_attention.py"],
    }.items()
    if find_spec(module) is None
    for file in files
]


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of two sizes for one task, and two that do not fit them; only to be read."""
    folder = tmp_path_factory.mktemp("sets")
    write_labelled(folder / "code", "lm", count=200)
    write_labelled(folder / "prose", "lm", count=80)
    write_labelled(folder / "classes", "classify", count=30)
    rows = {"train": random_rows(np.full(9, 5), "lm", vocabulary_size=32)}
    write_rows(folder / "other", rows, 32, tokenizer=b"{}")
    return folder
