"""Golden values of training: what metrics.jsonl says of 20 steps on a CPU, with one thread.

Each value is made twice: in one run, and in a run that goes on from an earlier checkpoint.
`losses.json` says on which machine they were made: the version of torch, the instructions that
torch uses and those that the processor has. On such a machine all values are equal to the last
bit. On others, losses are equal to 1e-6 and the other figures to 1e-4; where half precision is
used, all are equal to 1e-3. With the instructions of SSE4.1 instead of AVX-512, the differences
were at most 5e-7, 3e-5 and 2e-4. They are relative to the largest value of a list.
"""

import contextlib
import hashlib
import json
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import hub_models
from support.commands import call
from support.golden import make_data_set, save_tokenizer
from support.training import SEEN

from tokenfeed.tools import train

Golden = Any

STEPS = 20
OWN = ("--device", "cpu", "--log-every", 1, "--eval-every", 10, "--save-every", 5, "--keep", 3)
OWN += ("--eval-micro-batch-tokens", 64)
SHALLOW = ("--model", "shallow", "--sequence-length", 64, "--warmup-steps", 4)
TOKENS = ("--step-tokens", 512, "--micro-batch-tokens", 256)
ROWS = ("--step-rows", 16, "--micro-batch-tokens", 256, "--patience", 0)
PATIENT = ("--eval-every", 2, "--patience", 3, "--keep", 1, "--learning-rate", 2e-4)
CONSTANT = ("--schedule", "constant")
OVERFLOWING = ("--model", "support.training:overflowing_model")
CHAT = ("--targets", "last", "--dropout", 0.1)
LORA = ("--model", "hf:{llama}", "--lora", 2, "--sequence-length", 64, "--learning-rate", 1e-2)
RUNS: dict[str, tuple[str, tuple[object, ...]]] = {
    "lm": ("documents", (*SHALLOW, *TOKENS)),
    "classify": ("classes", (*SHALLOW, *ROWS, "--schedule", "linear", "--clip-norm", 0.5)),
    "score": ("pairs", (*SHALLOW, *ROWS, "--min-learning-rate", 1e-5)),
    "tag": ("tags", (*SHALLOW, *ROWS, "--schedule", "wsd", "--batching", "packed")),
    "complete": ("completions", (*SHALLOW, *TOKENS, *CONSTANT)),
    "chat": ("chat", (*SHALLOW, *TOKENS, *CHAT)),
    "words": ("classes", ("--model", "words", *ROWS, "--weight-decay", 0.5)),
    "Muon": ("documents", (*SHALLOW, *TOKENS, "--optimizer", "muon")),
    "LoRA": ("documents", (*LORA, *TOKENS)),
    "fp16": ("documents", (*SHALLOW, *TOKENS, "--precision", "fp16", *OVERFLOWING)),
    "patience": ("classes", (*SHALLOW, *ROWS, *CONSTANT, *PATIENT)),
}
"""Case -> kind of data set, and options."""
PHASES = """
shards: {classes}
model: hf:{llama_of_rows}
steps: 6
sequence_length: 48
micro_batch_tokens: 256
step_rows: 16
phases:
  - {{name: adapters, lora: 2, learning_rate: 1.0e-2}}
  - {{name: head, trainable: 'score*', schedule: constant, learning_rate: 5.0e-3}}
  - {{name: all, from: best, learning_rate: 1.0e-4}}
"""
CASES = ["machine", *RUNS, "phases"]
HALF = ("Muon", "fp16")
NAMES = ("loss", "gradient", "learning", "tokens", "targets", "skipped", "validation")
"""What the names of the figures begin with that are no times or loads."""


