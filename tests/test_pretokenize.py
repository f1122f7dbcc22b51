"""`pretokenize` as its users meet it: a process with arguments, an output folder, an exit code."""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenfeed.pipeline.manifest import Manifest

COMMAND = [sys.executable, "-m", "tokenfeed.tools.pretokenize"]
WORDS = [
    "the",
    "of",
    "tokens",
    "shard",
    "window",
    "gang",
    "stall",
    "feed",
    "déjà",
    "漢字",
    "🎉",
    "def",
    "return",
]


def run(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == expect, result.stderr
    return result


def run_json(*arguments: object) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return summary


def error_of(*arguments: object, expect: int = 1) -> str:
    """The one line that a run ends with."""
    lines = run(*arguments, expect=expect).stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:], lines
    assert "Traceback" not in "".join(lines)
    return errors[0]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def texts(num_documents: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 400))) for _ in range(num_documents)]


def write_long_corpus(folder: Path, num_lines: int = 3000) -> None:
    """Work for some ten seconds, cut into many units."""
    line = json.dumps({"text": "tokens of the stall " * 500}) + "\n"
    (folder / "long.jsonl").write_text(line * num_lines)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer.json."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["</s>"],
        show_progress=False,
    )
    made.train_from_iterator(WORDS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 text files and a .jsonl with two bad lines and an empty text."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index, text in enumerate(texts(60)):
        (folder / f"{index:02}.txt").write_text(text)
    lines = [json.dumps({"text": text}) for text in ["", *texts(200, seed=1)]]
    (folder / "lines.jsonl").write_text("\n".join([*lines, "{", '{"text": 1}']))
    return folder


def test_output_is_the_same_bytes_with_one_and_two_workers(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    options = ("--tokenizer", tokenizer, "--shard-size", "30KB", "--validation", "0.1")
    for workers in (1, 2):
        run(corpus, tmp_path / f"out{workers}", *options, "--workers", workers)
    made = files_of(tmp_path / "out1")
    assert made == files_of(tmp_path / "out2")
    assert made["tokenizer.json"] == tokenizer.read_bytes()
    assert sum(name.startswith("train/") for name in made) >= 10
    assert any(name.startswith("validation/") for name in made)
    assert not any(name.endswith(".tmp") or "journal" in name for name in made)


def test_training_a_tokenizer_is_part_of_what_repeats(corpus: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        run(corpus, tmp_path / out, "--vocab-size", 400)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    summary = run_json(corpus, tmp_path / "three")
    assert summary["vocabulary_size"] < summary["vocabulary_wanted"] == 32_768
    assert summary["end_token"] == "<|endoftext|>"


def test_the_ledger_closes_and_the_summary_agrees(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    summary = run_json(corpus, out, "--tokenizer", tokenizer.parent, "--shard-size", "30KB")
    ledger = Manifest.read(out).ledger
    assert (ledger.files, ledger.read, ledger.written) == (61, 263, 260)
    assert (ledger.empty, ledger.rejected) == (1, 2)
    text_bytes = sum(len(text.encode()) for text in texts(60) + texts(200, seed=1))
    assert ledger.bytes == summary["text_bytes"] == text_bytes
    assert (summary["documents"], summary["empty"], summary["rejected"]) == (260, 1, 2)
    sources = [json.loads(line) for line in (out / "sources.jsonl").read_text().splitlines()]
    assert sum(source["read"] for source in sources) == 263
    assert sources[60]["path"] == str(corpus / "lines.jsonl")
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["file"], reject["record"]) for reject in rejects] == [
        (str(corpus / "lines.jsonl"), 201),
        (str(corpus / "lines.jsonl"), 202),
    ]


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
        _kill_when_journalled(out, target, corpus, *options, "--workers", "2")
        done.append(len((out / ".journal.jsonl").read_bytes().splitlines()) - 1)
        assert not (out / "manifest.json").exists()
    next((out / "train").glob("*.arrow")).unlink()  # a finished shard that somebody lost
    with open(out / ".journal.jsonl", "ab") as journal:
        journal.write(b'{"unit": 99, "sha')  # what a kill inside an append leaves
    summary = run_json(corpus, out, *options, "--workers", "2")
    assert summary["units"] > summary["resumed_units"] >= done[-1] - 1 >= 11
    assert files_of(out) == files_of(tmp_path / "undisturbed")


def _kill_when_journalled(out: Path, units: int, *arguments: object) -> None:
    """Kill the parent process alone; its workers must notice by themselves."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, (*arguments, out))], stderr=subprocess.DEVNULL, start_new_session=True
    )
    journal = out / ".journal.jsonl"
    deadline = time.monotonic() + 60
    while not journal.exists() or len(journal.read_bytes().splitlines()) <= units:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    _wait_until_gone(process.pid)


def _wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 10
    while running := _running_in_group(group):
        assert time.monotonic() < deadline, f"outlived their parent: {running}"
        time.sleep(0.01)


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
    write_long_corpus(corpus)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*COMMAND, str(corpus), str(out), "--tokenizer", str(tokenizer), "--shard-size", "200KB"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (out / "train").exists() or not list((out / "train").iterdir()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    (line,) = stderr.splitlines()
    assert line.startswith("interrupted: ")
    assert "the same command continues" in line
    _wait_until_gone(process.pid)
    assert "manifest.json" not in files_of(out)


def test_a_killed_worker_is_an_error_and_no_hang(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    write_long_corpus(corpus)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*COMMAND, str(corpus), str(out), "--tokenizer", str(tokenizer), "--workers", "1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (out / "train").exists():
        assert process.poll() is None
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    (line,) = stderr.splitlines()
    assert line.startswith("error: a worker process was killed")


def test_another_command_or_input_on_an_unfinished_folder_is_refused(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    options = ("--tokenizer", tokenizer, "--shard-size", "20KB", "--workers", "1")
    _kill_when_journalled(out, 2, corpus, *options)
    before = files_of(out)
    message = error_of(corpus, out, *options, "--validation", "0.5", expect=2)
    assert "--validation was 0.01, is 0.5" in message
    (corpus / "one more.txt").write_text("new")
    message = error_of(corpus, out, *options, expect=2)
    assert "the number of input files was 61, is 62" in message
    assert files_of(out) == before


def test_a_file_that_vanishes_is_named_and_the_run_goes_on_when_it_is_back(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    write_long_corpus(corpus, num_lines=400)
    (corpus / "z.txt").write_text("in the last and smallest unit, which comes last")
    out = tmp_path / "out"
    command = [*COMMAND, str(corpus), str(out), "--tokenizer", str(tokenizer)]
    command += ["--shard-size", "200KB", "--workers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (out / ".journal.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.005)
    (corpus / "z.txt").rename(tmp_path / "away.txt")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = stderr.splitlines()
    assert line.startswith(f"error: {corpus / 'z.txt'}: vanished while the corpus was read.")
    (tmp_path / "away.txt").rename(corpus / "z.txt")
    subprocess.run(command, check=True, capture_output=True)
    assert Manifest.read(out).ledger.files == 63


def test_bad_input_is_one_line_and_writes_nothing(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank/a.txt").touch()
    (tmp_path / "no.json").write_text("{}")
    given = ("--tokenizer", tokenizer)
    cases: list[tuple[tuple[object, ...], int, str]] = [
        ((tmp_path / "gone", out, *given), 1, "gone: not found"),
        ((tmp_path / "empty", out, *given), 1, "no input file found"),
        ((tmp_path / "blank", out, *given), 1, "every document is empty"),
        ((tmp_path / "blank", out), 1, "no text to train a tokenizer on"),
        ((corpus / "lines.jsonl", out, *given, "--text-field", "x"), 1, "record 0: no field `x`"),
        ((corpus / "lines.jsonl", out, "--text-field", "x"), 1, "record 0: no field `x`"),
        ((corpus, out, "--tokenizer", tmp_path / "no.json"), 1, "is not a tokenizer.json"),
        ((corpus, out, "--tokenizer", tmp_path / "empty"), 1, "tokenizer.json: cannot be read"),
        (
            (corpus, out, "--tokenizer", "some-one/some-model"),
            1,
            "nor could it be had from the hub",
        ),
        ((corpus, out, *given, "--end-token", "<x>"), 2, "'<x>' is not in the vocabulary"),
        ((corpus, out, *given, "--validation", "1"), 2, "`--validation` 1.0"),
        ((corpus, out, *given, "--shard-size", "big"), 2, "`--shard-size` 'big'"),
        ((corpus, out, *given, "--shard-size", "0MB"), 2, "`--shard-size` 0"),
        ((corpus, out, *given, "--workers", "0"), 2, "`--workers` 0"),
        ((corpus, out, "--vocab-size", "10"), 2, "`--vocab-size` 10"),
        ((corpus,), 2, "two paths are needed"),
        ((corpus, corpus / "00.txt", *given), 2, "is not a folder"),
        ((corpus, corpus, *given), 2, "already holds other data (00.txt)"),
    ]
    for arguments, code, words in cases:
        assert words in error_of(*arguments, expect=code), arguments
        assert not out.exists(), arguments


def test_a_finished_data_set_is_not_touched(corpus: Path, tmp_path: Path, tokenizer: Path) -> None:
    out = tmp_path / "out"
    run(corpus, out, "--tokenizer", tokenizer)
    before = files_of(out)
    assert "finished data set" in error_of(corpus, out, "--tokenizer", tokenizer, expect=2)
    assert files_of(out) == before


def test_a_kill_between_manifest_and_end_is_finished_by_the_same_command(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    options = ("--tokenizer", tokenizer, "--shard-size", "20KB", "--workers", "1")
    _kill_when_journalled(out, 2, corpus, *options)
    run(corpus, tmp_path / "whole", *options)
    (out / "manifest.json").write_bytes((tmp_path / "whole/manifest.json").read_bytes())
    run(corpus, out, *options)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_the_same_texts_in_any_container_give_the_same_rows(
    tmp_path: Path, tokenizer: Path
) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(50)).encode()
    (tmp_path / "plain.jsonl").write_bytes(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    splits = []
    for name in ("plain.jsonl", "packed.jsonl.gz"):
        run(tmp_path / name, tmp_path / f"out-{name}", "--tokenizer", tokenizer)
        splits.append(Manifest.read(tmp_path / f"out-{name}").splits)
    assert splits[0] == splits[1]


def test_help_explains_itself_on_one_screen_without_torch() -> None:
    script = (
        "import runpy, sys, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'datasets' in sys.modules))\n"
        "sys.argv = ['pretokenize', '--help']\n"
        "runpy.run_module('tokenfeed.tools.pretokenize', run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    *lines, heavy = result.stdout.splitlines()
    assert heavy.endswith("False False"), heavy
    assert len(lines) <= 48
    for words in ("CORPUS... OUT", "--tokenizer", "(default: 0.01)", "(default: 32768)", "--json"):
        assert words in result.stdout


def test_of_two_that_start_at_once_one_is_refused(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    write_long_corpus(corpus)
    command = [*COMMAND, str(corpus), str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    started = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = sorted((process.communicate(timeout=60)[1], process.returncode) for process in started)
    assert sorted(code for _, code in ended) == [0, 2]
    (refusal,) = (stderr for stderr, code in ended if code == 2)
    assert "another run is writing here" in refusal or "already holds a finished" in refusal
    verify = [sys.executable, "-m", "tokenfeed.tools.shards", "verify", str(tmp_path / "out")]
    assert subprocess.run(verify, stdout=subprocess.DEVNULL, check=False).returncode == 0
