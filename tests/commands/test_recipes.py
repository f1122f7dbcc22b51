"""Each example trains on every row once, and goes on after a stop as if there had been none.

An example runs as a user runs it, in its own process; only that its model also writes down what it
is trained on, and that its loader makes several windows out of little data.
"""

import functools
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import feather
from support import ROOT, warm
from support.commands import SMALL
from support.simulated_clocks import SimulatedClock

import tokenfeed
from tokenfeed import Manifest, Packed, Padded, ShardLoader

pytestmark = pytest.mark.slow  # ten seconds each, most of them imports

EXAMPLES = ROOT / "recipes"
ONE_OF_OTHERS = "transformers_trainer"
"""Runs in CI; its imports alone take as long as a plain loop."""
OTHERS = [
    ONE_OF_OTHERS,
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("lightning_module", "accelerate_loop")
    ),
]
DISTRIBUTED = ["own_loop", ONE_OF_OTHERS, "lightning_module", "accelerate_loop"]
RESUMABLE = ["own_loop", *OTHERS]
RESUMED = ["own_loop", *(pytest.param(name, marks=pytest.mark.long) for name in DISTRIBUTED[1:])]
NEEDS = {
    "own_loop": [],
    "transformers_trainer": ["transformers", "accelerate"],
    "lightning_module": ["transformers", "lightning"],
    "accelerate_loop": ["transformers", "accelerate"],
}
MAX_TOKENS = 512
WINDOW_TOKENS = 2000
STEP_SIZE = 2
LONGEST_ROW = 100  # below the 128 of a packed sequence: no row is cut
NEVER = 10_000
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "ACCELERATE_USE_CPU": "true",  # else it takes two ranks on a CPU for two runs
}

TRACED = """
import functools, os, runpy, sys
import torch
from support.processes import FORKING
from tokenfeed import ShardDataset, ShardLoader
from tokenfeed.pipeline import processes

processes.subprocess = FORKING  # a worker that is a program imports for a quarter of a second

for kind in ShardDataset, ShardLoader:
    kind.__init__ = functools.partialmethod(kind.__init__, window_tokens=2000)

name = sys.argv.pop(1)
traces = {
    kind: open(name + kind + os.environ.get("RANK", "0"), "a", buffering=1)
    for kind in ("trained", "validated")
}
if "lightning" in sys.argv[1]:
    from lightning.pytorch import Trainer
    settings = {"num_sanity_val_steps": 0}
    if "RANK" in os.environ:
        settings |= {"accelerator": "cpu", "strategy": "ddp", "devices": 2}
    Trainer.__init__ = functools.partialmethod(Trainer.__init__, **settings)

def note(model, inputs):
    is_filler = "RANK" in os.environ and inputs["labels"].eq(-100).all()
    if not is_filler:
        trace = traces["trained" if model.training else "validated"]
        for row, ids in enumerate(inputs["input_ids"]):
            if "attention_mask" in inputs:
                rows = [ids[inputs["attention_mask"][row]]]
            else:
                starts = inputs["position_ids"][row].eq(0).nonzero().flatten().tolist()
                rows = torch.tensor_split(ids, starts[1:])
            for ids in rows:
                if ids.any():  # else padding
                    print(*ids.tolist(), file=trace)

sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
if "own_loop" in sys.argv[0]:
    sys.modules["transformers"] = None  # it needs torch alone
    import own_loop
    loss_sum = own_loop.loss_sum
    own_loop.loss_sum = lambda model, batch: (note(model, batch), loss_sum(model, batch))[1]
    own_loop.main()
else:
    from transformers import LlamaForCausalLM
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def traced(self, *args, **inputs):
        note(self, inputs)
        return forward(self, *args, **inputs)

    LlamaForCausalLM.forward = traced
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, write_dataset) -> Path:  # noqa: ANN001
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("examples") / "out"
    splits = {}
    for split, rows in (("train", 160), ("validation", 20)):
        lengths = rng.integers(2, LONGEST_ROW, rows)
        splits[split] = (rng.integers(1, 200, lengths.sum()), lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 1_000)
        write_dataset(folder, splits, 200)
    assert Manifest.read(folder).split("train").batches > 4
    return folder


class Run:
    """What an example printed, and what its model was trained on."""

    def __init__(self, example: str, trace: Path, *options: object, ranks: int = 1) -> None:
        tracer = trace.with_name("traced.py")
        tracer.write_text(TRACED)
        program = [tracer, trace, EXAMPLES / f"{example}.py", *options]
        env = os.environ | ENVIRONMENT
        if ranks == 1:
            done = warm.run(program, cwd=trace.parent, env=env)
        else:
            done = torchrun(ranks, program, trace.parent, env)
        assert done.returncode == 0, done.stderr
        self.printed = done.stdout
        found = re.findall(r"step (\d+) loss (\S+)", self.printed)
        self.losses = {int(step): float(loss) for step, loss in found}
        assert len(self.losses) == len(found)
        assert all(map(math.isfinite, self.losses.values()))
        self.rows, self.validated = (
            [
                line
                for file in sorted(trace.parent.glob(f"{trace.name}{kind}[0-9]"))
                for line in file.read_text().splitlines()
            ]
            for kind in ("trained", "validated")
        )


def torchrun(
    ranks: int, program: list[object], folder: Path, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launch, *map(str, program)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


Whole = Callable[[str], Run]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An epoch of an example, uninterrupted; each is run once."""

    @functools.cache
    def run(example: str) -> Run:
        folder = tmp_path_factory.mktemp(example)
        options = ["--steps", num_steps(example, data), "--save-every", NEVER]
        return Run(example, folder / "trace", *settings(data, folder), *options)

    return run


