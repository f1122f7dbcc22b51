"""Signals, killed processes, limits and odd environments: one line at most, and no traceback."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from support.commands import COMMAND
from support.corpora import messages_in, write_ballast
from support.data_sets import files_of
from support.pretokenizing import make

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.jobs import executors
from tokenfeed.tools.jobs.executors import LocalExecutor
from tokenfeed.tools.jobs.run_records import RunRecords
from tokenfeed.tools.pretokenize import needs_workers
from tokenfeed.tools.pretokenizing import make as make_module
from tokenfeed.tools.pretokenizing.make import make_dataset
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.prepare import Prepared

Environment = dict[str, str]


def run(
    *arguments: object,
    environment: Environment | None = None,
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=os.environ | (environment or {}),
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=300,
    )


def line_of(result: subprocess.CompletedProcess[str], code: int) -> str:
    assert result.returncode == code, result.stderr
    (line,) = messages_in(result.stderr)
    return line


def test_a_program_killed_before_it_forked_is_an_error_in_one_line(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    write_ballast(corpus)
    executors.start_early()
    (program,) = (
        child.pid
        for child in psutil.Process().children()
        if "'pretokenize'" in " ".join(child.cmdline())
    )
    os.kill(program, signal.SIGKILL)
    options = Options(paths=(str(corpus), str(tmp_path / "out")), tokenizer=str(tokenizer))
    with pytest.raises(TokenfeedError, match="a worker process was killed"):
        make_dataset(options)


def test_workers_that_cannot_begin_when_nobody_waits_any_more_say_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    executor = LocalExecutor()
    executor.prepare(partial(int, "no number"))
    executor.start(2)
    executor.shutdown()
    assert capfd.readouterr().err == ""


def test_an_error_in_a_worker_arrives_as_itself(
    corpus: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ballast(corpus)
    options = Options(paths=(str(corpus), str(tmp_path / "out")), tokenizer=str(tokenizer))

    def run_units(run: Prepared, records: RunRecords) -> str:
        (tmp_path / "out/train").write_text("no folder")
        return really(run, records)

    really = make_module.run_units
    monkeypatch.setattr(make_module, "run_units", run_units)
    with pytest.raises(FileExistsError) as caught:
        make_dataset(options)
    assert "in _answer" in "".join(caught.value.__notes__)


def test_a_long_temporary_folder_and_development_mode_do_no_harm(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    write_ballast(corpus)
    temporary = tmp_path / ("t" * 120)
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary), "PYTHONDEVMODE": "1"}
    out = tmp_path / "out"
    result = run(corpus, out, "--tokenizer", tokenizer, environment=environment)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert Manifest.read(out).ledger.written == 260


def test_the_locale_changes_no_byte(tmp_path: Path, tokenizer: Path) -> None:
    corpus = tmp_path / "größe"
    corpus.mkdir()
    for name in ("ä.jsonl", "漢.jsonl", "z.jsonl"):
        (corpus / name).write_text('{"tëxt": "the stall"}\n')
    plain = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for out, environment in {"one": {"LC_ALL": "C.UTF-8"}, "two": plain}.items():
        arguments = (corpus, tmp_path / out, "--tokenizer", tokenizer, "--field", "text=tëxt")
        assert run(*arguments, environment=environment).returncode == 0
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert r"gr\u00f6\u00dfe/\u00e4.jsonl" in (tmp_path / "two/sources.jsonl").read_text()


INTERRUPTED_IMPORT = """
import os, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "{package}":
            try:
                os.kill(os.getpid(), {number})
            except KeyboardInterrupt as error:  # as extension modules do
                raise ImportError(name) from error
sys.meta_path.insert(0, Finder)
sys.argv = {words}
from tokenfeed.tools.{command} import main
main()
"""


@pytest.mark.parametrize(
    ("words", "package", "number"),
    [
        (["pretokenize", "corpus", "out"], "numpy", signal.SIGINT),
        (["pretokenize", "corpus", "out"], "numpy", signal.SIGTERM),
        (["main", "doctor"], "psutil", signal.SIGINT),
        (["shards", "cat", "out"], "numpy", signal.SIGINT),
    ],
)
def test_an_interruption_of_the_imports_is_one_line(
    words: list[str], package: str, number: signal.Signals
) -> None:
    named = {"package": package, "number": int(number), "words": words, "command": words[0]}
    code = INTERRUPTED_IMPORT.format(**named)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert line_of(result, 128 + number) == "interrupted"


def limit(kind: int, number: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (number, number))


@pytest.mark.parametrize(
    ("kind", "number", "words"),
    [
        (resource.RLIMIT_NOFILE, 6, "Too many open files"),
        (resource.RLIMIT_AS, 150_000_000, "there is not enough memory"),
        (resource.RLIMIT_FSIZE, 300, ".made_by.json: File too large"),
        (resource.RLIMIT_FSIZE, 2_000, ".parts/plan.json: File too large"),
    ],
)
def test_what_is_short_is_named_in_one_line(
    corpus: Path, tmp_path: Path, tokenizer: Path, kind: int, number: int, words: str
) -> None:
    if kind == resource.RLIMIT_NOFILE:
        write_ballast(corpus)  # workers want connections
    arguments = (corpus, tmp_path / "out", "--tokenizer", tokenizer)
    no_cut_modules = {"PYTHONDONTWRITEBYTECODE": "1"}
    result = run(*arguments, environment=no_cut_modules, before=limit(kind, number))
    assert words in line_of(result, 1)


def test_only_much_input_starts_the_workers_program_early(corpus: Path, tokenizer: Path) -> None:
    large = corpus / "zz-ballast.jsonl"
    assert not needs_workers([str(corpus), "out"])
    write_ballast(corpus)
    assert not needs_workers(["--tokenizer", str(large), str(corpus / "00.txt"), "out"])
    assert needs_workers(["--tokenizer", str(tokenizer), str(corpus), "out"])


def test_what_is_small_needs_no_second_engine(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    small = make(corpus, tmp_path / "small", tokenizer)
    write_ballast(corpus)
    large = make(corpus, tmp_path / "large", tokenizer)
    assert small.engine.startswith("tokenizers")
    assert large.engine.startswith("gigatoken")
    assert (small.tokens, small.documents) == (large.tokens, large.documents)
    shards = [
        json.loads((tmp_path / name / "manifest.json").read_text())["splits"]
        for name in ("small", "large")
    ]
    assert shards[0] == shards[1]
