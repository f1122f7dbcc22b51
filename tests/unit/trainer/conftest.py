"""Leaves out what tests parts that are not installed here: extras, and what a newer torch has."""

from importlib.util import find_spec

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
