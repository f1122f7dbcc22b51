"""Services themselves, where they are installed: without a network, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import run
from support.corpora import texts


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "in").mkdir()
    for number, text in enumerate(texts(60)):
        (folder / "in" / f"{number}.txt").write_text(text)
    run(folder / "in", folder / "out", "--vocab-size", 300)
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("service", "left"),
    [
        ("wandb", "wandb/offline-run-*/run-run-*.wandb"),
        ("tensorboard", "tensorboard/events.out.*"),
        ("trackio", "tracked"),
    ],
)
def test_a_service_takes_a_run_without_a_network(
    service: str, left: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(service)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    words = ["--shards", shards, "--run-dir", tmp_path / "run", "--model", "words", "--steps", "4"]
    command = [sys.executable, "-m", "tokenfeed.tools.train", *map(str, words), "--track", service]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "The run goes on without it" not in done.stderr
    assert [*(tmp_path / "run").glob(left)], done.stderr
