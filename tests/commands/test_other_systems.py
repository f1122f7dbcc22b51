"""tokenfeed on systems that lack what Linux has: macOS and Windows."""

from pathlib import Path

import pytest
from support import warm
from support.other_systems import (
    COUNT_TOKENS,
    EVERY_MODULE,
    FORGET,
    LIKE_MACOS,
    LIKE_WINDOWS,
    PRETOKENIZE,
    RUN,
    SMALL_TRAIN,
)


@pytest.mark.slow
def test_all_but_frameworks_works_without_features_of_linux(
    text_shards: Path, tmp_path: Path
) -> None:
    """Every module is imported, rows are read, standard input is tokenized, a model is trained."""
    code = FORGET + LIKE_MACOS + EVERY_MODULE + COUNT_TOKENS + RUN + PRETOKENIZE + SMALL_TRAIN
    out = tmp_path / "out"
    done = warm.run(["-c", code, text_shards, out])
    assert done.returncode == 0, done.stderr
    alone, by_workers = map(int, done.stdout.split()[:2])
    assert alone == by_workers > 0
    assert "trained  4 steps" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-run", "out.txt"]
    assert (out / "manifest.json").is_file()
    assert (tmp_path / "out-run" / "checkpoints" / "step-00000004").is_dir()


def test_script_of_the_user_is_not_run_again_by_spawned_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        FORGET
        + LIKE_WINDOWS
        + """
import tokenfeed
from tokenfeed.tools.jobs import executors
from tokenfeed.tools.pretokenizing import runner
runner.is_small = lambda units: False
print("the script runs")
rows = [{"text": "some words of a text"}] * 50
made = tokenfeed.pretokenize(rows, sys.argv[1], vocab_size=300, workers=2, engine="tokenizers")
print(made.summary.documents)
"""
    )
    done = warm.run([script, tmp_path / "out"])
    assert done.stdout.split("\n")[:2] == ["the script runs", "50"], done.stderr


def test_killed_spawned_worker_is_an_error_of_one_line() -> None:
    code = (
        FORGET
        + LIKE_WINDOWS
        + """
from tokenfeed.pipeline.processes import Ended
from tokenfeed.tools.jobs.executors import local_executor
executor = local_executor()
executor.start(2)
print(executor.submit(max, 3, 5).result())
try:
    executor.submit(int, "x").result()
except ValueError as error:
    print(error)
try:
    executor.submit(os._exit, 1).result()
except Ended:
    print("a worker process ended")
executor.shutdown()
"""
    )
    done = warm.run(["-c", code])
    assert done.stdout.splitlines() == [
        "5",
        "invalid literal for int() with base 10: 'x'",
        "a worker process ended",
    ], done.stderr
