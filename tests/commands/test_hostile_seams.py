"""A policy of one's own and worker processes: a class that they cannot import is said to be one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from delivery import MakeDataset

SCRIPT = """
import json, sys
from dataclasses import dataclass
from tokenfeed import Padded, ShardLoader
from tokenfeed.pipeline.errors import LoaderError

def local():
    @dataclass(frozen=True)
    class Mine(Padded):
        pass
    return Mine

@dataclass(frozen=True)
class Mine(Padded):
    pass

said = []
for kind in (Mine, local()):
    for workers in (0, 1):
        with_ = ShardLoader(sys.argv[1], batching=kind(64), num_workers=workers)
        try:
            said.append(sum(len(batch.rows) for batch in with_))
        except LoaderError as error:
            said.append(str(error))
print(json.dumps(said))
"""


@pytest.fixture
def folder(make_dataset: MakeDataset) -> Path:
    return make_dataset(np.arange(1, 20))


def test_a_policy_that_workers_cannot_import_ends_in_one_line_with_a_remedy(
    folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stderr == ""
    alone, by_worker, local_alone, local_by_worker = json.loads(ended.stdout)
    assert alone == local_alone == 19
    for line in (by_worker, local_by_worker):
        assert line.startswith("loader workers cannot import the policy or store of the loader")
        assert "Mine" in line
        assert "\n" not in line
        assert line.endswith("in a separate module, or read in this process (`num_workers`=0).")
