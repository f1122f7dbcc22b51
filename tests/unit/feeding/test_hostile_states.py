"""States: the same plan in other words goes on, junk is refused when it is loaded."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from delivery import MakeDataset, open_loader, realistic_lengths, small_batches, spans

from tokenfeed import Fixed, Mixture, Packed, Padded, ShardLoader, merge_states
from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.policies import described_policy
from tokenfeed.pipeline.planning.policy import Batching


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(200), num_shards=3)


@pytest.fixture
def other(make_dataset: MakeDataset, folder: Path) -> Path:
    return make_dataset(realistic_lengths(300, seed=1))


def mixed(folder: Path, other: Path, first: float, second: float) -> ShardLoader:
    mixture = Mixture({folder: first, other: second}, "continue")
    return ShardLoader(mixture, batching=Padded(700), window_tokens=4000, num_workers=0)


@pytest.mark.parametrize(
    ("saved", "now"), [((7, 3), (0.7, 0.3)), ((0.1, 0.3), (1, 3)), ((1e-12, 2e-12), (5e11, 1e12))]
)
def test_weights_of_the_same_proportions_are_the_same_plan(
    folder: Path, other: Path, saved: tuple[float, float], now: tuple[float, float]
) -> None:
    first, second = mixed(folder, other, *saved), mixed(folder, other, *now)
    for _ in range(5):
        next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert [spans(batch) for batch in second] == [spans(batch) for batch in first]
    assert second.compare(first.state_dict(), second.state_dict()) is None


def test_other_proportions_are_another_plan(folder: Path, other: Path) -> None:
    state = mixed(folder, other, 0.7, 0.3).state_dict()
    with pytest.raises(ResumeError, match=r"weights=\[0\.7, 0\.3\], this loader has weights="):
        mixed(folder, other, 0.71, 0.3).load_state_dict(state)


def test_weights_saved_as_whole_numbers_are_still_read(folder: Path, other: Path) -> None:
    state = mixed(folder, other, 7, 3).state_dict()
    state["plan"]["weights"] = [7, 3]  # as they were written before weights became floats
    mixed(folder, other, 0.7, 0.3).load_state_dict(state)


POLICIES: list[tuple[str, Batching]] = [
    ("Padded(max_tokens=700)", Padded(700)),
    ("Padded(long_rows='cut', max_tokens=700, multiple_of=1)", Padded(700)),
    ("Fixed(batch_size=7)", Fixed(7)),
    ("Packed(sequence_length=64, batch_size=4)", Packed(64, 4)),
    ("Packed(sequence_length=64, batch_size=4, split=True)", Packed(64, 4, split=True)),
]


@pytest.mark.parametrize(("saved", "now"), POLICIES, ids=str)
def test_a_field_that_a_saved_policy_does_not_name_has_its_default(
    folder: Path, saved: str, now: Batching
) -> None:
    loader = open_loader(folder, now)
    state = loader.state_dict()
    state["plan"]["batching"] = saved
    loader.load_state_dict(state)


@pytest.mark.parametrize(
    "saved",
    [
        "Padded(max_tokens=701, multiple_of=1, long_rows='cut')",
        "Padded(max_tokens=700, multiple_of=8)",
        "Padded(max_tokens=700, long_rows='refuse')",
        "Padded(max_tokens=700, spice=3)",
        "Padded()",
        "Fixed(batch_size=700)",
        "Sorted(max_tokens=700)",
        "Padded(max_tokens=__import__('os').getpid())",
        "Padded.of(max_tokens=700)",
        "Padded(",
        "",
        "(" * 5000,
        None,
        700,
        ["Padded"],
    ],
    ids=lambda saved: str(saved)[:40],
)
def test_another_policy_and_no_policy_are_refused(folder: Path, saved: Any) -> None:
    loader = open_loader(folder, Padded(700))
    state = loader.state_dict()
    state["plan"]["batching"] = saved
    with pytest.raises(ResumeError, match="saved with batching="):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "policy", [Padded(700, 8), Fixed(3), Packed(64, 4, long_rows="refuse")], ids=str
)
def test_the_settings_of_a_policy_are_its_class_and_its_fields(policy: Batching) -> None:
    fields = {name: getattr(policy, name) for name in type(policy).__dataclass_fields__}
    assert described_policy(repr(policy)) == (type(policy).__name__, fields)


JUNK: list[tuple[str, Any]] = [
    *[(name, value) for name in ("epoch", "window", "micro_batch") for value in (0.5, 1.0, True)],
    *[(name, 10**30) for name in ("epoch", "window", "micro_batch")],
    ("micro_batch", 2**63),
    ("micro_batch", "1"),
    ("tokens", [0.5]),
    ("tokens", [10**30]),
    ("tokens", "1"),
    ("digest", "0x00000000000000"),
    ("digest", " 0123456789abcde"),
    ("digest", 5),
    ("trail", [[1.5, "0123456789abcdef"]]),
    ("trail", [[1, "0123456789abcdef", 3]]),
    ("version", 2.5),
    ("version", None),
    ("plan", [1]),
    ("plan", {1: 2}),
]


@pytest.mark.parametrize(("name", "junk"), JUNK, ids=repr)
def test_junk_in_a_state_is_refused_when_it_is_loaded(folder: Path, name: str, junk: Any) -> None:
    loader = open_loader(folder)
    state = loader.state_dict() | {name: junk}
    with pytest.raises(ResumeError) as caught:
        loader.load_state_dict(state)
    assert "\n" not in str(caught.value)


JUNK_SETTINGS: list[tuple[str, Any]] = [
    ("weights", ["x"]),
    ("weights", [0.0]),
    ("weights", [float("nan")]),
    ("weights", "7"),
    ("weights", []),
    ("weights", None),
    ("micro_batches_per_step", 0.5),
    ("micro_batches_per_step", 10**30),
    ("micro_batches_per_step", "2"),
    ("phases", 3),
]


@pytest.mark.parametrize(("name", "junk"), JUNK_SETTINGS, ids=repr)
@pytest.mark.parametrize("options", [{}, {"micro_batches_per_step": 2}], ids=str)
def test_junk_in_the_settings_of_a_state_is_refused_by_its_name(
    folder: Path, name: str, junk: Any, options: dict[str, int]
) -> None:
    loader = open_loader(folder, **options)
    state = loader.state_dict()
    state["plan"][name] = junk
    with pytest.raises(ResumeError, match=f"saved with {name}="):
        loader.load_state_dict(state)


@pytest.mark.parametrize("junk", [None, 3, [], {}, "x", {"version": 3}, {"streams": [3]}], ids=repr)
def test_what_is_no_state_is_no_state_wherever_it_is_given(folder: Path, junk: Any) -> None:
    loader = open_loader(folder)
    for give in (
        lambda: loader.load_state_dict(junk),
        lambda: loader.compare(junk, loader.state_dict()),
        lambda: loader.compare(loader.state_dict(), junk),
        lambda: merge_states([junk]),
    ):
        with pytest.raises(ResumeError, match="not a loader state"):
            give()


@pytest.mark.parametrize(
    ("name", "junk"), [("stream", 0.5), ("stream", [1]), ("num_streams", "2"), ("num_streams", 1e9)]
)
def test_merging_refuses_junk(folder: Path, name: str, junk: Any) -> None:
    state = open_loader(folder).state_dict()
    state["plan"][name] = junk
    with pytest.raises(ResumeError, match="not a loader state"):
        merge_states([state])
    state["plan"] |= {"stream": 0, "num_streams": 10**12}
    with pytest.raises(ResumeError, match="the state of stream 1 of"):
        merge_states([state])


def test_a_state_goes_through_pickle_with_the_loader(folder: Path) -> None:
    loader = open_loader(folder)
    for _ in range(3):
        next(iter(loader))
    state = loader.state_dict()
    loader.close()
    copy: ShardLoader = pickle.loads(pickle.dumps(loader))
    assert copy.state_dict() == state
    assert [spans(batch) for batch in copy] == [spans(batch) for batch in loader]
