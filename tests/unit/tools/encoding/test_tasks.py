"""Tasks: ids, types, labels and lengths are those of `tokenizers`, asked one text at a time."""

import functools
import json
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather
from support.commands import call, run
from support.corpora import WORDS, read
from tokenizers import Encoding, Tokenizer, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from tokenfeed import Fixed, ShardLoader
from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.corpus.records import FieldKind, checker
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units
from tokenfeed.tools.encoding.engines import ReferenceEngine
from tokenfeed.tools.encoding.labels import CountLabels, Labels, find_labels
from tokenfeed.tools.encoding.tasks.base import TaskEncoder
from tokenfeed.tools.encoding.tasks.classify import ClassifyEncoder
from tokenfeed.tools.encoding.tasks.complete import CompleteEncoder
from tokenfeed.tools.encoding.tasks.lm import LmEncoder
from tokenfeed.tools.encoding.tasks.tag import TagEncoder
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.shards import main

Row = dict[str, Any]
GONE = "\u200b\x00\x07"
"""A word that a BertNormalizer leaves nothing of."""
ODD = ["", " ", " fox", GONE, "quick\u200bfox", "[SEP]</s><|endoftext|>", "e\u0301", "漢字 🎉"]
TEXT = st.sampled_from(ODD) | st.text(max_size=12)
TAGS = ("B", "I", "O")
TAG = st.sampled_from(TAGS)
ENDS = {
    "byte-level": "<|endoftext|>",
    "word-piece": None,
    "metaspace": "</s>",
    "metaspace, never": "</s>",
    "llama": "</s>",
    "gemma": "</s>",
}
SPACED = ("byte-level", "metaspace, never", "gemma")
"""Tokenizers with other ids for a word behind a space."""
TEMPLATES = {
    "word-piece": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "metaspace": ("<s> $A </s>", "<s> $A </s> </s>:1 $B:1 </s>:1"),  # ends by itself
    "llama": ("<s> $A", "<s> $A <s>:1 $B:1"),
    "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B:0 </s>"),
}


