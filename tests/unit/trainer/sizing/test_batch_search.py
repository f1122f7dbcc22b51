"""The largest micro-batch that memory takes, and the sizes that are possible."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.feeding.batch_policy import make_policy, micro_batch_sizes, shapes
from tokenfeed.trainer.sensors.gpu_models import GPUS, identify_gpu, parse_gpu
from tokenfeed.trainer.sizing.batch_probe import largest_fitting

Sizes = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=40, unique=True).map(sorted)


@given(sizes=Sizes, limit=st.integers(0, 1 << 20))
def test_bisection_finds_the_largest_size_that_fits(sizes: list[int], limit: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    fitting = [size for size in sizes if size <= limit]
    assert largest_fitting(fits, sizes) == (fitting[-1] if fitting else None)
    assert len(tried) <= len(sizes).bit_length()


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
