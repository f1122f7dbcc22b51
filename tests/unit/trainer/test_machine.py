"""What the machine decides: settings for its GPU, and what is done without where it lacks parts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import write_labelled

from tokenfeed.tools import train_settings as train_command
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.sensors.gpu_models import GIB, GPUS, recognized
from tokenfeed.trainer.sizing.recommended import Machine, able, machine_of, sized

MANY = TrainConfig(shards="out", run_dir=Path("run"), step_tokens=1 << 16)
gpus = st.sampled_from([*GPUS.values(), recognized("NVIDIA A10", 22 * GIB, "bf16")])
machines = st.builds(
    Machine, gpu=st.none() | gpus, cores=st.integers(1, 64), has_compiler=st.booleans()
)


def laid(config: TrainConfig, machine: Machine, *said: str) -> TrainConfig:
    for choice in sized(config, machine, said, packed=True):
        config = dataclasses.replace(config, **choice.settings)
    for choice in able(config, machine):
        config = dataclasses.replace(config, **choice.settings)
    return config


@given(machines)
def test_what_is_decided_changes_no_training(machine: Machine) -> None:
    config = laid(MANY, machine)
    kept = {"micro_batch_tokens": 2048, "num_workers": None}
    assert dataclasses.replace(config, **kept) == MANY
    config.check()


@given(machines)
def test_what_was_said_stays(machine: Machine) -> None:
    assert sized(MANY, machine, ("micro_batch_tokens", "num_workers"), packed=True) == []


@given(machines, st.sampled_from(["auto", "fp32", "bf16", "fp16"]), st.booleans())
def test_what_the_machine_lacks_is_left_out_and_then_nothing_is_lacking(
    machine: Machine, precision: Any, compiles: bool
) -> None:
    config = dataclasses.replace(MANY, precision=precision, compile=compiles)
    left = laid(config, machine)
    assert able(left, machine) == []
    assert left.compile == (compiles and machine.has_compiler)
    assert all("\n" not in choice.reason for choice in able(config, machine))


@given(machines)
def test_on_a_cpu_nothing_changes(machine: Machine) -> None:
    assert laid(MANY, dataclasses.replace(machine, gpu=None)) == MANY


def test_a_step_of_one_micro_batch_is_left_as_it_is() -> None:
    small = dataclasses.replace(MANY, step_tokens=2048)
    machine = Machine(gpu=GPUS["H100"], cores=16, has_compiler=True)
    assert sized(small, machine, (), packed=True) == []


def test_padded_steps_of_tokens_keep_their_micro_batch_on_any_gpu() -> None:
    machine = Machine(gpu=GPUS["H100"], cores=16, has_compiler=True)
    assert sized(MANY, machine, (), packed=False) == []
    rows = dataclasses.replace(MANY, step_rows=64)
    assert [choice.settings for choice in sized(rows, machine, (), packed=False)] == [
        {"micro_batch_tokens": "auto"}
    ]


def test_a_line_says_what_was_decided_and_why() -> None:
    machine = Machine(gpu=GPUS["T4"], cores=2, has_compiler=False)
    config = dataclasses.replace(laid(MANY, machine))
    assert [choice.line(config) for choice in sized(MANY, machine, (), packed=True)] == [
        "--micro-batch-tokens auto (what fits T4, 14.5 GiB, in fp16)",
        "--num-workers 1 (2 cores)",
    ]


def test_the_command_asks_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = write_labelled(tmp_path / "shards", "lm")
    machine = Machine(gpu=GPUS["T4"], cores=2, has_compiler=False, unused=None)
    monkeypatch.setattr(train_command, "machine_of", lambda *_: machine)
    words = ["--shards", shards, "--preset", "rtx4090", "--step-tokens", 1 << 18]
    monkeypatch.setattr("sys.argv", ["train", *map(str, words), "--precision", "bf16"])
    caplog.set_level("INFO")
    config = train_command.parse_config()
    assert (config.compile, config.precision, config.num_workers) == (False, "fp16", 1)
    assert config.micro_batch_tokens == 16_384  # the preset said so
    assert "--compile is left out: there is no C compiler" in caplog.text
    assert "--precision fp16 instead of bf16, which T4 only emulates" in caplog.text


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "470.1")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    config = dataclasses.replace(MANY, device="auto")
    monkeypatch.setattr("tokenfeed.trainer.sizing.dry_run.find_gpu", lambda *_: None)
    (lack,) = able(config, machine_of(config, None))
    assert lack.reason.startswith(
        "training on the CPU: a GPU is here, and its driver 470.1 does not"
    )
    monkeypatch.setattr("torch.version.cuda", None)
    (lack,) = able(config, machine_of(config, None))
    assert "this torch was built without CUDA" in lack.reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert able(config, machine_of(config, None)) == []


def test_no_compiler_means_none_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not machine_of(MANY, "T4").has_compiler
    (tmp_path / "gcc").touch(mode=0o755)
    assert machine_of(MANY, "T4").has_compiler
