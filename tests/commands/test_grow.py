"""Data sets that grow: random sequences of append, merge and select, killed and repeated."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from subprocess import PIPE, CompletedProcess
from typing import Any
from unittest.mock import ANY

import pytest
from support import warm
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
    "seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed >= 3)) for seed in range(200)]
)
def test_any_sequence_of_changes_keeps_every_row(
    seed: int, tmp_path: Path, tokenizer: Path
) -> None:
    world = World(tmp_path, tokenizer, seed)
    world.make()
    for change in world.random.choices([world.append, world.merge, world.select, world.make], k=3):
        change()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> World:
    """A world with two data sets, and a copy of its folder beside it."""
    world = World(tmp_path_factory.mktemp("world") / "now", tokenizer, 0)
    world.folder.mkdir()
    world.make()
    world.make()
    shutil.copytree(world.folder, world.folder.with_name("kept"))
    return world


@pytest.fixture
def world(made: World) -> World:
    """The same world again, in the same folder: data sets name their input files."""
    shutil.rmtree(made.folder)
    shutil.copytree(made.folder.with_name("kept"), made.folder)
    world = World(made.folder, made.tokenizer, 0)
    world.texts, world.sets = dict(made.texts), deepcopy(made.sets)
    return world


def in_process(command: str, *arguments: object) -> "warm.Popen":
    code = f"from tokenfeed.tools.{command} import main; main()"
    return warm.Popen(["-c", code, *map(str, arguments)], stderr=PIPE, stdout=PIPE)


@pytest.mark.parametrize("command", ["append", "merge", "select"])
def test_two_processes_at_once_lose_and_double_no_row(world: World, command: str) -> None:
    """Of the same command: one may be refused in a line. The same command ends in the same
    bytes."""
    one, other = world.folder / "set0", world.folder / "set1"
    new, files = world.folder / "new", world.new_files(4)
    (first, *_), rows = world.sets["set0"].rows, world.sets["set0"].rows
    words: tuple[object, ...]
    if command == "append":
        words, new = ("pretokenize", *files, one, "--append", "--shard-size", "1KB"), one
        expected = rows + world.rows_of(files)
    elif command == "merge":
        words, expected = ("shards", "merge", one, other, new), rows + world.sets["set1"].rows
    else:
        words = ("shards", "select", one, new, "--where", f"origin {first[0]}", "--drop")
        expected = Counter({row: count for row, count in rows.items() if row[0] != first[0]})
        if not expected:
            return
    processes = [in_process(*words) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert "Traceback" not in errors
        assert process.returncode == 0 or errors.count("error: ") == 1, errors
    call(MAINS[str(words[0])], *words[1:])
    assert corpus_rows(new) == expected
    call(shards.main, "verify", new)
    assert not [path for path in new.rglob("*") if path.suffix == ".tmp" or path.name == ".work"]


def test_append_while_others_read_gives_them_one_version(world: World) -> None:
    """A merge, a selection and a copy during an append have the rows before or after it."""
    one, files = world.folder / "set0", world.new_files(6)
    before = world.sets["set0"].rows
    after, other = before + world.rows_of(files), world.sets["set1"].rows
    options = ("--append", "--shard-size", "1KB")
    process = in_process("pretokenize", *files, one, *options)
    number, ended = 0, False
    while not ended:
        ended, number = process.poll() is not None, number + 1
        call(shards.main, "merge", one, world.folder / "set1", world.folder / f"m{number}")
        call(shards.main, "select", one, world.folder / f"s{number}", "--where", "origin *")
        call(shards.main, "copy", one, world.folder / f"c{number}")
        for name, more in (("m", other), ("s", Counter()), ("c", Counter())):
            assert corpus_rows(world.folder / f"{name}{number}") in (before + more, after + more)
    process.communicate()
    assert process.returncode == 0
    assert corpus_rows(world.folder / f"c{number}") == after


@pytest.mark.parametrize(
    "number", [pytest.param(8, id="few"), pytest.param(150, id="many", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("command", ["append", "merge", "select", "copy"])
def test_damage_is_refused_or_found_in_what_is_made(
    world: World, command: str, number: int
) -> None:
    """No row is lost, doubled or changed in silence, and the damaged data set stays as it was."""
    source, out = world.folder / "set0", world.folder / "out"
    rows, files = world.sets["set0"].rows, world.new_files(1)
    good = world.folder / "good"
    shutil.copytree(source, good)
    names = sorted(path for path in files_of(good) if not path.startswith(".made"))
    expected = {
        "append": rows + world.rows_of(files),
        "merge": rows + world.sets["set1"].rows,
    }.get(command, rows)
    refused = 0
    for turn in range(number):
        shutil.rmtree(source)
        shutil.copytree(good, source)
        victim = source / names[turn % len(names)]
        content = bytearray(victim.read_bytes())
        if not content:
            continue
        content[world.random.randrange(len(content))] ^= 1 << world.random.randrange(8)
        victim.write_bytes(content)
        before = files_of(source)
        words = {
            "append": ("pretokenize", *files, source, "--append"),
            "merge": ("shards", "merge", source, world.folder / "set1", out),
            "select": ("shards", "select", source, out, "--where", "origin *"),
            "copy": ("shards", "copy", source, out),
        }[command]
        made = source if command == "append" else out
        result = attempt(MAINS[str(words[0])], *words[1:])
        if result.returncode:
            refused += 1
            assert result.stderr.count("error: ") == 1, result.stderr
            assert "Traceback" not in result.stderr
            assert before.items() <= files_of(source).items()
            assert not (out / "manifest.json").exists()
        elif attempt(shards.main, "verify", made).returncode == 0:
            assert corpus_rows(made) == expected
        shutil.rmtree(out, ignore_errors=True)
    assert refused > number // 6


def attempt(main: Callable[[], None], *arguments: object) -> CompletedProcess[str]:
    """Run a command that may fail."""
    return call(main, *arguments, expect=ANY)


def test_careless_commands_are_one_line_and_change_nothing(world: World) -> None:
    one, other = world.folder / "set0", world.folder / "set1"
    files = world.new_files(2)
    (world.folder / "notes").mkdir()
    (world.folder / "notes/mine.txt").write_text("mine")
    before = files_of(world.folder)
    kill_at(9, "pretokenize", files[0], one, "--append", "--shard-size", "1KB")
    for words in (
        ("pretokenize", files[1], one, "--append"),
        ("pretokenize", files[1], one),
        ("pretokenize", files[1], world.folder / "notes", "--append"),
        ("pretokenize", world.folder / "gone.jsonl", other, "--append"),
        ("pretokenize", other, one, "--append"),
        ("shards", "merge", one, other, one),
        ("shards", "merge", one, other, other),
        ("shards", "merge", one, one, world.folder / "out"),
        ("shards", "merge", one, f"{one}/../set0", world.folder / "out"),
        ("shards", "merge", one, other, world.folder / "notes"),
        ("shards", "select", one, one, "--where", "origin *"),
        ("shards", "select", one, other, "--where", "origin *"),
        ("shards", "select", one, world.folder / "notes", "--where", "origin *"),
        ("shards", "select", one, world.folder / "out", "--where", "origin *", "--drop"),
        ("shards", "select", one, files[0], "--where", "origin *"),
        ("shards", "copy", one, other),
        ("shards", "copy", one, f"{one}/"),
        ("shards", "export", one, other),
    ):
        result = attempt(MAINS[str(words[0])], *words[1:])
        assert result.returncode, words
        assert result.stderr.count("error: ") == 1, result.stderr
        assert not (world.folder / "out").exists()
        now = files_of(world.folder)
        assert {name: now.get(name) for name in before} == before, words
    assert f"delete {one}/.append," in attempt(pretokenize.main, files[1], one, "--append").stderr
    call(pretokenize.main, files[0], one, "--append", "--shard-size", "1KB")
    assert corpus_rows(one) == world.sets["set0"].rows + world.rows_of(files[:1])
    assert not [name for name in files_of(one) if name.startswith(".append")]


def test_merge_of_two_versions_is_refused(world: World) -> None:
    one = world.folder / "set0"
    shutil.copytree(one, world.folder / "earlier")
    run(*world.new_files(1), one, "--append")
    for paths in ((one, world.folder / "earlier"), (world.folder / "earlier", one)):
        said = call(shards.main, "merge", *paths, world.folder / "out", expect=2).stderr
        assert "is an earlier version of" in said
