"""Explaining a batch, or a step of a run from its state: the records it was really made of."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import call
from support.data_sets import MakeDataset
from support.delivery import POLICIES, open_loader, spans, tokens_of
from tokenizers import Tokenizer

from tokenfeed import Fixed, Mixture, ShardLoader
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.tools import shards

Explained = list[dict[str, Any]]


def explain(out: Path | list[Path], state: Path, *options: object, expect: int = 0) -> str:
    folders = out if isinstance(out, list) else [out]
    done = call(shards.main, "explain", *folders, "--state", state, *options, expect=expect)
    return done.stdout if expect == 0 else done.stderr


def lines_of(said: str) -> Explained:
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_pieces_of_a_batch_are_told_with_their_records_and_tokens(
    folder: Path, policy: Any
) -> None:
    """Row k of these data says k for its record."""
    with open_loader(folder, policy) as loader:
        for batch in loader:
            told = loader.explain(batch)
            assert [(o.record, o.start, o.stop - o.start) for o in told] == spans(batch)
            assert {o.file for o in told} == {"corpus.txt"}


def test_a_batch_of_other_data_is_refused(folder: Path, make_dataset: MakeDataset) -> None:
    small = open_loader(make_dataset(np.full(5, 9)))
    with pytest.raises(ConfigError, match=r"^`batch`: has row .* has rows 0 to 4. Use the loader"):
        small.explain(next(iter(open_loader(folder))))


def test_the_tokens_that_are_told_are_those_of_the_batch(documents: Path) -> None:
    lines = (documents.parent / "in.jsonl").read_text().splitlines()
    tokenizer = Tokenizer.from_file(str(documents / "tokenizer.json"))
    end = json.loads((documents / "manifest.json").read_text())["tokenizer"]["end_id"]
    with open_loader(documents, POLICIES[2]) as loader:
        for batch in loader:
            ids: list[int] = []
            for origin in loader.explain(batch):
                assert origin.file == str(documents.parent / "in.jsonl")
                text = json.loads(lines[origin.record])["text"]
                ids += [*tokenizer.encode(text).ids, end][origin.start : origin.stop]
            assert ids == tokens_of(batch).tolist()


@pytest.mark.slow
@settings(max_examples=4)
@given(data=st.data())
def test_a_step_is_told_from_any_state_as_each_rank_got_it(
    data: st.DataObject, folder: Path, tmp_path: Path
) -> None:
    world_size = data.draw(st.sampled_from([1, 2, 4]), "world_size")
    step_size = data.draw(st.sampled_from([4, 8]), "step_size")
    policy = data.draw(st.sampled_from(POLICIES), "policy")
    saved_after = data.draw(st.integers(0, 9), "saved_after")
    steps: dict[int, dict[int, Any]] = defaultdict(lambda: defaultdict(list))
    for rank in range(world_size):
        loader = open_loader(
            folder,
            policy,
            micro_batches_per_step=step_size,
            seed=3,
            epochs=None,
            rank=rank,
            world_size=world_size,
        )
        step, batches = 0, iter(loader)
        while step < 10:
            if step == saved_after and not steps[step][rank]:
                state = loader.state_dict()
            batch = next(batches)
            pieces = [origin._asdict() for origin in loader.explain(batch)]
            steps[step][rank].append((batch.is_filler, pieces))
            step += batch.ends_step
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    wanted = data.draw(st.integers(0, 9), "wanted")
    said = lines_of(explain(folder, path, "--step", wanted - saved_after + 1, "--json"))
    everything = [piece for micro_batch in said for piece in micro_batch["pieces"]]
    assert len(everything) == len({json.dumps(piece) for piece in everything})
    for rank in range(world_size):
        options = ("--step", wanted - saved_after + 1, "--rank", rank, "--world-size", world_size)
        told = lines_of(explain(folder, path, *options, "--json"))
        assert [(each["filler"], each["pieces"]) for each in told] == steps[wanted][rank]


def test_a_checkpoint_counts_the_steps_of_its_run_and_the_next_one_is_told_by_default(
    folder: Path, tmp_path: Path
) -> None:
    with open_loader(folder, micro_batches_per_step=4) as loader:
        batches = iter(loader)
        held = [[next(batches) for _ in range(4)] for _ in range(3)]
        state = loader.state_dict()
        held.append([next(batches) for _ in range(4)])
        records = [[[o.record for o in loader.explain(b)] for b in step] for step in held]
    (tmp_path / "checkpoint.json").write_text(json.dumps({"meta": {"step": 3, "loader": state}}))
    (tmp_path / "state.json").write_text(json.dumps(state))
    for options, step in {(): 3, ("--step", 1): 0, ("--step", 3): 2}.items():
        told = lines_of(explain(folder, tmp_path, *options, "--json"))
        assert [[p["record"] for p in each["pieces"]] for each in told] == records[step]
    said = explain(folder, tmp_path / "state.json")
    place = f"window {state['window']}, micro-batch {state['micro_batch']}"
    assert said.startswith(f"--- step 1 | epoch 0, {place}\ncorpus.txt record ")


def test_run_whose_windows_have_no_step_ends_with_an_error(folder: Path, tmp_path: Path) -> None:
    loader, file = open_loader(folder, Fixed(10**6, last="drop")), tmp_path / "state.json"
    assert loader.estimated_batches == 0
    file.write_text(json.dumps(loader.state_dict()))
    said = call(shards.main, "explain", folder, "--state", file, "--step", 1, expect=2).stderr
    assert "no window has enough rows for one step" in said


def test_step_of_a_run_in_file_order_is_explained(folder: Path, tmp_path: Path) -> None:
    with open_loader(folder, POLICIES[0], order="file", skip={folder: [(0, 2)]}) as loader:
        batches = iter(loader)
        next(batches)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        told = [origin._asdict() for origin in loader.explain(next(batches))]
    (said,) = lines_of(explain(folder, tmp_path / "state.json", "--json"))
    assert said["pieces"] == told
    assert [piece["row"] for piece in told] == sorted(piece["row"] for piece in told)


def test_what_cannot_be_told_is_one_line(
    folder: Path, make_dataset: MakeDataset, tmp_path: Path
) -> None:
    path = tmp_path / "state.json"
    with open_loader(folder) as loader:
        state = loader.state_dict()
    good = json.dumps(state)
    for content, words, code in (
        (None, "No such file", 2),
        ("{", "invalid JSON", 2),
        ("[1]", "this is not a loader state", 1),
        (json.dumps({"step": 3}), "this is not a loader state", 1),
        (json.dumps(state | {"plan": {}}), "this is not a loader state", 1),
        (good.replace('"Padded"', '"Odd"'), "the state was changed after it was saved", 1),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        (line,) = explain(folder, path, expect=code).splitlines()
        assert words in line, line
    path.write_text(good)
    assert "before the first step" in explain(folder, path, "--step", 0, expect=2)
    for step in (10**9, -(10**15)):
        assert "steps from the state, and all" in explain(folder, path, "--step", step, expect=2)
    assert "expected a rank" in explain(folder, path, "--rank", 2, "--world-size", 2, expect=2)
    other = make_dataset([5] * 30)
    assert "Give the same data sets, in the same order" in explain(other, path, expect=1)


def test_ranks_that_take_several_steps_at_once_are_told_them_as_one(
    folder: Path, tmp_path: Path
) -> None:
    """Three ranks, and one micro-batch a step."""
    held: dict[int, list[Any]] = {}
    for rank in range(3):
        settings: Any = {"micro_batches_per_step": 1, "rank": rank, "world_size": 3}
        with open_loader(folder, **settings) as loader:
            batches = iter(loader)
            next(batches)
            state = loader.state_dict()
            held[rank] = [[o.record for o in loader.explain(next(batches))] for _ in range(4)]
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    for rank, step in product(range(3), range(4)):
        options = ("--step", step + 1, "--rank", rank, "--world-size", 3, "--json")
        (told,) = lines_of(explain(folder, path, *options))
        assert [piece["record"] for piece in told["pieces"]] == held[rank][step]


@pytest.mark.parametrize(
    ("window_tokens", "exhausted"),
    [(7_000, "stop"), (20_000, "continue"), (90_000, "repeat")],
)
def test_explain_makes_a_mixture_of_any_window_size_again(
    window_tokens: int, exhausted: Any, make_dataset: MakeDataset, tmp_path: Path
) -> None:
    folders = [make_dataset([50] * 3000), make_dataset([50] * 900)]
    source = folders[1] / "sources"
    source.write_text(source.read_text().replace("corpus.txt", "others.txt"))
    manifest = Manifest.read(folders[1])
    replace(manifest, sources=replace(manifest.sources, xxh3=file_xxh3(source))).write(folders[1])
    mixture = Mixture({folders[0]: 0.65, folders[1]: 0.35}, exhausted)
    settings: dict[str, Any] = {"num_workers": 0, "window_tokens": window_tokens}
    with ShardLoader(mixture, batching=POLICIES[0], micro_batches_per_step=4, **settings) as loader:
        batches = iter(loader)
        state = loader.state_dict()
        told = [[o._asdict() for o in loader.explain(next(batches))] for _ in range(4)]
    (tmp_path / "state.json").write_text(json.dumps(state))
    said = lines_of(explain(folders, tmp_path / "state.json", "--json"))
    assert [each["pieces"] for each in said] == told
    assert {p["file"] for each in told for p in each} == {"corpus.txt", "others.txt"}
