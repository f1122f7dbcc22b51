"""What a run finds out about its input before it encodes anything."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.pretokenizing import make
from tokenizers import Tokenizer

from tokenfeed import ShardLoader
from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.planning.policies import Fixed
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units
from tokenfeed.tools.encoding.labels import CountLabels, find_labels
from tokenfeed.tools.encoding.tasks.classify import ClassifyEncoder
from tokenfeed.tools.pretokenizing.inputs import find_inputs
from tokenfeed.tools.pretokenizing.options import Options


def write_rows(path: Path, count: int, **row: object) -> None:
    path.write_text("".join(json.dumps(row | {"id": number}) + "\n" for number in range(count)))


@pytest.mark.parametrize("is_trained", [True, False])
def test_wrong_field_name_stops_after_10_000_records(
    tmp_path: Path, tokenizer: Path, is_trained: bool
) -> None:
    write_rows(tmp_path / "a.jsonl", 100_000, content="words")
    with pytest.raises(CorpusError) as caught:
        make(tmp_path / "a.jsonl", tmp_path / "out", None if is_trained else tokenizer)
    said = str(caught.value)
    assert said.startswith("no usable document: the first ")
    assert "a.jsonl, record 0: no field `text`; it has: content, id." in said
    assert said.endswith("Name the field: `--field text=NAME`.")
    assert int(said.split()[5].replace(",", "")) < 30_000
    assert not (tmp_path / "out").exists()


RECORDS: dict[str, dict[str, Any]] = {
    "lm": {"text": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "chat of pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "chat of pairs without a prompt": {"chosen": "b", "rejected": "c"},
    "complete": {"prompt": "a", "completion": "b"},
    "tag": {"tokens": ["a"], "tags": ["b"]},
    "tag --field tags=ner_tags": {"tokens": ["a"], "ner_tags": [1]},
    "tag --field tokens=words": {"words": ["a"], "tags": ["b"]},
    "ids": {"input_ids": [1]},
    "classify": {"text": "a", "label": 1},
    "score": {"text": "a", "score": 0.5},
}
"""Records that need a task, by the value of `--task`."""


WRONG = [
    (task, needed)
    for task in ("lm", "complete", "chat", "classify", "score", "tag", "ids")
    for needed in RECORDS
    if needed.partition(" of ")[0] != task
    and (task, needed) not in (("lm", "classify"), ("lm", "score"), ("chat", "complete"))
]
"""Tasks that cannot read such records."""


@pytest.mark.parametrize(("task", "needed"), WRONG)
def test_records_of_another_task_name_its_option(
    tmp_path: Path, tokenizer: Path, task: str, needed: str
) -> None:
    row = RECORDS[needed]
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 3)
    options: dict[str, Any] = {"task": task}
    if task == "chat":
        template = options["chat_template"] = str(tmp_path / "chat.jinja")
        Path(template).write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    names = "` and `".join(row)
    words = rf"Records with `{names}` need `--task {needed.partition(' of ')[0]}`\.$"
    if needed == "lm":
        own = {"classify": "label", "score": "score"}.get(task)
        words = rf"Name the field: `--field {own}=NAME`\.$" if own else "`text` alone .*--task lm`"
    for given in (tokenizer, None) if task not in ("chat", "ids") else (tokenizer,):
        with pytest.raises(CorpusError, match=words):  # None: before a tokenizer is trained
            make(tmp_path / "a.jsonl", tmp_path / "out", given, **options)


def test_named_field_that_is_missing_is_named_even_if_another_task_fits(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_rows(tmp_path / "a.jsonl", 3, text="a", label=1)
    with pytest.raises(CorpusError, match=r"no field `x`.* Name the field: `--field text=NAME`\.$"):
        make(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, field=("text=x",))


def test_a_task_that_reads_the_fields_of_the_records_is_not_told_of_another_one(
    tmp_path: Path, tokenizer: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    write_rows(tmp_path / "a.jsonl", 3, prompt="a", completion="b")
    with pytest.raises(CorpusError, match=r"Name the fields: `--field messages=NAME`, "):
        make(
            tmp_path / "a.jsonl",
            tmp_path / "out",
            tokenizer,
            task="chat",
            field=("messages=m",),
            chat_template=str(template),
        )


def test_one_file_without_the_field_does_not_stop_the_run(tmp_path: Path, tokenizer: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_rows(corpus / "a.jsonl", 20_000, content="words")
    write_rows(corpus / "b.jsonl", 3, text="words")
    made = make(corpus, tmp_path / "out", tokenizer, shard_size="8MB", validation=0)
    assert (made.documents, made.rejected) == (3, 20_000)


def in_validation(folder: Path, tokenizer: Path, texts: list[str], *, is_table: bool) -> set[str]:
    """Return the texts of the split validation, made with the default share."""
    corpus, out = folder / "corpus", folder / "out"
    corpus.mkdir(parents=True)
    if is_table:
        table = pa.table({"text": texts, "other": range(len(texts))})
        pq.write_table(table, corpus / "a.parquet", row_group_size=100)
    else:
        for part in range(3):  # several files, and a text for some
            rows = texts[part::3]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in rows[1:])
            (corpus / f"{part}.jsonl").write_text(lines)
            (corpus / f"{part}.txt").write_text(rows[0])
    make(corpus, out, tokenizer, workers=1)
    decode = Tokenizer.from_file(str(tokenizer)).decode
    if "validation" not in Manifest.read(out).splits:
        return set()
    with ShardLoader(out, split="validation", batching=Fixed(1), num_workers=0) as loader:
        return {decode(row["input_ids"][0].tolist()) for row in loader}


def test_default_validation_of_few_records_is_about_20_rows(
    tmp_path: Path, tokenizer: Path
) -> None:
    texts = [f"text number {number}" for number in range(3000)]
    before: set[str] = set()
    for count, least, most in ((60, 1, 14), (300, 8, 36), (1000, 8, 36), (3000, 14, 50)):
        found = in_validation(tmp_path / f"{count}", tokenizer, texts[:count], is_table=False)
        other = texts[:count][::-1]
        again = in_validation(tmp_path / f"{count} again", tokenizer, other, is_table=True)
        assert found == again  # in another order and format
        assert least <= len(found) <= most
        earlier = {text for text in found if int(text.split()[-1]) < len(before)}
        assert earlier <= before  # no row of train became one of validation
        before = found


def test_summary_says_that_validation_is_missing_or_small(tmp_path: Path, tokenizer: Path) -> None:
    write_rows(tmp_path / "a.jsonl", 5, text="some words")
    said = make(tmp_path / "a.jsonl", tmp_path / "none", tokenizer).facts()["validation"]
    assert said.startswith("none, of 5 rows.")
    assert "--validation 0.2" in said
    for path in tmp_path.glob("a.*"):
        path.write_text("".join(json.dumps({"text": f"w{n}"}) + "\n" for n in range(80)))
    small = make(tmp_path / "a.jsonl", tmp_path / "small", tokenizer)
    rows = small.splits["validation"]
    assert small.facts()["validation"].startswith(f"only {rows} rows, ")
    silent = make(tmp_path / "a.jsonl", tmp_path / "zero", tokenizer, validation=0.0)
    large = make(tmp_path / "a.jsonl", tmp_path / "half", tokenizer, validation=0.5)
    assert silent.facts()["validation"] == large.facts()["validation"] == ""


def test_default_validation_of_labelled_rows_is_a_tenth(tmp_path: Path) -> None:
    row = json.dumps({"text": "words", "label": "one"}) + "\n"
    for name in ("train", "test", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(100 * row)

    def part(*names: str, split: tuple[str, ...] = ()) -> float | None:
        paths = *(str(tmp_path / f"{name}.jsonl") for name in names), str(tmp_path / "out")
        return find_inputs(Options(paths=paths, task="classify", split=split)).validation

    assert part("train") == part("train", "test", split=("test=test.jsonl",)) == 0.1
    assert part("train", "validation", split=("validation=validation.jsonl",)) == 0
    with open(tmp_path / "train.jsonl", "ab") as file:
        os.truncate(file.fileno(), 400_000_000)
    assert part("train") == 0.1


def test_labels_counted_by_units_in_any_order_are_the_same(tmp_path: Path) -> None:
    rows = [{"text": "words " * 9, "label": f"k{number // 40}"} for number in range(400)]
    rows += [{"text": None, "label": "nowhere usable"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = find_corpus((str(tmp_path / "a.jsonl"),), out=None, field="text")
    units = cut_units(found.sources, 3_000)
    assert len(units) > 5
    task = ClassifyEncoder()
    work = CountLabels(task)
    plain = find_labels(units, task, map(work.of_unit, units))
    assert plain.names == tuple(f"k{number}" for number in range(10))
    shuffled = map(work.of_unit, random.Random(0).sample(units, len(units)))
    assert plain == find_labels(units, task, shuffled)