def machine() -> dict[str, str]:
    """What results of torch depend on."""
    flags = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return {
        "torch": torch.__version__,
        "uses": torch.backends.cpu.get_cpu_capability(),
        "has": f"{platform.machine()} {hashlib.blake2b(flags.encode(), digest_size=4).hexdigest()}",
    }


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data sets by kind, and models of transformers."""
    folder = tmp_path_factory.mktemp("sets")
    tokenizer = save_tokenizer(folder / "tokenizer")
    made = {
        kind: make_data_set(folder / kind, kind, tokenizer, seed=1, records=300)
        for kind in {kind for kind, _ in RUNS.values()}
    }
    made["llama"] = hub_models.save_model(folder / "llama", "CausalLM", "Llama")
    kind = "SequenceClassification"
    made["llama_of_rows"] = hub_models.save_model(folder / "rows", kind, "Llama", pad_token_id=91)
    return made


def trained(run_dir: Path, *words: object) -> None:
    with one_thread():
        call(train.main, "--run-dir", run_dir, *words)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """With more, sums have another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def figures_of(*run_dirs: Path) -> dict[str, list[float]]:
    """The figures of all lines of metrics.jsonl by name, the steps of the checkpoints, and the
    padding of the reports."""
    found: dict[str, list[float]] = {}
    for run_dir in run_dirs:
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            for name, value in json.loads(line).items():
                if name.startswith(NAMES):
                    found.setdefault(name, []).append(value)
        found.setdefault("checkpoints", []).extend(steps_saved(run_dir))
        report = json.loads((run_dir / "report.json").read_text())
        found.setdefault("padding", []).append(report["padding"])
    return found


def steps_saved(run_dir: Path) -> list[int]:
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(int(folder.name.removeprefix("step-")) for folder in folders)


def check(golden: Golden, case: str, *made: dict[str, list[float]]) -> None:
    """Compare figures with the golden ones, as exactly as this machine allows."""
    expected = golden.expected(case, made[0])
    if golden.expected("machine", machine()) == machine():
        assert [*made] == [expected] * len(made)
        return
    for each in made:
        assert each.keys() == expected.keys()
        for name, values in each.items():
            within = 1e-3 if case in HALF else 1e-6 if name.endswith("loss") else 1e-4
            room = within * max(map(abs, expected[name]), default=0)
            assert values == pytest.approx(expected[name], rel=0, abs=room), name


@pytest.mark.parametrize("case", RUNS)
def test_run_has_the_same_losses(
    case: str, golden: Golden, places: dict[str, Path], tmp_path: Path
) -> None:
    kind, options = RUNS[case]
    words = [str(word).format(**places) for word in options]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    SEEN.clear()
    trained(whole, "--shards", places[kind], *OWN, "--steps", STEPS, *words)
    first = steps_saved(whole)[0]
    saved = f"checkpoints/step-{first:08d}"
    shutil.copytree(whole / saved, resumed / saved)
    del SEEN[2 * first :]  # a model counts the micro-batches that it has seen
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(whole / name, resumed)
    trained(resumed, "--resume")
    check(golden, case, figures_of(whole), figures_of(resumed))
    name = f"checkpoints/step-{steps_saved(whole)[-1]:08d}/state-0.safetensors"
    saved, again = load_file(whole / name), load_file(resumed / name)
    assert saved.keys() == again.keys()
    assert all(torch.equal(value, again[each]) for each, value in saved.items())


def test_damaged_checkpoint_is_refused(places: dict[str, Path], tmp_path: Path) -> None:
    trained(tmp_path, "--shards", places["classes"], *OWN, "--steps", 5, *RUNS["words"][1])
    file = tmp_path / "checkpoints/step-00000005/state-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    said = call(train.main, "--resume", "--run-dir", tmp_path, "--steps", 6, expect=1).stderr
    assert "state-0.safetensors fails its checksum" in said.splitlines()[-1]


def test_phases_have_the_same_losses(
    golden: Golden, places: dict[str, Path], tmp_path: Path
) -> None:
    config, run_dir = tmp_path / "phases.yaml", tmp_path / "run"
    config.write_text(PHASES.format(**places))
    trained(run_dir, "--config", config, *OWN, "--save-every", 3, "--eval-every", 3)
    check(golden, "phases", figures_of(*sorted(run_dir.glob("phase-*"))))