def settings(data: Path, run_dir: Path) -> list[object]:
    batches = ["--max-tokens", MAX_TOKENS, "--micro-batches-per-step", STEP_SIZE]
    return [data, *batches, "--run-dir", run_dir]


def num_steps(example: str, data: Path) -> int:
    """Optimizer steps of an epoch."""
    packed = Packed(sequence_length=MAX_TOKENS // 4, batch_size=4)
    batching = packed if example == "accelerate_loop" else Padded(MAX_TOKENS)
    plan = {"micro_batches_per_step": STEP_SIZE, "window_tokens": WINDOW_TOKENS}
    ends_step = [b.ends_step for b in ShardLoader(data, batching=batching, num_workers=0, **plan)]
    if example == "transformers_trainer":  # it steps every STEP_SIZE micro-batches
        assert sum(ends_step) * STEP_SIZE == len(ends_step)
    return sum(ends_step)


def expected_rows(data: Path, split: str = "train") -> Counter[str]:
    return Counter(
        " ".join(map(str, row["input_ids"]))
        for file in sorted((data / split).iterdir())
        for row in feather.read_table(file, columns=["input_ids"]).to_pylist()
    )


def skip_unless_installed(example: str) -> None:
    """Without importing: that takes seconds, and warns."""
    for package in NEEDS.get(example, ["transformers"]):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def test_the_plain_dataloader_trains_on_every_row_once(data: Path, tmp_path: Path) -> None:
    skip_unless_installed("plain_dataloader")
    run = Run("plain_dataloader", tmp_path / "trace", *settings(data, tmp_path), "--steps", NEVER)
    assert Counter(run.rows) == expected_rows(data)
    assert sorted(run.losses) == list(range(1, len(run.losses) + 1))


@pytest.mark.parametrize("example", RESUMABLE)
def test_an_epoch_is_every_row_once(example: str, data: Path, whole: Whole) -> None:
    skip_unless_installed(example)
    assert sorted(whole(example).losses) == list(range(1, num_steps(example, data) + 1))
    assert Counter(whole(example).rows) == expected_rows(data)


@pytest.mark.parametrize("example", RESUMED)
def test_a_stop_changes_nothing(example: str, data: Path, whole: Whole, tmp_path: Path) -> None:
    skip_unless_installed(example)
    options, steps = settings(data, tmp_path), num_steps(example, data)
    first = Run(example, tmp_path / "first", *options, "--steps", 5, "--save-every", 4)
    rest = Run(example, tmp_path / "rest", *options, "--steps", steps, "--resume")
    assert sorted(first.losses) == [1, 2, 3, 4, 5]
    assert sorted(rest.losses)[0] in (5, 6)  # the Trainer also saves its last step
    assert first.losses | rest.losses == whole(example).losses
    assert first.rows == whole(example).rows[: len(first.rows)]
    assert rest.rows == whole(example).rows[-len(rest.rows) :]


@pytest.mark.long
@pytest.mark.parametrize("example", DISTRIBUTED)
def test_two_ranks_train_validate_and_resume_as_one(
    example: str, data: Path, whole: Whole, tmp_path: Path
) -> None:
    skip_unless_installed(example)
    alone, steps = whole(example), num_steps(example, data)
    options = settings(data, tmp_path)
    first = Run(example, tmp_path / "first", *options, "--steps", 5, "--save-every", 4, ranks=2)
    options += ["--steps", steps, "--save-every", NEVER]
    rest = Run(example, tmp_path / "rest", *options, "--resume", ranks=2)
    assert Counter(first.rows) == Counter(alone.rows[: len(first.rows)])
    assert Counter(rest.rows) == Counter(alone.rows[-len(rest.rows) :])
    assert min(rest.losses) in (5, 6)
    assert first.losses | rest.losses == pytest.approx(alone.losses, abs=1e-4)
    validates = example != "accelerate_loop"
    expected = expected_rows(data, "validation") if validates else Counter()
    assert Counter(alone.validated) == Counter(rest.validated) == expected


def test_notebook_has_no_outputs() -> None:
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)


