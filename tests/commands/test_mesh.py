"""Four processes in a mesh: which rows each rank receives, and losses with context parallelism."""

import json
from itertools import chain
from typing import Any

import numpy as np
import pytest
from support import PROGRAMS, warm
from support.data_sets import random_rows, write_rows
from support.delivery import times_delivered

LENGTHS = [5, 1, 9, 3, 7, 2, 40, 4, 6, 10, 31, 1] * 12


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mesh")
    rows = random_rows(np.asarray(LENGTHS), vocabulary_size=1000)
    shards = write_rows(folder / "shards", {"train": rows}, 1000)
    result = warm.run([PROGRAMS / "mesh_ranks.py", shards, folder])
    assert result.returncode == 0, result.stderr
    made: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return made


def test_context_parallel_ranks_receive_the_same_rows(found: dict[str, Any]) -> None:
    first, peer, second, its_peer = found["whole"]
    assert (first, second) == (peer, its_peer)
    assert times_delivered(chain(*first, *second), np.asarray(LENGTHS)) == {1}


def test_mesh_resumes_on_another_mesh_without_loss(found: dict[str, Any]) -> None:
    assert all(state == found["states"][0] for state in found["states"])
    of_ranks = [*found["first"][::2], *found["rest"]]
    assert all(map(len, of_ranks))
    delivered = chain.from_iterable(chain.from_iterable(of_ranks))
    assert times_delivered(delivered, np.asarray(LENGTHS)) == {1}


def test_losses_of_sequence_slices_equal_those_of_one_process(found: dict[str, Any]) -> None:
    assert len(found["alone"]) == 4
    for losses in found["losses"]:
        assert losses == pytest.approx(found["alone"], rel=1e-6)  # the divisor is float32
