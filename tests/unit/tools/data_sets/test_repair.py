"""`shards repair`: damaged and lost files come back as the manifest names them, or not at all."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import call, run
from support.corpora import texts
from support.data_sets import files_of
from support.pretokenizing import make, with_fast_engine
from tokenizers import Tokenizer

from tokenfeed.tools import shards
from tokenfeed.tools.corpus.records import FieldKind, Fields
from tokenfeed.tools.data_sets.remake import fields_of
from tokenfeed.tools.encoding.tasks import TASK_CLASSES, CompleteEncoder
from tokenfeed.tools.pretokenizing.options import Options

DAMAGE: list[Callable[[Path], object]] = [
    Path.unlink,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:-3]),
    lambda path: path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes())),
]
TASKS = {
    "lm": ("--field", "text=body"),
    "classify": ("--task", "classify", "--field", "text=body", "pair=second", "label=kind"),
    "score": ("--task", "score", "--field", "text=body", "score=number"),
    "tag": ("--task", "tag", "--field", "tokens=words", "tags=kinds"),
    "complete": ("--task", "complete", "--field", "prompt=body", "completion=second"),
}


def repair(out: Path, *arguments: object, expect: int = 0) -> str:
    done = call(shards.main, "repair", out, *arguments, expect=expect)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records that every task finds something in, and a file that is of a split of its own."""
    folder = tmp_path_factory.mktemp("records")
    for name, seed in {"a.jsonl": 1, "b.jsonl": 2, "c.test.jsonl": 3}.items():
        lines = [
            {
                "body": text,
                "second": text[:20],
                "kind": ("joy", "anger")[number % 2],
                "number": number / 4,
                "words": text.split()[:9],
                "kinds": ["BI"[n % 2] for n in range(len(text.split()[:9]))],
            }
            for number, text in enumerate(texts(40, seed=seed))
        ]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def made(
    records: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    split = ("--split", "test=*.test.jsonl", "--validation", "0.2", "--shard-size", "30KB")
    for task, options in TASKS.items():
        run(records, folder / task, "--tokenizer", tokenizer, *split, *options)
    return {task: folder / task for task in TASKS}


@pytest.mark.slow
@settings(max_examples=6)
@given(data=st.data(), task=st.sampled_from(list(TASKS)))
def test_what_is_damaged_is_made_again_from_the_corpus_wherever_it_lies(
    data: st.DataObject, task: str, made: dict[str, Path], records: Path
) -> None:
    with TemporaryDirectory() as folder:
        out, moved = Path(folder, "out"), Path(folder, "moved")
        shutil.copytree(made[task], out)
        shutil.copytree(records, moved)
        names = [path.relative_to(out) for path in sorted(out.rglob("*.arrow"))]
        assert len(names) > 4
        chosen = data.draw(st.sets(st.sampled_from([*names, Path("tokenizer.json")])))
        for name in chosen:
            data.draw(st.sampled_from(DAMAGE))(out / name)
        said = repair(out, "--corpus", moved)
        assert (f"repaired: {len(chosen)}" if chosen else "nothing to repair") in said
        assert files_of(out) == files_of(made[task])


@settings(max_examples=5)
@given(data=st.data())
def test_what_is_damaged_is_fetched_from_a_mirror(
    data: st.DataObject, made: dict[str, Path]
) -> None:
    with TemporaryDirectory() as folder:
        out = Path(folder, "out")
        shutil.copytree(made["lm"], out)
        names = sorted({path.relative_to(out) for path in out.rglob("*.*") if path.is_file()})
        names = [name for name in names if name.name not in ("manifest.json", ".made_by.json")]
        for name in data.draw(st.sets(st.sampled_from(names), min_size=1)):
            data.draw(st.sampled_from(DAMAGE))(out / name)
        repair(out, "--mirror", made["lm"])
        assert files_of(out) == files_of(made["lm"])


def test_a_data_set_of_the_fast_engine_is_repaired_by_it(
    corpus: Path, tmp_path: Path, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    with_fast_engine(monkeypatch)
    made = make(corpus, tmp_path / "out", tmp_path / "tokenizer.json")
    assert made.engine.startswith("gigatoken")
    before = files_of(tmp_path / "out")
    (tmp_path / "out/train/00001.arrow").unlink()
    repair(tmp_path / "out", "--corpus", corpus)
    assert files_of(tmp_path / "out") == before


def test_a_corpus_that_has_changed_replaces_nothing(
    made: dict[str, Path], records: Path, tmp_path: Path
) -> None:
    out, changed = tmp_path / "out", tmp_path / "changed"
    shutil.copytree(made["lm"], out)
    shutil.copytree(records, changed)
    text = (changed / "a.jsonl").read_text()
    (changed / "a.jsonl").write_text(text.replace("the", "teh"))
    (out / "train/00000.arrow").write_bytes(b"damaged")
    said = repair(out, "--corpus", changed, expect=1)
    assert "comes out with other bytes: the corpus has changed" in said
    assert "damaged or lost: 1, repaired: 0" in said
    assert (out / "train/00000.arrow").read_bytes() == b"damaged"
    answer = json.loads(repair(out, "--corpus", changed, "--json", expect=1))
    assert (answer["ok"], answer["repaired"], len(answer["problems"])) == (False, 0, 1)
    (changed / "a.jsonl").write_text(text + " ")
    assert "bytes, that of the data set had" in repair(out, "--corpus", changed, expect=1)
    (changed / "d.jsonl").write_text(text)
    assert "has 4 input files" in repair(out, "--corpus", changed, expect=1)
    assert not [path for path in out.iterdir() if "repair" in path.name]


def test_a_damaged_mirror_replaces_nothing(made: dict[str, Path], tmp_path: Path) -> None:
    out, mirror = tmp_path / "out", tmp_path / "mirror"
    for folder in (out, mirror):
        shutil.copytree(made["lm"], folder)
        (folder / "train/00000.arrow").unlink()
        (folder / "train/00001.arrow").write_bytes(folder.name.encode())
    said = repair(out, "--mirror", mirror, expect=1)
    assert "mirror/train/00000.arrow: not found" in said
    assert "mirror/train/00001.arrow: the file has checksum" in said
    assert (out / "train/00001.arrow").read_bytes() == b"out"


def test_what_cannot_be_made_again_says_what_is_needed(
    made: dict[str, Path], records: Path, corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(made["lm"], out)
    assert "needs one of `--corpus" in repair(out, expect=2)
    (out / "train/00000.arrow").unlink()
    (out / "sources.jsonl").unlink()
    said = repair(out, "--corpus", records, expect=1)
    assert "sources.jsonl: is made of the whole corpus. Restore it by `--mirror" in said
    assert "damaged or lost: 2, repaired: 1" in said
    (out / "train/00000.arrow").unlink()
    (out / ".made_by.json").unlink()
    assert "has no .made_by.json" in repair(out, "--corpus", records, expect=2)


def test_repair_names_folder_in_place_of_file(made: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made["lm"], out)
    (out / "train/00000.arrow").unlink()
    (out / "train/00000.arrow/inside").mkdir(parents=True)
    said = repair(out, "--mirror", made["lm"], expect=2)
    assert said == (
        f"error: {out}/train/00000.arrow: is a folder, expected a file. Move the folder away.\n"
    )


def test_repair_removes_what_killed_repair_left(made: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made["lm"], out)
    (out / ".repair-0abc1def/train").mkdir(parents=True)
    (out / ".repair-0abc1def/train/00000.arrow").touch()
    (out / "train/00000.arrow.0123456789abcdef.tmp").touch()
    assert "nothing to repair" in repair(out, "--mirror", made["lm"])
    assert files_of(out) == files_of(made["lm"])
    assert not (out / ".repair-0abc1def").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"--task": "unknown"},
        {"--split": None},
        {"--end-token": ["a"]},
        {"--validation": "much"},
        {"--special-tokens-in-text": "odd"},
        {"the fields": 7},
        {"the bytes of the input": None},
        {"the bytes of the input": "many"},
    ],
)
def test_a_recipe_that_is_damaged_is_told(
    made: dict[str, Path], records: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(made["lm"], out)
    next(out.glob("train/*")).unlink()
    recipe = json.loads((out / ".made_by.json").read_text())
    for damaged in (recipe | changes, {}):
        (out / ".made_by.json").write_text(json.dumps(damaged))
        said = repair(out, "--corpus", records, expect=2)
        assert said.startswith(f"error: {out}/.made_by.json: does not say by what options")
        assert said.count("\n") == 1


@dataclass(frozen=True, kw_only=True)
class Hinted(CompleteEncoder):
    """A task of somebody's own, one field of which is read only if it is named."""

    kinds: ClassVar[Fields] = {"hint": FieldKind.TEXT, **CompleteEncoder.kinds}
    hint: str | None = None


NAMED: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in TASK_CLASSES),
    ("classify", {"text": "body", "label": "kind"}),
    ("classify", {"text": "body", "pair": "second", "label": "kind"}),
    ("score", {"pair": "second"}),
    ("hinted", {"prompt": "body"}),
    ("hinted", {"prompt": "body", "hint": "second"}),
]


@pytest.mark.parametrize(("name", "named"), NAMED)
def test_the_fields_that_a_task_reads_are_told_by_their_names_alone(
    name: Any, named: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASK_CLASSES, "hinted", Hinted)  # type: ignore[misc]
    given: dict[str, Any] = {**named}
    task = TASK_CLASSES[name](**given)
    recipe = {"--task": name, "the fields": list(task.fields)}
    options = Options(paths=("corpus", "out"), task=name, field=(fields_of(recipe),))
    assert options.make_task() == task
