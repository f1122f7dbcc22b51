"""Defaults that suit a data set and a machine, for settings that the user does not give.

Documents keep the defaults of `TrainConfig`, except for evaluations, and on a GPU for the warm-up
and the budget of one epoch. Data with labels or completions gets as many epochs as make two million
tokens, or with labels 500 steps, but at least 3 and at most 10. The numbers were measured on small
data sets and two cores.

Learning rates were measured for steps of 32 rows, and follow the square root of the rows of a step.
A GPU gets a micro-batch that fits; a CPU changes no default. Does not import torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest, SplitInfo
from tokenfeed.pipeline.format.schema import Column, column_of
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.config.values import flag_of
from tokenfeed.trainer.data.datasets import epoch_of, is_packed, knows_steps

_TOKENS = 2_000_000
"""Tokens to train on in all epochs. A data set of fewer tokens is small."""
_EPOCHS = (3, 10)
_STEPS_OF_EPOCH, _ROWS = 500, (32, 256)
_LEAST_STEPS = 500
"""Steps of all epochs of labelled rows: with fewer, the loss of long rows still falls."""
_PATIENCE = 8
_RATE, _TAG_RATE = 1e-3, 3e-3
"""Learning rate for a step of 32 rows; for tags by the model `words`."""
_RATE_ROWS = 32
_FINE_RATE, _ADAPTER_RATE = 5e-5, 2e-4
_FINE_ROWS, _FINE_STEPS = 32, 50
"""Most rows of a step of completions, and fewest steps of an epoch, for a pretrained model."""
_MOST_SLOTS = 16_384
"""Token slots in a micro-batch of labelled rows at most. Its memory depends on the layers, not on
the vocabulary."""
_PACKED_LENGTH, _PACKED_SLOTS = (128, 8192), 2048
_WARMUP, _LINES = 0.1, 50
_LONG_WARMUP, _MOST_WARMUP = 0.037, 700
"""Warm-up in the presets for GPUs: 700 of 19,000 steps, as in reproductions of GPT-2."""
_MOST_STEP_TOKENS, _LEAST_STEP_TOKENS = 524_288, 2048
"""Bounds of a packed step that fills the GPU. The first is the step of GPT-2."""
_EVALUATION_SHARE = 0.05 * 3
"""Tokens of all evaluations per trained token: 5 % of the time, as a forward pass is a third of a
step."""
_EVALUATIONS = (2, 20)
"""Fewest and most evaluations of a run, besides the one before its first step."""
_LEAST_TOKENS, _ENOUGH_TOKENS, _MOST_TOKENS = 2048, 200_000, 1_000_000
"""Tokens of an evaluation. The first number costs hardly more than fewer. With more than the second
number, more evaluations are better. With the third, the loss has an error below 0.003."""
PROMPT_TOKENS, SAMPLE_TOKENS = 16, 48
"""Tokens of a sample's prompt from a document, and most tokens that a sample adds to its prompt."""
_TOKENS_OF_PASS = 64
"""A forward pass of one token takes less time than this number of tokens in a micro-batch: on a
processor as long as 22 to 31 tokens, with the built-in models."""
_EVALUATED = "so that evaluations after the first take about 5 % of the run"
_LEAST_LOG_EVERY, _MOST_EVERY = 10, 1000


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that were chosen for one reason."""

    settings: dict[str, Any]
    reason: str

    def without(self, given: Mapping[str, Any]) -> Self:
        """Return this choice without the settings that are given."""
        left = {k: v for k, v in self.settings.items() if given.get(k) is None}
        return replace(self, settings=left)

    def line(self, config: TrainConfig) -> str:
        """Return the flags of this choice that `config` has, with the reason; empty without any."""
        flags = [
            flag_of(name) + ("" if value is True else f" {value}")
            for name, value in self.settings.items()
            if getattr(config, name) == value and value is not False
        ]
        return f"chosen: {' '.join(flags)} ({self.reason})" if flags else ""


def _finetunes(given: Mapping[str, Any]) -> bool:
    """Return whether the model is pretrained."""
    return (given.get("model") or "").startswith("hf:") and not given.get("from_scratch")


def data_defaults(
    manifest: Manifest, given: Mapping[str, Any], longest_input: int | None = None
) -> list[Choice]:
    """Return the defaults that suit a data set, without those that depend on the steps.

    Args:
        manifest: The data.
        given: The given settings, on which defaults depend.
        longest_input: Longest input of the model in tokens; None without a limit.
    """
    train = manifest.splits.get("train")
    if train is None or not train.rows:
        return []
    longest = max(split.longest_row for split in manifest.splits.values())
    label = column_of(manifest.columns, "target")
    if label is not None:
        model = [] if given.get("model") else [_model(label, train)]
        by_words = label.per == "token" and bool(model) and model[0].settings["model"] == "words"
        batches = _padded(longest, train, given, _TAG_RATE if by_words else _RATE)
        patience = Choice({"patience": _PATIENCE}, "more evaluations find no better weights")
        return [*model, *batches, patience]
    if column_of(manifest.columns, "context") is not None:
        return [_packed(longest, train, given, longest_input)]
    return []


def tuning_defaults(manifest: Manifest | None, given: Mapping[str, Any]) -> list[Choice]:
    """Return the defaults that suit a pretrained model, or adapters beside one."""
    if not _finetunes(given):
        return []
    rows: float = _RATE_ROWS
    train = manifest.splits.get("train") if manifest else None
    if manifest is not None and train is not None and train.rows:
        rows = _rows_of_step(manifest, train, given)
    if given.get("lora") is None:
        return [_rate(_FINE_RATE, rows, "the model is pretrained; ")]
    decay = Choice({"weight_decay": 0.0}, "adapters start at zero, and must not decay to it")
    return [_rate(_ADAPTER_RATE, rows), decay]


def step_bound(manifest: Manifest, given: Mapping[str, Any], length: int) -> int:
    """Return the most rows of a step that fills the GPU, a power of two. `length` is that of a
    packed row.

    With more rows, an epoch would have too few steps.
    """
    train = manifest.split("train")
    if column_of(manifest.columns, "target") is not None:
        least, most, rows = _ROWS[0], _ROWS[1], train.rows
        steps = _FINE_STEPS
    else:
        least, most = _LEAST_STEP_TOKENS // length, _MOST_STEP_TOKENS // length
        rows = train.tokens // length
        is_read_often = column_of(manifest.columns, "context") is not None
        steps = _FINE_STEPS if is_read_often or _finetunes(given) else _STEPS_OF_EPOCH
    bounds = max(1, least), max(1, most)
    return 1 << _between(bounds, rows // steps).bit_length() - 1


def _rate(base: float, rows: float, reason: str = "") -> Choice:
    """Choose the rate that suits a step of some rows."""
    rate = float(f"{base * math.sqrt(rows / _RATE_ROWS):.3g}")
    words = scaling(base, rows, _RATE_ROWS, 0.5)
    return Choice({"learning_rate": rate}, f"{reason}scaled by rows a step: {words}")


def scaling(base: float, size: float, reference: float, power: float) -> str:
    """Return how a rate follows the size of a step, like 2.0e-5 x sqrt(32/8) = 4.0e-5."""
    ratio = f"{size:.7g}/{reference:.7g}"
    scaled = base * (size / reference) ** power
    words = f"sqrt({ratio})" if power == 0.5 else ratio
    return f"{_short(base)} x {words} = {_short(scaled)}"


def _short(number: float) -> str:
    digits, _, exponent = f"{number:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def _rows_of_step(manifest: Manifest, train: SplitInfo, given: Mapping[str, Any]) -> float:
    """Return the rows of a step that are given or chosen for labelled rows. Otherwise return the
    number that the rate was measured for."""
    is_labelled = column_of(manifest.columns, "target") is not None
    if is_labelled:
        if given.get("step_rows") is not None:
            return float(given["step_rows"])
        if given.get("step_tokens") is not None:
            return float(given["step_tokens"] * train.rows / train.tokens)
        return _step_rows(train)
    if column_of(manifest.columns, "context") is None:  # documents have any length
        return _RATE_ROWS
    tokens = given.get("step_tokens")
    if given.get("step_rows") is not None and given.get("sequence_length") is not None:
        tokens = given["step_rows"] * given["sequence_length"]
    return float(tokens * train.rows / train.tokens) if tokens is not None else _RATE_ROWS


def default_epochs(
    manifest: Manifest, given: Mapping[str, Any], *, on_gpu: bool = False
) -> int | None:
    """Return the epochs that suit a data set; None if the steps do not come from epochs.

    Documents are read once on a GPU, and for a fixed number of steps on a CPU.
    """
    if not data_defaults(manifest, given):
        return 1 if on_gpu and manifest.splits["train"].rows else None
    if _finetunes(given):
        return _EPOCHS[0]
    train = manifest.split("train")
    epochs = _TOKENS // max(1, train.tokens)
    if column_of(manifest.columns, "target") is not None:
        epochs = max(epochs, _LEAST_STEPS // math.ceil(train.rows / _step_rows(train)))
    return _between(_EPOCHS, epochs)


def steps_of_epochs(epochs: float, config: TrainConfig, manifest: Manifest, *, on_gpu: bool) -> int:
    """Estimate the steps of epochs from the manifest. With --step-rows, the steps of whole epochs
    are exact for data of one window.

    Raises:
        ConfigError: The number of steps depends on the order of rows in the data set.
    """
    if not knows_steps(config, manifest):
        raise ConfigError(
            "`--order`=file: how many steps an epoch of padded rows has depends on their order. "
            "Give --steps, or --step-rows in place of --step-tokens."
        )
    return max(1, round(epochs * epoch_of(config, manifest, on_gpu=on_gpu).steps))


def schedule_defaults(
    manifest: Manifest, config: TrainConfig, given: Mapping[str, Any], *, for_gpu: bool = False
) -> list[Choice]:
    """Return the defaults that suit the steps of a run.

    Args:
        manifest: The data.
        config: The settings so far.
        given: The given settings, which get no default.
        for_gpu: Whether the run is on a GPU, or a preset for one is given.
    """
    choices = []
    trained = float(config.steps * config.step_tokens)
    if config.step_rows is not None:
        train = manifest.split("train")
        row = config.sequence_length if is_packed(config, manifest) else train.tokens / train.rows
        trained = config.steps * config.step_rows * row
    sampled = _sampled_tokens(manifest, config)
    every = _evaluation_steps(manifest, config.steps, trained, sampled)
    reason = f"{config.steps:,} steps"
    # Evaluations share the steps of checkpoints, so that a best step rarely needs one of its own.
    save_every, is_paced = config.save_every, bool(data_defaults(manifest, given))
    if is_paced and "save_every" not in given:
        save_every = every
    every = config.eval_every if "eval_every" in given else round_up(every, save_every)
    pace = {}
    if is_paced:
        pace = {
            "warmup_steps": round(_WARMUP * config.steps),
            "eval_every": every,
            "save_every": round_up(save_every, every),
            "log_every": max(_LEAST_LOG_EVERY, config.steps // _LINES),
        }
    elif for_gpu:
        pace = {"warmup_steps": min(_MOST_WARMUP, round(_LONG_WARMUP * config.steps))}
    evaluations = _evaluations(manifest, config.steps, every, trained, sampled)
    pace = {k: v for k, v in pace.items() if k not in given and k not in evaluations}
    choices.append(Choice(pace, reason))
    choices.append(Choice({k: v for k, v in evaluations.items() if k not in given}, _EVALUATED))
    return [choice for choice in choices if choice.settings]


def _sampled_tokens(manifest: Manifest, config: TrainConfig) -> float:
    """Estimate the tokens of an evaluation that take as long as its samples.

    Models with a cache compute each token once, and models of one's own the row for each token."""
    train = manifest.split("train")
    prompt = min(config.sequence_length, train.tokens / max(1, train.rows))
    if column_of(manifest.columns, "context") is None:
        prompt = PROMPT_TOKENS
    is_own = ":" in config.model and not config.is_hub
    of_token = prompt + SAMPLE_TOKENS if is_own else _TOKENS_OF_PASS
    return config.samples * (prompt + SAMPLE_TOKENS * of_token)


