"""A batch on the CPU and on a device is the one that a slow loop would build."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import Span, plan_in_memory, random_rows, spans_of

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import (
    LENGTHS,
    ROW_TARGETS,
    SEGMENTS,
    Batch,
    BatchForm,
    make_batches,
)
from tokenfeed.pipeline.format.kinds import TargetRule
from tokenfeed.pipeline.format.schema import IGNORED, KINDS, RESERVED_NAMES, Rows, Task
from tokenfeed.pipeline.planning.batching import deal_rounds, plan_window
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policies import Batching, Fixed, Packed, Padded
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import IS_IGNORED, RankSlice

PAD, BEGIN = 9, 7
FORM = BatchForm(PAD)
NOTHING = -7.5
"""Stands for NaN, which equals nothing."""


@dataclass(frozen=True)
class Case:
    """A window, and which rank delivers it from where."""

    rows: Rows
    batching: Batching
    micro_batches_per_step: int = 1
    first: int = 0
    rank: int = 0
    world_size: int = 1

    def buffered(self) -> tuple[RankSlice, bytearray]:
        """The rank's slice, read from a buffer."""
        plan, reader = plan_in_memory(
            [self.rows], self.batching, micro_batches_per_step=self.micro_batches_per_step
        )
        rule = TargetRule("assistant") if KINDS in self.rows.per_token else None
        maker = WindowMaker(plan, reader, self.rank, self.world_size, rule)
        made = maker.make(Position(0, 0, self.first))
        buffer = bytearray(made.num_bytes)
        made.write(memoryview(buffer))
        return RankSlice.read(memoryview(buffer)), buffer

    def batches(self, device: str = "host", form: BatchForm = FORM) -> list[Batch]:
        """The batches of the rank. The device "cpu" is built as any device is."""
        made, _ = self.buffered()
        place = None if device == "host" else torch.device(device)
        return [batch for batch, _ in make_batches(made, form, place)]

    @property
    def begins(self) -> bool:
        """Whether each piece begins with a token that is not of its row."""
        return isinstance(self.batching, Packed) and self.batching.begin_token is not None

    def size(self, sequence: list[Span]) -> int:
        """Slots of a sequence without padding."""
        return sum(stop - start + self.begins for _, start, stop in sequence)

    def slow(self) -> Iterator[tuple[list[list[Span]], bool]]:
        """The sequences of each round, and whether it is a filler."""
        order = plan_in_memory([self.rows], self.batching)[0].order
        planned = plan_window(
            self.rows.lengths,
            self.batching,
            step_size=self.micro_batches_per_step,
            draw=order.draw(0, 0),
            labels=self.rows.per_row.get("label", self.rows.per_row.get("score")),
        )
        batches = [batch for step in spans_of(planned) for batch in step]
        rounds = deal_rounds(
            planned.step_offsets,
            self.micro_batches_per_step,
            first=self.first,
            rank=self.rank,
            world_size=self.world_size,
        )
        for mine, filler in zip(rounds.mine.tolist(), rounds.filler.tolist(), strict=True):
            sequences = batches[mine][:1] if filler else batches[mine]
            longest = max(map(self.size, sequences))
            rows = self.batching.rows_to_fill(round_up(longest, self.batching.multiple_of))
            yield sequences + [[]] * (rows - len(sequences)), filler


@st.composite
def cases(draw: st.DrawFn) -> Case:
    task: Task = draw(st.sampled_from(["lm", "classify", "score", "tag", "complete", "chat"]))
    lengths = np.array(draw(st.lists(st.integers(1, 25), min_size=1, max_size=25)))
    last = st.sampled_from(["short", "fill"])
    policies = [
        st.builds(Fixed, st.integers(1, 5), st.sampled_from([1, 8]), last=last),
        st.builds(Padded, st.integers(32, 90), st.sampled_from([1, 8]), last=last),
    ]
    if task not in ("classify", "score"):
        policies += [
            st.builds(Padded, st.integers(8, 30), st.sampled_from([1, 8]), last=last),
            st.builds(Packed, st.integers(2, 40), st.integers(1, 4), st.booleans(), last=last),
            st.builds(
                Packed,
                st.integers(2, 40),
                st.integers(1, 4),
                long_rows=st.sampled_from(["cut", "truncate"]),
                last=last,
                begin_token=st.just(BEGIN),
            ),
        ]
    rows = random_rows(
        lengths,
        task,
        pairs=draw(st.booleans()),
        vocabulary_size=draw(st.sampled_from([1 << 16, 1 << 32])),
    )
    world_size = draw(st.integers(1, 5))
    case = Case(rows, draw(st.one_of(policies)), draw(st.integers(1, 5)))
    last = len(case.batches()) - 1
    rank = draw(st.integers(0, world_size - 1))
    first = draw(st.integers(0, last))
    return Case(rows, case.batching, case.micro_batches_per_step, first, rank, world_size)


