"""A mixture keeps its proportions, whatever the sizes, weights and policy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data_sets import VOCABULARY_SIZE, random_rows, rows_of_ids, write_rows

from tokenfeed import ShardLoader, Stage
from tokenfeed.pipeline.errors import ConfigError, ManifestError, ResumeError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.schema import task_columns
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.plan import Plan
from tokenfeed.pipeline.planning.policies import Padded
from tokenfeed.pipeline.planning.schedule import Exhausted
from tokenfeed.pipeline.windows.reader import WindowReader


def write(folder: Path, **settings: Any) -> Path:
    settings = {"vocabulary_size": VOCABULARY_SIZE, "split": "train", "rows": 3} | settings
    task, lengths = settings.pop("task", "lm"), np.full(settings.pop("rows"), 5)
    columns = task_columns(task, pairs=settings.pop("pairs", False))
    rows = random_rows(lengths, task, pairs=len(columns) > len(task_columns(task)))
    splits = {settings.pop("split"): rows}
    return write_rows(folder, splits, task=task, columns=columns, **settings)


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        (
            {},
            {"tokenizer": b"another"},
            "one tokenizer.*--tokenizer .*/left/tokenizer` on",
        ),
        ({}, {"vocabulary_size": 1001}, "one vocabulary size.*1000.*1001"),
        ({}, {"task": "classify"}, "one task.*lm.*classify"),
        ({}, {"pairs": True}, r"one columns.*\[\].*token_type_ids"),
        (
            {"task": "tag", "label_names": ("a", "b")},
            {"task": "tag", "label_names": ("b", "a")},
            "one label names.*'a', 'b'.*'b', 'a'",
        ),
    ],
)
def test_sources_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, first: dict[str, Any], other: dict[str, Any], message: str
) -> None:
    left, right = write(tmp_path / "left", **first), write(tmp_path / "right", **other)
    with pytest.raises(ConfigError, match=message) as error:
        open_splits({left: 1, right: 1}, "train")
    assert str(left) in str(error.value)
    assert str(right) in str(error.value)
    assert len(open_splits({left: 1}, "train")) == 1


def test_a_source_without_rows_is_refused_by_name(tmp_path: Path) -> None:
    full, empty = write(tmp_path / "full"), write(tmp_path / "empty", rows=0)
    other = write(tmp_path / "other", split="validation")
    with pytest.raises(ConfigError, match=r"empty: the split `train` holds no rows"):
        open_splits({full: 1, empty: 1}, "train")
    with pytest.raises(ManifestError, match="nowhere"):
        open_splits({full: 1, tmp_path / "nowhere": 1}, "train")
    with pytest.raises(ManifestError, match=r"other.*`train`"):
        open_splits({full: 1, other: 1}, "train")


def test_record_batches_of_a_mixture_are_read_from_their_own_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 20)
    rows = [random_rows(np.full(count, 5)) for count in (7, 9, 30)]
    folders = [
        write_rows(tmp_path / f"{n}", {"train": part}, VOCABULARY_SIZE, num_shards=2)
        for n, part in enumerate(rows)
    ]
    sources = open_splits(folders, "train")
    assert [source.rows for source in sources] == [7, 9, 30]
    reader = WindowReader(sources)
    order = np.random.default_rng(0).permutation(sum(source.batches for source in sources))
    window = reader.read(order)
    assert sorted(window.numbers.tolist()) == list(range(46))
    ids = np.concatenate([part.ids.reshape(-1, 5) for part in rows])
    assert np.array_equal(window.rows.ids.reshape(-1, 5), ids[window.numbers])


def test_a_plan_knows_the_tokens_of_sources_that_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 10)
    folders = [write(tmp_path / "small", rows=2), write(tmp_path / "large", rows=6)]

    def tokens(exhausted: Exhausted) -> tuple[int | None, ...]:
        mixture = Mixture({folders[0]: 2, folders[1]: 3}, exhausted)
        plan = Plan.from_splits(
            open_splits(folders, "train"),
            mixture,
            Padded(100),
            split="train",
            micro_batches_per_step=1,
            window_tokens=None,
            seed=0,
            shuffle=True,
        )
        return plan.epoch_tokens

    assert tokens("continue") == (10, 30)
    assert tokens("repeat") == (20, 30)
    assert tokens("stop") == (10, None)


def test_sources_of_equal_content_are_refused(tmp_path: Path) -> None:
    """A plan knows a source by its content, so `skip` of one would not reach the other."""
    folders = [write(tmp_path / name) for name in ("a", "copy")]
    with pytest.raises(ConfigError, match=r"copy have the same content: use one of them"):
        ShardLoader(Mixture({str(each): 1 for each in folders}), batching=Padded(64), num_workers=0)


def test_any_seed_is_saved_with_stages(tmp_path: Path) -> None:
    stages = [Stage({str(write(tmp_path / "a")): 1})]
    options: dict[str, Any] = {"batching": Padded(64), "num_workers": 0, "seed": 2**64}
    state = json.loads(json.dumps(ShardLoader(stages, **options).state_dict()))
    ShardLoader(stages, **options).load_state_dict(state)


def test_mixture_of_many_data_sets_has_a_small_state(tmp_path: Path) -> None:
    """With "continue", each of 110 data sets ends at a place of its own."""
    folders = [
        write_rows(
            tmp_path / str(number),
            {"train": rows_of_ids(np.full(number + 1, number), np.ones(number + 1), 1000)},
            1000,
        )
        for number in range(110)
    ]
    weights = {str(folder): 1.0 for folder in folders}

    def loader(weights: dict[str, float]) -> ShardLoader:
        mixture = Mixture(weights, exhausted="continue")
        return ShardLoader(mixture, batching=Padded(64), num_workers=0, window_tokens=400)

    first = loader(weights)
    batches = iter(first)
    next(batches)
    state = json.dumps(first.state_dict())
    assert len(state) < 10_000
    second = loader(weights)
    second.load_state_dict(json.loads(state))
    rest = [batch.rows.tolist() for batch in batches]
    assert [batch.rows.tolist() for batch in second] == rest
    with pytest.raises(ResumeError, match="cannot resume: the state was saved with weights="):
        loader(weights | {str(folders[0]): 2.0}).load_state_dict(json.loads(state))
