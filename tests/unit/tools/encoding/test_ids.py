"""`--task ids`: rows of token ids are copied exactly, and wrong ids are rejected by record."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather, parquet
from support.data_sets import corpus_rows
from support.token_rows import save_words
from tokenizers import Tokenizer

from tokenfeed import Fixed, Mixture, ShardLoader, pretokenize
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.kinds import BEGINS, Kind, kinds_of
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.tools.data_sets.verify import find_problems

SIZE = 700
ROWS = [[random.Random(row).randrange(SIZE) for _ in range(row % 40)] for row in range(300)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", SIZE)


def rows_of(folder: Path) -> dict[int, list[int]]:
    return {record: [*ids] for _, record, ids in corpus_rows(folder)}


def sources(folder: Path) -> dict[str, Any]:
    """The same rows in every form."""
    import polars  # a fifth of a second

    lines = "".join(json.dumps({"input_ids": row, "other": "x"}) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(lines)
    table = pa.table({"input_ids": pa.array(ROWS, pa.list_(pa.uint16()))})
    parquet.write_table(table, folder / "rows.parquet", row_group_size=70)
    feather.write_feather(table, folder / "rows.arrow", compression="zstd")
    return {
        "lines": str(folder / "rows.jsonl"),
        "parquet": str(folder / "rows.parquet"),
        "arrow": str(folder / "rows.arrow"),
        "list": [{"input_ids": row} for row in ROWS],
        "polars": polars.DataFrame({"input_ids": ROWS}),
    }


def test_ids_are_copied_from_every_source(tmp_path: Path, tokenizer: Path) -> None:
    expected = {number: row for number, row in enumerate(ROWS) if row}
    for name, source in sources(tmp_path).items():
        out = tmp_path / f"out-{name}"
        made = pretokenize(source, out, task="ids", tokenizer=tokenizer)
        assert rows_of(out) == expected
        assert (made.manifest.task, made.summary.empty) == ("lm", len(ROWS) - len(expected))
        assert list(find_problems(open_store(out), made.manifest)) == []


def test_wrong_ids_are_rejected_with_their_record(tmp_path: Path, tokenizer: Path) -> None:
    values = [[1, -2], [SIZE], [1, None], "abc", [1.5], [[1]], None, [True], [2**64], [2**63], [7]]
    rows: list[dict[str, Any]] = [{"input_ids": value} for value in values]
    made = pretokenize([*rows, {}], tmp_path / "out", task="ids", tokenizer=tokenizer)
    assert [reject["record"] for reject in made.rejects] == [*range(10), 11]
    assert all("input_ids" in reject["reason"] for reject in made.rejects)
    assert f"has the id {SIZE}, but the tokenizer has {SIZE} ids" in made.rejects[1]["reason"]
    assert rows_of(tmp_path / "out") == {10: [7]}


def test_wrong_ids_of_a_table_are_rejected_with_their_record(
    tmp_path: Path, tokenizer: Path
) -> None:
    values = [[1, None], [3, 4], None, [-1], [SIZE], [], [5]]
    parquet.write_table(
        pa.table({"mine": pa.array(values, pa.large_list(pa.int32()))}), tmp_path / "a.parquet"
    )
    field = {"input_ids": "mine"}
    made = pretokenize(
        tmp_path / "a.parquet", tmp_path / "out", task="ids", tokenizer=tokenizer, field=field
    )
    assert [reject["record"] for reject in made.rejects] == [0, 2, 3, 4]
    assert rows_of(tmp_path / "out") == {1: [3, 4], 6: [5]}


def test_ids_need_the_tokenizer_that_made_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`--task ids` needs `--tokenizer`"):
        pretokenize([{"input_ids": [1]}], tmp_path / "out", task="ids")


TYPES = {
    "advantage": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "reward": st.integers(-(2**31), 2**31 - 1),
    "_Step2": st.integers(-(2**15), 2**15 - 1),
    "done": st.booleans(),
}
KEEP = {"advantage": "float32", "reward": "int32", "_Step2": "int16", "done": "int8"}


@st.composite
def records(draw: st.DrawFn) -> list[dict[str, list[Any]]]:
    """Records with a column of each type."""
    lengths = draw(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any))
    return [
        {
            "input_ids": draw(st.lists(st.integers(0, SIZE - 1), min_size=n, max_size=n)),
            **{name: draw(st.lists(kind, min_size=n, max_size=n)) for name, kind in TYPES.items()},
        }
        for n in lengths
    ]


@settings(max_examples=6)
@given(rows=records(), as_table=st.booleans())
def test_shards_have_the_kept_numbers_of_each_token(
    tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, rows: Any, as_table: bool
) -> None:
    out = tmp_path_factory.mktemp("kept") / "out"
    source = pa.Table.from_pylist(rows) if as_table else rows
    pretokenize(source, out, task="ids", tokenizer=tokenizer, keep=KEEP, validation=0)
    table = feather.read_table(out / "train/00000.arrow", memory_map=False)
    for name in ("input_ids", *TYPES):
        assert table[name].to_pylist() == [row[name] for row in rows if row["input_ids"]]


def test_kept_numbers_that_do_not_fit_reject_their_record(tmp_path: Path, tokenizer: Path) -> None:
    values: list[Any] = [[1], [1, 2, 3], [1, 300], [1, 0.5], [1, math.nan], [1, "2"], 7, None]
    rows = [{"input_ids": [5, 6], "step": value} for value in values]
    rows += [{"input_ids": [5, 6]}, {"input_ids": [5, 6], "step": [True, -128]}]
    made = pretokenize(
        rows, tmp_path / "out", task="ids", tokenizer=tokenizer, keep={"step": "int8"}
    )
    assert [reject["record"] for reject in made.rejects] == [*range(9)]
    reasons = [reject["reason"] for reject in made.rejects]
    assert all("`step`" in reason for reason in reasons)
    assert reasons[0] == "field `step` has 1 number(s) for 2 id(s)"
    assert reasons[2] == "field `step` has 300, expected int8, a whole number from -128 to 127"
    assert rows_of(tmp_path / "out") == {9: [5, 6]}


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (["rows"], "shards or batches use the name rows themselves"),
        (["reward-1"], "NAME has letters, digits and _ only"),
        ({"reward": "int64"}, "TYPE is float32, int8, int16, int32"),
        (["reward", "reward"], "needs fields of different names"),
    ],
)
def test_names_that_cannot_be_kept_are_refused(tmp_path: Path, keep: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pretokenize([], tmp_path / "out", task="ids", tokenizer=tmp_path, keep=keep)


def test_tasks_without_values_per_token_keep_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`--task lm` reads no number for each token\."):
        pretokenize([{"text": "a"}], tmp_path / "out", keep="reward")


def test_mixture_needs_one_type_of_kept_columns(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"input_ids": [1, 2], "reward": [3, 4]}]
    for dtype in ("int8", "float32"):
        out, keep = tmp_path / dtype, {"reward": dtype}
        pretokenize(rows, out, task="ids", tokenizer=tokenizer, keep=keep, validation=0)
    mixture = Mixture({tmp_path / "int8": 1.0, tmp_path / "float32": 1.0})
    with pytest.raises(ConfigError, match=r"reward \(int8\)"):
        ShardLoader(mixture, batching=Fixed(1))


masks = st.lists(st.lists(st.booleans(), max_size=30), min_size=1, max_size=12).filter(
    lambda rows: any(map(any, rows))
)


CHAT = """{% for m in messages %}{{ m.role + ' : ' }}{{ m.content }}\
{{ ' w1' if m.role == 'assistant' }} {% endfor %}\
{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"""
GENERATED = """{% for m in messages %}{{ m.role + ' : ' }}\
{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' w1' }}{% endgeneration %}\
{% else %}{{ m.content }}{% endif %} {% endfor %}"""


@pytest.mark.parametrize("template", [CHAT, GENERATED])
@settings(max_examples=3)
@given(
    chats=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(-100, 100)), min_size=2, max_size=6),
        min_size=1,
        max_size=6,
    )
)
def test_tokens_of_a_message_have_its_kept_number(
    tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, template: str, chats: Any
) -> None:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "chat.jinja").write_text(template)
    oracle = Tokenizer.from_file(str(tokenizer))
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    records, expected = [], []
    for chat in chats:
        messages, numbers = [], []
        for nth, (size, number) in enumerate(chat):
            role = ("user", "assistant")[nth % 2]
            content = " ".join(f"w{nth * 10 + word + 10}" for word in range(size))
            message = {"role": role, "content": content, "reward": number}
            if role == "user" and number % 2:
                del message["reward"]
                number = 0
            messages.append(message)
            numbers += [0, 0, *[number] * (size + (role == "assistant"))]
        records.append({"messages": messages})
        expected.append(numbers)
    made = pretokenize(
        records,
        folder / "out",
        task="chat",
        tokenizer=folder,
        chat_template=folder / "chat.jinja",
        keep={"reward": "int8"},
        validation=0,
        special_tokens_in_text="split",
    )
    assert made.rejects == []
    assert oracle.encode("w1 user").tokens == ["w1", "w0"]
    table = feather.read_table(folder / "out/train/00000.arrow", memory_map=False)
    assert table["reward"].to_pylist() == expected


def test_messages_without_a_kept_number_reject_their_record(
    tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(GENERATED)
    answers: list[dict[str, Any]] = [{}, {"reward": "1"}, {"reward": 300}, {"reward": 1}]
    made = pretokenize(
        [
            {
                "messages": [
                    {"role": "user", "content": "w5"},
                    {"role": "assistant", "content": "w6", **answer},
                ]
            }
            for answer in answers
        ],
        tmp_path / "out",
        task="chat",
        tokenizer=tokenizer,
        chat_template=tmp_path / "chat.jinja",
        keep={"reward": "int8"},
        validation=0,
    )
    assert [reject["reason"] for reject in made.rejects] == [
        "message 2 has no number in `reward`",
        "message 2 has '1' in `reward`",
        "message 2: `reward` has 300, expected int8, a whole number from -128 to 127",
    ]


@pytest.mark.parametrize("field", ["loss_mask", "labels"])
@settings(max_examples=5)
@given(rows=masks)
def test_masked_ids_have_the_kind_that_the_mask_says(
    tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, field: str, rows: list[list[bool]]
) -> None:
    out = tmp_path_factory.mktemp("masked") / "out"
    records = []
    for row, mask in enumerate(rows):
        ids = [(7 * row + place) % SIZE for place in range(len(mask))]
        labels = [i if is_target else IGNORED for i, is_target in zip(ids, mask, strict=True)]
        records.append({"input_ids": ids, "mine": labels if field == "labels" else mask})
    pretokenize(records, out, task="ids", field={field: "mine"}, tokenizer=tokenizer, validation=0)
    table = feather.read_table(out / "train/00000.arrow", memory_map=False)
    for kinds, mask in zip(table["kinds"].to_pylist(), filter(any, rows), strict=True):
        begins = [m and not before for m, before in zip(mask, [False, *mask[:-1]], strict=True)]
        assert (kinds_of(np.array(kinds, np.uint8)) == Kind.TEXT).tolist() == mask
        assert [kind >= BEGINS for kind in kinds] == begins


def test_masks_that_do_not_fit_reject_their_record(tmp_path: Path, tokenizer: Path) -> None:
    options: dict[str, Any] = {"task": "ids", "tokenizer": tokenizer, "validation": 0}
    values: list[Any] = [[1], [0, 2], [0, 0], None, [True, 0]]
    rows = [{"input_ids": [5, 6], "loss_mask": value} for value in values]
    made = pretokenize(rows, tmp_path / "a", field={"loss_mask": "loss_mask"}, **options)
    assert [reject["record"] for reject in made.rejects] == [0, 1, 2, 3]
    assert [reject["reason"] for reject in made.rejects[:3]] == [
        "field `loss_mask` has 1 number(s) for 2 id(s)",
        "field `loss_mask` has 2 for token 1, expected 0 or 1",
        "field `loss_mask` has no target: nothing to learn",
    ]
    rows = [{"input_ids": [5, 6], "labels": value} for value in ([5, 7], [-100, 6])]
    made = pretokenize(rows, tmp_path / "b", field={"labels": "labels"}, **options)
    (reject,) = made.rejects
    assert reject["reason"] == ("field `labels` has 7 for token 1, expected the id itself or -100")
    field = {"labels": "labels", "label": "label"}
    with pytest.raises(ConfigError, match="reads one of loss_mask, labels and label"):
        pretokenize(rows, tmp_path / "c", field=field, **options)


def test_ids_with_labels_give_the_shards_of_the_texts(tmp_path: Path, tokenizer: Path) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "validation": 0}
    texts = [{"text": f"w{row}", "label": f"c{row % 3}"} for row in range(60)]
    ids = [{"input_ids": [row], "label": f"c{row % 3}"} for row in range(60)]
    text_out, ids_out = tmp_path / "texts", tmp_path / "ids"
    pretokenize(texts, text_out, task="classify", **options)
    made = pretokenize(ids, ids_out, task="ids", field={"label": "label"}, **options)
    assert made.manifest.label_names == ("c0", "c1", "c2")
    for shard in made.manifest.split("train").shards:
        assert (ids_out / shard.file).read_bytes() == (text_out / shard.file).read_bytes()


def test_ids_of_a_table_beside_a_label_inside_an_object(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"input_ids": ids, "meta": {"class": "a"}} for ids in ([1, 2], [], [3])]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    pretokenize(
        tmp_path / "rows.parquet",
        tmp_path / "out",
        task="ids",
        tokenizer=tokenizer,
        field={"label": "meta.class"},
    )
    assert rows_of(tmp_path / "out") == {0: [1, 2], 2: [3]}
