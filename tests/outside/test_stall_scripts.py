"""Scripts under `tokenfeed stall` print and end as under python, and nothing is written.

On a CUDA device in name only, whose work is done as soon as it is queued, shares are those of a
stopwatch that only the test reads.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support import named_cuda, warm

from benchmarks.stall_tools.any_script import check, is_good

LOOP = """
import os, sys, threading
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(count=1):
    for _ in range(count):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
"""
SCRIPTS = {
    "deletes itself": (
        "threading.Thread(target=sys.exit, args=(5,)).start()\n"
        "os.chdir('/'); os.remove(__file__); print(step(12)); print('said', file=sys.stderr)\n"
        "sys.exit('bye')",
        "12 steps of SGD",
    ),
    "closures": (
        "rows = torch.randn(32, 8)\n"
        "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n"
        "    loss = model(rows).square().mean()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "print([float(optimizer.step(closure)) for _ in range(9)])",
        "9 steps of LBFGS",
    ),
    "generators": (
        "def feed():\n"
        "    try:\n"
        "        yield from DataLoader(torch.randn(40, 8), batch_size=2)\n"
        "    finally:\n"
        "        print('closed')\n"
        "rows = feed(); next(rows); rows.close()\n"
        "print([len(each) for each in feed()], step(8))\n"
        "print(1 / 0)",
        "8 steps of SGD",
    ),
    "two trainings": (
        "print(step(7)); model = nn.Linear(8, 8)\n"
        "optimizer = torch.optim.AdamW(model.parameters()); print(step(20))",
        "27 steps, at last of AdamW, number 2 of 2 optimizers",
    ),
    "syntax": ("print(1", "NOT MEASURED"),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_odd_script_ends_as_with_python(kind: str, tmp_path: Path) -> None:
    text, steps = SCRIPTS[kind]
    folder, script = tmp_path / "cwd", tmp_path / "odd.py"
    folder.mkdir()
    found = []
    for words in ([], ["-m", "tokenfeed.tools.stall"]):
        script.write_text(LOOP + text)
        found.append(warm.run([*words, script], cwd=folder))
    plain, watched = found
    assert (watched.stdout, watched.returncode) == (plain.stdout, plain.returncode)
    assert steps in watched.stderr
    if kind == "syntax":
        assert watched.stderr.startswith(f'  File "{script}"')  # no frame of another file
    assert not [*folder.iterdir()]


FETCH = "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch"
NEXT = "torch.utils.data.dataloader._BaseDataLoaderIter.__next__"
ON_DEVICE = """
import concurrent.futures, queue, threading, time, torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
model, other = (torch.nn.Linear(16, 4).to(device) for _ in range(2))
optimizer, second = (torch.optim.AdamW(each.parameters()) for each in (model, other))

def rows(count):
    return DataLoader(TensorDataset(torch.randn(count, 16), torch.zeros(count).long()), 4)

def loss(x, y, net=model):
    return cross_entropy(net(x.to(device)), y.to(device))

def step(x, y):
    loss(x, y).backward(); optimizer.step(); optimizer.zero_grad()

"""
TRAINER = """
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 40
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
arguments = TrainingArguments(
    max_steps=18, per_device_train_batch_size=1, gradient_accumulation_steps=2, eval_steps=8,
    per_device_eval_batch_size=20, eval_strategy="steps", logging_strategy="no", save_steps=9,
    disable_tqdm=True, report_to="none",
)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))
trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
print("done on", trainer.args.device)
"""
LIGHTNING = """
import lightning.pytorch as lightning
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

