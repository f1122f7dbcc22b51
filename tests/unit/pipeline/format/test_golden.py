"""The promises about data: format version 1 stays readable, and only a new plan version changes the
order of delivery.

`golden/format1` was written by the last version before the promise (1fccd40). `delivered.json` has
what its loader delivered by version 2 of the plan, `plan3.json` what the first version 3 delivered.
None of them is ever made again.
"""

import json
from typing import Any

import pytest
from support import FORMAT_1

from tokenfeed import Fixed, Manifest, Packed, Padded, ShardLoader
from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.policy import Batching

DELIVERED = json.loads((FORMAT_1 / "plan3.json").read_text())
PLAN_2 = json.loads((FORMAT_1 / "delivered.json").read_text())
POLICIES: dict[str, Batching] = {"padded": Padded(64), "fixed": Fixed(1), "packed": Packed(32, 2)}
CASES = [(task, policy) for task in sorted(DELIVERED) for policy in DELIVERED[task]]


def loader_of(task: str, policy: str) -> ShardLoader:
    batching = POLICIES[policy]
    return ShardLoader(FORMAT_1 / task, batching=batching, seed=5, epochs=2, num_workers=0)


def as_lists(loader: ShardLoader, names: list[str]) -> list[dict[str, Any]]:
    return [{name: batch[name].tolist() for name in names} for batch in loader]


@pytest.mark.parametrize("task", sorted(DELIVERED))
def test_the_manifest_is_read(task: str) -> None:
    assert Manifest.read(FORMAT_1 / task).task == task


@pytest.mark.parametrize(("task", "policy"), CASES)
def test_the_same_batches_come_in_the_same_order(task: str, policy: str) -> None:
    expected = DELIVERED[task][policy]["batches"]
    assert as_lists(loader_of(task, policy), list(expected[0])) == expected


RESUMED = [(task, policy) for task, policy in CASES if len(DELIVERED[task][policy]["batches"]) > 2]


@pytest.mark.parametrize(("task", "policy"), RESUMED)
def test_a_resumed_loader_delivers_the_same_rest(task: str, policy: str) -> None:
    expected = DELIVERED[task][policy]
    first = loader_of(task, policy)
    for _, _ in zip(range(2), first, strict=False):
        pass
    resumed = loader_of(task, policy)
    resumed.load_state_dict(first.state_dict())
    names = list(expected["batches"][0])
    assert as_lists(resumed, names) == expected["batches"][2:]
    assert resumed.state_dict()["digest"] == expected["last"]["digest"]


@pytest.mark.parametrize(("task", "policy"), RESUMED)
def test_a_state_of_another_plan_is_refused_by_name(task: str, policy: str) -> None:
    loader = loader_of(task, policy)
    with pytest.raises(ResumeError, match="version 2, this is version 3 of the plan"):
        loader.load_state_dict(PLAN_2[task][policy]["state"])
