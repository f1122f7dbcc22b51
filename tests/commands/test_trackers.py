"""Services themselves, where they are installed: without a network, in processes of their own."""

from pathlib import Path

import pytest
from support import warm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("service", "left"),
    [
        ("wandb", "wandb/offline-run-*/run-run-*.wandb"),
        ("trackio", "tracked"),
        ("tensorboard", "tensorboard/events.out.tfevents.*"),
    ],
)
def test_a_service_takes_a_run_without_a_network(
    service: str, left: str, text_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(service)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    words = ["--shards", text_shards, "--run-dir", tmp_path / "run", "--model", "words"]
    words += ["--steps", 4, "--track", service]
    done = warm.run(["-m", "tokenfeed.tools.train", *words])
    assert done.returncode == 0, done.stderr
    assert "The run goes on without it" not in done.stderr
    assert [*(tmp_path / "run").glob(left)], done.stderr
