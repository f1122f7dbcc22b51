"""Several folders read as one: every row once an epoch, in proportion to their tokens."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import call
from support.data_sets import MakeDataset, rows_in

from tokenfeed import Fixed, Manifest, Mixture, Packed, Padded, ShardLoader, pretokenize
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools import pretokenize as pretokenize_command
from tokenfeed.tools import shards, train
from tokenfeed.tools.train_settings import read_options

SIZES = {"old": 70, "new": 400, "tiny": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three data sets of one tokenizer, of very different sizes."""
    folder = tmp_path_factory.mktemp("sets")
    texts = {
        name: [{"text": f"{name} {number} " * (number % 11 + 1)} for number in range(size)]
        for name, size in SIZES.items()
    }
    pretokenize([*texts["old"], *texts["new"]], folder / "all", vocab_size=300, validation=0)
    for name, rows in texts.items():
        pretokenize(rows, folder / name, tokenizer=folder / "all", validation=0.1)
    return [folder / name for name in SIZES]


def _starts(batch: Any) -> list[int]:
    return [0] * len(batch.rows) if batch.starts is None else [int(each) for each in batch.starts]


@pytest.mark.parametrize("batching", [Padded(400), Packed(64, 4), Fixed(4)], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_list_of_folders_delivers_every_row_once_an_epoch(
    batching: Any, ranks: int, folders: list[Path]
) -> None:
    found: Counter[tuple[int, ...]] = Counter()
    for rank in range(ranks):
        with ShardLoader(
            folders, batching=batching, rank=rank, world_size=ranks, num_workers=0, epochs=1
        ) as loader:
            for batch in loader:
                found.update(zip(map(int, batch.rows), _starts(batch), strict=True))
    rows = sum(len(rows_in(folder)) for folder in folders)
    assert {row for row, _ in found} == set(range(rows))
    if not isinstance(batching, Packed):
        assert max(found.values()) == 1 or ranks > 1  # fillers repeat rows


def test_folders_as_one_are_a_mixture_without_weights(folders: list[Path]) -> None:
    """The same batches as of the mixture by tokens, in every way to write it."""
    tokens = {folder: Manifest.read(folder).split("train").tokens for folder in folders}
    ways: list[Any] = [folders, Mixture([*map(str, folders)]), Mixture(tokens, "continue")]
    batches = []
    for way in ways:
        with ShardLoader(way, batching=Padded(400), num_workers=0) as loader:
            batches.append([batch["input_ids"].tolist() for batch in loader])
    assert batches[0] == batches[1] == batches[2]


def test_rows_in_file_order_merge_by_their_middle_tokens(make_dataset: MakeDataset) -> None:
    folders = [make_dataset([2, 2, 2, 2]), make_dataset([4, 4])]
    with ShardLoader(folders, batching=Fixed(1), num_workers=0, order="file", epochs=1) as loader:
        assert [int(row) for batch in loader for row in batch.rows] == [0, 4, 1, 2, 5, 3]


def test_rows_of_each_folder_lie_evenly_in_an_epoch(folders: list[Path]) -> None:
    rows = [len(rows_in(folder)) for folder in folders]
    with ShardLoader(folders, batching=Fixed(4), num_workers=0, window_tokens=2000) as loader:
        order = [int(row) for batch in loader for row in batch.rows]
    places = [place for place, row in enumerate(order) if row < rows[0]]
    assert 0.35 < sum(places) / len(places) / len(order) < 0.65


@settings(max_examples=15, deadline=None)
@given(stop=st.integers(0, 40), before=st.integers(1, 3), after=st.integers(1, 3))
def test_folders_as_one_resume_on_other_ranks(
    folders: list[Path], stop: int, before: int, after: int
) -> None:
    def loaders(ranks: int) -> list[ShardLoader]:
        return [
            ShardLoader(
                folders,
                batching=Padded(300),
                rank=rank,
                world_size=ranks,
                num_workers=0,
                micro_batches_per_step=6,
            )
            for rank in range(ranks)
        ]

    def rows(ranks: list[ShardLoader], rounds: int | None) -> list[int]:
        found: list[int] = []
        feeds = [iter(loader) for loader in ranks]
        while rounds is None or rounds > 0:
            some = [next(feed, None) for feed in feeds]
            if some[0] is None:
                break
            found += [int(r) for batch in some if not batch.is_filler for r in batch.rows]
            rounds = None if rounds is None else rounds - 1
        return found

    first = loaders(before)
    delivered, total = rows(first, stop), sum(len(rows_in(folder)) for folder in folders)
    if len(delivered) == total:
        return  # the state begins the next pass
    state = json.loads(json.dumps(first[0].state_dict()))
    second = loaders(after)
    for loader in second:
        loader.load_state_dict(state)
    delivered += rows(second, None)
    assert sorted(delivered) == [*range(total)]


def test_train_reads_folders_without_weights_as_one(folders: list[Path], tmp_path: Path) -> None:
    common = ("--steps", 2, "--layers", 1, "--width", 32, "--sequence-length", 32)
    run = tmp_path / "run"
    call(train.main, "--shards", *folders, "--run-dir", run, *common, "--device", "cpu")
    config = (run / "config.yaml").read_text()
    assert all(str(folder) in config for folder in folders)
    call(train.main, "--shards", *folders, "--run-dir", run, *common, "--resume", "--steps", 3)
    said = call(train.main, "--shards", folders[0], folders[0], expect=2).stderr
    assert "occurs twice. Name each folder once." in said
    said = call(train.main, "--shards", folders[0], f"{folders[1]}=2", expect=2).stderr
    assert "has no weight, and others have one" in said


def test_wrong_lists_of_folders_are_refused(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folders[0])
    linked = [folders[0], tmp_path / "link"]
    for wrong in ([], [3], [folders[0], 3], [folders[0], folders[0]], [[folders[0]]], linked):
        with pytest.raises(ConfigError, match=r"list of folders|the same (folder|content)"):
            ShardLoader(wrong, batching=Padded(300))  # type: ignore[arg-type]
    for wrong in ([[folders[0]]], iter(folders), {*folders}, "a/", b"a/"):
        with pytest.raises(ConfigError, match="expected a list of folders, or a dict from"):
            Mixture(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        (["a", "https://h/b?key=x&sig=c=="], ("a", "https://h/b?key=x&sig=c==")),
        (["https://h/b?sig=1", "https://h/c?sig=2"], ("https://h/b?sig=1", "https://h/c?sig=2")),
        (["a=1", "https://h/b?sig=x=2"], {"a": 1, "https://h/b?sig=x": 2}),
        (["a=1", "s3://b/c?anonymous=2"], {"a": 1, "s3://b/c?anonymous": 2}),
    ],
)
def test_query_of_an_address_is_no_weight(
    words: list[str], parsed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train", "--shards", *words])
    assert read_options()["shards"] == parsed


@pytest.mark.parametrize("command", ["adopt", "merge", "split", "plan"])
def test_withdrawn_command_names_the_alternative(command: str) -> None:
    said = call(shards.main, command, "out", expect=2).stderr
    assert re.fullmatch(rf"error: `shards {command}` was withdrawn\. [^\n]{{20,}}\n", said)


def test_withdrawn_append_names_the_alternative() -> None:
    said = call(pretokenize_command.main, "more.txt", "out", "--append", expect=2).stderr
    assert re.fullmatch(r"error: [^\n]*`--append`[^\n]*`train --shards A B`[^\n]*\n", said)


def test_share_of_rows_is_the_same_in_every_call(folders: list[Path], tmp_path: Path) -> None:
    kept = []
    for name in ("a", "b"):
        call(shards.main, "select", folders[1], tmp_path / name, "--where", "share 0.3")
        kept.append(rows_in(tmp_path / name))
    call(shards.main, "select", folders[1], tmp_path / "c", "--where", "share 0.3", "--drop")
    assert kept[0] == kept[1]
    whole = Counter(map(tuple, rows_in(folders[1])))
    assert Counter(map(tuple, kept[0])) + Counter(map(tuple, rows_in(tmp_path / "c"))) == whole
    assert 0.2 < len(kept[0]) / whole.total() < 0.4
    call(shards.main, "verify", tmp_path / "a")
