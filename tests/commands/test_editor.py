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


Shown = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What pyright says, in basic mode, of two files outside the repository."""
    folder = tmp_path_factory.mktemp("user")
    files = {"loop.py": USERS_FILE, "mistakes.py": "\n".join(MISTAKES)}
    for name, code in files.items():
        (folder / name).write_text(code)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, *files], cwd=folder, stdout=subprocess.PIPE, text=True)
    found: Shown = {name: [] for name in files}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        found[Path(each["file"]).name].append(each)
    return found


def test_a_loop_of_a_user_is_typed(shown: Shown) -> None:
    assert {each["severity"] for each in shown["loop.py"]} == {"information"}, shown
    assert [each["message"].split('"')[-2] for each in shown["loop.py"]] == SHOWN


def test_mistakes_of_a_user_are_seen(shown: Shown) -> None:
    assert [each["rule"] for each in shown["mistakes.py"]] == list(MISTAKES.values())
