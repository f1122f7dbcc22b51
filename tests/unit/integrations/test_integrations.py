"""The loader in other frameworks: what they get is what the loader gives, and weighs as it should.

The frameworks themselves are run by `test_recipes.py`.
"""

import contextlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.delivery import MakeDataset, open_loader
from support.simulated_clocks import SimulatedClock
from torch.utils.data import DataLoader

from tokenfeed import Fixed, Padded, StallMeter
from tokenfeed.integrations import steps as step_module
from tokenfeed.integrations.dataloader import StatefulShardLoader
from tokenfeed.integrations.steps import Step, steps
from tokenfeed.pipeline.errors import ConfigError

SETTINGS = {"micro_batches_per_step": 3, "num_workers": 0, "epochs": 2}


@pytest.fixture
def folder(make_dataset: MakeDataset) -> Path:
    return make_dataset(lengths=[5, 1, 9, 3, 7, 2, 8, 4, 6, 10, 1, 1] * 4)


def ids_of(batches: object) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in batches]  # type: ignore[attr-defined]


def test_steps_hold_the_batches_of_the_loader_and_the_state_behind_each(folder: Path) -> None:
    plain = open_loader(folder, Padded(24), **SETTINGS)
    batches, states = [], []
    for batch in plain:
        batches.append(batch)
        if batch.ends_step:
            states.append(plain.state_dict())
    made = list(steps(open_loader(folder, Padded(24), **SETTINGS)))
    assert ids_of(batch for step in made for batch in step) == ids_of(batches)
    assert [step.state for step in made] == states
    ends = [[batch.ends_step for batch in step] for step in made]
    assert ends == [[False] * (len(step) - 1) + [True] for step in made]


class _Interrupted:
    """A meter at whose mark Ctrl-C comes, after the batches of a step are taken."""

    def cause(self, name: str) -> contextlib.AbstractContextManager[object]:
        raise KeyboardInterrupt


def test_a_step_that_ctrl_c_cuts_comes_again(folder: Path) -> None:
    whole = [ids_of(step) for step in steps(open_loader(folder, Padded(24), **SETTINGS))]
    loader = open_loader(folder, Padded(24), **SETTINGS)
    begun = [ids_of(step) for step in islice(steps(loader), 3)]
    state = loader.state_dict()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(steps(loader, meter=_Interrupted()))  # type: ignore[arg-type]
        assert loader.state_dict() == state
    assert begun + [ids_of(step) for step in steps(loader)] == whole


def test_the_gradient_of_a_step_is_that_of_its_targets_at_once(folder: Path) -> None:
    weights = torch.nn.Embedding(1000, 1, dtype=torch.float64)

    def values(step: Step) -> list[torch.Tensor]:
        return [weights(batch["input_ids"])[batch["labels"] != -100] for batch in step]

    for step in steps(open_loader(folder, Padded(24), **SETTINGS)):
        weights.zero_grad()
        for value in values(step):
            (value.sum() / step.divisor).backward()
        summed = weights.weight.grad.clone()
        weights.zero_grad()
        joined = torch.cat(values(step))
        (joined.sum() / max(1, len(joined))).backward()
        torch.testing.assert_close(summed, weights.weight.grad, rtol=1e-6, atol=1e-9)


class Ddp(torch.nn.Module):
    """Says whether it would exchange gradients."""

    synchronizes = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True


class Fsdp2(torch.nn.Module):
    """The same, in the way of `fully_shard`."""

    synchronizes = True

    def set_requires_gradient_sync(self, value: bool) -> None:
        self.synchronizes = value


@pytest.mark.parametrize("model", [Ddp(), Fsdp2()], ids=["no_sync", "switch"])
def test_ranks_exchange_gradients_with_the_last_batch_only(
    model: Ddp | Fsdp2, folder: Path
) -> None:
    for step in steps(open_loader(folder, Padded(24), **SETTINGS)):
        seen = [model.synchronizes for _ in step.accumulate(model)]
        assert seen == [False] * (len(step) - 1) + [True]
        assert model.synchronizes
    for _ in step.accumulate(model):
        break  # whoever leaves early
    assert model.synchronizes
    assert list(step.accumulate(torch.nn.Linear(1, 1))) == list(step.batches)  # one rank


