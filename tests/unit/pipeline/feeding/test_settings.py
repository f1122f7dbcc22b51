"""A setting of the wrong type ends in one line at the door, or is taken for what it plainly is."""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed
from support.delivery import (
    MakeDataset,
    open_dataset,
    open_loader,
    spans,
)

from tokenfeed import Fixed, Mixture, Packed, Padded, ShardDataset, ShardLoader
from tokenfeed.pipeline.errors import ConfigError


def refusal(make: Callable[[], object]) -> str:
    """The one line that a setting is refused with."""
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


NO_NUMBERS: list[Any] = [2.0, 1.5, "2", True, None, np.float32(2), np.bool_(True), [2], b"2", 0, -1]
NO_NUMBERS += [math.nan, math.inf, np.arange(300).reshape(3, 100), 10**30]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("max_tokens", lambda value: Padded(value)),
        ("multiple_of", lambda value: Padded(100, value)),
        ("batch_size", lambda value: Fixed(value)),
        ("multiple_of", lambda value: Fixed(4, multiple_of=value)),
        ("sequence_length", lambda value: Packed(value, 4)),
        ("batch_size", lambda value: Packed(64, value)),
    ],
)
def test_sizes_of_a_policy_are_whole_numbers(name: str, make: Callable[[Any], object]) -> None:
    for value in NO_NUMBERS:
        assert refusal(lambda value=value: make(value)).startswith(f"`{name}`=")


def test_words_and_switches_of_a_policy_are_those_there_are() -> None:
    bad: Any
    assert refusal(lambda: Padded(64, long_rows="crop")).startswith("`long_rows`='crop'")
    for bad in ("keep", None, True, ["cut"]):
        assert refusal(lambda bad=bad: Padded(64, long_rows=bad)).startswith("`long_rows`=")
        assert refusal(lambda bad=bad: Packed(64, 1, long_rows=bad)).startswith("`long_rows`=")
    for bad in ("no", 0, 1, None):
        assert refusal(lambda bad=bad: Packed(64, 1, split=bad)).startswith("`split`=")
        for policy in (Packed, Padded, Fixed):
            sizes = (64, 1) if policy is Packed else (64,)
            assert refusal(lambda p=policy, s=sizes, b=bad: p(*s, last=b)).startswith("`last`=")


class Wider(Padded):
    """A policy of another project, which a saved state could not name."""


WRONG: dict[str, list[Any]] = {
    "micro_batches_per_step": [2.0, "2", True, 0, -1, 10**30, math.nan],
    "window_tokens": [0, -5, math.nan, 2e6, "4M", True],
    "epochs": [1.5, "2", True, 0, -1, math.inf],
    "seed": [1.5, "x", None, True, math.nan],
    "shuffle": ["no", 0, 1, None],
    "split": [3, None, ["train"], b"train"],
    "path": [None, 3, {"a": 1}],
    "rank": [1.0, "0", True, -1, 2],
    "world_size": [2.0, "2", True, 0, -1],
    "num_workers": [1.0, "1", True, -1, None, 100_000],
    "timeout": ["5", True, 0, -1, math.nan, None],
    "num_streams": [1.0, "1", True, 0, -1],
    "cache_bytes": ["10GB", 1.5, True, -1],
    "ignore_index": [1.0, "0", True, None, 10**30],
    "device": [None, 1.5, "gpu", "meta"],
    "batching": [None, "padded", Wider(100)],
}


def test_a_loader_refuses_a_setting_of_the_wrong_type_by_its_name(folder: Path) -> None:
    options = {"batching": Padded(700), "num_workers": 0, "rank": 0, "world_size": 2}
    for name, values in WRONG.items():
        for value in values:
            given = {"path": folder} | options | {name: value}
            assert refusal(lambda given=given: ShardLoader(**given)).startswith(f"`{name}`=")


def test_an_epoch_of_a_dataset_is_a_whole_number(folder: Path) -> None:
    dataset = ShardDataset(folder, Padded(700))
    bad: Any
    for bad in (1.5, "1", -1, None):
        assert refusal(lambda bad=bad: setattr(dataset, "epoch", bad)).startswith("`epoch`=")
    dataset.epoch = np.int64(3)  # type: ignore[assignment]
    assert dataset.epoch == 3


def test_numbers_of_numpy_are_the_numbers_they_are(folder: Path) -> None:
    plain = open_loader(
        folder, Padded(700), seed=3, micro_batches_per_step=2, epochs=1, window_tokens=9000
    )
    numpy = open_loader(
        folder,
        Padded(np.int64(700), np.uint8(1)),  # type: ignore[arg-type]
        seed=np.int64(3),
        micro_batches_per_step=np.int32(2),
        epochs=np.int64(1),
        window_tokens=np.int64(9000),
        shuffle=np.bool_(True),
        rank=np.int64(0),
        world_size=np.int64(1),
        num_workers=np.int64(0),
        timeout=np.float32(9),
        split=np.str_("train"),
    )
    assert json.loads(json.dumps(numpy.state_dict())) == plain.state_dict()
    assert [spans(batch) for batch in numpy] == [spans(batch) for batch in plain]
    assert json.dumps(numpy.state_dict()) == json.dumps(plain.state_dict())
    plain.load_state_dict(numpy.state_dict())


