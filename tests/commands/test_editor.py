"""What an editor shows somebody who writes a loop: names are found and have their types."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyright", reason="comes with `make setup`, not with other environments")

USERS_FILE = """
from tokenfeed import Packed, Padded, ShardLoader

loader = ShardLoader("out/", batching=Padded(16_384), micro_batches_per_step=4)
reveal_type(loader)
for batch in loader:
    reveal_type(batch)
    reveal_type(batch["input_ids"])
    reveal_type(batch.num_targets)
reveal_type(Packed(1024, batch_size=16))
"""
SHOWN = ["ShardLoader", "Batch", "Tensor", "int", "Packed"]
MISTAKES = {
    "from tokenfeed import Paded": "reportAttributeAccessIssue",
    "import tokenfeed.pipelines": "reportMissingImports",
    "from tokenfeed import ShardLoader; ShardLoader('out/')": "reportCallIssue",
    "from tokenfeed import Padded; Padded('many')": "reportArgumentType",
}


def shown_of(folder: Path, code: str) -> list[dict[str, Any]]:
    """What pyright says, in basic mode, of a file outside the repository."""
    (folder / "loop.py").write_text(code)
    arguments = ["--outputjson", "--pythonpath", sys.executable, "loop.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pyright", *arguments], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    shown: list[dict[str, Any]] = json.loads(done.stdout)["generalDiagnostics"]
    return shown


def test_a_loop_of_a_user_is_typed(tmp_path: Path) -> None:
    shown = shown_of(tmp_path, USERS_FILE)
    assert {each["severity"] for each in shown} == {"information"}, shown
    assert [each["message"].split('"')[-2] for each in shown] == SHOWN


def test_mistakes_of_a_user_are_seen(tmp_path: Path) -> None:
    shown = shown_of(tmp_path, "\n".join(MISTAKES))
    assert [each["rule"] for each in shown] == list(MISTAKES.values())
