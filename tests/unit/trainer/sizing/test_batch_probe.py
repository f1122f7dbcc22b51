"""`--micro-batch-tokens auto`: what is found by trying, on a device whose memory is simulated."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import RUNS, make_config, read_metrics, run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.feeding.batch_policy import possible_sizes
from tokenfeed.trainer.loop import trainer as loop
from tokenfeed.trainer.sizing.batch_probe import (
    SHARE_OF_MEMORY,
    DeviceMemory,
    Probe,
    choose_micro_batch,
)
from tokenfeed.trainer.sizing.dry_run import dry_run
from tokenfeed.trainer.sizing.memory_model import PeakBytes
from tokenfeed.trainer.tasks.registry import make_task

CPU = torch.device("cpu")


class Simulated(PeakBytes, DeviceMemory):
    """A context in which tensors of this thread may take at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.tries = limit, -1  # the last reset follows the trials

    def __torch_dispatch__(self, *args: Any, **named: Any) -> Any:
        out = super().__torch_dispatch__(*args, **named)
        if self.now > self.limit:
            raise torch.OutOfMemoryError("simulated")
        return out

    def free_bytes(self) -> int:
        return self.limit

    def reset(self) -> None:
        self.tries += 1
        self.peak = self.now

    def peak_bytes(self) -> int:
        return self.peak


def auto(every_task: Path, folder: Path, way: str, **settings: Any) -> TrainConfig:
    given = RUNS[way] | {"steps": 3, "step_tokens": 768, "micro_batch_tokens": "auto"} | settings
    return make_config(every_task / given.pop("shards"), folder, **given)


def sizes_of(config: TrainConfig) -> list[int]:
    return possible_sizes(config, make_task(config, Manifest.read(config.shards), CPU))


def bytes_of(config: TrainConfig, size: int) -> int:
    """Return the peak bytes of a trial with enough memory."""
    memory = Simulated(1 << 60)
    with memory:
        found = Probe(dataclasses.replace(config, micro_batch_tokens=size), CPU, memory)
        return int(found.bytes_of(size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "wanted"),
    [("lm packed", 0), ("classify padded", 0.5)],
)
def test_the_largest_that_fits_is_found_by_bisection_and_nothing_stays(
    every_task: Path, tmp_path: Path, way: str, wanted: float
) -> None:
    config = auto(every_task, tmp_path / "run", way)
    sizes = sizes_of(config)
    size = sizes[round(wanted * (len(sizes) - 1))]
    memory = Simulated(int(bytes_of(config, size) / SHARE_OF_MEMORY * 1.01))
    gc.collect()
    with memory:
        found = choose_micro_batch(config, World(CPU), memory)
    gc.collect()
    assert found == dataclasses.replace(config, micro_batch_tokens=size)
    assert 1 <= memory.tries <= len(sizes).bit_length()
    assert memory.now == 0


@pytest.mark.slow
def test_where_nothing_fits_one_line_says_so(every_task: Path, tmp_path: Path) -> None:
    config = auto(every_task, tmp_path / "run", "lm packed")
    memory = Simulated(bytes_of(config, sizes_of(config)[0]) // 2)
    # The model itself fits.
    with (
        pytest.raises(ConfigError, match=r"`--micro-batch-tokens`=auto: \d+ tokens, .* Try"),
        memory,
    ):
        choose_micro_batch(config, World(CPU), memory)


@pytest.mark.slow
def test_a_run_with_auto_is_the_run_with_the_number(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = auto(every_task, tmp_path / "auto", "lm packed", dropout=0.1)
    size = sizes_of(config)[1]
    limit = int(bytes_of(config, size) / SHARE_OF_MEMORY * 1.01)

    def decided(given: TrainConfig, world: World) -> TrainConfig:
        memory = Simulated(limit)
        with memory:
            return choose_micro_batch(given, world, memory)

    monkeypatch.setattr(loop, "choose_micro_batch", decided)
    run(config)
    written = TrainConfig.of_run(config.run_dir)
    assert written is not None
    assert written.micro_batch_tokens == size
    run(dataclasses.replace(config, micro_batch_tokens=size, run_dir=tmp_path / "number"))
    for key in ("loss", "validation_loss"):
        assert read_metrics(tmp_path / "auto", key) == read_metrics(tmp_path / "number", key)


def test_a_run_that_goes_on_keeps_its_number(every_task: Path, tmp_path: Path) -> None:
    run(auto(every_task, tmp_path / "run", "lm packed", micro_batch_tokens=192, steps=2))
    again = auto(every_task, tmp_path / "run", "lm packed", resume=True)
    report = run(again)
    assert report.steps == 3
    written = TrainConfig.of_run(tmp_path / "run")
    assert written is not None
    assert written.micro_batch_tokens == 192
    assert run(again) == report  # finished already


def test_a_cpu_takes_no_more_than_it_has_use_for(every_task: Path, tmp_path: Path) -> None:
    config = auto(every_task, tmp_path / "run", "lm packed", step_tokens=6144)
    found = choose_micro_batch(config, World(CPU))
    assert found.micro_batch_tokens == max(size for size in sizes_of(config) if size <= 2048)


@pytest.mark.slow
def test_a_plan_predicts_the_number_for_a_gpu(every_task: Path, tmp_path: Path) -> None:
    config = auto(every_task, tmp_path / "run", "lm packed", step_tokens=128)
    assert dry_run(config, "H100").micro_batches_per_step == 1


class Driver:
    """The calls of torch's module of a device that tell of memory."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 70, 100

    def memory_reserved(self, device: Any) -> int:
        return 20

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.calls.append("reset_peak_memory_stats")

    def max_memory_allocated(self, device: Any) -> int:
        return 50


def test_the_memory_of_a_device_is_what_is_free_and_what_this_process_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setattr(torch, "get_device_module", lambda device: driver)
    memory = DeviceMemory(torch.device("cuda", 0))
    memory.reset()
    assert (memory.free_bytes(), memory.peak_bytes()) == (90, 50)
    assert driver.calls == ["empty_cache", "reset_peak_memory_stats"]