def test_seeds_of_any_size_give_an_order(folder: Path) -> None:
    for seed in (-1, 2**64 - 1, 10**30, np.uint64(2**64 - 1)):
        loader = open_loader(folder, seed=seed)
        assert len(list(loader)) > 0
        assert json.loads(json.dumps(loader.state_dict()))["plan"]["seed"] == int(seed)


def test_weights_of_any_type_of_number_are_saved_as_they_read(
    folder: Path, make_dataset: MakeDataset
) -> None:
    other = make_dataset([50] * 100)
    plans = []
    for first, second in [
        (0.7, 0.3),
        (np.float32(0.7), np.float64(0.3)),
        (Fraction(7, 10), Fraction(3, 10)),
    ]:
        mixture = Mixture({folder: first, other: second})  # type: ignore[dict-item]
        loader = ShardLoader(mixture, batching=Padded(700), num_workers=0)
        plans.append(json.loads(json.dumps(loader.state_dict()))["plan"])
    assert plans[0] == plans[1] == plans[2]


def test_a_weight_is_a_number_above_nothing() -> None:
    bad: Any
    for bad in (0, -1, math.nan, math.inf, True, "0.5", None, 1j, [1], 10**400, Fraction(0)):
        message = refusal(lambda bad=bad: Mixture({"code/": bad, "prose/": 1}))
        assert "weight of code/ is" in message


def test_absurd_proportions_are_refused() -> None:
    for weight in (1e-30, 1e300, 1e-320, 1e10):
        message = refusal(lambda weight=weight: Mixture({"code/": weight, "prose/": 1.0}))
        assert "no weight may be more than 1,000,000,000 times another" in message


@pytest.mark.slow
def test_the_largest_proportions_give_an_epoch(folder: Path, make_dataset: MakeDataset) -> None:
    mixture = Mixture({folder: 1e9, make_dataset([50] * 100): 1})
    loader = ShardLoader(mixture, batching=Padded(700), num_workers=0)
    next(iter(loader))
    json.dumps(loader.state_dict())


def test_weights_are_a_mapping_of_folders() -> None:
    bad: Any
    for bad in ([("code/", 1)], "code/", None, {3: 1.0}, {None: 1.0}):
        assert refusal(lambda bad=bad: Mixture(bad))


def test_one_folder_under_two_spellings_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    for other in (folder.name, f"./{folder.name}", folder / ".." / folder.name, str(folder)):
        mixture = Mixture({folder: 1.0, other: 1.0})
        message = refusal(lambda mixture=mixture: ShardLoader(mixture, batching=Padded(700)))
        assert "the same folder is named twice" in message


LAUNCHERS = {
    "WORLD_SIZE": "RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_rank_of_any_launcher_is_read(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (*LAUNCHERS, *LAUNCHERS.values()):
        monkeypatch.delenv(each, raising=False)
    message = refusal(lambda: open_loader(folder, rank="launcher"))
    assert message.startswith("`rank`='launcher': the environment has no rank and world size (RANK")
    monkeypatch.setenv(name, "3")
    assert "has no rank" in refusal(lambda: open_loader(folder, rank="launcher"))
    monkeypatch.setenv(LAUNCHERS[name], "2")
    found = open_loader(folder, rank="launcher")
    expected = open_loader(folder, rank=2, world_size=3)
    assert (found.rank, found.world_size) == (2, 3)
    assert spans(next(iter(found))) == spans(next(iter(expected)))
    message = refusal(lambda: open_loader(folder, rank="launcher", world_size=3))
    assert message.startswith("`world_size`=3: with `rank`='launcher'")
    monkeypatch.setenv(LAUNCHERS[name], "3")
    assert refusal(lambda: open_loader(folder, rank="launcher")).startswith("`rank`=3")


@pytest.mark.parametrize(
    "name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"]
)
def test_loader_before_the_group_of_any_launcher_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "4")
    message = refusal(lambda: ShardLoader(folder, batching=Padded(700)))
    assert message.startswith(
        f"{name}=4: 4 processes were started, but torch.distributed is not initialized"
    )
    ShardLoader(folder, batching=Padded(700), rank=0, world_size=1)


def test_loader_and_dataset_take_the_rank_of_torch_distributed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    loader = open_loader(folder, Padded(700))
    assert (loader.rank, loader.world_size) == (1, 2)
    shares = open_dataset(folder, Padded(700))
    assert [spans(b) for share in shares for b in share] == [spans(b) for b in loader]


@pytest.mark.parametrize("name", ["rank", "world_size"])
def test_rank_without_world_size_is_rejected(folder: Path, name: str) -> None:
    options: dict[str, Any] = {name: 1}
    message = refusal(lambda: ShardLoader(folder, batching=Padded(700), **options))
    assert message.startswith(f"`{name}`=1: pass both `rank` and `world_size`")
