"""Data of benchmarks/scenarios/: the text in Python's standard library, a tokenizer, shards.

docstrings   and the package each is from; at most 192 tokens
comments     of the length of a tweet, and the package each is from; at most 128 tokens
commands     25 sentences and the JSON that they ask for; others are held out
files        source files, as documents
modules      long source files, as documents
"""

import ast
import itertools
import json
import random
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

__all__ = ["SOURCES", "Data", "Record", "make"]

Record = dict[str, Any]
Task = Literal["classify", "complete", "lm"]

PAD, END = "[PAD]", "[SEP]"
LAYERS = 2
PACKAGES = 4
FILES_OF = ("asyncio", "email", "http", "importlib", "logging", "xml")
LONG = 3_000
"""Characters of a long source file, at least."""
HELD_OUT = 400
"""Records at most."""


@dataclass(frozen=True, slots=True)
class Data:
    """A data set, as records and as shards."""

    task: Task
    shards: Path
    model: Path
    """Folder of a tokenizer and of the config of a model, for `transformers` and `train`."""
    train: list[Record]
    held_out: list[Record]


@dataclass(frozen=True, slots=True)
class Source:
    """Where records come from."""

    task: Task
    read: Callable[[], list[Record]]
    vocabulary: int
    width: int = 128
    """Of a model of two layers."""
    longest: int | None = None
    """Tokens of a record that is used."""
    examples: int | None = None
    """To train on; by default all that are not held out."""


def sources() -> Iterator[tuple[str, str]]:
    """Every source file but the tests: its package and text."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if not {"site-packages", "test", "tests", "lib2to3"} & set(parts):
            yield parts[0].removesuffix(".py"), path.read_text("utf-8", errors="replace")


def docstrings() -> Iterator[tuple[str, str]]:
    for package, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield package, ast.get_docstring(node) or ""


def comments() -> Iterator[tuple[str, str]]:
    """Comments; those of neighbouring lines are one."""
    for package, text in sources():
        lines = map(str.strip, text.splitlines())
        for is_comment, block in itertools.groupby(lines, lambda line: line.startswith("# ")):
            if is_comment:
                yield package, " ".join(line[2:] for line in block)


def by_package(texts: Iterable[tuple[str, str]], characters: range) -> list[Record]:
    """Texts of some length, of the packages that most of them are from."""
    chosen = [(package, text) for package, text in texts if len(text) in characters]
    counted = Counter(package for package, _ in chosen).most_common(PACKAGES)
    packages = {package for package, _ in counted}
    return [{"text": text, "label": package} for package, text in chosen if package in packages]


def commands() -> list[Record]:
    devices = ("lamp", "heater", "fan", "radio", "oven", "camera")
    rooms = ("kitchen", "bedroom", "hall", "garage", "attic", "office")
    forms = ("Turn {state} the {device} in the {room}.", "The {device} of the {room}: {state}!")
    records = []
    for device, room, state, form in itertools.product(devices, rooms, ("on", "off"), forms):
        wanted = {"device": device, "room": room, "state": state}
        prompt = f"{form.format(**wanted)} ->"
        records.append({"prompt": prompt, "completion": f" {json.dumps(wanted)}"})
    return records


def files() -> list[Record]:
    return [{"text": text} for package, text in sources() if text and package in FILES_OF]


def modules() -> list[Record]:
    return [{"text": text} for _, text in sources() if len(text) >= LONG]


SOURCES: dict[str, Source] = {
    "docstrings": Source(
        "classify", lambda: by_package(docstrings(), range(10, 800)), 4096, longest=192
    ),
    "comments": Source(
        "classify", lambda: by_package(comments(), range(40, 281)), 4096, longest=128
    ),
    "commands": Source("complete", commands, 512, examples=25),
    "files": Source("lm", files, 4096, 256),
    "modules": Source("lm", modules, 4096),
}


def make(name: str, folder: Path, *, most: int | None = None) -> Data:
    """A data set, made unless it is there.

    Args:
        name: One of SOURCES.
        folder: Where data sets are kept.
        most: Records to take at most, for a trial.
    """
    source, home = SOURCES[name], folder / name
    if not home.exists():
        records = source.read()
        random.Random(0).shuffle(records)
        write(source, records[:most], home)
    train, held_out = (read_lines(home / f"{split}.jsonl") for split in ("train", "validation"))
    return Data(source.task, home / "shards", home / "model", train, held_out)


def write(source: Source, records: list[Record], home: Path) -> None:
    tokenizer = train_tokenizer(source, (" ".join(map(str, each.values())) for each in records))
    home.mkdir(parents=True)
    tokenizer.save_pretrained(home / "model")
    if source.longest is not None:
        lengths = map(len, tokenizer([record["text"] for record in records])["input_ids"])
        pairs = zip(records, lengths, strict=True)
        records = [record for record, length in pairs if length <= source.longest]
    least = source.examples or len(records) * 9 // 10
    held_out = min(HELD_OUT, len(records) - least)
    train = records[held_out:][: source.examples]
    classes = len({record["label"] for record in train}) if source.task == "classify" else 0
    describe(source, tokenizer, classes).save_pretrained(home / "model")
    for split, chosen in (("train", train), ("validation", records[:held_out])):
        lines = "".join(json.dumps(record) + "\n" for record in chosen)
        (home / f"{split}.jsonl").write_text(lines)
    write_shards(source.task, home)


def write_shards(task: Task, home: Path) -> None:
    from tokenfeed.tools.pretokenizing.make import make_dataset
    from tokenfeed.tools.pretokenizing.options import (
        Options,  # not for loops that know of no shards
    )

    corpora = (str(home / "train.jsonl"), str(home / "validation.jsonl"))
    make_dataset(
        Options(
            paths=(*corpora, str(home / "shards")),
            task=task,
            tokenizer=str(home / "model"),
            end_token=END,
            add_special_tokens=task == "classify",
            split=("validation=validation.jsonl",),
            workers=1,
        )
    )


def describe(
    source: Source, tokenizer: transformers.PreTrainedTokenizerFast, classes: int
) -> transformers.PretrainedConfig:
    """A BERT for classes, of the size that is called tiny; else a GPT-2."""
    width, heads = source.width, source.width // 64
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if source.task == "classify":
        return transformers.BertConfig(
            hidden_size=width,
            num_hidden_layers=LAYERS,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            num_labels=classes,
            **ids,
        )
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return transformers.GPT2Config(n_embd=width, n_layer=LAYERS, n_head=heads, **ids, **ends)


def train_tokenizer(source: Source, texts: Iterable[str]) -> transformers.PreTrainedTokenizerFast:
    """Bytes in pairs; of texts with a class as `[CLS] text [SEP]`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, "[CLS]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=source.vocabulary, special_tokens=special, initial_alphabet=alphabet
        ),
    )
    if source.task == "classify":
        tokenizer.post_processor = TemplateProcessing(
            single=f"[CLS] $A {END}",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", END)],
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, cls_token="[CLS]", sep_token=END
    )


def read_lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]
