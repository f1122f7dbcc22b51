"""A begin token stands before every piece of a packed batch, and changes nothing else."""

from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data_sets import VOCABULARY_SIZE, random_rows, write_rows
from support.delivery import open_loader, spans

from tokenfeed import Batch, Packed
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.schema import IGNORED, Column, task_columns
from tokenfeed.pipeline.planning.policies import describe, policy_of

TOKEN = 7
LENGTHS = np.random.default_rng(0).integers(1, 90, 150)


def rows_of(task: str) -> Rows:
    rows = random_rows(LENGTHS, "lm" if task == "chat" else task, vocabulary_size=VOCABULARY_SIZE)  # type: ignore[arg-type]
    rows.per_token["advantage"] = np.arange(1, len(rows.ids) + 1, dtype=np.float32)
    if task == "chat":
        kinds = np.random.default_rng(1).integers(0, 8, len(rows.ids))
        rows.per_token["kinds"] = kinds.astype(np.uint8)
    return rows


def columns_of(task: str) -> tuple[Any, ...]:
    return (*task_columns(task), Column(name="advantage", dtype="float32", per="token"))  # type: ignore[arg-type]


def label_of(rows: Rows, task: str, row: int, token: int) -> int:
    """The label of a token of a row that has a token before it."""
    at = int(LENGTHS[:row].sum()) + token
    if task == "tag":
        return int(rows.per_token["labels"][at])
    is_target = {
        "lm": True,
        "complete": task == "complete" and token >= rows.per_row["prompt_length"][row],
        "chat": task == "chat" and bool(rows.per_token["kinds"][at] & 4),
    }[task]
    return int(rows.ids[at]) if is_target else IGNORED


def check(batch: Batch, rows: Rows, task: str) -> None:
    """Compare a batch with its rows, token by token."""
    ids, labels = batch["input_ids"].flatten().tolist(), batch["labels"].flatten().tolist()
    kept, positions = batch["advantage"].flatten().tolist(), batch["position_ids"].flatten()
    ends = batch.cu_seqlens.tolist()
    pieces = iter(spans(batch))
    length = batch["input_ids"].shape[1]
    assert (batch["input_ids"][:, 0][batch.lengths > 0] == TOKEN).all()
    for begin, end in pairwise(ends):
        line, column = divmod(begin, length)
        if column >= batch.lengths[line]:
            continue  # padding
        row, start, count = next(pieces)
        assert end - begin == count + 1
        assert positions[begin:end].tolist() == list(range(count + 1))
        assert (ids[begin], labels[begin], kept[begin]) == (TOKEN, IGNORED, 0)
        first = int(LENGTHS[:row].sum()) + start
        assert ids[begin + 1 : end] == rows.ids[first : first + count].tolist()
        assert kept[begin + 1 : end] == rows.per_token["advantage"][first : first + count].tolist()
        if not batch.is_filler:
            expected = [label_of(rows, task, row, start + nth) for nth in range(count)]
            assert labels[begin + 1 : end] == expected
    assert next(pieces, None) is None
    if not batch.is_filler:
        assert batch.num_targets == sum(label != IGNORED for label in labels)
        assert batch.num_tokens == batch.piece_lengths.sum() + len(batch.rows)


@pytest.mark.parametrize("task", ["lm", "tag", "complete", "chat"])
@pytest.mark.parametrize(
    ("order", "batching"),
    [
        ("shuffled", Packed(64, 4, begin_token=TOKEN)),
        ("file", Packed(33, 3, long_rows="truncate", fill=True, begin_token=TOKEN)),
    ],
    ids=str,
)
def test_every_piece_begins_with_the_token(
    tmp_path: Path, task: str, order: str, batching: Packed
) -> None:
    rows = rows_of(task)
    folder = write_rows(
        tmp_path / "data",
        {"train": rows},
        VOCABULARY_SIZE,
        task=task,  # type: ignore[arg-type]
        columns=columns_of(task),
    )
    options: dict[str, Any] = {"order": order, "world_size": 2, "micro_batches_per_step": 3}
    delivered = []
    for rank in range(2):
        for batch in open_loader(folder, batching, rank=rank, **options):
            check(batch, rows, task)
            delivered += [] if batch.is_filler else spans(batch)
    longest = batching.sequence_length - 1
    limit = longest if batching.long_rows == "truncate" else LENGTHS.max()
    assert sum(count for _, _, count in delivered) == LENGTHS.clip(max=limit).sum()
    assert max(count for _, _, count in delivered) == longest


def test_state_with_a_begin_token_resumes_and_is_told_apart(folder: Path) -> None:
    batching = Packed(64, 4, begin_token=TOKEN)
    loader = open_loader(folder, batching)
    list(islice(loader, 5))
    state, rest = loader.state_dict(), [spans(batch) for batch in loader]
    again = open_loader(folder, batching)
    again.load_state_dict(state)
    assert [spans(batch) for batch in again] == rest
    assert policy_of(describe(batching)) == batching
    for other in (Packed(64, 4), Packed(64, 4, begin_token=TOKEN + 1)):
        with pytest.raises(Exception, match="saved with batching="):
            open_loader(folder, other).load_state_dict(state)
    assert "begin_token" not in repr(Packed(64, 4))


def test_origins_do_not_count_the_token(folder: Path) -> None:
    loader = open_loader(folder, Packed(64, 4, begin_token=TOKEN))
    batch = next(iter(loader))
    sizes = [stop - start for _, _, start, stop, *_ in loader.explain(batch)]
    assert sizes == batch.piece_lengths.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"begin_token": -1}, "`begin_token`=-1: expected"),
        ({"begin_token": "<bos>"}, "`begin_token`='<bos>': expected"),
        ({"begin_token": 7, "split": True}, "`begin_token`=7 cannot be added with `split`=True"),
        ({"begin_token": 7, "long_rows": "crop"}, "cannot be added with `long_rows`='crop'"),
        ({"begin_token": 7, "sequence_length": 1}, "leaves no room in `sequence_length`=1"),
        ({"begin_token": 10**6}, "`begin_token`=1000000: the vocabulary has only "),
    ],
    ids=str,
)
def test_begin_token_that_cannot_be_is_refused(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_loader(folder, Packed(**{"sequence_length": 64, "batch_size": 4} | settings))
