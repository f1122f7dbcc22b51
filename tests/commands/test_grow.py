"""Data sets that grow: random sequences of append, merge and select, killed and repeated."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.commands import call, kill_at, run
from support.data_sets import corpus_rows, files_of
from support.delivery import open_loader
from tokenizers import Tokenizer

from tokenfeed import Padded
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools import pretokenize, shards

Rows = Counter[tuple[str, int, tuple[int, ...]]]
"""Input file, record and ids of each row."""
WORDS = ["one", "small", "word", "after", "another", "makes", "many", "rows", "of", "text"]


@dataclass
class DataSet:
    """What a data set must have."""

    rows: Rows
    checksummed: set[str] = field(default_factory=set)
    """Input files that have a checksum, as appended files have."""
    first: set[str] = field(default_factory=set)
    """Input files of the run that made it."""


class World:
    """A folder with input files and data sets, and what each must have."""

    def __init__(self, folder: Path, tokenizer: Path, seed: int) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.random = random.Random(seed)
        self.texts: dict[str, list[str]] = {}
        self.sets: dict[str, DataSet] = {}
        self.kills = 0
        self.encode = Tokenizer.from_file(str(tokenizer))
        self.end = self.encode.token_to_id("</s>")

    def new_files(self, count: int) -> list[str]:
        """Write input files with texts, empty texts and a line that is not JSON."""
        for _ in range(count):
            name = str(self.folder / f"file{len(self.texts):02}.jsonl")
            texts = [
                " ".join(self.random.choices(WORDS, k=self.random.randint(0, 60)))
                for _ in range(self.random.randint(1, 12))
            ]
            self.texts[name] = [f"of {name}", *texts]
            lines = [json.dumps({"text": text}) for text in self.texts[name]]
            Path(name).write_text("\n".join([*lines, "{"]) + "\n")
        return [*self.texts][len(self.texts) - count :]

    def rows_of(self, files: list[str]) -> Rows:
        """What `tokenizers` makes of input files."""
        return Counter(
            (file, record, (*self.encode.encode(text, add_special_tokens=False).ids, self.end))
            for file in files
            for record, text in enumerate(self.texts[file])
            if text
        )

    def complete(self, command: str, *arguments: object) -> None:
        """Run a command to its end, after it was killed at most twice."""
        for _ in range(self.random.choice([0, 1, 1, 2])):
            self.kills += kill_at(self.random.randint(0, 40), command, *arguments)
        call(MAINS[command], *arguments)

    def check(self, name: str, undisturbed: Path) -> None:
        folder = self.folder / name
        assert files_of(folder) == files_of(undisturbed)
        assert corpus_rows(folder) == self.sets[name].rows
        call(shards.main, "verify", folder)
        shutil.rmtree(undisturbed)

    def any_set(self) -> str:
        return self.random.choice([*self.sets])

    def make(self) -> None:
        """Make a data set of new input files."""
        files, name = self.new_files(self.random.randint(1, 3)), f"set{len(self.sets)}"
        options = ("--tokenizer", self.tokenizer, "--validation", 0.2, "--shard-size", "1KB")
        self.complete("pretokenize", *files, self.folder / name, *options)
        run(*files, self.folder / "undisturbed", *options)
        self.sets[name] = DataSet(self.rows_of(files), first={*files})
        self.check(name, self.folder / "undisturbed")

    def append(self) -> None:
        """Append new input files, and some that are in already. A state resumes afterwards."""
        name = self.any_set()
        folder, other, now = self.folder / name, self.folder / "undisturbed", self.sets[name]
        known = sorted(now.first | now.checksummed)
        known = self.random.sample(known, self.random.randint(0, min(2, len(known))))
        new = self.new_files(self.random.randint(0, 2)) if known else self.new_files(1)
        shutil.copytree(folder, other)
        state, end = self.saved(folder)
        options = ("--append", "--validation", 0.2, "--shard-size", "1KB")
        self.complete("pretokenize", *known, *new, folder, *options)
        run(*known, *new, other, *options)
        now.rows += self.rows_of(new)
        now.checksummed |= {*new}
        self.check(name, other)
        if state:
            with open_loader(folder, Padded(256), window_tokens=400) as loader:
                loader.load_state_dict(state)
                assert (sum(1 for _ in loader) > 0) == (state != end)
                assert loader.state_dict() == end

    def saved(self, folder: Path) -> tuple[Any, Any]:
        """Return a state in an epoch, and the state at its end."""
        if not Manifest.read(folder).split("train").rows:
            return None, None
        with open_loader(folder, Padded(256), window_tokens=400) as loader:
            for _ in islice(loader, self.random.randint(0, 5)):
                pass
            state = json.loads(json.dumps(loader.state_dict()))
            for _ in loader:
                pass
            return state, loader.state_dict()

    def merge(self) -> None:
        """Merge two data sets."""
        one, other = self.any_set(), self.any_set()
        prints = {Manifest.read(self.folder / each).fingerprint for each in (one, other)}
        if len(prints) == 1:
            return
        name, undisturbed = f"set{len(self.sets)}", self.folder / "undisturbed"
        parts = [self.folder / one, self.folder / other]
        self.complete("shards", "merge", *parts, self.folder / name)
        call(shards.main, "merge", *parts, undisturbed)
        first, second = self.sets[one], self.sets[other]
        checksummed = first.checksummed | second.checksummed
        self.sets[name] = DataSet(first.rows + second.rows, checksummed)
        self.check(name, undisturbed)

    def select(self) -> None:
        """Keep or drop some rows: those of an input file, or listed ones."""
        source = self.any_set()
        rows, drop = self.sets[source].rows, self.random.random() < 0.5
        some = self.random.sample(sorted(rows), self.random.randint(1, min(9, len(rows))))
        if self.random.random() < 0.5:
            (file, _, _), *_ = some
            options: tuple[object, ...] = ("--where", f"origin {file}")
            chosen = {row[:2] for row in rows if row[0] == file}
        else:
            (self.folder / "list").write_text(
                "".join(json.dumps({"file": file, "record": n}) + "\n" for file, n, _ in some)
            )
            options = ("--rows", self.folder / "list")
            chosen = {row[:2] for row in some}
        left = Counter({r: n for r, n in rows.items() if (r[:2] in chosen) != drop})
        if not left:
            return
        name, undisturbed = f"set{len(self.sets)}", self.folder / "undisturbed"
        options = (*options, "--drop") if drop else options
        self.complete("shards", "select", self.folder / source, self.folder / name, *options)
        call(shards.main, "select", self.folder / source, undisturbed, *options)
        there = {row[0] for row in left}
        self.sets[name] = DataSet(left, self.sets[source].checksummed & there)
        self.check(name, undisturbed)
        for file in {row[0] for row in rows} - there:
            for path, content in files_of(self.folder / name).items():
                assert Path(file).name.encode() not in content, path


MAINS: dict[str, Callable[[], None]] = {"pretokenize": pretokenize.main, "shards": shards.main}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed >= 10)) for seed in range(200)]
)
def test_any_sequence_of_changes_keeps_every_row(
    seed: int, tmp_path: Path, tokenizer: Path
) -> None:
    world = World(tmp_path, tokenizer, seed)
    world.make()
    for change in world.random.choices([world.append, world.merge, world.select, world.make], k=3):
        change()