trainer = lightning.Trainer(
    max_steps=18, devices=1, val_check_interval=8, num_sanity_val_steps=0, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
rows = RandomDataset(32, 40)
trainer.fit(BoringModel(), DataLoader(rows), DataLoader(rows, 20))
print("done on", trainer.strategy.root_device)
"""
RANKS = """
import os, time, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

rank = int(os.environ["LOCAL_RANK"])
torch.distributed.init_process_group(backend="nccl")
torch.cuda.set_device(rank)

class Rows(Dataset):
    def __len__(self):
        return 36
    def __getitem__(self, index):
        time.sleep(0.1 * rank)
        return torch.randn(8)

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = DistributedDataParallel(model.to(rank), device_ids=[rank])
for rows in DataLoader(Rows(), 2):
    model(rows.to(rank)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
print("done on", next(model.parameters()).device)
torch.distributed.destroy_process_group()
"""
SFT = (
    "--model_name_or_path model --dataset_name data --output_dir out --max_steps 18 --bf16 False "
    "--per_device_train_batch_size 2 --eval_strategy steps --eval_steps 8 --max_length 16 "
    "--gradient_checkpointing False --report_to none --disable_tqdm True --logging_steps 100"
)
Case = tuple[str, str, list[list[object]], tuple[str, ...]]
EVALUATE = "transformers.trainer.Trainer.evaluate"
HF_FAULTS: list[list[object]] = [
    ["transformers.trainer.Trainer.prediction_step", 0.5, False],
    [EVALUATE, 0.0, True],
]
BORING = "lightning.pytorch.demos.boring_classes.BoringModel.validation_step"
LOOP_RUN = "lightning.pytorch.loops.evaluation_loop._EvaluationLoop.run"
DEVICE_SCRIPTS: dict[str, Case] = {
    # First batches come before `eval()` and before `train()`, and one of training is evaluated.
    "evaluation": (
        "def evaluate():\n"
        "    model.eval()\n"
        "    with torch.no_grad():\n"
        "        [loss(x, y).item() for x, y in rows(4)]\n"
        "        for x, y in training: return loss(x, y).item()\n"
        "def validate():\n"
        "    for x, y in rows(8):\n"
        "        model.eval(); loss(x, y)\n"
        "training = rows(28)\n"
        "for number in range(21):\n"
        "    if number % 7 == 0: validate(); evaluate(); batches = iter(training)\n"
        "    x, y = next(batches); model.train(); step(x, y)\n",
        "evaluation",
        [[FETCH, 0.1, False], ["__main__.evaluate", 0.0, True], ["__main__.validate", 0.0, True]],
        ("less often than every 7 steps, or on fewer", "21 steps of AdamW"),
    ),
    "two optimizers and accumulation": (
        "for number, (x, y) in enumerate(rows(128), 1):\n"
        "    with torch.autocast(device, dtype=torch.bfloat16):\n"
        "        ((loss(x, y) + loss(x, y, other)) / 2).backward()\n"
        "    if number % 2 == 0:\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "        second.step(); second.zero_grad(); optimizer.step(); optimizer.zero_grad()\n",
        "data",
        [[FETCH, 0.1, False], [NEXT, 0.0, True]],
        ("batches come late", "16 steps, at last of AdamW, number 1 of 2 optimizers"),
    ),
    "own threads": (
        "ready = queue.Queue(2)\n"
        "def load():\n"
        "    time.sleep(0.1); return torch.randn(4, 16), torch.zeros(4).long()\n"
        "def fill():\n"
        "    while True: ready.put(load())\n"
        "threading.Thread(target=fill, daemon=True).start()\n"
        "with concurrent.futures.ThreadPoolExecutor(1) as pool:\n"
        "    coming = pool.submit(load)\n"
        "    for number in range(20):\n"
        "        x, y = ready.get(); batch = coming.result()\n"
        "        coming = pool.submit(load); step(*batch)\n",
        "data",
        [["queue.Queue.get", 0.0, True], ["concurrent.futures._base.Future.result", 0.0, True]],
        ("batches come late", "make batches in more threads or workers"),
    ),
}
LONG_SCRIPTS: dict[str, Case] = {
    "transformers.Trainer": (TRAINER, "evaluation", HF_FAULTS, ("raise `eval_steps`",)),
    "Lightning": (
        LIGHTNING,
        "evaluation",
        [[BORING, 0.5, False], [LOOP_RUN, 0.0, True]],
        ("raise `val_check_interval`",),
    ),
    "TRL": ("-m trl.scripts.sft", "evaluation", HF_FAULTS, ("raise `eval_steps`",)),
    "late rank": (RANKS, "data", [[NEXT, 0.0, True]], ("WAITS FOR RANK 1", "rank 0 of 2")),
}


def save_for_trl(folder: Path) -> None:
    """Save a tiny model with a tokenizer of words, and rows of text."""
    import transformers
    from support.hub_models import VOCABULARY, save_model
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w0", pad_token="w1"
    )
    fast.save_pretrained(save_model(folder / "model", "CausalLM", "Llama"))
    (folder / "data").mkdir()
    for split, count in (("train", 40), ("test", 16)):
        rows = [json.dumps({"text": f"w2 w3 w{4 + number}"}) for number in range(count)]
        (folder / f"data/{split}.jsonl").write_text("\n".join(rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [*DEVICE_SCRIPTS, *(pytest.param(each, marks=pytest.mark.long) for each in LONG_SCRIPTS)],
)
def test_share_on_a_device_in_name_only_is_that_of_a_stopwatch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if lack := named_cuda.why_not():
        pytest.skip(lack)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text, cause, faults, words = (DEVICE_SCRIPTS | LONG_SCRIPTS)[kind]
    script, options = ["train.py"], dict[str, Any]()
    Path("train.py").write_text(ON_DEVICE + text if kind in DEVICE_SCRIPTS else text)
    if kind == "TRL":
        save_for_trl(tmp_path)
        script = [*text.split(), *SFT.split()]
        options = {"ignore": r"'(eval|train)_(runtime|\w+_per_second)': '[\d.]+'"}
    elif kind == "late rank":
        launcher = "-m torch.distributed.run --nproc-per-node 2 --standalone"
        options = {"launcher": launcher.split(), "rank": 1}
    elif kind == "transformers.Trainer":
        options = {"ignore": r"'(eval|train)_(runtime|\w+_per_second)': '[\d.]+'"}
    assert request.config.cache
    library = named_cuda.build(request.config.cache.mkdir("named_cuda"))
    found = check(script, cause, faults, named_cuda=library, **options)
    assert is_good(found), found
    assert found["exit codes"] == [0, 0]
    shown = "\n".join([found["stdout"], *found["lines"]])
    assert found["truth"] > 0.1
    assert [word for word in words if word not in shown] == [], shown
