"""Whole steps of the real loop on a CUDA device in name only: what a GPU would be told to do."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PROGRAMS, named_cuda
from support.hub_models import save_model
from support.training import RUNS, make_config

from benchmarks.gpu.memory import RunPlan

LACKING = named_cuda.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(LACKING is not None, reason=str(LACKING))]

Seen = dict[str, Any]

LIKE_OTHERS = {
    *("complete padded", "chat packed", "chat padded", "pairs padded", "tag packed"),
    *("lm padded", "score padded", "tag padded"),
    "hub Gemma3Text",
    *("t4 complete packed", "t4 classify padded", "t4 muon"),
}
"""Attention, head and dtypes of each are those of other runs: `make test-long` has them."""


def cases(names: Iterable[str]) -> list[Any]:
    """Cases, and those like others marked as long."""
    return [
        pytest.param(name, marks=[pytest.mark.long] * name.startswith(tuple(LIKE_OTHERS)))
        for name in names
    ]


ONE_MICRO_BATCH = {"step_tokens": 128}
"""Steps of other cases accumulate two."""
NARROW: dict[str, dict[str, Any]] = {
    f"{run} bf16": RUNS[run] | ONE_MICRO_BATCH | {"precision": "bf16"} for run in RUNS
}
CASES = NARROW | {
    "lm packed bf16": RUNS["lm packed"] | {"num_workers": 1},  # the default precision
    "fp32": RUNS["complete packed"] | {"precision": "fp32"},
    "muon": RUNS["tag padded"] | {"optimizer": "muon"},
}
HUB = {
    f"hub {name}": RUNS[run] | {"hub": name, "from_scratch": True, "precision": "bf16"}
    for name, run in (("Qwen3", "complete packed"), ("Gemma3Text", "complete packed"))
}
"""Models of transformers: norms of queries give fp32 under autocast; windows."""
T4 = {
    f"t4 {name}": settings | {"capability": (7, 5)}
    for name, settings in {
        "lm packed": RUNS["lm packed"],
        "complete packed": RUNS["complete packed"],
        "classify padded": RUNS["classify padded"],
        "muon": RUNS["lm packed"] | {"optimizer": "muon"},
        "hub Qwen3": HUB["hub Qwen3"] | {"precision": "auto"},
        "lora GPT2": HUB["hub Qwen3"]
        | {"hub": "GPT2", "precision": "auto", "from_scratch": False, "lora": 4},
    }.items()
}
FAULTS = {
    fault: RUNS["lm packed"] | ONE_MICRO_BATCH | {"fault": fault} for fault in ("wait", "device")
}

FLASH, MASKED = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
BY_ENDS = (
    "_varlen_attn" if torch.torch_version.TorchVersion(torch.__version__) >= "2.11" else MASKED
)
ATTENTION = {
    "lm packed": FLASH,
    "lm padded": FLASH,
    "complete packed": BY_ENDS,
    "complete padded": FLASH,
    "chat packed": BY_ENDS,
    "chat padded": FLASH,
    "classify padded": BY_ENDS,
    "pairs padded": BY_ENDS,
    "score padded": BY_ENDS,
    "tag packed": BY_ENDS,
    "tag padded": BY_ENDS,
}


@pytest.fixture(scope="module")
def seen(
    tmp_path_factory: pytest.TempPathFactory, every_task: Path, request: pytest.FixtureRequest
) -> dict[str, Seen]:
    """What each case did; one process runs them all, since importing torch takes the longest."""
    folder = tmp_path_factory.mktemp("named_cuda")
    wanted = " ".join(item.name.replace("-", " ") for item in request.session.items)
    cases = {
        name: settings | {"shards": str(every_task / settings["shards"])}
        for name, settings in (CASES | HUB | T4 | FAULTS).items()
        if not name.startswith(tuple(LIKE_OTHERS)) or f"[{name}]" in wanted
    }
    for name in [name for name in cases if "hub" in cases[name]]:
        hub = cases[name].pop("hub")
        cases[name]["model"] = f"hf:{save_model(folder / hub, 'CausalLM', hub)}"
    assert request.config.cache
    library = named_cuda.build(request.config.cache.mkdir("named_cuda"))
    program = [sys.executable, "-W", "error", str(PROGRAMS / "on_named_cuda.py")]
    ended = subprocess.run(
        [*program, str(library), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=900,  # on a machine in use
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Seen] = json.loads(ended.stdout)
    return found


def waits_of_steps(seen: Seen) -> list[str]:
    return [place for place, cause in seen["waits"] if cause in (None, "data")]


def dtypes(seen: Seen, *operators: str) -> set[str]:
    found = (kinds for name, kinds in seen["operators"].items() if name.startswith(operators))
    return {kind for kinds in found for kind in kinds}


@pytest.mark.parametrize("case", cases(CASES | HUB | T4))
def test_steps_run_on_a_gpu_and_wait_for_nothing(seen: dict[str, Seen], case: str) -> None:
    assert "error" not in seen[case], seen[case]["error"]
    assert waits_of_steps(seen[case]) == []
    assert {cause for _, cause in seen[case]["waits"]} == {"log", "evaluation"}


@pytest.mark.parametrize("name", cases(NARROW))
def test_products_are_narrow_and_what_is_kept_is_not(seen: dict[str, Seen], name: str) -> None:
    case = seen[name]
    assert dtypes(case, "mm", "addmm", "bmm", "baddbmm") == {"bfloat16"}
    assert dtypes(case, "_log_softmax", "_fused_adamw") == {"float32"}
    assert case["weights"] == case["moments"] == ["cuda:0 float32"]


@pytest.mark.parametrize("name", cases(NARROW))
def test_attention_is_by_the_kernel_that_fits(seen: dict[str, Seen], name: str) -> None:
    backward = f"{ATTENTION[name.removesuffix(' bf16')]}_backward"
    operators = seen[name]["operators"]
    assert {
        name for name in operators if "attention_backward" in name or "attn_backward" in name
    } == {backward}


@pytest.mark.parametrize("case", cases(HUB))
def test_attention_of_transformers_is_by_ends(seen: dict[str, Seen], case: str) -> None:
    assert f"{BY_ENDS}_backward" in seen[case]["operators"]
    assert dtypes(seen[case], "mm", "addmm", "bmm", "baddbmm") == {"bfloat16"}


def test_a_gpu_of_today_computes_in_bf16_and_the_rest_of_fp32_as_tf32(
    seen: dict[str, Seen],
) -> None:
    assert seen["lm packed bf16"]["precision"] == "bf16"
    assert seen["fp32"]["matmul"] == "high"
    assert dtypes(seen["fp32"], "mm", "addmm", "bmm") == {"float32"}


@pytest.mark.parametrize("case", cases(T4))
def test_a_t4_computes_in_fp16_and_adds_layers_in_fp32(seen: dict[str, Seen], case: str) -> None:
    found = seen[case]
    assert found["precision"] == "fp16"
    assert dtypes(found, "mm", "addmm", "bmm", "baddbmm") == {"float16"}
    assert dtypes(found, "_log_softmax", "_fused_adamw") == {"float32"}
    assert "_amp_update_scale_" in found["operators"]
    kernels = (name for name in found["operators"] if name.endswith("_backward"))
    assert {name for name in kernels if "att" in name} == {f"{MASKED}_backward"}
    assert found["moments"] == ["cuda:0 float32"]
    assert found["sums"] == ["float32"]


def test_bf16_has_no_scale(seen: dict[str, Seen]) -> None:
    assert "_amp_update_scale_" not in seen["lm packed bf16"]["operators"]


@pytest.mark.parametrize("case", cases(case for case in CASES if case != "fp32"))
def test_the_memory_of_steps_on_a_gpu_is_as_predicted_without_one(
    seen: dict[str, Seen], case: str, every_task: Path
) -> None:
    settings = {"num_workers": 0} | CASES[case]
    shards = every_task / settings.pop("shards")
    config = make_config(shards, every_task / "run", steps=100, **settings)
    if config.precision == "auto":
        config = dataclasses.replace(config, precision="bf16")
    predicted = RunPlan(config, on_gpu=True).peak(config)
    assert predicted == pytest.approx(seen[case]["peak"], rel=0.03)


def test_muon_keeps_its_momentum_on_the_device_and_wide(seen: dict[str, Seen]) -> None:
    assert seen["muon"]["optimizer"] == "MuonAdamW"
    assert seen["muon"]["weights"] == seen["muon"]["moments"] == ["cuda:0 float32"]


def test_values_and_copies_that_wait_within_a_step_are_found(seen: dict[str, Seen]) -> None:
    found = waits_of_steps(seen["wait"])
    assert all("on_named_cuda.py" in place for place in found)
    for operator in ("_local_scalar", "_to_copy"):
        assert any(operator in place for place in found)


def test_a_mix_of_devices_is_an_error(seen: dict[str, Seen]) -> None:
    assert "DeviceMismatchError" in seen["device"]["error"]
