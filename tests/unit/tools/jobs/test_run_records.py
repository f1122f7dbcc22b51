"""What an unfinished run keeps, and what the process that goes on with it reads again."""

import errno
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.corpora import texts
from support.data_sets import files_of
from support.pretokenizing import interrupt, make, part

from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenfeedError
from tokenfeed.pipeline.format import storage
from tokenfeed.pipeline.format.shard_writer import ShardWriter
from tokenfeed.pipeline.format.store import LocalStore
from tokenfeed.tools.jobs import run_records as records
from tokenfeed.tools.pretokenizing import make as make_module
from tokenfeed.tools.pretokenizing import prepare as prepare_module
from tokenfeed.tools.pretokenizing.inputs import Inputs

opened: list[str] = []


def note_opens(event: str, arguments: Any) -> None:
    if event == "open":
        opened.append(str(arguments[0]))


sys.addaudithook(note_opens)
LABELLED = {"task": "classify", "field": ("label=kind",)}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A corpus of a few files in some units, with labels; what some are shows only inside."""
    folder = tmp_path / "lines"
    folder.mkdir()
    rows = [{"text": text, "kind": f"k{len(text) % 3}"} for text in texts(170, seed=3)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps(rows[:3]))
    (folder / "image.bin").write_bytes(b"\0\1\2")
    return folder


def opens_of(folder: Path) -> list[str]:
    """Files below a folder that were opened since `opened` was cleared."""
    return [name for name in opened if name.startswith(f"{folder}{os.sep}")]


@pytest.mark.parametrize("options", [{}, LABELLED], ids=["lm", "classify"])
def test_parts_and_finish_read_only_their_own_units(
    lines: Path, tmp_path: Path, tokenizer: Path, options: dict[str, Any]
) -> None:
    make(lines, tmp_path / "plain", tokenizer, **options)
    out = tmp_path / "out"
    units = part("0/20", lines, out, tokenizer, **options).units
    assert units == 1
    opened.clear()
    assert part("19/20", lines, out, tokenizer, **options).units == 0
    assert part("0/20", lines, out, tokenizer, **options).resumed_units == 1
    assert not opens_of(lines)
    for index in range(1, 18):
        part(f"{index}/20", lines, out, tokenizer, **options)
    assert part("18/20", lines, out, tokenizer, **options).is_complete
    assert files_of(out) == files_of(tmp_path / "plain")


def test_resumed_run_reads_neither_corpus_nor_shards(
    lines: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    interrupt(lines, out, tokenizer, **LABELLED)
    opened.clear()
    summary = make(lines, out, tokenizer, **LABELLED)
    assert summary.resumed_units == summary.units >= 7
    assert not opens_of(lines)
    assert not [name for name in opens_of(out) if name.endswith(".arrow")]


def test_shard_of_another_time_is_compared_and_kept(
    lines: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    interrupt(lines, out, tokenizer)
    os.utime(out / "train/00002.arrow", ns=(1, 1))
    opened.clear()
    summary = make(lines, out, tokenizer)
    assert summary.resumed_units == summary.units
    assert {Path(name).name for name in opens_of(out / "train")} == {"00002.arrow"}


def test_trained_tokenizer_that_is_lost_is_trained_again(lines: Path, tmp_path: Path) -> None:
    make(lines, tmp_path / "plain", None, vocab_size=300)
    out = tmp_path / "out"
    interrupt(lines, out, None, vocab_size=300)
    (out / "tokenizer.json").write_bytes((out / "tokenizer.json").read_bytes() + b" ")
    make(lines, out, None, vocab_size=300)
    assert files_of(out) == files_of(tmp_path / "plain")


def test_refused_resume_names_the_first_file_that_differs(
    lines: Path, tmp_path: Path, tokenizer: Path
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (lines / name).write_text('{"text": "more"}\n')
    part("0/3", lines, tmp_path / "out", tokenizer)
    before = files_of(tmp_path / "out")
    os.utime(lines / "b.jsonl", ns=(1, 1))
    with pytest.raises(ConfigError, match=r"the first is \S+b.jsonl, which was written at another"):
        part("1/3", lines, tmp_path / "out", tokenizer)
    (lines / "a.jsonl").write_text('{"text": "and more"}\n')
    with pytest.raises(ConfigError, match=r"first is \S+a.jsonl, which had 17 bytes and has 21"):
        part("1/3", lines, tmp_path / "out", tokenizer)
    (lines / "a.jsonl").unlink()
    (lines / "b.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"the first is \S+a.jsonl, which is missing"):
        make(lines, tmp_path / "out", tokenizer)
    assert files_of(tmp_path / "out") == before


def test_resume_with_other_packages_is_refused(
    lines: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(lines, tmp_path / "out", tokenizer)
    monkeypatch.setattr(records, "versions", lambda: ["pyarrow 1.0"])
    with pytest.raises(ConfigError, match=r"the packages: before tokenfeed .* now pyarrow 1\.0"):
        make(lines, tmp_path / "out", tokenizer)


def refused(*arguments: object) -> None:
    """A file system without locks."""
    raise OSError(errno.ENOLCK, "No locks available")


def test_parts_of_two_commands_begun_without_locks_exclude_each_other(
    lines: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other part begins when the first has found an empty folder, and not claimed it yet."""
    monkeypatch.setattr(storage.fcntl, "flock", refused)
    out, create = tmp_path / "out", LocalStore.create

    def late(output: LocalStore, *arguments: Any) -> Any:
        patched.undo()
        part("0/2", lines, out, tokenizer)
        return create(output, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "create", late)
        with pytest.raises(ConfigError, match=r"--validation: before not given, now 0\.5"):
            part("0/2", lines, out, tokenizer, validation=0.5)
    assert make(lines, out, tokenizer).units >= 7