def slow_batch(case: Case, sequences: list[list[Span]], filler: bool) -> dict[str, Any]:
    """Token by token: the definition."""
    rows, begins = case.rows, np.cumsum(case.rows.lengths) - case.rows.lengths
    kinds = rows.per_token.get(KINDS)
    sizes = [case.size(sequence) for sequence in sequences]
    length = round_up(max(sizes), case.batching.multiple_of)
    tables: dict[str, list[list[int]]] = {
        name: [[] for _ in sequences]
        for name in ("input_ids", "labels", "token_type_ids", "position_ids", "seq_idx")
    }
    documents = 0
    for number, sequence in enumerate(sequences):
        row_of = {name: table[number] for name, table in tables.items()}
        for row, start, stop in sequence:
            for at in range(start - case.begins, stop):
                token = begins[row] + at
                row_of["position_ids"].append(at - start + case.begins)
                row_of["seq_idx"].append(documents)
                if at < start:
                    for name, value in (("input_ids", BEGIN), ("labels", IGNORED)):
                        row_of[name].append(value)
                    row_of["token_type_ids"].append(0)
                    continue
                row_of["input_ids"].append(int(rows.ids[token]))
                if "token_type_ids" in rows.per_token:
                    row_of["token_type_ids"].append(int(rows.per_token["token_type_ids"][token]))
                label = int(rows.ids[token])
                if "labels" in rows.per_token:
                    label = int(rows.per_token["labels"][token])
                elif (
                    (at == start and not case.begins)
                    or (at < rows.per_row.get("prompt_length", begins * 0)[row])
                    or (kinds is not None and not kinds[token] & 4)
                ):
                    label = IGNORED
                row_of["labels"].append(IGNORED if filler else label)
            documents += 1
        padding = range(length - len(row_of["input_ids"]))
        for name, fill in (("input_ids", PAD), ("labels", IGNORED), ("token_type_ids", 0)):
            row_of[name] += [fill for _ in padding]
        row_of["position_ids"] += padding
        row_of["seq_idx"] += [documents for _ in padding]
        documents += bool(padding)
    made: dict[str, Any] = tables
    for name, none in ("label", IGNORED), ("score", NOTHING):
        if name in rows.per_row:
            values = rows.per_row[name].tolist()
            made["labels"] = [
                none if filler or not spans else values[spans[0][0]] for spans in sequences
            ]
    if "token_type_ids" not in rows.per_token:
        del made["token_type_ids"]
    if not isinstance(case.batching, Packed):
        del made["position_ids"], made["seq_idx"]
        made["attention_mask"] = [[at < size for at in range(length)] for size in sizes]
        return made
    documents_of_slots = np.ravel(made["seq_idx"])
    edges = np.flatnonzero(np.diff(documents_of_slots, prepend=-1, append=-1)).tolist()
    bounds = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    return made | bounds | {"max_length_q": length, "max_length_k": length, "use_cache": False}


