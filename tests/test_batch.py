"""Both builders give the same batch, and it is the one a slow loop would build."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.batch import (
    IGNORED,
    Batch,
    RaggedBatch,
    build_on_device,
    build_on_host,
    device_inputs,
)

PAD = 9


def ragged_of(
    sequences: list[list[int]], *, dtype: str = "u2", multiple_of: int = 1, filler: bool = False
) -> RaggedBatch:
    """A ragged batch of sequences given as lists of piece lengths."""
    pieces = np.array([length for sequence in sequences for length in sequence])
    rng = np.random.default_rng(0)
    return RaggedBatch(
        ids=rng.integers(0, np.iinfo(dtype).max, pieces.sum(), endpoint=True).astype(dtype),
        rows=np.full(len(pieces), -1) if filler else np.arange(len(pieces)),
        starts=np.zeros(len(pieces), np.int64),
        piece_lengths=pieces,
        sequence_offsets=np.cumsum([0] + [len(sequence) for sequence in sequences]),
        lengths=np.array([sum(sequence) for sequence in sequences]),
        multiple_of=multiple_of,
    )


RAGGED = st.builds(
    ragged_of,
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6),
    dtype=st.sampled_from(["u2", "u4"]),
    multiple_of=st.sampled_from([1, 8]),
    filler=st.booleans(),
)


def slow_batch(ragged: RaggedBatch) -> dict[str, list[list[int]]]:
    """Token by token: the definition."""
    length = ragged.padded_length
    ids, mask, labels = [], [], []
    at = piece = 0
    for row, count in enumerate(ragged.lengths.tolist()):
        tokens = ragged.ids[at : at + count].tolist()
        row_labels = list(tokens)
        start = 0
        for _ in range(int(np.diff(ragged.sequence_offsets)[row])):
            row_labels[start] = IGNORED
            start += int(ragged.piece_lengths[piece])
            piece += 1
        if ragged.is_filler:
            row_labels = [IGNORED] * count
        ids.append(tokens + [PAD] * (length - count))
        mask.append([True] * count + [False] * (length - count))
        labels.append(row_labels + [IGNORED] * (length - count))
        at += count
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def on_device(ragged: RaggedBatch, device: str) -> Batch:
    ids, index = device_inputs(ragged)
    return build_on_device(ids.to(device), index.to(device), ragged, PAD)


@given(RAGGED)
def test_host_batches_equal_the_slow_definition(ragged: RaggedBatch) -> None:
    batch = build_on_host(ragged, PAD)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == slow_batch(ragged)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["attention_mask"].dtype == torch.bool


@given(RAGGED)
def test_device_batches_equal_host_batches(ragged: RaggedBatch) -> None:
    host, device = build_on_host(ragged, PAD), on_device(ragged, "cpu")
    for name in host:
        assert host[name].dtype == device[name].dtype
        assert torch.equal(host[name], device[name]), name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_on_a_gpu_equal_host_batches() -> None:
    ragged = ragged_of([[5, 3], [1], [9, 9, 9]], dtype="u2", multiple_of=8)
    host, device = build_on_host(ragged, PAD), on_device(ragged, "cuda")
    for name in host:
        assert torch.equal(host[name], device[name].cpu()), name


@given(RAGGED)
def test_counts_on_the_host_equal_counts_of_the_tensors(ragged: RaggedBatch) -> None:
    batch = build_on_host(ragged, PAD)
    assert batch.num_targets == int((batch["labels"] != IGNORED).sum())
    assert batch.num_slots == batch["input_ids"].numel()
    if not ragged.is_filler:
        assert batch.num_tokens == int(batch["attention_mask"].sum())


def test_a_batch_unpacks_like_a_dict() -> None:
    batch = build_on_host(ragged_of([[3], [2]]), PAD)
    assert set(dict(**batch)) == {"input_ids", "attention_mask", "labels"}
    assert repr(batch) == "Batch([2, 3], 5 tokens, cpu)"
