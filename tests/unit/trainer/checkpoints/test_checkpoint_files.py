"""Checkpoints on a real disk: whole or absent, checked to the bit, the latest and best kept."""

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import (
    assert_same,
    make_meta,
    make_state,
    names_in,
    open_saver,
    save,
    sealed_content,
)

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.trainer.checkpoints import async_saver
from tokenfeed.trainer.checkpoints.checkpoint_files import Best, Checkpoints
from tokenfeed.trainer.distributed.world import State

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def load(folder: Path, step: int | None = None) -> State:
    return Checkpoints(folder).open(step).read()


def step_of(folder: Path) -> int:
    return Checkpoints(folder).open().meta.step


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any dtype and shape, also laid out in another order of memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    raw = torch.empty([*shape], dtype=dtype)
    count = raw.numel() * raw.element_size()
    content = random.Random(draw(st.integers(0, 99))).randbytes(count)
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    if count:
        raw = torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
    return raw.t() if raw.dim() == 2 and draw(st.booleans()) else raw


STATES = st.dictionaries(st.text("abc.", min_size=1, max_size=4), tensors(), max_size=6)


@settings(max_examples=10)
@given(state=STATES, compress=st.booleans())
def test_any_state_comes_back_bit_for_bit(
    state: State, compress: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("state")
    save(folder, 1, state, compress=compress)
    live = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    assert_same(state, Checkpoints(folder).open().read(live))
    assert names_in(folder) == ["step-00000001"]
    shutil.rmtree(folder)


def test_read_joins_many_frames(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_saver, "_FRAME_BYTES", 100)
    state = {"model.a": torch.rand(99, 7), "model.b": torch.zeros(5000)}
    path = save(folder, 1, state, compress=True)
    assert_same(state, Checkpoints(folder).open().read())
    assert (path / "state-0.safetensors.zst").read_bytes().count(b"\x28\xb5\x2f\xfd") > 200


@pytest.mark.parametrize("cut", [True, False])
def test_open_rejects_damaged_frames_whose_checksum_was_forged(folder: Path, cut: bool) -> None:
    path = save(folder, 1, compress=True)
    file = path / "state-0.safetensors.zst"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content[:-20] if cut else content)
    described = json.loads((path / "checkpoint.json").read_bytes())
    described["files"][file.name] = file_xxh3(file)
    (path / "checkpoint.json").write_bytes(sealed_content(described))
    with pytest.raises(ResumeError, match="the checkpoint is damaged") as error:
        Checkpoints(folder).open()
    assert "\n" not in str(error.value)
    assert names_in(folder) == ["step-00000001"]


