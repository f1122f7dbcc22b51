"""How fast would a step be on an H100? Predicted from its kernels, without a GPU.

The step is one of GPT-2 124M: 64 rows of 1,024 tokens in bf16. `operators` counts its kernels, the
bytes that they move and their operations. A kernel takes the longer of its bytes at 3.35 TB/s and
its operations at the rates below, and 3 microseconds for its launch. Nothing overlaps, and nothing
is exchanged between GPUs.

Matrix products reach a share of 989 TFLOP/s that is fitted to one published time, that of llm.c.
Rates of attention are those of the FlashAttention-3 paper. Other published times check the model:
it is refuted where one is further off than 15 %.

usage: python -m benchmarks.gpu.roofline        # some minutes; writes results/roofline.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.operators import Operator, compiled, dispatched, in_part, times
from benchmarks.gpu.peers import Size, attention_flops, llm_c, nanochat
from benchmarks.protocol import RESULTS, write_result
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.models.build import CHOICES
from tokenfeed.trainer.models.gpt import SIZES, ModelSize, Transformer
from tokenfeed.trainer.optim.optimizer import make_optimizer
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.step import scale_and_clip
from tokenfeed.trainer.tasks import vocabulary_loss as chunked_loss

__all__ = ["Published", "seconds", "share_of_peak"]

BYTES_PER_S, FLOPS_PER_S, LAUNCH_S = 3.35e12, 989e12, 3e-6
FLASH_2, FLASH_3, CUDNN = "FlashAttention 2", "FlashAttention 3", "cuDNN"
ATTENTION = {
    (FLASH_2, 64, 1024): (229e12, 238e12 * 229 / 306),
    (CUDNN, 64, 1024): (288e12, 348e12 * 288 / 373),
    (FLASH_3, 64, 1024): (265e12, 363e12 * 265 / 392),
    (CUDNN, 128, 1024): (410e12, 408e12 * 410 / 574),
    (FLASH_3, 128, 2048): (521e12, 501e12 * 521 / 625),
}
"""Operations per second of causal attention forward and backward, by kernel, width of a head and
length of a row (Shah et al. 2024, figures 5 and 6). Backward is shown there without a causal mask:
it is taken to lose as much by the mask as forward."""

GPT2 = Size(layers=12, width=768, heads=12, length=1024, vocabulary=50304, tokens=65_536)
GPT2_FLOPS = 6 * (GPT2.matrices + GPT2.vocabulary * GPT2.width) + 12 * 12 * 768 * 1024
"""Per token, as MFU counts them."""
XL = Size(
    layers=48,
    width=1600,
    heads=25,
    length=1024,
    vocabulary=50304,
    tokens=16_384,
    micro_batches=8,
)
MODDED = Size(layers=12, width=768, heads=6, length=1024, vocabulary=50304, tokens=65_536)
KEYS = 0.75 * 768 + 0.25 * 1024
"""Keys of a query of nanochat, on average: three of four layers see 1,024 tokens of 2,048."""
D24 = Size(
    layers=24,
    width=1536,
    heads=12,
    length=2048,
    vocabulary=32768,
    tokens=32_768,
    micro_batches=2,
    keys=KEYS,
)
D26 = Size(
    layers=26,
    width=1664,
    heads=13,
    length=2048,
    vocabulary=32768,
    tokens=32_768,
    micro_batches=2,
    keys=KEYS,
)
NANOCHAT_124M = Size(layers=12, width=768, heads=12, length=1024, vocabulary=50304, tokens=65_536)

_SPLIT = ("blocks", "forward and backward")
"""Parts that are listed by kind of kernel."""


@dataclass(frozen=True, slots=True)
class Published:
    """A step that somebody timed on H100s, and where they say so."""

    name: str
    operators: list[Operator]
    attention: tuple[str, int, int]
    tokens: int
    """Of a step on one GPU."""
    seconds: float
    source: str


def seconds(operator: Operator, attention: tuple[float, float], share: float) -> float:
    """Return the time of an operator.

    Args:
        operator: The kernels of one name.
        attention: Operations per second of attention, forward and backward.
        share: Share of the peak that matrix products reach.
    """
    rates = {
        "product": FLOPS_PER_S * share,
        "attention": attention[0],
        "attention backward": attention[1],
        "memory": FLOPS_PER_S,
    }
    compute, move = operator.flops / rates[operator.kind], operator.bytes / BYTES_PER_S
    work = compute + move if operator.kind == "product" else max(compute, move, key=abs)
    return work + operator.launches * LAUNCH_S


def step_seconds(
    operators: Iterable[Operator], attention: tuple[str, int, int], share: float
) -> float:
    return sum(seconds(operator, ATTENTION[attention], share) for operator in operators)


def share_of_peak(case: Published) -> float:
    """Return the share of the peak with which the model gives the published time of a step."""
    low, high = 0.01, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if step_seconds(case.operators, case.attention, middle) > case.seconds:
            low = middle
        else:
            high = middle
    return high


def ours(size: Size) -> list[Operator]:
    """Return the kernels of `train --compile` with a GPT-2, one micro-batch a step."""
    head = Head(kind="vocabulary", outputs=size.vocabulary, vocabulary_size=size.vocabulary)
    blocks = _blocks(size, head)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [*blocks, *_around(size, head), *_loss(size), *_update(head)]


def _blocks(size: Size, head: Head) -> list[Operator]:
    """Return the kernels of all blocks, forward and backward."""

    def make(rows: int) -> Any:
        model = Transformer(ModelSize(layers=1, width=size.width, heads=size.heads), head)
        block = torch.compile(model.blocks[0], dynamic=False)
        x = torch.randn(rows, 256, size.width, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.zeros(rows, 256, dtype=torch.int64)
        micro_batch = MicroBatch.of_ids(ids, causal=True)
        rotary = model.rotary(micro_batch.positions_BT, torch.bfloat16)

        def call() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return block(x, rotary, micro_batch.scope)  # type: ignore[no-any-return]

        return call

    attend = {"attention": attention_flops(size), "attention backward": 2.5 * attention_flops(size)}
    with inductor.patch(CHOICES):  # as `compile_model` does
        found = [line.at("blocks", size.tokens) for line in compiled(make)]
    one = [replace(each, flops=attend.get(each.kind, each.flops)) for each in found]
    return times(one, size.layers)


def _around(size: Size, head: Head) -> list[Operator]:
    """Return the embedding and the last norm, which run one by one."""
    model = Transformer(ModelSize(layers=0, width=size.width, heads=size.heads), head)
    micro_batch = MicroBatch.of_ids(
        torch.zeros(size.tokens // size.length, size.length, dtype=torch.int64), causal=True
    )
    with dispatched("embedding and last norm") as found:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(micro_batch)
        hidden.backward(torch.empty_like(hidden))  # type: ignore[no-untyped-call]
        model.embedding.weight.grad += torch.empty_like(model.embedding.weight)  # of the head
    return found


def _loss(size: Size) -> list[Operator]:
    """Return the vocabulary loss: products one by one, and one compiled function per chunk."""
    chunk = chunked_loss.chunk_tokens(size.tokens, size.vocabulary, compiled=True)

    def make(rows: int) -> Any:
        logits = torch.randn(rows * 256, size.vocabulary).bfloat16()
        targets = torch.zeros(rows * 256, dtype=torch.int64)
        run: Any = torch.compile(chunked_loss.loss_and_error, dynamic=False)

        def call() -> None:
            run(logits, targets, wants_error=True)

        return call

    def uncounted(logits: Tensor, targets: Tensor, *, wants_error: bool) -> tuple[Tensor, Tensor]:
        return logits.new_empty(()), logits.new_empty(logits.shape)

    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        count = size.tokens / chunk
        function = [line.at("vocabulary loss", chunk, times=count) for line in compiled(make)]
    hidden = torch.empty(size.tokens, size.width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(size.vocabulary, size.width, requires_grad=True)
    targets = torch.empty(size.tokens, dtype=torch.int64)
    plain = chunked_loss.compiled_loss_and_error
    chunked_loss.compiled_loss_and_error = lambda: uncounted  # type: ignore[assignment]
    try:
        with dispatched("vocabulary loss") as found, torch.autocast("cpu", torch.bfloat16):
            chunked_loss.vocabulary_loss(hidden, weight, targets, compiled=True).backward()  # type: ignore[no-untyped-call]
    finally:
        chunked_loss.compiled_loss_and_error = plain
    return [*function, *found]


def _update(head: Head) -> list[Operator]:
    """Return clipping and AdamW."""
    model = Transformer(SIZES["gpt2"], head)
    optimizer = make_optimizer(model, "adamw", 0.1)
    precision = Precision("bf16", torch.device("cpu"))
    norm = torch.nn.utils.get_total_norm
    torch.nn.utils.get_total_norm = partial(norm, foreach=True)  # as on a GPU
    try:
        for _ in range(2):  # the first makes the moments
            for weight in model.parameters():
                weight.grad = torch.empty_like(weight)
            with dispatched("optimizer") as found:
                scale_and_clip(optimizer, precision, 1.0, 1.0)
    finally:
        torch.nn.utils.get_total_norm = norm
    is_update = [operator.name.startswith("aten::_fused") for operator in found]
    return [
        *(o for o, update in zip(found, is_update, strict=True) if update),
        *in_part([o for o, update in zip(found, is_update, strict=True) if not update], "clipping"),
    ]


def transformers_trainer(size: Size) -> list[Operator]:
    """Return the kernels of `transformers.Trainer(bf16=True)`, not compiled: four micro-batches,
    since all logits in fp32 fill a GPU."""
    sys.path.append(str(RESULTS.parents[1] / "tests"))
    from support import named_cuda

    parts = 4
    with tempfile.TemporaryDirectory() as folder:
        library = named_cuda.build(Path(folder))
        command = ["-m", "benchmarks.gpu.eager_peer", str(library), str(size.tokens // parts)]
        ended = subprocess.run(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True
        )
    found = [Operator(*fields) for fields in json.loads(ended.stdout.splitlines()[-1])]
    passes = [operator for operator in found if operator.part != "optimizer"]
    return [*times(passes, parts), *(o for o in found if o.part == "optimizer")]


def published() -> list[Published]:
    """The published times: the first one is fitted, the others are checked."""
    ways = (
        ("llm.c, GPT-2 124M", llm_c(GPT2), (CUDNN, 64, 1024), GPT2, 0.140,
         "modded-nanogpt, records/track_1_short/2024-10-13_llmc: 140 ms"),
        ("llm.c, GPT-2 1558M", llm_c(XL), (CUDNN, 64, 1024), XL, 2.80,
         "llm.c, scripts/run_gpt2_1558M.sh: 2.80 s"),
        ("modded-nanogpt, PyTorch 2.5", nanochat(MODDED, modded=True), (CUDNN, 128, 1024), MODDED,
         0.1418, "modded-nanogpt, records/track_1_short/2024-10-18_PyTorch25: 141.8 ms"),
        ("nanochat d24", nanochat(D24), (FLASH_3, 128, 2048), D24, 10949.467 / 16704,
         "nanochat, dev/LEADERBOARD.md, run 1: 16,704 steps in 10,949 s"),
        ("nanochat d26, bf16", nanochat(D26), (FLASH_3, 128, 2048), D26, 524_288 / 630e3,
         "nanochat, dev/LOG.md: 630,000 tokens/s on 8 GPUs"),
    )  # fmt: skip
    return [
        Published(name, found, attention, size.tokens * size.micro_batches, time, source)
        for name, found, attention, size, time, source in ways
    ]


def figures(
    name: str, operators: list[Operator], attention: tuple[str, int, int], tokens: int, share: float
) -> dict[str, Any]:
    """Return what is predicted of a step: its time, and by part its launches, bytes and time."""
    total = step_seconds(operators, attention, share)
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for operator in operators:
        kind = operator.kind.split()[0]
        part = f"{operator.part}: {kind}" if operator.part in _SPLIT else operator.part
        took = seconds(operator, ATTENTION[attention], share)
        figures = operator.launches, operator.bytes, operator.flops, took
        parts[part] = [a + b for a, b in zip(parts[part], figures, strict=True)]
    return {
        "trainer": name,
        "attention": attention[0],
        "tokens_per_step": tokens,
        "tokens_per_s": round(tokens / total),
        "mfu": round(GPT2_FLOPS * tokens / total / FLOPS_PER_S, 3),
        "milliseconds": round(1e3 * total, 1),
        "kernels": round(sum(operator.launches for operator in operators)),
        "gigabytes": round(sum(operator.bytes for operator in operators) / 1e9, 1),
        "parts": {
            part: {
                "kernels": round(launches),
                "gigabytes": round(moved / 1e9, 1),
                "teraflops": round(flops / 1e12, 2),
                "milliseconds": round(1e3 * took, 1),
            }
            for part, (launches, moved, flops, took) in parts.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = published()
    share = share_of_peak(cases[0])
    checks = [
        {
            "check": case.name,
            "predicted_tokens_per_s": round(case.tokens / took),
            "published_tokens_per_s": round(case.tokens / case.seconds),
            "difference": round(case.seconds / took - 1, 3),
            "source": case.source,
        }
        for case in cases
        for took in [step_seconds(case.operators, case.attention, share)]
    ]
    step = ours(GPT2)
    trainers = (
        ("tokenfeed", step, CUDNN),
        ("tokenfeed", step, FLASH_2),
        ("llm.c", cases[0].operators, CUDNN),
        ("nanochat", nanochat(NANOCHAT_124M), FLASH_3),
        ("transformers.Trainer", transformers_trainer(GPT2), CUDNN),
    )
    results = [
        *checks,
        *(
            figures(name, found, (kernel, 64, 1024), GPT2.tokens, share)
            for name, found, kernel in trainers
        ),
    ]
    for entry in results:
        print(json.dumps(entry))
    about = {"share_of_peak": round(share, 3), "device": "none: an H100 is predicted"}
    print(write_result("roofline", results, options.results, **about))


if __name__ == "__main__":
    main()
