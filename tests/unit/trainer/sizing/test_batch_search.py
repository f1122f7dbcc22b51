"""The largest micro-batch that memory takes, on simulated allocators."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.feeding.batch_policy import make_policy, micro_batch_sizes, shapes
from tokenfeed.trainer.sensors.gpu_models import GPUS, identify_gpu, parse_gpu
from tokenfeed.trainer.sizing.batch_probe import MOST_RUNS, largest_fitting

Sizes = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=40, unique=True).map(sorted)


class Allocator:
    """Runs sizes, up to its bytes."""

    def __init__(self, constant: int, slope: float, limit: int, *, fails: bool) -> None:
        self._constant, self._slope, self._limit, self._fails = constant, slope, limit, fails
        self.runs: list[int] = []

    def bytes_of(self, size: int) -> int:
        return self._constant + int(self._slope * size)

    def run(self, size: int) -> int | None:
        self.runs.append(size)
        needed = self.bytes_of(size)
        return None if self._fails and needed > self._limit else needed


@given(
    sizes=Sizes,
    constant=st.integers(0, 1 << 20),
    slope=st.floats(1, 100),
    limit=st.integers(0, 1 << 27),
    least=st.integers(1, 1000),
    fails=st.booleans(),
)
def test_four_runs_find_a_size_that_fits(
    sizes: list[int], constant: int, slope: float, limit: int, least: int, fails: bool
) -> None:
    allocator = Allocator(constant, slope, limit, fails=fails)
    found = largest_fitting(allocator.run, sizes, limit, least=least)
    assert len(allocator.runs) <= MOST_RUNS
    fitting = [size for size in sizes if allocator.bytes_of(size) <= limit]
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        first = allocator.runs[0]
        second = allocator.runs[min(1, len(allocator.runs) - 1)]
        if {first, second} <= set(fitting) and second > first:  # a line was known
            assert found == fitting[-1]


@given(bend=st.integers(1000, 100_000), limit=st.integers(1 << 16, 1 << 24))
def test_where_bytes_grow_faster_than_promised_less_is_taken(bend: int, limit: int) -> None:
    runs: list[int] = []

    def run(size: int) -> int | None:
        runs.append(size)
        needed = 10 * size + 20 * max(0, size - bend)
        return needed if needed <= limit else None

    found = largest_fitting(run, [1 << k for k in range(20)], limit)
    assert len(runs) <= MOST_RUNS
    assert found is not None
    assert 10 * found + 20 * max(0, found - bend) <= limit


@given(
    step=st.integers(1, 64),
    length=st.integers(1, 5).map(lambda times: 64 * times),
    packed=st.booleans(),
    longest=st.integers(1, 400),
    compiled=st.booleans(),
    by_rows=st.booleans(),
)
def test_every_size_makes_the_same_step(
    step: int, length: int, packed: bool, longest: int, compiled: bool, by_rows: bool
) -> None:
    config = TrainConfig(
        shards="out",
        sequence_length=length,
        step_tokens=2 * step * length,
        micro_batch_tokens=2 * step * length,
        step_rows=2 * step if by_rows else None,
        compile=compiled,
    )
    sizes = micro_batch_sizes(config, packed=packed, longest=longest)
    assert sizes == sorted(set(sizes))
    for size in sizes:
        changed = dataclasses.replace(config, micro_batch_tokens=size)
        changed.check()
        policy = make_policy(changed, packed=packed, on_gpu=True)
        assert changed.accumulation * (changed.rows if by_rows else size) == (
            2 * step if by_rows else config.step_tokens
        )
        if compiled and not by_rows:
            assert shapes(policy, longest)


def test_gpus_are_known_by_name_or_by_their_memory() -> None:
    assert parse_gpu("h100") == GPUS["H100"]
    assert parse_gpu("RTX 4090").tflops == 165.2
    assert parse_gpu("24").bytes == 24 << 30
    assert parse_gpu("24").tflops is None
    for wrong in ("H1000", "-3", "nan", "0", "inf"):
        with pytest.raises(ConfigError, match=r"`--gpu`=.*: expected one of .*H100.* in GiB"):
            parse_gpu(wrong)


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA A40", 149.7),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", 65),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A400", None),
        ("something else", None),
    ],
)
def test_a_gpu_that_is_there_has_a_speed_only_where_it_is_certain(
    device: str, tflops: float | None
) -> None:
    assert identify_gpu(device, 1 << 30, "bf16").tflops == tflops
