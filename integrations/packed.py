"""Check that a model separates the documents of a packed batch.

    check_documents_apart(model, next(iter(loader)))

Attention layers of transformers separate documents by the position ids and sequence lengths of a
packed batch. Layers with a state (Mamba, linear attention, convolutions), ALiBi positions and
encoders without FlashAttention may not, and only the loss would show it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch

_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2


@torch.no_grad()
def check_documents_apart(
    model: Callable[..., Any], batch: Batch, *, tolerance: float | None = None
) -> None:
    """Compare the logits of a packed batch with the logits of its documents alone.

    Call it once before training, and before DDP or FSDP wraps the model. It runs one forward pass
    of the batch, and one of the longest document that does not begin a row.

    Args:
        model: Called as `model(**batch)`, without the labels. Returns logits [B, T, V], or
            something that has them as `logits`. Adapt other models by a function, after
            `model.eval()`: `lambda **batch: model(batch["input_ids"], batch["seq_idx"])`.
        batch: A packed batch, on the model's device.
        tolerance: Largest accepted difference, as a share of the largest logit. Default: 1e-4 if
            the logits are float32, else 2e-2. TF32 needs more.

    Raises:
        ConfigError: The logits differ, the model does not take the keys of a batch, or no row of
            the batch has two documents.
    """
    length = batch.input_ids.shape[1]
    behind = [
        (end - begin, begin, end)
        for begin, end in pairwise(batch.cu_seqlens.tolist())
        if begin % length and not _is_padding(batch, begin)
    ]
    if not behind:
        raise ConfigError(
            "`batch`: every row has a single document, so nothing can be compared. Use "
            "another batch, or a larger `sequence_length`."
        )
    _, begin, end = max(behind)
    row, place = begin // length, slice(begin % length, (end - 1) % length + 1)
    packed = {key: value for key, value in batch.items() if key != "labels"}
    _check_takes(model, packed)
    with _evaluating(model):
        beside_TV = _logits(model(**packed))[row, place].float()
        logits_1TV = _logits(model(**_document(packed, row, place)))
    if tolerance is None:
        tolerance = _TOLERANCE if logits_1TV.dtype == torch.float32 else _HALF_TOLERANCE
    alone_TV = logits_1TV[0].float()
    difference = float((beside_TV - alone_TV).abs().max() / alone_TV.abs().max())
    if not difference <= tolerance:  # also true for NaN
        raise ConfigError(
            f"`model`: {type(model).__name__} mixes the documents of a packed row: the logits of a "
            f"document differ by {difference:.2g} of the largest one from its logits alone "
            f"(tolerance {tolerance:.2g}). Use `batching=Padded(...)`. In a model of your own, "
            "attention needs a mask from `seq_idx` or `position_ids`, and other layers that "
            "connect tokens must begin again at every document."
        )


def has_neighbors(batch: Batch) -> bool:
    """Return whether the batch is packed, and a row has several documents."""
    return "cu_seq_lens_q" in batch and bool(np.diff(batch.sequence_offsets).max() > 1)


def _document(packed: dict[str, Any], row: int, place: slice) -> dict[str, Any]:
    """Return the inputs of a single document of a packed batch, with the same keys."""
    ids, length = packed["input_ids"], place.stop - place.start
    ends = torch.tensor([0, length], dtype=torch.int32, device=ids.device)
    alone = {
        key: value[row : row + 1, place]
        for key, value in packed.items()
        if isinstance(value, torch.Tensor) and value.shape == ids.shape
    }
    alone["seq_idx"] = alone["seq_idx"] - alone["seq_idx"][:, :1]
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return packed | alone | lengths | {"max_length_q": length, "max_length_k": length}


def _check_takes(model: Any, packed: dict[str, Any]) -> None:
    """Check that a model can be called with the keys of a batch."""
    try:
        signature(getattr(model, "forward", model)).bind(**packed)
    except TypeError as error:
        raise ConfigError(
            f"`model`: {type(model).__name__} cannot be called as model(**batch): {error}. Call "
            "`model.eval()` and pass a function instead, such as `lambda **batch: "
            'model(batch["input_ids"], batch["seq_idx"])`.'
        ) from error


def _is_padding(batch: Batch, slot: int) -> bool:
    row, column = divmod(slot, batch.input_ids.shape[1])
    return bool(column >= batch.lengths[row])


def _logits(output: Any) -> torch.Tensor:
    given: Any = output["logits"] if isinstance(output, dict) else output
    logits: torch.Tensor = getattr(given, "logits", given)
    return logits


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off inside the block."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
