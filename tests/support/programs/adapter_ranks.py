"""An adapter trains on one or two ranks, beside a plain loop over the batches of all ranks.

python adapter_ranks.py ADAPTER DATA_SET RANKS FOLDER

The first rank prints JSON: `weights` and `expected` of the model after two passes, `resumed` for
each step after which the training was stopped and continued, and what the adapter's case adds.
Steps have two micro-batches. The last step of a pass is shorter, on two ranks a filler is among
the batches, and rows of padding fill the last ones. The learning rate falls to 0.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from support.processes import free_ports
from torch import Tensor, nn

from tokenfeed import Fixed, ShardLoader
from tokenfeed.integrations.dataloader import StatefulShardLoader
from tokenfeed.pipeline.feeding.batch import Batch

PARTS, RATE, PASSES = 2, 0.5, 2


class Head(nn.Module):
    """A head as those of transformers: its own loss is the mean over all rows of a batch."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(1000, 6), nn.Linear(6, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> Any:
        mask_BT1 = attention_mask.unsqueeze(-1).float()
        mean = (self.table(input_ids) * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
        logits = self.out(mean)
        if labels is None:
            return {"logits": logits}
        if labels.is_floating_point():
            return {"loss": nn.functional.mse_loss(logits.squeeze(-1), labels), "logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Case:
    """A data set on some ranks."""

    def __init__(self, data: str, ranks: int) -> None:
        self.data, self.ranks = Path(data), ranks
        self.is_score = self.loader(0).manifest.task == "score"
        self.outputs = 1 if self.is_score else 3

    def loader(self, rank: int | None = None, **settings: Any) -> ShardLoader:
        """Return the loader of this rank, or of another one."""
        place = {} if rank is None else {"rank": rank, "world_size": self.ranks}
        return ShardLoader(
            self.data,
            batching=Fixed(4, last="fill"),
            num_workers=0,
            micro_batches_per_step=PARTS * self.ranks,
            **place | settings,
        )

    def model(self) -> Head:
        return Head(self.outputs)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of the labels that count."""
        if self.is_score:
            real = ~labels.isnan()
            return (logits.squeeze(-1)[real] - labels[real]).square().sum()
        return nn.functional.cross_entropy(logits, labels, reduction="sum")

    def steps(self, *, of_loader: bool = False) -> Iterator[list[Batch]]:
        """Yield the batches of all ranks in each step, of both passes: as the loader ends steps, or
        as frameworks count them, two in a row."""
        loaders = [self.loader(rank) for rank in range(self.ranks)]
        for _ in range(PASSES):
            step: list[Batch] = []
            rounds = list(zip(*loaders, strict=True))
            for number, batches in enumerate(rounds, 1):
                step.extend(batches)
                is_full = batches[0].ends_step if of_loader else len(step) == PARTS * self.ranks
                if is_full or number == len(rounds):
                    yield step
                    step = []

    def expected(self, *, of_loader: bool) -> list[float]:
        """Return the weights of a plain loop over all rows of each step."""
        model, steps = self.model(), list(self.steps(of_loader=of_loader))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for number, batches in enumerate(steps):
            count = sum(batch.num_targets for batch in batches)
            for batch in batches:
                logits = model(batch["input_ids"], batch["attention_mask"])["logits"]
                (self.loss(logits, batch["labels"]) / count).backward()
            optimizer.param_groups[0]["lr"] = RATE * (1 - number / len(steps))
            optimizer.step()
            optimizer.zero_grad()
        return flat(model).tolist()

    def steps_of_a_pass(self) -> int:
        return len(list(self.steps())) // PASSES


def weights_of(model: Any) -> list[float]:
    """Return all weights. They are the same on all ranks, or the sum is NaN."""
    own = flat(getattr(model, "module", model))
    if torch.distributed.is_initialized():
        others = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(others, own)
        if not all(torch.equal(own, other) for other in others):
            return [float("nan")]
    return own.tolist()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).double()


def by_trainer(case: Case, folder: str) -> dict[str, Any]:
    """Train by ShardTrainer, resume in a pass and at its end, and compute metrics of every row."""
    from tokenfeed.integrations.transformers import ShardTrainer

    def trainer() -> Any:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=PASSES,
            gradient_accumulation_steps=PARTS,
            learning_rate=RATE,
            optim="sgd",
            max_grad_norm=0.0,
            use_cpu=True,
            ddp_backend="gloo" if case.ranks > 1 else None,
            save_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        loader = case.loader(device=arguments.device)
        evaluated = case.loader(device=arguments.device, split="validation")
        return ShardTrainer(
            case.model(),
            arguments,
            train_dataset=loader,
            eval_dataset=evaluated,
            compute_metrics=metrics,
        )

    whole = trainer()
    whole.train()
    resumed = {}
    for step in (2, case.steps_of_a_pass()):
        again = trainer()
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}")
        resumed[step] = weights_of(again.model)
    model, sums = whole.model, []
    for rank in range(case.ranks):
        for batch in case.loader(rank, split="validation"):
            logits = model(batch["input_ids"], batch["attention_mask"])["logits"]
            sums.append([float(case.loss(logits, batch["labels"])), batch.num_targets])
    total, count = (sum(column) for column in zip(*sums, strict=True))
    found = whole.evaluate()
    return {
        "weights": weights_of(model),
        "resumed": resumed,
        "evaluation": [found["eval_loss"], found["eval_rows"], found["eval_finite"]],
        "expected_evaluation": [total / count, count, True],
    }


def metrics(prediction: Any) -> dict[str, Any]:
    labels = torch.as_tensor(prediction.label_ids).float()
    return {"rows": len(labels), "finite": bool((labels.isfinite() & (labels >= 0)).all())}


def by_accelerate(case: Case, folder: str) -> dict[str, Any]:
    """Train by `accumulate` over a prepared StatefulShardLoader, with a prepared schedule."""
    from accelerate import Accelerator

    def run(stop: int | None = None, resume: int | None = None) -> tuple[list[float], list[float]]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        loader = StatefulShardLoader(case.loader(), transform=lambda batch: batch)
        # As scripts of Accelerate count it: the batches of all ranks, before `prepare`.
        total = PASSES * -(-len(loader) // PARTS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / total))
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        done, rates = 0, []
        if resume is not None:
            accelerator.load_state(f"{folder}/{resume}")
            done = resume
        while done < PASSES * case.steps_of_a_pass():
            for batch in loader:
                with accelerator.accumulate(model):
                    logits = model(batch["input_ids"], batch["attention_mask"])["logits"]
                    loss = case.loss(logits, batch["labels"]) + 0.0 * logits.sum()
                    accelerator.backward(loss / 4)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    done += 1
                    rates.append(optimizer.param_groups[0]["lr"])
                    if stop is not None:
                        accelerator.save_state(f"{folder}/{done}")
        return weights_of(model), rates

    weights, rates = run(stop=0)
    resumed = {step: run(resume=step)[0] for step in (2, case.steps_of_a_pass())}
    return {"weights": weights, "resumed": resumed, "rates": rates, "same": True}


def by_lightning(case: Case, folder: str) -> dict[str, Any]:
    """Train by Lightning's own optimization over a StatefulShardLoader."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()

        def training_step(self, batch: Batch, index: int) -> Tensor:
            logits = self.model(batch["input_ids"], batch["attention_mask"])["logits"]
            return (case.loss(logits, batch["labels"]) + 0.0 * logits.sum()) / 4

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    def run(checkpoint: int | None = None, **settings: Any) -> Module:
        module = Module()
        callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = Trainer(
            accelerator="cpu",
            devices=case.ranks,
            strategy="ddp" if case.ranks > 1 else "auto",
            max_epochs=PASSES,
            accumulate_grad_batches=PARTS,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[] if checkpoint else [callback],
        )
        loader = StatefulShardLoader(case.loader(**settings), transform=lambda batch: batch)
        path = f"{folder}/step={checkpoint}.ckpt" if checkpoint else None
        trainer.fit(module, loader, ckpt_path=path)
        return module

    weights = weights_of(run().model)
    return {"weights": weights, "resumed": {2: weights_of(run(2).model)}, "same": True}


def by_steps(case: Case, folder: str) -> dict[str, Any]:
    """Train by a plain loop over `steps`, and resume from the state of a step."""
    from tokenfeed.integrations.steps import steps

    def run(state: dict[str, Any] | None = None, done: int = 0) -> tuple[list[float], list[Any]]:
        model: Any = case.model()
        if case.ranks > 1:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        loader, saved = case.loader(), []
        if state:
            loader.load_state_dict(state["loader"])
            model.load_state_dict(state["model"])
        total = PASSES * case.steps_of_a_pass()
        while done < total:
            for step in steps(loader):
                for batch in step.accumulate(model):
                    logits = model(batch["input_ids"], batch["attention_mask"])["logits"]
                    loss = case.loss(logits, batch["labels"]) + 0.0 * logits.sum()
                    (loss / step.divisor).backward()
                optimizer.param_groups[0]["lr"] = RATE * (1 - done / total)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                saved.append({"loader": json.loads(json.dumps(step.state)), "model": weights})
        return weights_of(model), saved

    weights, saved = run()
    places = (2, case.steps_of_a_pass())
    return {"weights": weights, "resumed": {at: run(saved[at - 1], at)[0] for at in places}}


ADAPTERS: dict[str, Callable[[Case, str], dict[str, Any]]] = {
    "ShardTrainer": by_trainer,
    "Accelerate": by_accelerate,
    "Lightning": by_lightning,
    "steps": by_steps,
}


def main(adapter: str, data: str, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    rank = 0
    if ranks > 1:
        port = str(free_ports()[0])
        rank = int(os.fork() == 0)
        launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        launcher |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "1"}
        os.environ.update(launcher | {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)})
        torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    case = Case(data, ranks)
    found = ADAPTERS[adapter](case, folder)
    if rank:
        os._exit(0)
    fillers = sum(batch.is_filler for step in case.steps() for batch in step)
    sizes = [len(step) for step in case.steps()]
    expected = case.expected(of_loader=adapter == "steps")
    print(json.dumps({"expected": expected, "fillers": fillers, "sizes": sizes} | found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
