"""Parts of a run, in any order, repeated, at once and killed: the bytes of one process."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import texts
from support.data_sets import files_of
from support.false_engine import false_engine, sampled_document
from support.pretokenizing import make, part, with_fast_engine
from tokenizers import Tokenizer

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.store import LocalStore
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units
from tokenfeed.tools.jobs.run_records import JobPart, RunRecords


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of seven units."""
    folder = tmp_path_factory.mktemp("lines")
    text = "".join(json.dumps({"text": text}) + "\n" for text in texts(170, seed=3))
    (folder / "lines.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def undisturbed(
    lines: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert make(lines, out, tokenizer, validation=0.1).units >= 7
    return files_of(out)


def stopped_after(units: int) -> Callable[..., None]:
    """`Records.append`, and an interruption after so many calls."""
    append, left = RunRecords.append, [units]

    def stopping(parts: RunRecords, result: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt  # its shards are there, its record is not
        left[0] -= 1
        append(parts, result)

    return stopping


@pytest.mark.parametrize(
    ("prompts", "completion", "warns"),
    [
        (("Who?", "And how many?"), "Ann.", True),
        (("Who?\n", "And how many?\n"), "Ann.", False),
        (("Who?", "And how many?"), " Ann.", False),
        (("Who? A:", "And how many? A:"), "Ann.", False),
    ],
    ids=["none", "line break", "space", "common end"],
)
def test_prompts_without_a_separator_are_reported(
    prompts: tuple[str, ...],
    completion: str,
    warns: bool,
    tmp_path: Path,
    tokenizer: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = [{"prompt": prompt, "completion": completion} for prompt in prompts]
    corpus = tmp_path / "pairs.jsonl"
    corpus.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    make(corpus, tmp_path / "out", tokenizer, task="complete")
    assert ("nothing separates prompts from completions" in caplog.text) == warns


@pytest.mark.slow
@settings(max_examples=5)
@given(
    attempts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=6),
    last=st.permutations(range(3)),
    at_end=st.sampled_from(["finish", "plain"]),
)
def test_parts_in_any_order_repeated_and_killed_give_the_bytes_of_one_run(
    attempts: list[tuple[int, int]],
    last: list[int],
    at_end: str,
    lines: Path,
    tokenizer: Path,
    undisturbed: dict[str, bytes],
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        out = Path(folder, "out")
        for index, units in attempts:
            patch.setattr(RunRecords, "append", stopped_after(units))
            try:
                part(f"{index}/3", lines, out, tokenizer, validation=0.1)
            except KeyboardInterrupt as stopped:
                assert "finished and kept" in str(stopped)
            patch.undo()
        for index in last[: 3 if at_end == "finish" else 1]:
            part(f"{index}/3", lines, out, tokenizer, validation=0.1)
        made = make(lines, out, tokenizer, validation=0.1, finish=at_end == "finish")
        assert made.resumed_units >= (made.units if at_end == "finish" else made.units // 3)
        assert files_of(out) == undisturbed


def test_finish_encodes_units_of_missing_parts(
    lines: Path, tmp_path: Path, tokenizer: Path, undisturbed: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    done = sum(part(f"{index}/5", lines, out, tokenizer, validation=0.1).units for index in (1, 3))
    made = make(lines, out, tokenizer, validation=0.1, finish=True)
    assert made.resumed_units == done < made.units
    assert files_of(out) == undisturbed
    assert part("1/5", lines, out, tokenizer, validation=0.1).already_finished
    assert make(lines, out, tokenizer, validation=0.1, finish=True).already_finished


def test_parts_of_other_counts_do_nothing_twice(
    lines: Path, tmp_path: Path, tokenizer: Path, undisturbed: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    first = part("0/3", lines, out, tokenizer, validation=0.1)
    both = [part(f"{index}/2", lines, out, tokenizer, validation=0.1) for index in range(2)]
    assert sum(each.resumed_units for each in both) == first.units
    assert [each.is_complete for each in both] == [False, True]
    assert files_of(out) == undisturbed


def test_the_part_that_ends_last_makes_the_data_set_and_no_other_does(
    lines: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    part("0/3", lines, out, tokenizer)
    recipe = json.loads((out / ".made_by.json").read_bytes())
    recipe.pop("the packages")
    num_units = recipe.pop("the number of units")
    with RunRecords.begin(LocalStore(out), recipe, num_units, JobPart(1, 3)):
        part("2/3", lines, out, tokenizer)
        with pytest.raises(ConfigError, match="writing here, or a part of a run"):
            make(lines, out, tokenizer, finish=True)
        assert not (out / "manifest.json").exists()
        assert not part("1/3", lines, out, tokenizer).is_complete  # the other one is at work
    last = part("1/3", lines, out, tokenizer)
    assert last.is_complete
    assert last.resumed_units == last.units
    assert make(lines, out, tokenizer).already_finished


def test_the_limit_on_rejects_holds_over_all_parts(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    (corpus / "0.jsonl").write_text('{"text": 1}\n')
    for index in range(4):
        part(f"{index}/5", corpus, tmp_path / "out", tokenizer, max_rejects=2)
    with pytest.raises(CorpusError, match="`--max-rejects 2` ends the run here"):
        part("4/5", corpus, tmp_path / "out", tokenizer, max_rejects=2)
    with pytest.raises(CorpusError, match="`--max-rejects 2` ends the run here"):
        make(corpus, tmp_path / "out", tokenizer, finish=True, max_rejects=2)
    make(corpus, tmp_path / "out", tokenizer, finish=True, max_rejects=3)


@pytest.mark.slow
def test_one_part_that_finds_the_fast_engine_wrong_has_all_parts_use_the_other(
    tmp_path: Path, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, corpus = tmp_path / "tokenizer.json", tmp_path / "corpus"
    byte_level.save(str(tokenizer))
    corpus.mkdir()
    honest = [texts(30, seed=seed) for seed in range(3)]
    written = [*honest[0], *honest[1], sampled_document("LIE", 3_000), *honest[2]]
    for number, text in enumerate(written):
        (corpus / f"{number:03}.txt").write_text(text)
    with_fast_engine(monkeypatch)
    monkeypatch.setitem(sys.modules, "gigatoken", false_engine())
    make(corpus, tmp_path / "plain", tokenizer)
    assert Manifest.read(tmp_path / "plain").tokenizer.differences == 1
    out = tmp_path / "out"
    found = find_corpus((str(corpus),), out=out, field="text")
    (lying,) = (
        unit.number
        for unit in cut_units(found.sources, 30_000)
        if any(part.source.name.endswith("060.txt") for part in unit.parts)
    )
    others = [index for index in range(3) if index != lying % 3]
    for index in (*others, lying % 3):
        part(f"{index}/3", corpus, out, tokenizer)
    make(corpus, out, tokenizer, finish=True)
    assert files_of(out) == files_of(tmp_path / "plain")


@pytest.mark.parametrize("content", ["", "[]", None])
def test_a_claim_that_is_damaged_is_told(
    lines: Path, tokenizer: Path, tmp_path: Path, content: str | None
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if content is None:
        (out / ".made_by.json").mkdir()
    else:
        (out / ".made_by.json").write_text(content)
    with pytest.raises(ConfigError, match=r"by\.json: is damaged, so what made the data set there"):
        part("0/2", lines, out, tokenizer)
    with pytest.raises(ConfigError, match=r"by\.json: is damaged"):
        make(lines, out, tokenizer)


@pytest.mark.parametrize("folder", ["x.tmp", ".parts/sub", "train/x.arrow", "train/x.tmp"])
def test_finish_leaves_folders_that_are_not_its_own(
    lines: Path, tmp_path: Path, tokenizer: Path, undisturbed: dict[str, bytes], folder: str
) -> None:
    part("0/2", lines, tmp_path / "out", tokenizer, validation=0.1)
    (tmp_path / "out" / folder).mkdir(parents=True)
    make(lines, tmp_path / "out", tokenizer, validation=0.1, finish=True)
    assert files_of(tmp_path / "out") == undisturbed
