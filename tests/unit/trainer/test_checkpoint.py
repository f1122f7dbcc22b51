"""Checkpoints on a real disk: whole or absent, checked, the latest two kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.trainer.checkpoint import CheckpointMeta, Checkpoints, random_state, set_random_state

CPU = torch.device("cpu")


def make_progress(step: int) -> CheckpointMeta:
    return CheckpointMeta(
        step=step,
        tokens=step * 100,
        slots=step * 128,
        model="tiny",
        vocabulary_size=64,
        loader={"epoch": 0, "window": step, "step": 3},
    )


def make_state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((4,), float(step))}, "scaler": {}}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_what_was_saved_last_is_loaded(checkpoints: Checkpoints) -> None:
    for step in (9, 10):
        checkpoints.save(make_progress(step), make_state(step))
    progress, state = checkpoints.load(CPU)
    assert progress == make_progress(10)
    assert torch.equal(state["model"]["weight"], torch.full((4,), 10.0))


def test_the_latest_two_are_kept(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoints.save(make_progress(step), make_state(step))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004"]


def test_a_save_that_was_killed_is_no_checkpoint_and_is_cleared_by_the_next(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoints.save(make_progress(1), make_state(1))
    unfinished = tmp_path / "checkpoints" / "step-00000002.tmp"
    unfinished.mkdir()
    (unfinished / "state.pt").write_bytes(b"half")
    assert checkpoints.load(CPU)[0].step == 1
    checkpoints.save(make_progress(2), make_state(2))
    assert not unfinished.exists()
    assert checkpoints.load(CPU)[0].step == 2


def test_an_error_while_saving_leaves_the_earlier_checkpoint_the_latest(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(make_progress(1), make_state(1))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(make_progress(2), make_state(2))
    assert checkpoints.load(CPU)[0].step == 1


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(data)


def cut_the_progress(path: Path) -> None:
    (path / "progress.json").write_text('{"step": 1, ')


def forget_the_tokens(path: Path) -> None:
    (path / "progress.json").write_text('{"step": 1, "state_xxh3": "0"}')


def lose_the_state(path: Path) -> None:
    (path / "state.pt").unlink()


@pytest.mark.parametrize(
    "damage", [flip_a_bit, cut_the_progress, forget_the_tokens, lose_the_state]
)
def test_a_damaged_checkpoint_is_one_line_with_its_folder_and_the_remedy(
    checkpoints: Checkpoints, damage: Callable[[Path], None]
) -> None:
    damage(checkpoints.save(make_progress(1), make_state(1)))
    with pytest.raises(ResumeError, match=r"step-00000001.* damaged .*Delete this folder") as error:
        checkpoints.load(CPU)
    assert "\n" not in str(error.value)


def test_nothing_to_resume_from_says_so(checkpoints: Checkpoints) -> None:
    with pytest.raises(ResumeError, match="no checkpoint to resume from"):
        checkpoints.load(CPU)


def test_random_numbers_go_on_where_the_state_was_taken() -> None:
    state = random_state(CPU)
    expected = torch.rand(5)
    set_random_state(state, CPU)
    assert torch.equal(torch.rand(5), expected)
