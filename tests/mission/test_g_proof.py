"""The mission, proof: a test for each row of docs/mission.md, by public commands and API."""

import json
import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from support import deepspeed_engine
from support.commands import call
from support.hub_models import config_of, write_shards

from benchmarks.protocol import RESULTS
from benchmarks.scenarios import counted
from benchmarks.scenarios.case import SCENARIOS
from benchmarks.scenarios.parts import PARTS
from benchmarks.scenarios.simulated import loop
from tokenfeed import Packed, Padded, ShardLoader
from tokenfeed.integrations.steps import steps
from tokenfeed.tools import train

if TYPE_CHECKING:
    from support.simulated_clocks import SimulatedClock

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny_bert(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    options = {"vocab_size": 64, "intermediate_size": 1024, **small}
    monkeypatch.setattr("transformers.BertConfig", partial(transformers.BertConfig, **options))
    monkeypatch.setattr(counted, "BATCHES", (128, 256))


def test_m34_one_command_measures_each_optimization_before_and_after(
    tiny_bert: None, clock: "SimulatedClock", tmp_path: Path
) -> None:
    results = json.loads((RESULTS / "optimizations.json").read_text())["results"]
    situations = json.loads((RESULTS / "scenarios.json").read_text())["results"]
    assert {entry["case"] for entry in situations} == set(SCENARIOS) == set("abcde")
    assert {entry["case"] for entry in results} == set(PARTS)
    page = (ROOT / "docs/benchmarks.md").read_text()
    first = page.index("<!-- benchmark:")
    assert page[first:].startswith("<!-- benchmark:optimizations -->\n| optimization |")

    def batches(seconds: float) -> Iterator[None]:
        while True:
            yield clock.sleep(seconds)

    before, after = loop(batches(0.2), 20, tuned=False), loop(batches(0.001), 20, tuned=True)
    assert before["ms_a_batch"] == pytest.approx(200 + 30 + 50, rel=0.01)
    assert before["idle"] == pytest.approx(230 / 280, abs=0.01)
    assert after["ms_a_batch"] == pytest.approx(50, rel=0.01)
    assert after["idle"] < 0.01

    fp32, bf16, fp16 = counted.by_precision(tmp_path)
    assert bf16["gb"] == fp16["gb"] < fp32["gb"]
    plain, recomputed = counted.by_batch(tmp_path)
    assert recomputed["gb_by_rows"]["256"] < plain["gb_by_rows"]["256"]
    assert plain["largest_batch_by_card_gb"]["80"] > plain["largest_batch_by_card_gb"]["12"] > 0


def changed_lines(section: str) -> int:
    """Return the lines that a section of docs/how/projects.md adds: `+` of a diff, or a listing."""
    blocks = re.findall(r"```(diff|text)\n(.*?)```", section, re.DOTALL)
    lines = [(kind, line) for kind, block in blocks for line in block.splitlines() if line.strip()]
    return sum(kind == "text" or line.startswith("+") for kind, line in lines)


def loop_of(section: str, *, resumes: bool) -> str:
    """Return the code of a section after the change, without its line for a resume."""
    block = section.split("```diff\n")[1].split("```")[0]
    lines = [line[1:] for line in block.splitlines() if line[0] != "-"]
    return "\n".join(line for line in lines if resumes or "# to resume" not in line)


def test_m35_loader_in_other_projects_changes_at_most_ten_lines(tmp_path: Path) -> None:
    page = (ROOT / "docs/how/projects.md").read_text()
    sections = {name.split("\n")[0]: name for name in page.split("\n## ")}
    table = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|", page, re.MULTILINE))
    counted = ("nanoGPT", "torchtitan", "transformers", "TRL", "Accelerate", "DeepSpeed")
    for name in (*counted, "Lightning"):
        assert changed_lines(sections[name]) == int(table[name]) <= 10, name
    assert changed_lines(sections["A plain DataLoader"]) == int(table["a `DataLoader`"]) == 1

    shards = write_shards(tmp_path / "lm", "lm")
    settings: dict[str, Any] = {"num_workers": 0, "micro_batches_per_step": 5}

    class Loader(ShardLoader):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(shards, batching=Packed(32, 2), **settings)

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config_of("Llama"))

    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    sizes = []
    for step in steps(Loader()):  # the plain loop of the README
        sizes.append(len(step))
        for batch in step:
            plain(**batch, num_items_in_batch=step.divisor).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert min(sizes) < max(sizes) == 5, "a step at the end of a window is shorter"

    def same(other: torch.nn.Module) -> bool:
        pairs = zip(plain.parameters(), other.parameters(), strict=True)
        return all(torch.allclose(one, two, atol=1e-6) for one, two in pairs)

    names: dict[str, Any] = {"ShardLoader": Loader, "Packed": Packed, "Padded": Padded}
    accelerated = model()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(accelerated.parameters(), lr=0.1)
    names |= {"steps": steps, "accelerator": accelerator, "optimizer": optimizer}
    exec(loop_of(sections["Accelerate"], resumes=False), names | {"model": accelerated})
    assert same(accelerated)

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    deepspeed = pytest.importorskip("deepspeed") if find_spec("deepspeed") else deepspeed_engine
    names |= {"deepspeed": deepspeed, "config": config}
    code = loop_of(sections["DeepSpeed"], resumes=False)
    code = code.replace("runs/first", str(tmp_path / "saved"))
    stopped, resumed = model(), model()
    early = code.replace(
        "    engine.save", "    if step.state['micro_batch'] > 5: break\n    engine.save"
    )
    exec(early, names | {"model": stopped})
    assert not same(stopped)
    code = loop_of(sections["DeepSpeed"], resumes=True)
    exec(code.replace("runs/first", str(tmp_path / "saved")), names | {"model": resumed})
    assert same(resumed)


OUT_OF_SCOPE = {
    "DeepSpeed": "--shard-model",
    "pipeline parallelism": "torchtitan",
    "tensor parallelism": "ranks_of",
    "K80": "T4",
    "several heads": "prompts and completions",
    "animated bar": "progress lines",
    "share of GPU memory": "--micro-batch-tokens auto",
}
"""What `train` leaves out, and words of the advice."""


@pytest.mark.parametrize("name", OUT_OF_SCOPE)
def test_m40_what_is_out_of_scope_is_said(name: str) -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    table = page.partition("**Out of scope**")[2].partition("\n**")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("|")]
    (advice,) = [advice for what, advice in rows if name in what]
    assert OUT_OF_SCOPE[name] in advice
    options = re.findall(r"`(--[a-z-]+)", advice)
    known = call(train.main, "--help-all").stdout
    assert all(option in known for option in options)
    for link in re.findall(r"\]\(([^)#]+)", advice):
        assert (ROOT / "docs" / link).is_file()