def test_slow_loader_meter_agrees_with_stopwatch(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = torch.optim.AdamW.step

    def slow(*args: Any) -> Any:
        clock.sleep(0.024)
        return step(*args)

    monkeypatch.setattr(torch.optim.AdamW, "step", slow)
    monkeypatch.setattr(sys, "argv", ["slow_loader.py", "--items", "160"])
    runpy.run_path(str(EXAMPLES / "slow_loader.py"), run_name="__main__")
    printed = capsys.readouterr().out
    shares = [
        float(re.search(pattern, printed, re.MULTILINE)[1])  # type: ignore[index]
        for pattern in (r"^ +data +([\d.]+)%", r"^stopwatch ([\d.]+)%")
    ]
    assert shares == pytest.approx([25.0, 25.0], abs=0.1)  # 8 of 32 ms
    assert "set `num_workers=1` in your DataLoader" in printed


# ---------- scripts for jobs ----------
TRAIN = "--device cpu --sequence-length 32 --micro-batch-tokens 256"
RECORDS = [f"a text of some words, number {number}, about {number % 7}" for number in range(80)]
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ m.role + ': ' + m.content + '<|endoftext|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
RUN_STDIN = "import sys; exec(compile(sys.stdin.read(), '-', 'exec'), {'__name__': '__main__'})"
"""What `python -` does."""
SBATCH = """#!/bin/bash
# Runs the jobs of an array one after the other, at once.
tasks=none
for word; do
    case $word in --array=0-*) tasks=$(seq 0 "${word#--array=0-}") ;; esac
done
for SLURM_ARRAY_TASK_ID in $tasks; do
    export SLURM_ARRAY_TASK_ID
    bash -c "${!#}" >&2 || exit 1
done
echo 1
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with texts, rows, conversations, and a model with its tokenizer."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("recipes")
    for name in ("corpus", "next"):
        (folder / name).mkdir()
        for number, text in enumerate(RECORDS):
            (folder / name / f"{number}.txt").write_text(f"{name}: {text}\n" * 40)
    rows = [{"text": text, "label": ("odd", "even")[n % 2]} for n, text in enumerate(RECORDS)]
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}
        for text in RECORDS
    ]
    for file, records in (
        ("rows.jsonl", rows),
        ("train.jsonl", rows[:60]),
        ("test.jsonl", rows[60:]),
        ("chats.jsonl", chats),
    ):
        (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenfeed.pretokenize(folder / "corpus", folder / "made", vocab_size=300)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "made/tokenizer.json"),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), intermediate_size=64, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder


JOBS = {
    "slurm_to_bucket": (
        {
            "CORPUS": "corpus/",
            "OUT": "parts/",
            "PARTS": "2",
            "OPTIONS": "--tokenizer model --shard-size 20KB",
        },
        "look at it",
    ),
    "next_month": (
        {"UNTIL": "200k", "STEPS": "2", "MORE": "4", "OPTIONS": "--vocab-size 300", "TRAIN": TRAIN},
        "report",
    ),
    "chat_lora": ({"MODEL": "model", "TRAIN": f"{TRAIN} --steps 2"}, "reply:"),
    "phases_on_t4": (
        {
            "MODEL": "model",
            "HEAD": "score.*",
            "PRESET": "test",
            "PLACE": "copy/",
            "OPTIONS": "",
            "TRAIN": f"{TRAIN} --steps 2",
        },
        "phase-3-everything",
    ),
    "gpt2": (
        {
            "PRICE": "2",
            "PRESET": "quick",
            "TOKENS": "2k",
            "OPTIONS": "--vocab-size 300",
            "TRAIN": f"{TRAIN} --step-tokens 512 --model tiny",
        },
        "1 B tokens / ",
    ),
    "classify": ({"MODEL": "model", "OPTIONS": "", "TRAIN": f"{TRAIN} --steps 2"}, "test: {"),
}
"""The scripts, with variables for small data and what they print."""


@pytest.mark.parametrize("job", JOBS)
def test_script_of_a_job_runs_on_small_data(job: str, place: Path, tmp_path: Path) -> None:
    variables, printed = JOBS[job]
    folder = tmp_path / "job"
    shutil.copytree(place, folder, ignore=shutil.ignore_patterns("made"))
    with warm.serve_commands(tmp_path / "bin", SMALL, python=RUN_STDIN):
        (tmp_path / "bin/sbatch").write_text(SBATCH)
        (tmp_path / "bin/sbatch").chmod(0o755)
        path = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        done = subprocess.run(
            ["bash", EXAMPLES / f"{job}.sh"],
            cwd=folder,
            env=os.environ | ENVIRONMENT | variables | {"PATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert printed in done.stdout + done.stderr


def test_scripts_of_jobs_are_all_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.sh")} == set(JOBS)
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert {name for name in names if name not in listed} == {"tiny.py", "README.md"}
