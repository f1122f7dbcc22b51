"""Whatever ends a run, the same command continues it, to the bytes of an undisturbed one."""

import base64
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.commands import (
    COMMAND,
    ended_by,
    error_of,
    kill_at,
    records_in,
    run,
    run_json,
    start,
)
from support.corpora import messages_in, texts, write_ballast, write_lines, write_long_corpus
from support.data_sets import files_of
from support.object_server import remote_store
from support.processes import children_of, eventually

from tokenfeed import Manifest


def test_a_killed_run_continues_to_the_same_bytes(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    for index, text in enumerate(texts(120, seed=2)):
        (corpus / f"more{index:03}.txt").write_text(text * 20)
    options = ("--tokenizer", tokenizer, "--shard-size", "50KB", "--validation", "0.1")
    run(corpus, tmp_path / "undisturbed", *options)
    out = tmp_path / "out"
    done = []
    for target in (2, 6, 12):
        more = target - len(records_in(out))
        _kill_when_recorded(more, corpus, out, *options, "--workers", "2")
        done.append(len(records_in(out)))
        assert not (out / "manifest.json").exists()
    next((out / "train").glob("*.arrow")).unlink()  # a finished shard that somebody lost
    records_in(out)[-1].write_bytes(b'{"unit": 99, "sha')  # a damaged record
    plan = out / ".parts/plan.json"
    plan.write_text(plan.read_text().replace("1", "2"))  # a damaged plan, which is JSON still
    summary = run_json(corpus, out, *options, "--workers", "2")
    assert summary["units"] > summary["resumed_units"] >= done[-1] - 2 >= 10
    assert files_of(out) == files_of(tmp_path / "undisturbed")


def _kill_when_recorded(units: int, *arguments: object) -> None:
    """Kill the parent process alone; its workers must notice by themselves."""
    process, errors = ended_by(signal.SIGKILL, units, *arguments)
    assert process.returncode == -signal.SIGKILL, errors
    _wait_until_gone(process.pid)


def _wait_until_gone(group: int) -> None:
    assert eventually(lambda: not _running_in_group(group)), _running_in_group(group)


def _running_in_group(group: int) -> list[str]:
    """Processes of a group that are not mere zombies, which nobody may reap in a container."""
    running = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().rpartition(")")
            state, _, process_group = fields.split()[:3]
            if int(process_group) == group and state not in "ZX":
                running.append(name)
    return running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_in_one_line_and_leaves_no_process(
    corpus: Path, tmp_path: Path, tokenizer: Path, number: signal.Signals
) -> None:
    write_ballast(corpus)
    out = tmp_path / "out"
    words = (corpus, out, "--tokenizer", tokenizer, "--shard-size", "30KB")
    process, errors = ended_by(number, 1, *words, group=number == signal.SIGINT)
    assert process.returncode == 128 + number
    (line,) = messages_in(errors)
    assert line.startswith("interrupted: ")
    assert "the same command continues" in line
    _wait_until_gone(process.pid)
    assert "manifest.json" not in files_of(out)


def test_interruption_while_a_tokenizer_is_trained_does_not_wait_for_it(tmp_path: Path) -> None:
    """Merging 30 MB of random letters takes more than two minutes."""
    corpus, out = tmp_path / "corpus.txt", tmp_path / "out"
    corpus.write_bytes(base64.encodebytes(random.Random(0).randbytes(22_000_000)))
    process = warm.Popen([*COMMAND[1:], corpus, out], stderr=subprocess.PIPE)
    assert process.stderr
    assert process.stderr.readline().startswith("training a tokenizer")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "interrupted: the same command continues\n")


