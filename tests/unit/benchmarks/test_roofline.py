"""The model of benchmarks/gpu/roofline.py: what it counts of known operators, and how it adds."""

import json

import pytest
import torch

from benchmarks.gpu.__main__ import compared, comparison, predicted_step
from benchmarks.gpu.operators import Operator, dispatched, times
from benchmarks.gpu.peers import Size, llm_c
from benchmarks.gpu.roofline import ATTENTION, CUDNN, Published, seconds, share_of_peak

ROWS, INNER, COLUMNS = 6, 8, 10
CASE = CUDNN, 64, 1024


def test_an_operator_counts_what_it_reads_and_writes_once() -> None:
    left, right = torch.ones(ROWS, INNER), torch.ones(INNER, COLUMNS)
    with dispatched("part") as found:
        out = left @ right
        out.t().add_(1.0)
    product, addition = found
    assert product.bytes == 4 * (ROWS * INNER + INNER * COLUMNS + ROWS * COLUMNS)
    assert product.flops == 2 * ROWS * INNER * COLUMNS
    assert addition.bytes == 2 * 4 * ROWS * COLUMNS
    assert (product.kind, addition.kind) == ("product", "memory")


def test_a_list_of_tensors_takes_a_launch_per_thirty() -> None:
    tensors = [torch.ones(4) for _ in range(61)]
    with dispatched("part") as found:
        torch._foreach_mul_(tensors, 2.0)
    assert [operator.launches for operator in found] == [3]


def test_a_kernel_takes_its_bytes_or_operations_and_a_launch() -> None:
    rates = ATTENTION[CASE]
    moves = Operator("part", "copy", 2, 3.35e12)
    attends = Operator("part", "attention backward", 1, 0, rates[1])
    multiplies = Operator("part", "mm", 1, 3.35e12, 989e12)
    found = [seconds(operator, rates, 0.5) for operator in (moves, attends, multiplies)]
    assert found == pytest.approx([1 + 6e-6, 1 + 3e-6, 1 + 2 + 3e-6])


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_the_fitted_share_gives_the_published_time(share: float) -> None:
    size = Size(layers=2, width=768, heads=12, length=1024, vocabulary=50304, tokens=65_536)
    found = llm_c(size)
    took = sum(seconds(operator, ATTENTION[CASE], share) for operator in found)
    case = Published("a step", found, CASE, size.tokens, took, "nowhere")
    assert share_of_peak(case) == pytest.approx(share)


def test_llm_c_has_the_operations_of_six_per_weight_and_token() -> None:
    size = Size(layers=12, width=768, heads=12, length=1024, vocabulary=50304, tokens=65_536)
    products = sum(o.flops for o in llm_c(size) if o.kind == "product")
    assert products == 6 * (size.matrices + size.vocabulary * size.width) * size.tokens
    attention = sum(o.flops for o in llm_c(size) if o.kind.startswith("attention"))
    assert attention == 3.5 * 4 * 12 * size.tokens * 512 * size.width
    twice = times(llm_c(size), 2)
    assert sum(o.bytes for o in twice) == 2 * sum(o.bytes for o in llm_c(size))


MEASURED = {
    "tokens_per_step": 65_536,
    "tokens_per_s": 200_000,
    "mfu": None,
    "kernels": 700.0,
    "peak_memory_bytes": 30,
    "predicted_memory_bytes": 25,
    "stall": {"causes": {"data": {"fraction": 0.0123}}},
}


def test_measured_figures_stand_beside_predicted_ones_in_one_json() -> None:
    predicted = predicted_step()
    found = compared(MEASURED, predicted)
    assert set(found) == {"tokens_per_s", "kernels", "peak_memory_bytes"}
    assert found["tokens_per_s"]["ratio"] == 200_000 / predicted["tokens_per_s"]
    assert found["peak_memory_bytes"] == {"predicted": 25, "measured": 30, "ratio": 1.2}
    entry = json.loads(json.dumps(MEASURED | {"compared": found}))
    told = comparison(entry)
    assert "peak_memory_bytes: 25 | 30 | 1.20" in told
    assert "stall, data: 1.23%" in told


def test_a_step_of_another_size_is_compared_by_memory_alone() -> None:
    found = compared(MEASURED | {"tokens_per_step": 512}, predicted_step())
    assert set(found) == {"peak_memory_bytes"}