def _evaluation_steps(manifest: Manifest, steps: int, trained: float, sampled: float) -> int:
    """Return the steps between evaluations that keep their share of the time, with samples."""
    whole = manifest.splits["validation"].tokens if "validation" in manifest.splits else 0
    wanted = max(1, min(whole, _ENOUGH_TOKENS)) + sampled
    count = _between(_EVALUATIONS, int(_EVALUATION_SHARE * trained / wanted) - 1)
    return min(_MOST_EVERY, math.ceil(steps / count))


def _evaluations(
    manifest: Manifest, steps: int, every: int, trained: float, sampled: float
) -> dict[str, int]:
    """Return `eval_every` and `eval_tokens`. The test split is evaluated once, and may have as many
    tokens as all evaluations of the validation split. Samples take at most half of the tokens."""
    count = 1 + math.ceil(steps / every)
    often = {"validation": 1, "test": count}
    sizes = [manifest.splits[k].tokens / n for k, n in often.items() if k in manifest.splits]
    each = _EVALUATION_SHARE * trained / count
    most = max(_LEAST_TOKENS, min(_MOST_TOKENS, int(max(each - sampled, each / 2))))
    if not any(sizes):
        return {}
    return {"eval_every": every} | ({"eval_tokens": most} if most < max(sizes) else {})


