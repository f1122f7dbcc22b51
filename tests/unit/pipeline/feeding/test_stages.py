"""A list of stages: exact shares, every row once per reading, and a future that may change."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import VOCABULARY_SIZE, random_rows, write_rows
from support.delivery import Ranks, joined, open_loader, same_values, spans, with_settings

from tokenfeed import Fixed, Manifest, Mixture, Packed, Padded, ShardDataset, ShardLoader, Stage
from tokenfeed.integrations.steps import steps
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.state import resealed

OPTIONS: dict[str, Any] = {"window_tokens": 1500, "micro_batches_per_step": 2}
SMALL = Padded(max_tokens=256)
LENGTHS = [np.random.default_rng(seed).integers(1, 60, 20 + 60 * seed) for seed in range(4)]
WEIGHTS = st.sampled_from([1, 2, 3, 0.5, 0.1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Four data sets of many small record batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 150)
        parent = tmp_path_factory.mktemp("sources")
        yield [
            write_rows(parent / f"s{n}", {"train": random_rows(lengths)}, VOCABULARY_SIZE, 2)
            for n, lengths in enumerate(LENGTHS)
        ]


@dataclass(frozen=True)
class Drawn:
    """A stage without folders. Its sources are numbers."""

    weights: dict[int, float]
    tokens: int
    policy: int

    def stage(self, folders: list[Path], begins: int) -> Stage:
        """The stage, from some token of the run on."""
        return Stage(
            {folders[n]: weight for n, weight in self.weights.items()},
            until_tokens=begins + self.tokens,
            batching=[None, *SMALL_POLICIES][self.policy],
        )


SMALL_POLICIES = [
    Packed(sequence_length=64, batch_size=2),
    Packed(sequence_length=48, batch_size=3, split=True),
    Fixed(batch_size=4),
]
SOURCES = st.dictionaries(st.integers(0, 3), WEIGHTS, min_size=1, max_size=4)
STAGES = st.builds(Drawn, SOURCES, st.integers(4_000, 8_000), st.integers(0, 3))
LISTS = st.lists(STAGES, min_size=1, max_size=3)


@dataclass(frozen=True)
class Change:
    """What happens after some rounds: other ranks go on, perhaps with another future."""

    rounds: int
    world_size: int
    future: list[Drawn] | None
    longer: int
    """How much longer the stage under way becomes in an edited list, in tokens."""
    weights: dict[int, float] | None


CHANGES = st.lists(
    st.builds(
        Change,
        st.integers(0, 60),
        st.integers(1, 3),
        st.none() | LISTS,
        st.integers(0, 3_000),
        st.none() | SOURCES,
    ),
    min_size=3,
    max_size=3,
)


def listed(drawn: list[Drawn], folders: list[Path], begins: int = 0) -> list[Stage]:
    """The stages one after the other."""
    starts = accumulate((each.tokens for each in drawn), initial=begins)
    return [each.stage(folders, start) for each, start in zip(drawn, starts, strict=False)]


def edges_of(state: dict[str, Any]) -> list[list[int]]:
    """The tokens of the run at the edges of the windows of every stage, from a saved state."""
    edges, begins = [], 0
    for stage in state["plan"]["stages"]:
        window, length = stage["window_tokens"], stage["until"] - begins
        count = max(1, (length + window // 2) // window)
        edges.append([begins + nth * window for nth in range(count)] + [stage["until"]])
        begins = stage["until"]
    return edges


def edited(
    stages: list[Stage], state: dict[str, Any], change: Change, folders: list[Path]
) -> list[Stage]:
    """A list with the same past and another future. The past ends with the window under way."""
    edges = edges_of(state)
    flat = [0, *(edge for each in edges for edge in each[1:])]
    begun = state["window"] + (state["micro_batch"] > 0)
    stop = flat[begun]
    past = [stage for stage in stages if stage.until_tokens <= stop]
    under_way = [stage for stage in stages if stage.until_tokens > stop][:1]
    begins = max([0, *(stage.until_tokens for stage in past)])
    if under_way and begins < stop:
        until = stop + change.longer if change.longer > 1_500 else stop
        under_way[0] = replace(under_way[0], until_tokens=until)
        past += under_way
        begins = under_way[0].until_tokens
    assert change.future is not None
    return past + listed(change.future, folders, begins)


def ideal(stages: Sequence[Stage], folder: Path, tokens: int) -> Fraction:
    """The tokens that a data set should have got after some tokens of the run."""
    got, begins = Fraction(0), 0
    for stage in stages:
        if begins >= tokens:
            break
        passed = min(tokens, stage.until_tokens) - begins
        got += share(stage.weights, folder) * passed
        begins = stage.until_tokens
    return got


def share(weights: Any, folder: StorePath) -> Fraction:
    exact = {each: Fraction(str(weight)) for each, weight in weights.items()}
    return exact.get(folder, Fraction(0)) / sum(exact.values())


def check_rows(stages: list[Stage], folders: list[Path], order: str) -> None:
    """Deliver the whole list, and check shares and rows at every edge of a window."""
    loader = open_loader(stages, SMALL, **OPTIONS | {"order": order})
    numbers = list(dict.fromkeys(folders.index(f) for s in stages for f in s.weights))
    lengths = np.concatenate([LENGTHS[n] for n in numbers])
    ends = np.cumsum([len(LENGTHS[n]) for n in numbers])
    counted = np.zeros(len(lengths), np.int64)
    edges = [edge for each in edges_of(loader.state_dict()) for edge in each[1:]]
    window, read = 0, np.append(-1, ends - 1)
    for batch in loader:
        np.add.at(counted, batch.rows, batch.piece_lengths)
        for row in batch.rows[batch.starts == 0].tolist() if order == "file" else ():
            source = np.searchsorted(ends, row, side="right")
            first = ends[source] - len(LENGTHS[numbers[source]])
            assert row == (first if read[source] == ends[source] - 1 else read[source] + 1)
            read[source] = row
        if loader.position.micro_batch:
            continue
        times, rest = np.divmod(counted, lengths)
        assert not rest.any(), "a row was delivered in part"
        for n, of_rows in zip(numbers, np.split(times, ends[:-1]), strict=True):
            assert of_rows.max() <= of_rows.min() + 1, "a row came again before another one came"
            info = Manifest.read(folders[n]).splits["train"]
            due = ideal(stages, folders[n], edges[window]) * info.batches / info.tokens
            in_readings = of_rows.min() * info.batches
            rest = np.count_nonzero(of_rows > of_rows.min())
            # a reading under way has between this many rows and record batches
            fewest, most = in_readings + (rest > 0), in_readings + min(rest, info.batches)
            assert fewest - 1 <= due < most + 1, "the share is off by more than one record batch"
        window += 1
    assert window == len(edges)


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2)
@given(drawn=LISTS, changes=CHANGES, order=st.sampled_from(["shuffled", "file"]))
def test_a_run_whose_future_changed_equals_an_uninterrupted_run_of_its_final_list(
    drawn: list[Drawn], changes: list[Change], order: str, folders: list[Path]
) -> None:
    stages, state, options = listed(drawn, folders), None, OPTIONS | {"order": order}
    runs: list[Ranks] = []
    for change in changes:
        ranks = Ranks(stages, change.world_size, state, batching=SMALL, **options)
        if change.weights and state is not None:
            weights = {f: w for n, w in change.weights.items() if (f := folders[n])}
            known = {folder for stage in ranks.loaders[0].stages for folder in stage.weights}
            if known >= weights.keys():
                try:
                    for loader in ranks.loaders:
                        loader.reweigh(weights)
                except ConfigError as error:
                    known_errors = ("too few", "last window has begun")
                    assert any(each in str(error) for each in known_errors)
        runs.append(ranks)
        state = ranks.run(change.rounds)
        if state["epoch"]:
            break
        stages = ranks.loaders[0].stages
        if change.future is not None:
            stages = edited(stages, state, change, folders)
    else:
        runs.append(Ranks(stages, 1, state, batching=SMALL, **options))
        state = runs[-1].run()
    final = runs[-1].loaders[0].stages
    alone = Ranks(final, 1, batching=SMALL, **options)
    whole = alone.run()
    assert (whole["digest"], whole["epoch"]) == (state["digest"], 1)
    assert [batch for step in joined(runs) for batch in step] == [
        batch for step in joined([alone]) for batch in step
    ]
    check_rows(final, folders, order)


def test_state_of_a_step_has_a_later_change_of_weights(folders: list[Path]) -> None:
    first, second, *_ = folders
    script = [Stage({first: 1, second: 1}, until_tokens=30_000)]
    with open_loader(script, SMALL, **OPTIONS) as loader:  # type: ignore[arg-type]
        own = steps(loader)
        step, fetched, _ = next(own), next(own), next(own)
        before = step.state
        loader.reweigh({second: 1})
        assert step.state["plan"] == loader.state_dict()["plan"]
        rest = [spans(batch) for batch in fetched]
        state = json.loads(json.dumps(step.state))
        with open_loader(script, SMALL, **OPTIONS) as other:  # type: ignore[arg-type]
            other.load_state_dict(state)
            again = [spans(batch) for batch in other]
            assert again[: len(rest)] == rest
            assert other.stages == loader.stages
        list(own)
        assert other.state_dict() == loader.state_dict()
        loader.rewind()
        loader.reweigh({first: 1})
        assert step.state == before, "the list has another past now"


def test_batches_of_stages_that_are_shorter_than_a_window_are_estimated(
    folders: list[Path],
) -> None:
    list_ = [
        Stage({folders[3]: 1}, until_tokens=5_000),
        Stage({folders[2]: 1, folders[3]: 1}, until_tokens=15_000),
    ]
    with open_loader(list_, SMALL, window_tokens=100_000) as loader:  # type: ignore[arg-type]
        assert loader.estimated_batches == pytest.approx(len(list(loader)), rel=0.15)


def test_a_record_batch_repeated_in_a_window_is_decoded_once(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = write_rows(tmp_path / "tiny", {"train": random_rows(np.array([5]))}, VOCABULARY_SIZE)
    reads, read = [], ShardReader.read

    def counted(reader: ShardReader, number: int) -> Any:
        reads.append(number)
        return read(reader, number)

    monkeypatch.setattr(ShardReader, "read", counted)
    list_ = [Stage({tiny: 1, folders[3]: 1}, until_tokens=3_000)]
    with open_loader(list_, SMALL, window_tokens=3_000) as loader:  # type: ignore[arg-type]
        rows = np.concatenate([batch.rows for batch in loader])
        assert np.count_nonzero(rows == 0) == 300
    assert len(reads) < 30


def test_a_run_that_has_ended_goes_on_with_a_longer_list(folders: list[Path]) -> None:
    first, second, *_ = folders
    short = [Stage({first: 1}, until_tokens=9_000)]
    longer = [*short, Stage({first: 1, second: 1}, until_tokens=20_000)]
    runs = [Ranks(short, 1, batching=SMALL, **OPTIONS)]  # type: ignore[arg-type]
    state = runs[0].run()
    runs.append(Ranks(longer, 2, state, batching=SMALL, **OPTIONS))  # type: ignore[arg-type]
    final = runs[1].run()
    alone = Ranks(longer, 1, batching=SMALL, **OPTIONS)  # type: ignore[arg-type]
    assert alone.run() == final, "also the tokens of each data set"
    assert [b for step in joined(runs) for b in step] == [b for s in joined([alone]) for b in s]


@pytest.mark.parametrize("is_edited", [False, True])
def test_batches_have_one_shape_after_a_resume_too(folders: list[Path], is_edited: bool) -> None:
    """A state does not say that micro-batches are filled, but the list that goes on does."""
    first, second, *_ = folders
    filled = Packed(64, 3, last="fill")
    list_ = [
        Stage({first: 1}, until_tokens=9_000),
        Stage({first: 1, second: 2}, until_tokens=20_000, batching=filled),
        Stage({second: 1}, until_tokens=26_000),
    ]
    with open_loader(list_, Packed(64, 3, last="fill"), **OPTIONS) as loader:  # type: ignore[arg-type]
        for batch in loader:
            if loader.position.window == 9 and batch.ends_step:
                break
        state = loader.state_dict()
    if is_edited:
        list_[2] = Stage({first: 1}, until_tokens=30_000)
    with open_loader(list_, filled, **OPTIONS) as loader:  # type: ignore[arg-type]
        loader.load_state_dict(state)
        batches = list(loader)
    assert {tuple(batch.input_ids.shape) for batch in batches} == {(3, 64)}
    assert any(not batch.lengths.all() for batch in batches), "rows of padding"


def test_a_list_that_ends_at_the_present_position_counts_as_read_to_its_end(
    folders: list[Path],
) -> None:
    first = folders[0]
    short = [Stage({first: 1}, until_tokens=9_000)]
    longer = [*short, Stage({first: 1}, until_tokens=20_000)]
    alone = Ranks(short, 1, batching=SMALL, **OPTIONS)  # type: ignore[arg-type]
    end = alone.run()
    with open_loader(longer, SMALL, **OPTIONS) as loader:  # type: ignore[arg-type]
        for _ in loader:
            if loader.state_dict()["digest"] == end["digest"]:
                break
        state = loader.state_dict()
    with open_loader(short, SMALL, **OPTIONS) as loader:  # type: ignore[arg-type]
        loader.load_state_dict(state)
        assert loader.state_dict() == end


def test_targets_of_a_stage_select_its_labels_and_are_resumed(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(0).integers(20, 60, 300), "chat")
    chat = write_rows(tmp_path / "chat", {"train": rows}, VOCABULARY_SIZE, task="chat")
    targets = [None, "all", {"text", "call"}, "last"]
    plain = [Stage({chat: 1}, until_tokens=3_000 * n) for n in (1, 2, 3, 4)]
    list_ = [replace(each, targets=of) for each, of in zip(plain, targets, strict=True)]
    options: dict[str, Any] = {"window_tokens": 3_000, "targets": "assistant"}

    def labels(stages: list[Stage], **changes: Any) -> list[tuple[int, list[Any]]]:
        with open_loader(stages, Fixed(4), **options | changes) as loader:
            at = [loader.position.window]
            found = []
            for batch in loader:
                found.append((at[-1], batch["labels"].tolist()))
                at.append(loader.position.window)
        return found

    expected = [labels(plain, targets="assistant" if of is None else of) for of in targets]
    found = labels(list_)
    assert found == [expected[window][nth] for nth, (window, _) in enumerate(found)]
    assert len({str([labels for _, labels in each]) for each in expected}) == 4
    with open_loader(list_, Fixed(4), **options) as loader:
        first = [next(iter(loader))["labels"].tolist() for _ in range(len(found) // 2)]
        state = json.loads(json.dumps(loader.state_dict()))
        assert [stage.targets for stage in loader.stages] == [None, "all", "call,text", "last"]
    for stages in (list_, loader.stages):
        with open_loader(stages, Fixed(4), **options) as loader:
            loader.load_state_dict(state)
            assert first + [b["labels"].tolist() for b in loader] == [each for _, each in found]
    for wrong, message in (("texts", "`targets`='texts'"), (len, "a function only as `targets`")):
        with pytest.raises(ConfigError, match=message):
            open_loader([replace(plain[0], targets=wrong)], Fixed(4))  # type: ignore[arg-type]


def test_short_first_stage_does_not_count_as_poorly_mixed(folders: list[Path]) -> None:
    list_ = [Stage({folders[3]: 1}, until_tokens=1_500), Stage({folders[3]: 1})]
    with open_loader(list_, SMALL, window_tokens=None) as loader:  # type: ignore[arg-type]
        assert loader.stats().mixing == 1.0  # and no warning, which would be an error
        with pytest.raises(ConfigError, match="a stage has no `until_tokens`"):
            _ = loader.estimated_batches


def test_record_batches_of_very_different_sizes_are_warned_of(
    folders: list[Path], tmp_path: Path
) -> None:
    rows = random_rows(np.repeat(np.arange(1, 65), 2))
    merged = write_rows(tmp_path / "merged", {"train": rows}, VOCABULARY_SIZE, 64)
    for data in ([Stage({merged: 1, folders[3]: 1})], Mixture({merged: 1, folders[3]: 1})):
        with pytest.warns(UserWarning, match=r"merged have very different sizes.*`pretokenize`"):
            open_loader(data, SMALL, **OPTIONS)  # type: ignore[arg-type]
    open_loader(merged, SMALL, **OPTIONS)
    open_loader([Stage({folders[3]: 1, folders[2]: 1})], SMALL, **OPTIONS)  # type: ignore[arg-type]


def test_a_long_row_in_a_short_stage_is_warned_of(folders: list[Path], tmp_path: Path) -> None:
    rows = random_rows(np.array([*[30] * 400, 4_000]))
    books = write_rows(tmp_path / "books", {"train": rows}, VOCABULARY_SIZE)
    weights = {books: 1, folders[3]: 1}

    def opened(until: int) -> None:
        stages = [Stage(weights, until_tokens=until), Stage(weights)]
        open_loader(stages, SMALL, window_tokens=20_000)  # type: ignore[arg-type]

    with pytest.warns(UserWarning, match=r"books has a row of 4,000 tokens, 5% of stage 1\."):
        opened(80_000)
    opened(400_000)


def test_a_dataset_of_stages_delivers_the_batches_of_a_loader(folders: list[Path]) -> None:
    list_ = [
        Stage({folders[1]: 1}, until_tokens=9_000),
        Stage({folders[1]: 1, folders[2]: 2}, until_tokens=18_000),
    ]
    dataset = ShardDataset(list_, batching=SMALL, epochs=1, **OPTIONS)
    batches = [batch for share in dataset for batch in share]
    with open_loader(list_, SMALL, **OPTIONS) as loader:
        assert all(same_values(*pair) for pair in zip(loader, batches, strict=True))


def refusal_of(path: object, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_loader(path, SMALL, **OPTIONS | options)  # type: ignore[arg-type]
    return str(caught.value)


def test_lists_that_mean_nothing_are_refused_in_one_line(folders: list[Path]) -> None:
    first = folders[0]
    endless, ending = Stage({first: 1}), Stage({first: 1}, until_tokens=9_000)
    assert "expected a folder, a URL, a Mixture, or a list of folders or stages" in refusal_of(
        ending
    )
    assert "the same folder is named twice" in refusal_of([Stage({first: 1, str(first): 1})])
    assert "a list of folders or stages" in refusal_of([])
    assert "stage 1 has no end, so stage 2 never begins" in refusal_of([endless, endless])
    assert "stage 2 ends at token 9,000, but begins at 9,000" in refusal_of([ending, ending])
    assert "the stage from token 0 to 10 has too few tokens, 10. With" in refusal_of(
        [Stage({first: 1}, until_tokens=10)]
    )
    for make, message in (
        (lambda: Stage({}), "`weights`={}: expected a dict"),
        (lambda: Stage({first: 0}), "expected a number above 0"),
        (lambda: Stage({first: 1}, until_tokens=0), "`until_tokens`=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


@pytest.fixture(scope="module")
def saved(folders: list[Path]) -> tuple[list[Stage], dict[str, Any]]:
    """A list and a state in its second stage, of which three windows were begun."""
    list_ = [
        Stage({folders[1]: 1, folders[2]: 1}, until_tokens=9_000),
        Stage({folders[1]: 1, folders[3]: 1}, until_tokens=20_000),
        Stage({folders[3]: 1}, until_tokens=30_000),
    ]
    with open_loader(list_, SMALL, **OPTIONS) as loader:
        for _ in loader:
            if loader.position.window == 8 and loader.position.micro_batch == 2:
                return list_, loader.state_dict()
    raise AssertionError


def test_a_past_that_differs_is_refused_with_the_place_and_both_values(
    folders: list[Path], saved: tuple[list[Stage], dict[str, Any]]
) -> None:
    list_, state = saved
    _, second, third, _ = folders
    one, two, three = list_

    def refused(stages: object, **options: Any) -> str:
        loader = open_loader(stages, SMALL, **OPTIONS | options)  # type: ignore[arg-type]
        with pytest.raises(ResumeError) as caught:
            loader.load_state_dict(state)
        return str(caught.value)

    assert f"from token 0 on, the share of {second} is 2/3" in refused(
        [replace(one, weights={second: 2, third: 1}), two, three]
    )
    assert "from token 8,000 on" in refused([replace(one, until_tokens=8_000), two, three])
    assert f"from token 9,000 on, the share of {second} is 1 in this list" in refused(
        [one, Stage({second: 1}, until_tokens=20_000), three]
    )
    assert "`batching` is Fixed" in refused([replace(one, batching=Fixed(2)), two, three])
    assert "ends at token 9,000, but the current window of the run ends" in refused([one])
    assert "the state has a list of stages, but this loader has none" in refused(second)
    assert "seed=0" in refused(list_, seed=1)
    assert "windows of 1,500 tokens, but this loader has 3,000" in refused(
        list_, window_tokens=3_000
    )
    assert "micro_batches_per_step=2, this" in refused(
        list_, micro_batches_per_step=4, window_tokens=3_000
    )
    unaltered = open_loader([one, two, Stage({third: 1})], SMALL, **OPTIONS)
    unaltered.load_state_dict(state)
    assert [stage.until_tokens for stage in unaltered.stages] == [9_000, 20_000, None]


@pytest.mark.parametrize("saved_with", [100, 1_500, None])
def test_window_tokens_error_names_the_value_to_pass(
    folders: list[Path], saved_with: int | None
) -> None:
    first, second, _, last = folders
    list_ = [
        Stage({first: 1, second: 9}, until_tokens=9_000),
        Stage({second: 1, last: 1}, until_tokens=20_000),
    ]

    def made(window_tokens: int | None) -> ShardLoader:
        return open_loader(list_, SMALL, window_tokens=window_tokens)  # type: ignore[arg-type]

    with made(saved_with) as loader:
        assert any(loader.position.window for _ in loader)
        state = loader.state_dict()
    with pytest.raises(ResumeError) as caught:
        made(4_000).load_state_dict(state)
    advised = str(caught.value).split("Pass `window_tokens`=")[-1].rstrip(".")
    made(int(advised)).load_state_dict(state)


def test_short_stage_warns_of_the_shares_that_whole_record_batches_give(
    folders: list[Path], tmp_path: Path
) -> None:
    first, second = (
        write_rows(tmp_path / name, {"train": random_rows(np.full(600 // n, n))}, VOCABULARY_SIZE)
        for name, n in (("long", 50), ("short", 30))
    )  # of four record batches each, because `folders` makes record batches small
    weights = {first: 0.7, second: 0.3}
    with pytest.warns(UserWarning, match=r"stage 1 is short.*--shard-size") as caught:
        loader = open_loader([Stage(weights, until_tokens=300), Stage(weights)], SMALL, **OPTIONS)
    batches = iter(loader)
    while loader.position.window == 0:
        next(batches)
    tokens = loader.state_dict()["tokens"]
    named = re.search(r"(\d+)% of its tokens are of (.*), not", str(caught[0].message))
    assert named is not None
    number = [str(first), str(second)].index(named[2])
    assert round(100 * tokens[number] / sum(tokens)) == int(named[1])
    assert abs(tokens[0] / sum(tokens) - 0.7) > 0.05
    loader.close()
    open_loader([Stage(weights, until_tokens=3_000), Stage(weights)], SMALL, **OPTIONS)
    with pytest.warns(UserWarning, match="an epoch is short"):
        open_loader(Mixture({first: 0.9, second: 0.1}, exhausted="stop"), SMALL, **OPTIONS)


def test_reweigh_returns_its_beginning_and_warns_of_a_long_delay(folders: list[Path]) -> None:
    first, *_, second = folders
    list_ = [Stage({first: 1, second: 1})]
    with open_loader(list_, SMALL, **OPTIONS) as loader:
        next(iter(loader))
        assert loader.reweigh({second: 1}) == 1_500 == loader.stages[0].until_tokens
    with open_loader(list_, SMALL, window_tokens=None) as loader:
        next(iter(loader))
        with pytest.warns(UserWarning, match=r"begins at token 12,4..,....*`window_tokens`"):
            loader.reweigh({second: 1})
        state = loader.state_dict()
        edited = [Stage({first: 1, second: 1}, until_tokens=9_000), Stage({second: 1})]
        with pytest.raises(ResumeError, match=r"ends at token 12,4..,....*`window_tokens`"):
            open_loader(edited, SMALL, window_tokens=None).load_state_dict(state)


def test_second_change_of_weights_in_a_window_replaces_the_first(folders: list[Path]) -> None:
    first, second, *_ = folders
    list_ = [Stage({first: 1, second: 1}, until_tokens=1_500), Stage({first: 1, second: 1})]
    loaders = [open_loader(list_, SMALL, **OPTIONS) for _ in range(3)]  # type: ignore[arg-type]
    for loader in loaders:
        for _ in islice(loader, 10):
            pass
    once, twice, resumed = loaders
    begins = once.reweigh({first: 1, second: 4})
    assert twice.reweigh({second: 1}) == begins
    resumed.load_state_dict(json.loads(json.dumps(twice.state_dict())))
    for loader in (twice, resumed):
        assert loader.reweigh({first: 1, second: 4}) == begins
        assert loader.state_dict() == once.state_dict()
        assert loader.stages == once.stages
    rest = [[spans(batch) for batch in islice(loader, 40)] for loader in loaders]
    assert rest[0] == rest[1] == rest[2]


def test_rest_of_a_stage_that_is_too_short_is_refused_with_its_tokens(folders: list[Path]) -> None:
    first, second, *_ = folders
    with open_loader([Stage({first: 1}, until_tokens=20_000)], SMALL, **OPTIONS) as loader:
        next(iter(loader))
        state = loader.state_dict()
    stop = edges_of(state)[0][1]
    shorter = [
        Stage({first: 1}, until_tokens=stop + 10),
        Stage({first: 1, second: 1}, until_tokens=40_000),
    ]
    message = rf"cannot resume: the stage from token {stop:,} to {stop + 10:,} has too few tokens"
    with pytest.raises(ResumeError, match=message):
        open_loader(shorter, SMALL, **OPTIONS).load_state_dict(state)


def test_reweighing_is_refused_where_it_means_nothing(
    folders: list[Path], saved: tuple[list[Stage], dict[str, Any]]
) -> None:
    list_, state = saved
    loader = open_loader(list_, SMALL, **OPTIONS)
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="is in no stage of this loader"):
        loader.reweigh({folders[0]: 1})
    ended = open_loader([Stage({folders[0]: 1}, until_tokens=9_000)], SMALL, **OPTIONS)
    assert list(ended)
    with pytest.raises(ConfigError, match="was read to its end"):
        ended.reweigh({folders[0]: 1})
    with pytest.raises(ConfigError, match="`reweigh` needs a loader of stages"):
        open_loader(folders[0], SMALL).reweigh({folders[0]: 1})
    assert loader.state_dict() == state
    short = open_loader([Stage({folders[3]: 1}, until_tokens=1_500)], SMALL, **OPTIONS)
    next(iter(short))
    with pytest.raises(ConfigError, match="ends at token 1,500, and its last window has begun"):
        short.reweigh({folders[3]: 1})


def test_damaged_lists_of_a_state_are_refused(saved: tuple[list[Stage], dict[str, Any]]) -> None:
    list_, state = saved
    first = state["plan"]["stages"][0]
    for change in (
        {"stages": None},
        {"stages": []},
        {"stages": [{}]},
        {"stages": [first | {"until": None}] * 2},
        {"stages": [first] * 2},
        {"stages": [first | {"weights": {"0" * 16: 1}}]},
        {"stages": [first | {"weights": [1] * 9}]},
        {"stages": [first | {"weights": {}}]},
        *(
            {"stages": [first | {"weights": dict.fromkeys(first["weights"], weight)}]}
            for weight in (0, -1, "1", float("nan"))
        ),
        {"stages": [first | {"window_tokens": None}]},
        {"stages": [first | {"batching": None}]},
        {"stages": [first | {"batching": {"policy": "what"}}]},
        {"stages": [first | {"batching": "Padded(1)"}]},
        {"batching": 7},
        {"given": 7},
    ):
        loader = open_loader(list_, SMALL, **OPTIONS)  # type: ignore[arg-type]
        for each in (change, change | {"given": "other"}):
            try:
                loader.load_state_dict(with_settings(state, **each))
            except (ResumeError, ConfigError) as error:
                assert "\n" not in str(error)
            else:
                assert "stages" not in change
    with pytest.raises(ResumeError, match="the tokens of 1 sources, but its plan has"):
        loader.load_state_dict(resealed(state, tokens=[0]))
