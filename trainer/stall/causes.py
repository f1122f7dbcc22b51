"""The causes of a stall: verdicts, thresholds and remedies."""

from typing import Literal, NamedTuple

Cause = Literal[
    "data",
    "copy",
    "launch",
    "wait",
    "log",
    "checkpoint",
    "evaluation",
    "garbage collection",
    "allocator",
    "recompilation",
    "communication",
    "other",
]


class About(NamedTuple):
    """A cause.

    The thresholds of data and launch are those of TensorFlow's input-pipeline analyzer. Causes that
    should cost nothing are named from 1 % on.
    """

    verdict: str
    """The verdict if this is the main cause."""
    activity: str
    """The start of the reason of a verdict. The share of the time follows."""
    meaning: str
    """What the device waited for."""
    remedy: str
    """General advice on what to change, for any training loop."""
    named: float
    """Share of the time from which verdicts and advice name the cause."""


ABOUT: dict[Cause, About] = {
    "data": About(
        "WAITS FOR DATA",
        "batches come late: waiting for them takes",
        "a batch that was not ready",
        "use more workers in the loader, prefetch more, tokenize beforehand, or read from a faster "
        "disk",
        named=0.05,
    ),
    "copy": About(
        "WAITS FOR COPIES",
        "batches are copied late: waiting for the copies takes",
        "the copy of a batch that was ready",
        "page-lock batches and copy them ahead with `non_blocking=True`, and send int32, not int64",
        named=0.01,
    ),
    "launch": About(
        "THE HOST IS LATE",
        "the host queues kernels more slowly than they run: waiting for them takes",
        "the host, which queues kernels more slowly than they run",
        "use larger micro-batches or `torch.compile`",
        named=0.03,
    ),
    "wait": About(
        "WAITS FOR THE HOST TO READ",
        "the host reads values such as `loss.item()`, and then queues kernels late, which takes",
        "the host, which was late because it had waited for a value (.item())",
        "read values such as `loss.item()` a step later, or only when you log; "
        "`meter.find_waits()` names the lines",
        named=0.01,
    ),
    "log": About(
        "WAITS FOR LOGGING",
        "logging takes",
        "a progress line",
        "log less often",
        named=0.01,
    ),
    "checkpoint": About(
        "WAITS FOR CHECKPOINTS",
        "saving checkpoints takes",
        "the disk, which still wrote the checkpoint before; on a CPU also the copy of the state",
        "save less often, or in the background",
        named=0.01,
    ),
    "evaluation": About(
        "WAITS FOR EVALUATION",
        "evaluating takes",
        "the metrics of the validation split",
        "evaluate less often, or on fewer batches",
        named=0.05,
    ),
    "garbage collection": About(
        "WAITS FOR GARBAGE COLLECTION",
        "collecting garbage takes",
        "a full run of Python's garbage collector",
        "call `gc.freeze()` after the first steps and `gc.disable()`, and collect at progress "
        "lines",
        named=0.005,
    ),
    "allocator": About(
        "WAITS FOR MEMORY",
        "freeing and allocating memory takes",
        "memory that was freed and allocated again",
        "set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or use fewer shapes",
        named=0.005,
    ),
    "recompilation": About(
        "WAITS FOR THE COMPILER",
        "compiling again takes",
        "torch.compile, which compiled again after the first steps",
        "bound the shapes, or mark them dynamic",
        named=0.01,
    ),
    "communication": About(
        "WAITS FOR OTHER RANKS",
        "exchanging gradients and waiting for other ranks takes",
        "the exchange of gradients with other ranks, and late ranks",
        "`meter.gather()` finds the slowest rank",
        named=0.05,
    ),
    "other": About(
        "WAITS FOR OTHER CODE",
        "other code between steps takes",
        "host code between steps",
        "bracket parts of the code between steps with `meter.cause(...)` to see which one it is",
        named=0.01,
    ),
}
"""Each cause, in the order of reports."""

CAUSES: tuple[Cause, ...] = tuple(ABOUT)

REMEDIES: dict[str, str] = {
    **{cause: about.remedy for cause, about in ABOUT.items()},
    "work": "check the clock, the temperature and the neighbours of its device",
    "exchange": "exchange gradients less often, by steps of more micro-batches, or use a faster "
    "network (no rank is late)",
    "padding": "pack rows, or sort more of them by length",
    "steps": "call `meter.step()` after each optimizer step",
    "more steps": "train for more steps: the first ones are warm-up",
}
"""What to change, by cause, and about other things that cost time: the work of a late rank, the
exchange of gradients, padding, and a loop without a measured step."""