def test_open_of_compressed_checkpoint_on_full_disk_names_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(folder, 1, compress=True)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: SimpleNamespace(copy_stream=refuse))
    with pytest.raises(ResumeError, match=r"No space left on device.* Free space there"):
        Checkpoints(folder).open()
    assert names_in(folder) == [path.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_compressed_checkpoint_on_read_only_disk_is_read(folder: Path) -> None:
    save(folder, 1, compress=True)
    folder.chmod(0o555)
    try:
        assert_same(make_state(1), Checkpoints(folder).open().read())
    finally:
        folder.chmod(0o755)


def test_read_overwrites_live_tensors_in_place(folder: Path) -> None:
    saved = torch.rand(5, 3)
    save(folder, 1, {"model.a": saved, "model.b": saved + 1})
    live = torch.zeros(3, 5, dtype=torch.float64).t()  # other layout, wider numbers
    state = Checkpoints(folder).open().read({"model.a": live})
    assert state["model.a"] is live
    assert torch.equal(live, saved.double())
    assert torch.equal(state["model.b"], saved + 1)


def test_open_rejects_unlisted_tensor_file(folder: Path) -> None:
    path = save(folder, 1)
    shutil.copy(path / "state-0.safetensors", path / "state-1.safetensors")
    with pytest.raises(ResumeError, match=r"state-1.safetensors is not listed"):
        Checkpoints(folder).open()


def test_other_programs_read_the_tensors_by_the_names_of_the_weights(folder: Path) -> None:
    path = save(folder, 1, {"model.blocks.0.weight": torch.arange(6.0).view(2, 3)})
    found = safetensors.torch.load_file(path / "state-0.safetensors")
    assert found.keys() == {"model.blocks.0.weight"}
    assert torch.equal(found["model.blocks.0.weight"], torch.arange(6.0).view(2, 3))


def test_tied_weights_are_kept_once(folder: Path) -> None:
    weight = torch.rand(300, 10)
    path = save(folder, 1, {"embedding": weight, "head": weight})
    assert (path / "state-0.safetensors").stat().st_size < 1.5 * 300 * 10 * 4
    tied = torch.zeros(300, 10)
    load_into = {"embedding": tied, "head": tied}
    assert Checkpoints(folder).open().read(load_into).keys() == {"embedding"}
    assert torch.equal(tied, weight)


def test_what_cannot_be_saved_is_named(folder: Path) -> None:
    state: Any = {"model.x": {1, 2}}
    with pytest.raises(ConfigError, match=r"model\.x: set cannot be saved"):
        save(folder, 1, state)


def test_the_latest_are_kept(folder: Path) -> None:
    for step in (1, 2, 3, 4):
        save(folder, step)
    assert names_in(folder) == ["step-00000003", "step-00000004"]
    for step in (5, 6):
        save(folder, step, keep=3)
    assert names_in(folder) == ["step-00000004", "step-00000005", "step-00000006"]
    save(folder, 7, keep=1)
    assert names_in(folder) == ["step-00000007"]


def test_best_is_kept_if_its_loss_is_nan(folder: Path) -> None:
    best = Best(step=1, metric="macro_f1", metrics={"loss": math.nan, "macro_f1": 0.5})
    with open_saver(folder) as saver:
        for step in (1, 2, 3, 4):
            saver.save(make_meta(step, best=best), make_state(step))
    assert names_in(folder) == ["step-00000001", "step-00000003", "step-00000004"]
    assert repr(Checkpoints(folder).best()) == repr(best)  # a NaN is not equal to itself


def test_a_save_that_was_killed_is_no_checkpoint_and_is_cleared_by_the_next(folder: Path) -> None:
    save(folder, 1)
    unfinished = folder / "step-00000002.tmp"
    unfinished.mkdir()
    (unfinished / "state-0.safetensors").write_bytes(b"half")
    assert step_of(folder) == 1
    save(folder, 2)
    assert not unfinished.exists()
    assert step_of(folder) == 2


def test_a_bit_that_was_flipped_anywhere_is_refused_in_one_line(folder: Path) -> None:
    path = save(folder, 1, make_state(1) | {"random.cpu": torch.get_rng_state()[:200]})
    draw = random.Random(0)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in draw.sample(range(len(whole)), 150):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            try:
                state = load(folder)
            except ResumeError as error:
                assert "step-00000001: the checkpoint is damaged" in str(error)
            else:  # white space between what JSON says
                assert file.suffix == ".json"
                assert whole[place : place + 1].isspace()
                assert torch.equal(state["model.weight"], make_state(1)["model.weight"])
        file.write_bytes(whole)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def nest(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


@pytest.mark.parametrize("damage", [cut, Path.unlink, nest])
@pytest.mark.parametrize("name", ["state-0.safetensors", "checkpoint.json"])
def test_a_damaged_checkpoint_is_one_line_with_its_folder_and_the_remedy(
    folder: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(save(folder, 1) / name)
    with pytest.raises(ResumeError, match=r"step-00000001.* damaged .*Delete this folder"):
        load(folder)


def test_checkpoint_of_another_step_is_refused(folder: Path) -> None:
    save(folder, 1).rename(folder / "step-00000007")
    with pytest.raises(ResumeError, match=r"step-00000007.* \(its checkpoint\.json is of step 1\)"):
        load(folder)


def _list_files(path: Path, files: dict[str, str]) -> None:
    """Write another list of files, with the right checksum, into a checkpoint.json."""
    path.write_bytes(sealed_content(json.loads(path.read_bytes()) | {"files": files}))


@pytest.mark.parametrize("name", ["/dev/zero", "../state-0.safetensors", "state-0.bin"])
def test_checkpoint_that_lists_foreign_files_is_refused(folder: Path, name: str) -> None:
    _list_files(save(folder, 1) / "checkpoint.json", {name: "0" * 16})
    with pytest.raises(ResumeError, match=rf"damaged \(checkpoint\.json lists '{re.escape(name)}'"):
        load(folder)


def test_broken_tensor_file_with_right_checksum_is_refused(folder: Path) -> None:
    path = save(folder, 1)
    (path / "state-0.safetensors").write_bytes(bytes(8))
    checksum = xxhash.xxh3_64_hexdigest(bytes(8))
    _list_files(path / "checkpoint.json", {"state-0.safetensors": checksum})
    with pytest.raises(ResumeError, match=r"step-00000001.* damaged .*Delete this folder"):
        load(folder)
