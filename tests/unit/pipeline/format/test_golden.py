"""The promises about data: format version 1 stays readable, and only a new plan version changes the
order of delivery.

`golden/format1` was written by the last version before the promise (1fccd40). `delivered.json` has
what its loader delivered by version 2 of the plan, `plan5.json` what the first version 5 delivered.
None of them is ever made again.
"""

import json
from typing import Any

import pytest
from support import FORMAT_1

from tokenfeed import Fixed, Packed, Padded, ShardLoader
from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.policies import Batching

DELIVERED = json.loads((FORMAT_1 / "plan5.json").read_text())
PLAN_2 = json.loads((FORMAT_1 / "delivered.json").read_text())
POLICIES: dict[str, Batching] = {"padded": Padded(64), "fixed": Fixed(1), "packed": Packed(32, 2)}
CASES = [(task, policy) for task in sorted(DELIVERED) for policy in DELIVERED[task]]


def loader_of(task: str, policy: str) -> ShardLoader:
    batching = POLICIES[policy]
    return ShardLoader(FORMAT_1 / task, batching=batching, seed=5, epochs=2, num_workers=0)


def as_lists(loader: ShardLoader, names: list[str]) -> list[dict[str, Any]]:
    return [{name: batch[name].tolist() for name in names} for batch in loader]


@pytest.mark.parametrize(("task", "policy"), CASES)
def test_the_same_batches_come_in_the_same_order(task: str, policy: str) -> None:
    expected, loader = DELIVERED[task][policy], loader_of(task, policy)
    assert as_lists(loader, list(expected["batches"][0])) == expected["batches"]
    assert loader.state_dict()["digest"] == expected["last"]["digest"]


def test_a_state_of_another_plan_is_refused_by_name() -> None:
    task, policy = CASES[0]
    loader = loader_of(task, policy)
    with pytest.raises(ResumeError, match="version 2, this is version 5 of the plan"):
        loader.load_state_dict(PLAN_2[task][policy]["state"])