@functools.cache  # training a WordPiece is not deterministic
def oracle(kind: str) -> Tokenizer:
    """The tokenizer that is always asked directly."""
    bert = kind == "word-piece"
    unknown = "[UNK]" if bert else "<unk>"
    made = Tokenizer(models.WordPiece(unk_token=unknown) if bert else models.BPE(unk_token=unknown))
    if bert:
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre.BertPreTokenizer()
    elif kind == "llama":
        parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(parts)
    elif kind == "gemma":
        made.normalizer = normalizers.Replace(" ", "▁")
    elif kind == "byte-level":
        made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    else:
        made.pre_tokenizer = pre.Metaspace(prepend_scheme="never" if "never" in kind else "always")
    special = [unknown, *(("[CLS]", "[SEP]") if bert else ("<s>", "</s>", "<|endoftext|>"))]
    special = special[-1:] if kind == "byte-level" else special[:3]
    trainer = (WordPieceTrainer if bert else BpeTrainer)(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog naïve"] * 9, trainer)
    if kind in TEMPLATES:
        ids = [(token, made.token_to_id(token)) for token in special]
        made.post_processor = processors.TemplateProcessing(*TEMPLATES[kind], ids)
    made.encode_special_tokens = True
    return made


def ids_of(kind: str, text: str) -> list[int]:
    return list(oracle(kind).encode(text, add_special_tokens=False).ids)


def ended(kind: str, ids: list[int]) -> list[int]:
    """The row of a task whose rows end, which is with one end."""
    end = ENDS[kind]
    last = [oracle(kind).get_vocab()[end]] if end else []
    return ids if ids[-1:] == last else ids + last


def word_encoding(kind: str, words: list[str], special: bool) -> Encoding:
    """Words that are encoded one by one as they are within a text."""
    words = [word and " " + word for word in words] if kind in SPACED else words
    return oracle(kind).encode(words, is_pretokenized=True, add_special_tokens=special)


def tags_of(encoding: Encoding, tags: list[Any], other: Any) -> list[Any]:
    """The tag of each token that begins a word, and `other` for all others."""
    pairs = zip(encoding.word_ids, [None, *encoding.word_ids][:-1], strict=True)
    return [other if word in (None, before) else tags[word] for word, before in pairs]


def listed(ragged: Ragged) -> list[list[int]]:
    return [ragged.values[start:end].tolist() for start, end in pairwise(ragged.offsets)]


def encoded(task: TaskEncoder, kind: str, **values: Any) -> dict[str, list[Any]]:
    """What the task makes of records, by column: a list of rows each."""
    given: Any = {own: [*map(checker(task.kinds[own]), values[own])] for own in task.names}
    tokenizer = TextTokenizer.load(oracle(kind).to_str().encode(), origin=kind)
    samples = task.encode(given, ReferenceEngine(tokenizer).encode, task.template(tokenizer))
    columns = {name: ragged.values for name, ragged in samples.per_token.items()} | samples.per_row
    dtypes = {"input_ids": "uint16"} | {column.name: column.dtype for column in task.columns}
    assert {name: str(column.dtype) for name, column in columns.items()} == dtypes
    found = {name: listed(ragged) for name, ragged in samples.per_token.items()}
    found |= {name: column.tolist() for name, column in samples.per_row.items()}
    found |= {"unusable": samples.unusable} if samples.unusable else {}
    return found | {"has_text": samples.has_text.tolist()}


@pytest.mark.parametrize("kind", ["byte-level", "word-piece", "metaspace"])
@given(texts=st.lists(TEXT, max_size=5), special=st.booleans())
def test_a_document_is_encode_and_one_end(kind: str, texts: list[str], special: bool) -> None:
    special = special and kind in TEMPLATES
    rows = [oracle(kind).encode(text, add_special_tokens=special).ids for text in texts]
    assert encoded(LmEncoder(add_special_tokens=special), kind, text=texts) == {
        "input_ids": [ended(kind, ids) for ids in rows],
        "has_text": [bool(ids_of(kind, text)) for text in texts],
    }


@pytest.mark.parametrize("kind", [*TEMPLATES, "byte-level"])
@given(
    pair=st.sampled_from([None, "other"]),
    records=st.lists(st.tuples(TEXT, TEXT, TAG), max_size=5),
    special=st.booleans(),
)
def test_a_classified_row_is_encode_of_its_texts_without_an_end(
    kind: str, pair: str | None, records: list[tuple[str, str, str]], special: bool
) -> None:
    special = special and kind in TEMPLATES
    task = ClassifyEncoder(
        names={"pair": "other"} if pair else {},
        labels=Labels(TAGS),
        add_special_tokens=special,
    )
    texts, others, labels = ([record[place] for record in records] for place in range(3))
    asked = [(text, other if pair else None) for text, other in zip(texts, others, strict=True)]
    rows = [oracle(kind).encode(*one, add_special_tokens=special) for one in asked]
    types = {"token_type_ids": [row.type_ids for row in rows]} if pair else {}
    assert encoded(task, kind, text=texts, pair=others, label=labels) == types | {
        "input_ids": [row.ids for row in rows],
        "label": [TAGS.index(label) for label in labels],
        "has_text": [any(ids_of(kind, text or "") for text in one) for one in asked],
    }


@pytest.mark.parametrize("kind", [*ENDS])
@given(
    records=st.lists(st.lists(st.tuples(TEXT, TAG), max_size=6), max_size=5), special=st.booleans()
)
def test_the_first_token_of_a_word_has_its_tag_and_no_other_token_has_one(
    kind: str, records: list[list[tuple[str, str]]], special: bool
) -> None:
    special = special and kind in TEMPLATES
    task = TagEncoder(labels=Labels(TAGS), add_special_tokens=special)
    words, tags = ([[pair[place] for pair in record] for record in records] for place in range(2))
    rows = [word_encoding(kind, of_row, special) for of_row in words]
    numbers = [[TAGS.index(tag) for tag in of_row] for of_row in tags]
    found = encoded(task, kind, tokens=words, tags=tags)
    has_token = [
        [word in row.word_ids for word in range(len(of))]
        for row, of in zip(rows, words, strict=True)
    ]
    assert [*found.pop("unusable", {})] == [
        n for n, of in enumerate(has_token) if any(of) and not all(of)
    ]
    assert found == {
        "input_ids": [row.ids for row in rows],
        "labels": [tags_of(row, of_row, -100) for row, of_row in zip(rows, numbers, strict=True)],
        "has_text": [any(of) and all(of) for of in has_token],
    }


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_words_have_the_ids_that_they_have_within_a_text(kind: str) -> None:
    task = TagEncoder(labels=Labels(TAGS))
    found = encoded(task, kind, tokens=[["lazy", "dog"]], tags=[["B", "I"]])["input_ids"][0]
    assert ids_of(kind, "quick lazy dog") == ids_of(kind, "quick") + found


@pytest.mark.parametrize("kind", ["byte-level", "word-piece", "metaspace"])
@given(records=st.lists(st.tuples(TEXT, TEXT), max_size=5), special=st.booleans())
def test_prompt_and_completion_are_encoded_apart_within_one_template(
    kind: str, records: list[tuple[str, str]], special: bool
) -> None:
    special = special and kind in TEMPLATES
    records = [record for record in records if ids_of(kind, record[1])]
    task = CompleteEncoder(add_special_tokens=special)
    found = encoded(task, kind, prompt=[p for p, _ in records], completion=[c for _, c in records])
    rows, lengths = [], []
    for record in records:
        parts = [oracle(kind).encode(text, add_special_tokens=False) for text in record]
        whole = Encoding.merge(parts, growing_offsets=False)
        framed = oracle(kind).post_process(whole, add_special_tokens=special)
        rows.append(ended(kind, framed.ids))
        lengths.append(framed.special_tokens_mask.index(0) + len(parts[0]))
    expected = {"input_ids": rows, "prompt_length": lengths, "has_text": [True] * len(rows)}
    assert found == expected
    assert not any(encoded(task, kind, prompt=["the fox"], completion=[""])["has_text"])


def label_names(
    folder: Path, field: str = "label", kind: FieldKind = FieldKind.LABEL
) -> tuple[str, ...]:
    corpus = find_corpus((str(folder),), out=folder / "out", field=field)
    units = cut_units(corpus.sources, 10**9)
    task = type("Task", (ClassifyEncoder,), {"kinds": {"mood": kind}})(names={"mood": field})
    return find_labels(units, task, map(CountLabels(task).of_unit, units)).names


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def labels_in_files(folder: Path, *files: list[Any]) -> Path:
    for number, labels in enumerate(files):
        write_lines(folder / f"{number}.jsonl", [{"label": label} for label in labels])
    return folder


def test_names_are_sorted_and_whole_numbers_stay_themselves(tmp_path: Path) -> None:
    cases: list[tuple[list[Any], tuple[str, ...]]] = [
        (["joy", "anger", "joy", "été"], ("anger", "joy", "été")),
        ([3, "0"], ("0", "1", "2", "3")),
        ([10, "02", "x"], ("02", "10", "x")),
        ([True, False], ("false", "true")),
        ([-1, None, 1.5, "a"], ("a",)),
        ([(1 << 15) - 1], tuple(map(str, range(1 << 15)))),
    ]
    for number, (labels, names) in enumerate(cases):
        assert label_names(labels_in_files(tmp_path / f"{number}", labels)) == names
    of_one_file_alone = labels_in_files(tmp_path / "files", ["b"] * 9, ["c", "a"])
    assert label_names(of_one_file_alone) == ("a", "b", "c")


def test_labels_that_cannot_be_numbered_are_one_error(tmp_path: Path) -> None:
    cases: list[tuple[list[Any], FieldKind, str]] = [
        ([1 << 15], FieldKind.LABEL, "has label 32768"),
        ([*map(str, range(-1, 1 << 15))], FieldKind.LABEL, "more than 32,768 different"),
        (
            [None, -1],
            FieldKind.LABEL,
            r"no usable record has a label in field `label`.*`--field mood=NAME`",
        ),
        ([1.0, 2.0], FieldKind.LABEL, "no usable record has a label in field `label`"),
        ([[], []], FieldKind.LABELS, "`--field mood=NAME`"),
        (["9" * 5000], FieldKind.LABEL, "field `label` has"),
    ]
    for number, (labels, kind, words) in enumerate(cases):
        with pytest.raises(CorpusError, match=words):
            label_names(labels_in_files(tmp_path / f"{number}", labels), kind=kind)


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_labels_that_no_row_of_train_has_are_named(
    task: str, tmp_path: Path, tokenizer: Path
) -> None:
    """Each became an output of the head, and nothing said so."""
    labels = {"train": ["a", "b"], "validation": ["b", "c"], "test": ["d"]}
    for split, found in labels.items():
        rows = (
            {"text": each, "label": each, "tokens": [each, "x"], "tags": [each, "a"]}
            for each in found
        )
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ("--task", task, "--tokenizer", tokenizer)
    made = run(*(tmp_path / f"{split}.jsonl" for split in labels), tmp_path / "mixed", *options)
    assert "in the split train" not in made.stderr
    made = run(tmp_path, tmp_path / "out", *options, "--exclude", "mixed")
    said = "2 of 4 labels, like c, have no row in the split train, only in test, validation."
    assert said in made.stderr
    made = run(tmp_path / "train.jsonl", tmp_path / "first", *options, "--limit", 1)
    assert "1 of 2 labels, like " in made.stderr


def test_record_without_text_is_not_called_one_without_label(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"tweet": "hi", "mood": "joy"}])
    units = cut_units(find_corpus((str(tmp_path),), out=tmp_path / "o", field="mood").sources, 99)
    task = ClassifyEncoder(names={"text": "body", "label": "mood"})
    message = r"^no usable.*no field `body`; it has: tweet, mood\. Name the field: .*=NAME`\.$"
    with pytest.raises(CorpusError, match=message):
        find_labels(units, task, map(CountLabels(task).of_unit, units))