def listed(batch: Batch) -> dict[str, Any]:
    return {
        name: value.nan_to_num(NOTHING).tolist() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("device", ["host", "cpu"])
@given(case=cases())
def test_batches_are_those_of_the_slow_definition(device: str, case: Case) -> None:
    for batch, (sequences, filler) in zip(case.batches(device), case.slow(), strict=True):
        assert listed(batch) == slow_batch(case, sequences, filler)
        assert batch.is_filler == filler
        if isinstance(case.batching, Packed):
            assert batch.max_seqlen == np.diff(batch.cu_seqlens.cpu()).max()
            assert batch["input_ids"].shape[1] <= case.batching.sequence_length


@pytest.mark.parametrize("device", ["host", "cpu"])
@given(case=cases(), seed=st.integers(0, 1 << 32))
def test_kept_columns_follow_their_tokens(device: str, case: Case, seed: int) -> None:
    rng, size = np.random.default_rng(seed), len(case.rows.ids)
    kept = {
        "advantage": rng.normal(size=size).astype(np.float32),
        "step": rng.integers(-128, 128, size).astype(np.int8),
    }
    case.rows.per_token.update(kept)
    begins = np.cumsum(case.rows.lengths) - case.rows.lengths
    for batch, (sequences, _) in zip(case.batches(device), case.slow(), strict=True):
        for name, values in kept.items():
            expected = torch.zeros(batch["input_ids"].shape).to(batch[name])
            for line, sequence in zip(expected, sequences, strict=True):
                parts = [
                    np.append(values[:0] if not case.begins else [0], values[first + a : first + b])
                    for first, a, b in ((begins[row], a, b) for row, a, b in sequence)
                ]
                found = torch.from_numpy(np.concatenate([values[:0], *parts]).astype(values.dtype))
                line[: len(found)] = found
            assert torch.equal(batch[name], expected)
            assert batch[name].dtype == (torch.float32 if name == "advantage" else torch.int64)
            assert name in batch
            assert name not in dict(**batch)


@pytest.mark.parametrize("batching", [Padded(100), Packed(8, 2)])
def test_names_of_a_batch_are_reserved(batching: Batching) -> None:
    batch = Case(random_rows(np.array([5, 3, 2]), pairs=True), batching).batches()[0]
    names = {*batch, *(name for name in dir(batch) if not name.startswith("_"))}
    assert names | {IS_IGNORED, LENGTHS, ROW_TARGETS, SEGMENTS} <= RESERVED_NAMES


FORMS = [
    FORM,
    BatchForm(PAD, -1),
]


@pytest.mark.parametrize("device", ["host", "cpu"])
@given(form=st.sampled_from(FORMS), case=cases())
def test_targets_are_the_labels_of_what_a_slot_predicts(
    device: str, form: BatchForm, case: Case
) -> None:
    own = {"labels", "label", "score"} & {*case.rows.per_token, *case.rows.per_row}
    for batch in case.batches(device, form):
        labels, targets = batch["labels"].tolist(), batch.targets.tolist()
        expected = labels if own else [[*row[1:], IGNORED] for row in labels]
        if "score" not in own:
            flat = np.array(expected)
            expected = np.where(flat == IGNORED, form.ignore_index, flat).tolist()
        assert np.array_equal(targets, expected, equal_nan=True)
        assert batch.targets is batch.targets
        assert batch["labels"].tolist() == labels or "score" in own
        assert batch.targets.is_contiguous()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("task", ["lm", "tag", "complete"])
def test_batches_on_a_gpu_equal_host_batches(task: Task) -> None:
    rows = random_rows(np.arange(1, 60), task, pairs=True)
    for batching in (Padded(100, 8), Packed(40, 3)):
        case = Case(rows, batching)
        for one, other in zip(case.batches(), case.batches("cuda"), strict=True):
            assert listed(one) == listed(other)


@given(cases())
def test_a_batch_outlives_the_buffer_it_was_built_from(case: Case) -> None:
    made, buffer = case.buffered()
    batches = [batch for batch, _ in make_batches(made, FORM)]
    buffer[:] = b"\xff" * len(buffer)
    for batch, expected in zip(batches, case.batches(), strict=True):
        assert listed(batch) == listed(expected)
        assert batch.lengths.tolist() == expected.lengths.tolist()
        assert batch.rows.tolist() == expected.rows.tolist()
        assert batch.ends_step == expected.ends_step


OF_PACKED = [
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "use_cache",
]


@pytest.mark.parametrize(
    ("batching", "pairs", "keys"),
    [
        (Padded(100), False, ["input_ids", "attention_mask", "labels"]),
        (Fixed(2), True, ["input_ids", "attention_mask", "token_type_ids", "labels"]),
        (Packed(8, 2), False, ["input_ids", *OF_PACKED, "labels"]),
        (Packed(8, 2), True, ["input_ids", *OF_PACKED, "token_type_ids", "labels"]),
    ],
)
def test_a_batch_unpacks_like_a_dict(batching: Batching, pairs: bool, keys: list[str]) -> None:
    case = Case(random_rows(np.array([5, 3, 2]), pairs=pairs), batching)
    batch = case.batches()[0]
    assert list(dict(**batch)) == keys
    assert len(batch) == len(keys)
    assert "token_type_ids" in batch or not pairs
    assert batch["labels"] is batch["labels"]
    assert batch.labels is batch["labels"]
    with pytest.raises(AttributeError, match=r"'lables'\. Its keys are input_ids, "):
        batch.lables  # noqa: B018
    with pytest.raises(AttributeError, match=r"'pop'\. .* change a copy, `dict\(batch\)`\.$"):
        batch.pop("labels")
    for key in keys:
        with pytest.raises(AttributeError, match=rf"^`{key}` of a Batch cannot be set: `model\("):
            setattr(batch, key, batch[key])
    for missing in ("label", {"attention_mask", "position_ids"}.difference(keys).pop()):
        assert missing not in batch
        with pytest.raises(KeyError, match=missing):
            batch[missing]
        assert not hasattr(batch, missing)


@pytest.mark.parametrize("batching", [Padded(100), Packed(8, 2)])
def test_a_batch_goes_to_another_device_with_all_it_has(batching: Batching) -> None:
    """`meta` stands in for a GPU: it has devices and shapes, and no values."""
    rows = random_rows(np.array([5, 3, 2, 7]), pairs=True)
    rows.per_token["advantage"] = np.arange(17, dtype=np.float32)
    batch = Case(rows, batching).batches()[0]
    assert batch.targets.device == batch.device
    assert batch.to("cpu") is batch
    with pytest.raises(ConfigError, match=r"`to`\(torch\.float16\): a Batch keeps its dtypes"):
        batch.to(torch.float16)  # type: ignore[arg-type]
    moved = batch.to("meta")
    assert moved.targets.device == moved.advantage.device == moved.device
    tensors = [value for value in moved.values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.num_targets == batch.num_targets
    assert list(moved) == list(batch)


@pytest.mark.parametrize("name", ["cu_seqlens", "max_seqlen"])
def test_padded_batch_asked_for_documents_raises(name: str) -> None:
    batch = Case(random_rows(np.array([5, 3])), Padded(100)).batches()[0]
    with pytest.raises(ConfigError, match=f"`{name}`: only packed batches have this attribute"):
        getattr(batch, name)


def test_batch_built_in_inference_mode_trains_later() -> None:
    batch = Case(random_rows(np.array([5, 3])), Padded(100)).batches()[0]
    with torch.inference_mode():
        assert not batch["labels"].is_inference()


@pytest.mark.parametrize("batching", [Padded(100), Packed(8, 2)])
def test_pin_memory_pins_every_tensor(batching: Batching, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is nothing to pin memory for: a clone stands in for the pinned copy."""
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = Case(random_rows(np.array([5, 3, 2, 7])), batching).batches()[0]
    copy = batch.pin_memory()
    assert listed(copy) == listed(batch)
    tensors = [value for value in copy.values() if isinstance(value, torch.Tensor)]
    assert {id(tensor) for tensor in tensors} <= {id(tensor) for tensor in pinned}


@settings(max_examples=20)
@given(cases())
def test_pickled_batch_is_the_same_batch(case: Case) -> None:
    for batch, expected in zip(case.batches(), case.batches(), strict=True):
        copy = pickle.loads(pickle.dumps(batch))
        assert listed(copy) == listed(expected)
        assert repr(copy) == repr(expected)
        for name in ("rows", "starts", "piece_lengths", "sequence_offsets", "lengths"):
            assert getattr(copy, name).tolist() == getattr(expected, name).tolist()
        for name in ("ends_step", "is_filler", "num_tokens", "num_targets"):
            assert getattr(copy, name) == getattr(expected, name)