def _model(label: Column, train: SplitInfo) -> Choice:
    """Choose a model without layers for few rows: layers would memorize the rows."""
    few = train.tokens < _TOKENS
    words = {"model": "words", "dropout": 0.3 if label.per == "row" else 0.5}
    settings = words if few else {"model": "tiny", "dropout": 0.1}
    return Choice(settings, f"{train.tokens:,} tokens are {'few' if few else 'not few'}")


def _padded(longest: int, train: SplitInfo, given: Mapping[str, Any], rate: float) -> list[Choice]:
    """Choose rows a step, in one micro-batch if it is not too large, and the rate that suits a step
    of 32 rows to them. If rows are cut, choose as many tokens instead."""
    length = max(2, round_up(longest, 8))
    reason = f"the longest row has {longest:,} tokens"
    if given.get("step_tokens") is not None and given.get("step_rows") is None:
        rows = max(1, round(given["step_tokens"] * train.rows / train.tokens))
        return [Choice({"sequence_length": length}, reason), _rate(rate, rows)]
    chosen, cut_to = _step_rows(train), given.get("sequence_length") or longest
    if cut_to < longest and given.get("step_rows") is None and given.get("batching") != "packed":
        step = {"step_tokens": round_up(max(1, chosen * train.tokens // train.rows), cut_to)}
        choice = Choice(step, f"a row of {longest:,} tokens is longer than --sequence-length")
        return [choice, *_padded(longest, train, {**given, **step}, rate)]
    rows = given.get("step_rows") or chosen
    slots = max(length, min(rows * length, _MOST_SLOTS))
    return [
        Choice({"sequence_length": length, "micro_batch_tokens": slots}, reason),
        Choice({"step_rows": chosen}, f"{math.ceil(train.rows / chosen):,} steps an epoch"),
        _rate(rate, rows),
    ]


def _packed(
    longest: int, train: SplitInfo, given: Mapping[str, Any], longest_input: int | None
) -> Choice:
    """Choose rows that hold the longest example, up to the longest input of the model. Steps of a
    pretrained model have up to 32 examples."""
    length = _between(_PACKED_LENGTH, round_up(longest, 64))
    length = given.get("sequence_length") or min(length, longest_input or length)
    slots = given.get("micro_batch_tokens")
    if not isinstance(slots, int):
        slots = max(1, _PACKED_SLOTS // length) * length
    rows = min(_FINE_ROWS, train.rows // _FINE_STEPS) if _finetunes(given) else 0
    step = max(slots, round_up(rows * train.tokens // train.rows, slots))
    settings = {"sequence_length": length, "micro_batch_tokens": slots, "step_tokens": step}
    if given.get("step_rows") is not None:
        del settings["step_tokens"]
    open_ones = {name: value for name, value in settings.items() if given.get(name) is None}
    return Choice(open_ones, f"the longest row has {longest:,} tokens")


def _step_rows(train: SplitInfo) -> int:
    """Return rows a step: a power of two, for about 500 steps an epoch."""
    return _between(_ROWS, 1 << max(1, train.rows // _STEPS_OF_EPOCH).bit_length() - 1)


def _between(bounds: tuple[int, int], value: int) -> int:
    least, most = bounds
    return max(least, min(most, value))


def gpu_default(config: TrainConfig, *, packed: bool) -> Choice | None:
    """Return the micro-batch of a GPU, if a step has the same rows with a smaller one. Ranks that
    share a model cannot try sizes: one rank that is out of memory would leave the others waiting.
    """
    if config.shard_model or (not packed and config.step_rows is None):
        return None
    return Choice({"micro_batch_tokens": "auto"}, "as many as fit the GPU")


def size_defaults(
    config: TrainConfig, given: Mapping[str, Any], ranks: int, *, packed: bool
) -> list[Choice]:
    """Return sizes of a step and of its micro-batches that fit each other, whole sequences and the
    ranks, where the usual sizes do not.

    Args:
        config: The settings so far.
        given: The given settings, which stay.
        ranks: Number of ranks, each of which is to have a micro-batch.
        packed: Whether rows are packed into whole sequences.
    """
    length, step, micro = config.sequence_length, config.step_tokens, config.micro_batch_tokens
    choices = []
    if config.step_rows is not None:
        step = config.step_rows * length
    elif packed and "step_tokens" not in given and step % length:
        step = round_up(step, length)
        choices.append(Choice({"step_tokens": step}, f"whole sequences of {length:,} tokens"))
    if micro == "auto" or "micro_batch_tokens" in given:
        return choices
    row = 1 if config.step_rows is None else length
    parts = config.step_rows or step
    sizes = [row * parts // count for count in range(1, parts + 1) if parts % count == 0]
    whole = [size for size in sizes if size >= length and size % length == 0]
    most = round_up(micro, length)
    fitting = [size for size in whole if step // size >= ranks and size <= most]
    misfits = (packed and micro % length) or (config.step_rows is None and step % micro)
    if fitting and (misfits or step // micro < ranks):
        reason = f"{ranks} ranks share a step" if ranks > 1 else f"a step has {step:,} tokens"
        choices.append(Choice({"micro_batch_tokens": fitting[0]}, reason))
    return choices
