"""What is known of a GPU by its name."""

import pytest

from tokenfeed.trainer.stall.device import peak_tflops


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
    assert peak_tflops(device) == tflops
