"""Tasks: ids, types, labels and lengths are those of `tokenizers`, asked one text at a time."""

import functools
import json
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Encoding, Tokenizer, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.ragged import Ragged
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.tools.corpus.records import Kind
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units
from tokenfeed.tools.encoding.labels import find_labels

Row = dict[str, Any]


GONE = "\u200b\x00\x07"
"""A word that a BertNormalizer leaves nothing of."""


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
    else:
        by_byte = pre.ByteLevel(add_prefix_space=False)
        made.pre_tokenizer = by_byte if kind == "byte-level" else pre.Metaspace()
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


def word_encoding(kind: str, words: list[str], special: bool) -> Encoding:
    """Only behind a space has a byte-level word the ids that it has within a text."""
    words = [word and " " + word for word in words] if kind == "byte-level" else words
    return oracle(kind).encode(words, is_pretokenized=True, add_special_tokens=special)


def tags_of(encoding: Encoding, tags: list[Any], other: Any) -> list[Any]:
    """The tag of each token that begins a word, and `other` for all others."""
    pairs = zip(encoding.word_ids, [None, *encoding.word_ids][:-1], strict=True)
    return [other if word in (None, before) else tags[word] for word, before in pairs]


def listed(ragged: Ragged) -> list[list[int]]:
    return [ragged.values[start:end].tolist() for start, end in pairwise(ragged.offsets)]


def label_names(folder: Path, field: str = "label", kind: Kind = Kind.LABEL) -> tuple[str, ...]:
    corpus = find_corpus((str(folder),), out=folder / "out", field=field)
    units = cut_units(corpus.sources, 10**9)
    return find_labels(units, {field: kind}, field, lambda values: {}).names


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def pretokenized(task: str, corpus: Path, *options: str) -> tuple[Manifest, dict[str, list[Row]]]:
    """What the command makes of a corpus: rows by split, without origin and labels by name."""
    out = corpus.with_name("out")
    oracle("word-piece").save(str(corpus.with_name("tokenizer.json")))
    command = [sys.executable, "-m", "tokenfeed.tools.pretokenize", str(corpus), str(out)]
    command += ["--task", task, "--tokenizer", str(corpus.parent), "--workers", "1", *options]
    result = subprocess.run(
        [*command, "--add-special-tokens"], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    manifest = Manifest.read(out)
    rows: dict[str, list[Row]] = {split: [] for split in manifest.splits}
    for split, shard in (
        (s, shard) for s, info in manifest.splits.items() for shard in info.shards
    ):
        part, _ = ShardReader.open(out, manifest, shard).read(0)
        columns = {name: listed(Ragged(v, part.lengths)) for name, v in part.per_token.items()}
        columns |= {name: v.tolist() for name, v in part.per_row.items() if "origin" not in name}
        rows[split] += [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    names = dict(enumerate(manifest.label_names)) | {-100: None}
    for row in chain(*rows.values()):
        row |= {"label": names[row["label"]]} if "label" in row else {}
        row |= {"labels": [*map(names.__getitem__, row["labels"])]} if "labels" in row else {}
    return manifest, rows


FIELDS = {
    "classify": ("text", "label"),
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
    "tag": [
        (["quick", GONE, "foxes"], ["B", "lost", "I"], "good"),
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


def test_digits_with_a_leading_zero_are_a_label_too(tmp_path: Path) -> None:
    records = [{"text": "fox", "label": label} for label in ("01", "2", "1")]
    _, rows = pretokenized("classify", write_lines(tmp_path / "a.jsonl", records))
    assert [row["label"] for row in rows["train"]] == ["01", "2", "1"]


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_the_numbers_of_a_saved_data_set_mean_its_classes(task: str, tmp_path: Path) -> None:
    words, field = FIELDS[task]
    classes: Any = datasets.ClassLabel(names=["neutral", "good", "bad"])  # in no sorted order
    content: Row = {words: ["fox", "dog"], field: [2, 0]}
    if task == "tag":
        classes, content = datasets.List(classes), {words: [["fox", "dog"]], field: [[2, 0]]}
    data = datasets.Dataset.from_dict(content).cast_column(field, classes)
    datasets.DatasetDict({"train": data, "validation": data}).save_to_disk(tmp_path / "in")
    kind = Kind.LABEL if task == "classify" else Kind.LABELS
    assert label_names(tmp_path / "in", field, kind) == ("neutral", "good", "bad")
    _, rows = pretokenized(task, tmp_path / "in")
    named = {"classify": ["bad", "neutral"], "tag": [[None, "bad", "neutral", None]]}[task]
    assert [row[field.replace("tags", "labels")] for row in rows["train"]] == named