def test_dataloader_face_transforms_batches_and_resumes(folder: Path) -> None:
    def opened() -> StatefulShardLoader:
        loader = open_loader(folder, Padded(24), **SETTINGS)
        return StatefulShardLoader(loader, lambda batch: (batch["input_ids"], batch.targets))

    expected = [
        (batch["input_ids"].tolist(), batch.targets.tolist())
        for batch in StatefulShardLoader(open_loader(folder, Padded(24), **SETTINGS))
    ]
    first, rest = opened(), opened()
    assert isinstance(first, DataLoader)
    assert len(first) == len(expected)
    given = list(islice(first, 4))
    rest.load_state_dict(first.state_dict())
    assert [(ids.tolist(), targets.tolist()) for ids, targets in [*given, *rest]] == expected


def test_accelerate_neither_splits_nor_loses_batches(folder: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    def prepared() -> tuple[Accelerator, StatefulShardLoader]:
        accelerator = Accelerator(cpu=True)
        loader = open_loader(folder, Padded(24), rank=0, world_size=2, **SETTINGS)
        return accelerator, accelerator.prepare(StatefulShardLoader(loader))

    whole = ids_of(open_loader(folder, Padded(24), rank=0, world_size=2, **SETTINGS))
    accelerator, first = prepared()
    assert ids_of(islice(first, 4)) == whole[:4]
    accelerator.save_state(str(tmp_path))
    accelerator, rest = prepared()
    accelerator.load_state(str(tmp_path))
    assert ids_of(rest) == whole[4:]


def test_steps_divides_by_ranks_of_its_group(folder: Path, tmp_path: Path) -> None:
    """One process stands for a data-parallel group of one beside others of a larger world."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        loader = open_loader(folder, Padded(24), num_workers=0, rank=0, world_size=2)
        with pytest.raises(ConfigError, match=r"`group` of `steps` has 1 ranks, .*`world_size`=2"):
            steps(loader)
        alone = open_loader(folder, Padded(24), num_workers=0, rank=0, world_size=1)
        step = next(steps(alone, group=dist.group.WORLD))
        assert step.divisor.item() == sum(batch.num_targets for batch in step)
    finally:
        dist.destroy_process_group()


def test_steps_charge_the_sum_of_targets_to_the_meter_that_watches(
    folder: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    divisor = step_module._divisor

    def slow(*args: Any) -> torch.Tensor:
        clock.sleep(1.0)  # another rank is late
        return divisor(*args)

    monkeypatch.setattr(step_module, "_divisor", slow)
    meter = StallMeter("cpu", skipped_steps=1)
    for _ in meter.watch(steps(open_loader(folder, Padded(24), **SETTINGS))):
        meter.step()
    report = meter.report()
    assert report.causes["communication"].seconds == pytest.approx(report.steps, rel=1e-3)
    assert report.causes["data"].seconds < 0.1


def test_steps_of_ranks_without_a_group_raises(folder: Path) -> None:
    loader = open_loader(folder, Padded(24), num_workers=0, rank=0, world_size=2)
    with pytest.raises(ConfigError, match=r"`world_size`=2 ranks, .* is not running"):
        steps(loader)


@pytest.mark.parametrize("other", ["out/", DataLoader([1]), None], ids=["path", "loader", "none"])
def test_other_objects_than_a_loader_are_named(other: Any) -> None:
    for take in (steps, StatefulShardLoader):
        with pytest.raises(ConfigError, match=rf"ShardLoader, not a {type(other).__name__}\. Pass"):
            take(other)


def test_a_step_without_a_target_divides_by_one(make_dataset: MakeDataset) -> None:
    loader = open_loader(
        make_dataset(lengths=[1, 1, 1]), Fixed(1), num_workers=0, micro_batches_per_step=1
    )
    assert [step.divisor.item() for step in steps(loader)] == [1, 1, 1]