def pretokenized(task: str, corpus: Path, *options: str) -> tuple[Manifest, dict[str, list[Row]]]:
    """What the command makes of a corpus: rows by split, without origin and labels by name."""
    out = corpus.with_name("out")
    oracle("word-piece").save(str(corpus.with_name("tokenizer.json")))
    options = "--task", task, "--tokenizer", str(corpus.parent), "--add-special-tokens", *options
    run(corpus, out, "--workers", 1, *options)
    manifest = Manifest.read(out)
    rows: dict[str, list[Row]] = {}
    for split, info in manifest.splits.items():
        tables = [feather.read_table(out / shard.file, memory_map=False) for shard in info.shards]
        rows[split] = [row for table in tables for row in table.to_pylist()]
    for row in chain(*rows.values()):
        del row["origin_file"], row["origin_record"]
    names = dict(enumerate(manifest.label_names)) | {-100: None}
    for row in chain(*rows.values()):
        row |= {"label": names[row["label"]]} if "label" in row else {}
        row |= {"labels": [*map(names.__getitem__, row["labels"])]} if "labels" in row else {}
    return manifest, rows


FIELDS = {
    "classify": ("text", "label"),
    "score": ("text", "score"),
    "tag": ("tokens", "tags"),
    "complete": ("prompt", "completion"),
}
RECORDS: dict[str, list[tuple[Any, Any, str]]] = {
    "classify": [
        ("quick fox", "joy", "good"),
        ("a dog", "anger", "good"),
        ("", "joy", "empty"),
        (GONE, "joy", "empty"),
        ("a", ..., "no field `label`"),
        (["a"], "joy", "field `text` is list, expected text"),
        ("a", None, "field `label` is null, expected a name or"),
        ("a", -1, "field `label` is -1, expected a name or"),
        ("lazy", "of validation", "good"),
    ],
    "score": [
        ("quick fox", 2.5, "good"),
        ("a dog", -3, "good"),
        ("lazy", "0.1", "good"),
        ("", 1.0, "empty"),
        ("a", ..., "no field `score`"),
        ("a", None, "field `score` is null, expected a finite number"),
        ("a", True, "field `score` is True, expected a finite number"),
        ("a", float("nan"), "field `score` is nan, expected a finite number"),
        ("a", 1e39, "field `score` is 1e+39, expected a finite number"),
        ("a", "a lot", "field `score` is 'a lot', expected a finite number"),
        ("a", "1_000", "field `score` is '1_000', expected a finite number"),
        ("the", 0, "good"),
    ],
    "tag": [
        (["quick", "foxes"], ["B", "I"], "good"),
        (["quick", GONE, "foxes"], ["B", "lost", "I"], "word 2 ("),
        (["dog"], ["O"], "good"),
        ([], [], "empty"),
        (["", GONE], ["B", "I"], "empty"),
        (["a", "b"], ["B"], "2 word(s), but 1 tag(s)"),
        ([], ["B"], "0 word(s), but 1 tag(s)"),
        (["a"], ..., "no field `tags`"),
        ("a", ["B"], "field `tokens` is str, expected a list of texts"),
        (["a", 1], ["B", "B"], "field `tokens` is 1, expected text"),
        (["a"], "B", "field `tags` is str, expected a list of names"),
        (["a"], [1.5], "field `tags` is 1.5, expected a name or"),
        (["naïve"], ["of validation"], "good"),
    ],
    "complete": [
        ("quick", "fox", "good"),
        ("", "dog", "good"),
        ("a", "", "empty"),
        ("a", GONE, "empty"),
        ("a", ..., "no field `completion`"),
        (1, "a", "field `prompt` is 1, expected text"),
        ("the lazy", "dog", "good"),
    ],
}