@pytest.mark.parametrize("killed", ["workers", "their program"])
def test_a_killed_worker_is_an_error_and_no_hang(
    corpus: Path, tmp_path: Path, tokenizer: Path, killed: str
) -> None:
    """Workers go on without the program that has forked them."""
    write_long_corpus(corpus)
    out = tmp_path / "out"
    words = (corpus, out, "--tokenizer", tokenizer, "--workers", 1)
    process = warm.Popen([*COMMAND[1:], *words], stderr=subprocess.PIPE)
    assert eventually(lambda: any(out.glob("train/*"))), "no worker writes"
    for server in children_of(process.pid):
        for worker in children_of(server) if killed == "workers" else [server]:
            os.kill(worker, signal.SIGKILL)
    _, stderr = process.communicate(timeout=300)
    if killed == "their program":
        assert process.returncode == 0, stderr
        return
    assert process.returncode == 1
    (line,) = messages_in(stderr)
    assert line.startswith("error: a worker process was killed")
    assert re.search(rf", at unit \d+, {corpus}/", line)


def test_a_file_that_vanishes_is_named_and_the_run_goes_on_when_it_is_back(
    corpus: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_long_corpus(corpus, num_lines=400)
    (corpus / "z.txt").write_text("in the last and smallest unit, which comes last")
    out = tmp_path / "out"
    options = ("--tokenizer", tokenizer, "--shard-size", "50KB", "--workers", "1")
    replace = os.replace

    def take_away(source: Any, target: Any, **options: Any) -> None:
        replace(source, target, **options)
        if out / ".parts/00000.json" == Path(target):
            (corpus / "z.txt").rename(tmp_path / "away.txt")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", take_away)
        message = error_of(corpus, out, *options)
    assert message.startswith(f"error: {corpus / 'z.txt'}: vanished while the corpus was read.")
    (tmp_path / "away.txt").rename(corpus / "z.txt")
    run(corpus, out, *options)
    assert Manifest.read(out).ledger.files == 63


def test_a_kill_between_manifest_and_end_is_finished_by_the_same_command(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    options = ("--tokenizer", tokenizer, "--shard-size", "20KB", "--workers", "1")
    _kill_when_recorded(2, corpus, out, *options)
    run(corpus, tmp_path / "whole", *options)
    (out / "manifest.json").write_bytes((tmp_path / "whole/manifest.json").read_bytes())
    run(corpus, out, *options)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    """A limit on the size of files refuses writes in the middle of a shard, as a full disk does."""
    write_ballast(corpus)
    options = ("--tokenizer", tokenizer, "--shard-size", "2MB", "--workers", "1")
    run(corpus, tmp_path / "undisturbed", *options)
    out = tmp_path / "out"
    result = subprocess.run(
        [*COMMAND, *map(str, (corpus, out, *options))],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # Python would leave cut .pyc files
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    (line,) = messages_in(result.stderr)
    assert line.startswith("error: ")
    assert "File too large" in line
    run(corpus, out, *options)
    assert files_of(out) == files_of(tmp_path / "undisturbed")


@pytest.mark.long  # `test_remote_output.py` breaks runs off at any change of a store, in process
def test_a_killed_command_from_store_to_store_is_continued_by_the_same(
    corpus: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects are those of a folder."""
    pytest.importorskip("obstore")
    for index, text in enumerate(texts(40, seed=2)):
        (corpus / f"more{index:03}.txt").write_text(text * 20)
    write_ballast(corpus)
    with remote_store(monkeypatch) as remote:
        for path in corpus.iterdir():
            remote.put(f"in/{path.name}", path.read_bytes())
        given = f"s3://{remote.prefix}/in", f"s3://{remote.prefix}/out"
        options = ("--tokenizer", tokenizer, "--shard-size", "50KB", "--validation", "0.1")
        run(corpus, tmp_path / "plain", *options)
        killed, _ = ended_by(signal.SIGKILL, 3, *given, *options, "--workers", "2")
        assert killed.returncode == -signal.SIGKILL
        ended = start(*given, *options, "--workers", "2", "--json")
        assert '"resumed_units": 0' not in ended.stdout
    plain, prefix = files_of(tmp_path / "plain"), f"{remote.prefix}/out/"
    there = remote.server.objects.items()
    made = {name.removeprefix(prefix): each.data for name, each in there if prefix in name}
    assert made.keys() == plain.keys()
    shards = [name for name in plain if name.endswith(".arrow")]
    assert [made[name] for name in shards] == [plain[name] for name in shards]


@pytest.mark.long
@pytest.mark.slow
def test_fifty_kills_at_random_moments_change_no_byte(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    for index, text in enumerate(texts(60, seed=3)):
        (corpus / f"more{index:03}.txt").write_text(text * 20)
    lines = [json.dumps({"text": text * 3}) + "\n" for text in texts(1200, seed=4)]
    (corpus / "many.jsonl").write_text("".join(lines))
    options = ("--shard-size", "50KB", "--validation", "0.1", "--workers", "2")
    options = (*options, "--vocab-size", "400")  # training is part of what may be killed
    started = time.monotonic()
    run(corpus, tmp_path / "undisturbed", *options)
    seconds = time.monotonic() - started
    expected = files_of(tmp_path / "undisturbed")
    draw = random.Random(0)
    kills = finished = 0
    while kills < 50 or not finished:
        out = tmp_path / f"out{finished}"
        kills += _run_for(draw.uniform(0, seconds), corpus, out, *options)
        if (out / "manifest.json").exists() and not (out / ".parts").exists():
            assert files_of(out) == expected
            finished += 1
    if (tmp_path / f"out{finished}").exists():
        run(corpus, tmp_path / f"out{finished}", *options)
        assert files_of(tmp_path / f"out{finished}") == expected


def _run_for(seconds: float, *arguments: object) -> bool:
    """Run the command and kill it, alone or with its workers; False if it was done before."""
    words = [*COMMAND[1:], *arguments]
    process = warm.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        if int(seconds * 1e6) % 2:
            with contextlib.suppress(ProcessLookupError):  # it has no group yet
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        _wait_until_gone(process.pid)
        return True
    assert code == 0
    return False


def test_a_killed_run_continues_only_with_the_same_standard_input(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def feed(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    data = write_lines(tmp_path / "a.jsonl", texts(2500)).read_bytes()
    options = ("--tokenizer", tokenizer, "--shard-size", "100KB", "--workers", 1)
    out = tmp_path / "out"
    with open(tmp_path / "a.jsonl", "rb") as file:
        ended_by(signal.SIGKILL, 2, "-", out, *options, stdin=file)
    assert len(records_in(out)) >= 2
    feed(data[:-2] + b"!}")
    assert "of another command, input" in error_of("-", out, *options, expect=2)
    for folder in (out, tmp_path / "undisturbed"):
        feed(data)
        run("-", folder, *options)
    assert files_of(out) == files_of(tmp_path / "undisturbed")


def test_parts_do_each_unit_once_and_survive_a_kill(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    options = ("--tokenizer", tokenizer, "--shard-size", "5KB", "--validation", "0.1")
    whole = run_json(corpus, tmp_path / "plain", *options)["units"]
    out = tmp_path / "out"
    assert kill_at(12, "pretokenize", corpus, out, *options, "--part=0/3")
    parts = [run_json(corpus, out, *options, f"--part={part}/3") for part in range(3)]
    units = [part["units"] for part in parts]
    assert sum(units) == whole
    assert max(units) - min(units) <= 1
    assert [part["is_complete"] for part in parts] == [False, False, True]
    assert files_of(out) == files_of(tmp_path / "plain")


@pytest.mark.long
def test_parts_killed_at_any_write_change_no_byte(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    options = ("--tokenizer", tokenizer, "--shard-size", "60KB", "--validation", "0.1")
    run(corpus, tmp_path / "plain", *options)
    expected = files_of(tmp_path / "plain")
    before, out = tmp_path / "before", tmp_path / "out"
    steps = ["--part=0/2", "--part=1/2"]
    for number, step in enumerate(steps):
        moment, was_killed = 0, True
        while was_killed:
            if before.exists():
                shutil.copytree(before, out)
            was_killed = kill_at(moment, "pretokenize", corpus, out, *options, step)
            for left in steps[number:]:
                run(corpus, out, *options, left)
            assert files_of(out) == expected
            shutil.rmtree(out)
            moment += 1
        assert moment > 10
        run(corpus, before, *options, step)