def test_shard_deleted_during_the_run_is_no_data_set(
    lines: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, really = tmp_path / "out", make_module.run_units

    def losing(*arguments: Any) -> Any:
        settings = really(*arguments)
        (out / "train/00001.arrow").unlink()
        return settings

    with monkeypatch.context() as patched:
        patched.setattr(make_module, "run_units", losing)
        with pytest.raises(TokenfeedError, match=r"00001.arrow: was deleted or changed while"):
            make(lines, out, tokenizer)
    assert not (out / "manifest.json").exists()
    make(lines, out, tokenizer)
    make(lines, tmp_path / "plain", tokenizer)
    assert files_of(out) == files_of(tmp_path / "plain")


def test_rejects_are_kept_in_files_not_in_records(
    lines: Path, tmp_path: Path, tokenizer: Path
) -> None:
    good = (lines / "lines.jsonl").read_text()
    (lines / "lines.jsonl").write_text(good + '{"text": 1}\n' * 500)
    out = tmp_path / "out"
    interrupt(lines, out, tokenizer)
    assert all(file.stat().st_size < 4000 for file in (out / ".parts").glob("0*.json"))
    make(lines, out, tokenizer)
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_bytes().splitlines()]
    assert [reject["record"] for reject in rejects if "record" in reject] == list(range(170, 670))
    assert [reject["line"] for reject in rejects if "record" in reject] == list(range(171, 671))
    make(lines, tmp_path / "plain", tokenizer)
    assert files_of(out) == files_of(tmp_path / "plain")


def test_two_equal_runs_without_locks_leave_one_data_set(
    lines: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run begins and ends while the first one writes a shard."""
    make(lines, tmp_path / "plain", tokenizer)
    monkeypatch.setattr(storage.fcntl, "flock", refused)
    out, append = tmp_path / "out", ShardWriter.append

    def late(writer: ShardWriter, rows: Any) -> None:
        append(writer, rows)
        if patched:
            patched.pop().undo()
            make(lines, out, tokenizer)

    patched = [pytest.MonkeyPatch()]
    patched[0].setattr(ShardWriter, "append", late)
    with pytest.raises(ConfigError, match="another run has finished it, or was withdrawn"):
        make(lines, out, tokenizer)
    assert files_of(out) == files_of(tmp_path / "plain")
    assert make(lines, out, tokenizer).already_finished


def test_withdrawn_run_leaves_no_temporary_file(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LocalStore.write

    def killed_before(output: LocalStore, name: str, content: bytes) -> None:
        """What a kill leaves of an earlier try to write the file."""
        (output.folder / f"{name}.0123.tmp").write_bytes(content[:9])
        write(output, name, content)

    monkeypatch.setattr(LocalStore, "write", killed_before)
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(CorpusError, match="no usable document"):
        make(tmp_path / "a.jsonl", tmp_path / "out", tokenizer)
    assert not (tmp_path / "out").exists()


def test_parts_begun_at_once_make_one_plan(
    lines: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(lines, tmp_path / "plain", tokenizer)
    out, both_listed, cut_units = tmp_path / "out", threading.Barrier(2), prepare_module.cut_units
    plans: list[Any] = []
    find_inputs = make_module.find_inputs

    def listing(*arguments: Any) -> Inputs:
        listed = find_inputs(*arguments)
        if listed.options.part:
            both_listed.wait(60)  # neither has found a plan
        return listed

    def planning(*arguments: Any) -> Any:
        plans.append(cut_units(*arguments))
        return plans[-1]

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as threads:
        patched.setattr(make_module, "find_inputs", listing)
        patched.setattr(prepare_module, "cut_units", planning)
        parts = [threads.submit(part, f"{n}/2", lines, out, tokenizer) for n in range(2)]
        ended = [each.result() for each in parts]
    assert [*map(len, plans)] == [sum(each.units for each in ended)]
    assert any(each.is_complete for each in ended)
    assert files_of(out) == files_of(tmp_path / "plain")


def test_part_that_cannot_be_planned_leaves_nothing(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n')
    with pytest.raises(CorpusError, match="no usable record has a label"):
        part("0/2", tmp_path / "a.jsonl", tmp_path / "new/out", tokenizer, task="classify")
    assert not (tmp_path / "new/out").exists()