def expected_row(task: str, first: Any, second: Any) -> Row:
    if task == "classify":
        return {"input_ids": oracle("word-piece").encode(first).ids, "label": second}
    if task == "score":
        ids = oracle("word-piece").encode(first).ids
        return {"input_ids": ids, "score": float(np.float32(second))}
    if task == "tag":
        encoding = word_encoding("word-piece", first, True)
        return {"input_ids": encoding.ids, "labels": tags_of(encoding, second, None)}
    cls, sep = (oracle("word-piece").token_to_id(token) for token in ("[CLS]", "[SEP]"))
    prompt = [cls, *ids_of("word-piece", first)]
    ids = [*prompt, *ids_of("word-piece", second), sep]
    return {"input_ids": ids, "prompt_length": len(prompt)}


@pytest.mark.parametrize("task", [*FIELDS])
def test_the_command_writes_good_records_and_accounts_for_all(task: str, tmp_path: Path) -> None:
    *train, validation = RECORDS[task]
    for split, records in ("train", train), ("validation", [validation]):
        pairs = [zip(FIELDS[task], record[:2], strict=True) for record in records]
        lines = [{name: value for name, value in pair if value is not ...} for pair in pairs]
        write_lines(tmp_path / f"in/a.{split}.jsonl", lines)
    globbed = ("--split", "validation=*.validation.jsonl")
    manifest, rows = pretokenized(task, tmp_path / "in", *globbed)
    assert rows == {
        "train": [expected_row(task, *record[:2]) for record in train if record[2] == "good"],
        "validation": [expected_row(task, *validation[:2])],
    }
    assert manifest.label_names == tuple(sorted(manifest.label_names))
    fates = [fate for *_, fate in train]
    reasons = {n: fate for n, fate in enumerate(fates) if fate not in ("good", "empty")}
    counted = (len(fates) + 1, fates.count("good") + 1, fates.count("empty"), len(reasons))
    ledger = manifest.ledger
    assert (ledger.read, ledger.written, ledger.empty, ledger.rejected) == counted
    rejects = [*map(json.loads, (tmp_path / "out/rejects.jsonl").read_text().splitlines())]
    for reject, (number, words) in zip(rejects, reasons.items(), strict=True):
        assert (Path(reject["file"]).name, reject["record"]) == ("a.train.jsonl", number)
        assert reject["reason"].startswith(words)


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_the_numbers_of_a_saved_data_set_mean_its_classes(task: str, tmp_path: Path) -> None:
    words, field = FIELDS[task]
    classes: Any = datasets.ClassLabel(names=["neutral", "good", "bad"])  # in no sorted order
    content: Row = {words: ["fox", "dog"], field: [2, 0]}
    if task == "tag":
        classes, content = datasets.Sequence(classes), {words: [["fox", "dog"]], field: [[2, 0]]}
    data = datasets.Dataset.from_dict(content).cast_column(field, classes)
    datasets.DatasetDict({"train": data, "validation": data}).save_to_disk(str(tmp_path / "in"))
    kind = FieldKind.LABEL if task == "classify" else FieldKind.LABELS
    assert label_names(tmp_path / "in", field, kind) == ("neutral", "good", "bad")
    _, rows = pretokenized(task, tmp_path / "in")
    named = {"classify": ["bad", "neutral"], "tag": [[None, "bad", "neutral", None]]}[task]
    assert [row[field.replace("tags", "labels")] for row in rows["train"]] == named


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of pairs of texts, each with a score: its number divided by 7."""
    folder = tmp_path_factory.mktemp("scores")
    oracle("byte-level").save(str(folder / "tokenizer.json"))
    records = [{"text": text, "to": "dog", "score": at / 7} for at, text in enumerate(WORDS)]
    path = write_lines(folder / "a.jsonl", records)
    options = ("--tokenizer", folder, "--validation", 0, "--workers", 1)
    run(path, folder / "out", "--task", "score", "--field", "pair=to", *options)
    return folder / "out"


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "jsonl"])
def test_numbers_of_every_format_are_read_as_they_were(ending: str, tmp_path: Path) -> None:
    numbers = [row / 7 for row in range(13)]
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"text": numbers}), path)
    elif ending == "jsonl":
        write_lines(path, [{"text": number} for number in numbers])
    else:
        path.write_text("\n".join(["text", *map(str, numbers)]))
    assert read(path, FieldKind.NUMBER) == (dict(enumerate(numbers)), {})


def test_scores_reach_the_batches_as_they_were(scores: Path) -> None:
    batches = list(ShardLoader(scores, batching=Fixed(2), num_workers=0))
    assert all(batch["labels"].dtype == torch.float32 for batch in batches)
    assert sum(batch.num_targets for batch in batches) == len(WORDS)
    pairs = [pair for b in batches for pair in zip(b.rows, b["labels"].tolist(), strict=True)]
    assert sorted(pairs) == [(row, float(np.float32(row / 7))) for row in range(len(WORDS))]


def test_a_data_set_of_scores_is_inspected_verified_and_read_back(scores: Path) -> None:
    inspected, verified = (call(main, name, scores).stdout for name in ("inspect", "verify"))
    assert "columns input_ids, token_type_ids, score, " in inspected
    assert verified.startswith(f"{scores}: good")
    lines = call(main, "cat", scores, "--json", "--rows", len(WORDS)).stdout.splitlines()
    found = [json.loads(line)["score"] for line in lines]
    assert found == [float(str(np.float32(row / 7))) for row in range(len(WORDS))]
    assert "tokens | score 0.2857143\n" in call(main, "cat", scores, "--start", 2).stdout


def test_a_filler_has_no_score(scores: Path) -> None:
    options = {"num_workers": 0, "world_size": 3, "micro_batches_per_step": 4}
    ranks = [ShardLoader(scores, batching=Fixed(2), rank=rank, **options) for rank in range(3)]
    batches = [batch for rank in ranks for batch in rank]
    assert any(batch.is_filler for batch in batches)
    for batch in batches:
        assert batch["labels"].isnan().all() == batch.is_filler
    assert sum(batch.num_targets for batch in batches) == len(WORDS)


@pytest.mark.parametrize(
    ("column", "inside"),
    [
        (pa.list_(pa.string(), 2), "[0]"),
        (pa.large_list_view(pa.string()), "[0]"),
        (pa.struct({"a": pa.string()}), ".KEY"),
    ],
)
def test_advice_names_the_value_inside_any_list(column: pa.DataType, inside: str) -> None:
    """Lists of a fixed size got no advice."""
    advice = LmEncoder().remedy(f"column `text` is {column}, expected text")
    assert advice == f" Name the value inside: `--field text=text{inside}`."
