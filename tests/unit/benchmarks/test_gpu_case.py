"""What benchmarks/gpu/case.py has a GPU watch, on the CPU: when a wait would be an error."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.training import follow_brackets, write_labelled

from benchmarks.gpu import case as gpu_case


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_labelled(tmp_path / "lm", "lm")
    return tmp_path


@pytest.mark.long
def test_a_wait_is_an_error_in_steps_and_in_none_of_the_brackets_that_may_wait(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = follow_brackets(monkeypatch)
    modes: list[str] = ["default"]
    seen: dict[str | None, set[str]] = {}
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def noting(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            seen.setdefault(where(), set()).add(modes[-1])
            return function(*args, **options)

        return call

    for name in ("backward", "tolist", "isfinite", "long"):
        monkeypatch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
    monkeypatch.setattr(torch.nn.Embedding, "forward", noting(torch.nn.Embedding.forward))
    monkeypatch.setattr(gpu_case, "WAITING_STEPS", 6)
    finish = gpu_case.Trainer.finish

    def finished(trainer: gpu_case.Trainer) -> object:
        assert modes[-1] == "default"
        monkeypatch.undo()  # here every wait is allowed
        return finish(trainer)

    monkeypatch.setattr(gpu_case.Trainer, "finish", finished)
    gpu_case.waits(data, "cpu", gpu_case.SMALL, {})
    assert seen.pop(None) == {"error"}
    assert seen.keys() >= {"log", "evaluation"}
    assert all(kinds == {"default"} for kinds in seen.values())
    assert modes[-1] == "default"
