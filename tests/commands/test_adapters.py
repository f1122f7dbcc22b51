"""Every adapter on one and two ranks, beside a plain loop over the rows of each step.

Each case has a filler, rows of padding, a short last step of a pass, accumulation, a schedule, and
a resume within and at the end of a pass (`support/programs/adapter_ranks.py`). Elsewhere:

| adapter | its cells |
|---|---|
| ShardDataModule of Lightning, Fabric | unit/integrations/test_lightning.py |
| ShardSFTTrainer of TRL | unit/integrations/test_trl.py; the rest is ShardTrainer's |
| torchtitan | unit/integrations/test_torchtitan.py |
| DeepSpeed | mission/test_g_proof.py |
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PROGRAMS, warm
from support.data_sets import random_rows, write_rows

from tokenfeed import Padded, ShardLoader
from tokenfeed.integrations.dataloader import StatefulShardLoader
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import Task, task_columns

pytestmark = pytest.mark.slow

ADAPTERS = ("ShardTrainer", "Accelerate", "Lightning", "steps")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with classes and with scores, whose numbers suit no number of batches."""
    folder = tmp_path_factory.mktemp("adapters")
    tasks: tuple[Task, ...] = ("classify", "score")
    for task in tasks:
        rows = {
            split: random_rows(np.asarray([3 + n % 11 for n in range(count)]), task)
            for split, count in {"train": 33, "validation": 21}.items()
        }
        names = ("joy", "fear", "anger") if task == "classify" else ()
        columns = task_columns(task)
        write_rows(folder / task, rows, 1000, 2, task=task, columns=columns, label_names=names)
    return folder


def run(adapter: str, data_set: Path, ranks: int, folder: Path) -> dict[str, Any]:
    program = PROGRAMS / "adapter_ranks.py"
    done = warm.run([str(program), adapter, str(data_set), str(ranks), str(folder)])
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("task", ["classify", "score"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_on_ranks_trains_as_a_plain_loop(
    adapter: str, task: str, ranks: int, data: Path, tmp_path: Path
) -> None:
    found = run(adapter, data / task, ranks, tmp_path)
    weights = found["weights"]
    assert all(map(math.isfinite, weights))
    assert min(found["sizes"]) < max(found["sizes"]), "the last step of a pass is shorter"
    assert (ranks == 1) == (found["fillers"] == 0)
    if "same" not in found:  # a loss of the step's own, divided by all targets
        assert weights == pytest.approx(found["expected"], abs=1e-5)
    for step, resumed in found["resumed"].items():
        assert resumed == pytest.approx(weights, abs=1e-6), f"resumed after step {step}"
    if "evaluation" in found:
        assert found["evaluation"] == pytest.approx(found["expected_evaluation"], rel=1e-5)
    if "rates" in found:
        assert found["rates"][-1] == pytest.approx(0, abs=1e-6)
        assert found["rates"][len(found["rates"]) // 2] > 0.05


def test_stateful_loader_of_scores_with_padding_rows_needs_a_transform(data: Path) -> None:
    with (
        ShardLoader(data / "score", batching=Padded(64, last="fill"), num_workers=0) as loader,
        pytest.raises(ConfigError, match="`transform`: rows that complete a batch"),
    ):
        StatefulShardLoader(loader)


def test_second_reader_of_a_stateful_loader_is_refused(data: Path) -> None:
    from accelerate import skip_first_batches

    loader = StatefulShardLoader(ShardLoader(data / "classify", batching=Padded(64), num_workers=0))
    with pytest.raises(ConfigError, match="continues after the saved batch by itself"):
        list(skip_first_batches(loader, 3))
