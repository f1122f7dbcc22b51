"""Adopted files: the same rows as they came with, read in place, and never wrong ones."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import random_rows, write_rows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tokenfeed import Packed, Padded, ShardLoader, ShardReader
from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenfeedError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.tools.data_sets import adopt as adopting
from tokenfeed.tools.data_sets import foreign as reading
from tokenfeed.tools.data_sets.adopt import adopt
from tokenfeed.tools.data_sets.copy import copy_data_set
from tokenfeed.tools.data_sets.export import Format, export_data_set
from tokenfeed.tools.data_sets.verify import find_problems
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

WIDTHS = {"narrow": 1000, "wide": 70_000}
END = 7
"""The id of the end token."""
ENDINGS: dict[Format, str] = {
    "megatron": ".bin",
    "nanogpt": ".bin",
    "llm.c": "_000001.bin",
    "olmo": ".npy",
    "datatrove": ".ds",
}


def tokenizer_of(size: int) -> TextTokenizer:
    vocabulary = {"first": 0, "</s>": END, "last": size - 1}
    made = Tokenizer(WordLevel(vocabulary, unk_token="first"))
    return TextTokenizer.load(made.to_str().encode(), origin="test")


TOKENIZERS = {width: tokenizer_of(size) for width, size in WIDTHS.items()}


def ended(rows: Rows) -> Rows:
    """Rows of which each ends with the end token, and has no other one."""
    ids = np.where(rows.ids == END, END + 1, rows.ids)
    ids[np.cumsum(rows.lengths) - 1] = END
    rows.per_token["input_ids"][:] = ids
    return rows


def foreign(folder: Path, rows: Rows, to: Format, width: str = "narrow") -> Path:
    """A file of a format with some rows."""
    size = WIDTHS[width]
    data = write_rows(folder / "data", {"train": ended(rows)}, size)
    export_data_set(str(data), folder / "foreign", to)
    return folder / "foreign" / f"train{ENDINGS[to]}"


def rows_in(path: Path, split: str = "train") -> list[list[int]]:
    manifest = Manifest.read(path)
    found = []
    for info in manifest.splits[split].shards:
        reader = ShardReader.open(path, manifest, info)
        for batch in range(info.batches):
            rows, _ = reader.read(batch)
            found += [part.tolist() for part in np.split(rows.ids, np.cumsum(rows.lengths)[:-1])]
    return found


def lists_of(rows: Rows) -> list[list[int]]:
    return [part.tolist() for part in np.split(rows.ids, np.cumsum(rows.lengths)[:-1])]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("to", ENDINGS)
@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=80), small=st.booleans())
def test_there_and_back_gives_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    to: Format,
    width: str,
    lengths: list[int],
    small: bool,
) -> None:
    if (to, width) == ("nanogpt", "wide"):
        return
    folder = tmp_path_factory.mktemp("adopt")
    rows = random_rows(np.array(lengths), vocabulary_size=WIDTHS[width])
    file = foreign(folder, rows, to, width)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(adopting, "SHARD_TOKENS", 300)
            patch.setattr(reading, "CHUNK_TOKENS", 50)
            patch.setattr(reading, "CHUNK_ROWS", 7)
        manifest = adopt([str(file)], str(folder / "out"), TOKENIZERS[width])
    assert rows_in(folder / "out") == lists_of(rows)
    assert manifest.splits["train"].rows == manifest.ledger.written == len(rows)
    assert list(find_problems(folder / "out", manifest)) == []
    copy_data_set(str(folder / "out"), str(folder / "copy"))
    file.unlink()
    assert rows_in(folder / "copy") == lists_of(rows), "a copy has its tokens itself"


def test_no_token_is_copied_and_every_loader_reads_the_same(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(0).integers(1, 900, 900), vocabulary_size=1000)
    file = foreign(tmp_path, rows, "megatron")
    adopt([str(file)], str(tmp_path / "out"), TOKENIZERS["narrow"])
    own = sum(path.stat().st_size for path in (tmp_path / "out/train").iterdir())
    assert own < 20 * len(rows) + 20_000 < file.stat().st_size / 20
    for batching in (Packed(512, batch_size=2), Padded(4096)):
        loaders = [
            ShardLoader(path, batching=batching, seed=3, num_workers=0)
            for path in (tmp_path / "out", tmp_path / "data")
        ]
        for one, other in zip(*loaders, strict=True):
            real = one["labels"] != -100
            assert (one["labels"] == other["labels"]).all()
            assert (one["input_ids"] == other["input_ids"])[real].all()


def test_files_named_for_validation_and_patterns_make_splits(tmp_path: Path) -> None:
    rows = random_rows(np.full(30, 9), vocabulary_size=1000)
    file = foreign(tmp_path, rows, "nanogpt")
    names = ("train.bin", "val.bin", "shard_000007.bin")
    for name in names:
        (tmp_path / name).write_bytes(file.read_bytes())
    paths = tuple(str(tmp_path / name) for name in names)
    made = adopt(paths, str(tmp_path / "out"), TOKENIZERS["narrow"], (("test", "shard*"),))
    assert {name: split.rows for name, split in made.splits.items()} == {
        "train": 30,
        "validation": 30,
        "test": 30,
    }
    assert rows_in(tmp_path / "out", "test") == lists_of(rows)


def test_documents_of_several_sequences_and_empty_ones(tmp_path: Path) -> None:
    """As Megatron writes them; empty documents are counted, and are no rows."""
    ids = np.arange(1, 13, dtype=np.uint16)
    lengths = np.array([2, 3, 4, 3], np.int32)
    index = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([8])
    index += np.array([4, 5], np.uint64).tobytes() + lengths.tobytes()
    index += (np.array([0, 2, 5, 9]) * 2).astype(np.int64).tobytes()
    index += np.array([0, 2, 2, 3, 4], np.int64).tobytes()
    (tmp_path / "a.idx").write_bytes(index + bytes(4))
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    made = adopt([str(tmp_path / "a.bin")], str(tmp_path / "out"), TOKENIZERS["narrow"])
    assert rows_in(tmp_path / "out") == [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12]]
    assert (made.ledger.read, made.ledger.written, made.ledger.empty) == (4, 3, 1)


def _too_large(folder: Path) -> tuple[str, str]:
    np.array([1, 2, 5000, 7], np.uint16).tofile(folder / "a.bin")
    return "a.bin", "a.bin, token 2: has the id 5,000, and the tokenizer has 1,000 ids"


def _negative(folder: Path) -> tuple[str, str]:
    rows = random_rows(np.full(5, 4), vocabulary_size=70_000)
    file = foreign(folder, rows, "megatron", "wide")
    ids = np.fromfile(file, np.int32)
    ids[3] = -1
    ids.tofile(file)
    return str(file), "token 3: has the id -1"


def _odd_size(folder: Path) -> tuple[str, str]:
    (folder / "a.bin").write_bytes(b"123")
    return "a.bin", "has 3 bytes, which are no ids of 2 bytes each"


def _lying_header(folder: Path) -> tuple[str, str]:
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 9
    (folder / "a.bin").write_bytes(header.tobytes() + bytes(4))
    return "a.bin", "no ids of 9 of 2 bytes each after 1024 bytes of a header"


def _lying_index(folder: Path) -> tuple[str, str]:
    file = foreign(folder, random_rows(np.full(5, 4), vocabulary_size=1000), "datatrove")
    np.array([4, 8], np.uint64).tofile(f"{file}.index")
    return str(file), "the index has rows of 8 tokens, the file has 20"


def _unordered(folder: Path) -> tuple[str, str]:
    file = foreign(folder, random_rows(np.full(5, 4), vocabulary_size=1000), "datatrove")
    np.array([8, 4, 20], np.uint64).tofile(f"{file}.index")
    return str(file), "its rows are out of order"


def _no_index(folder: Path) -> tuple[str, str]:
    (folder / "a.ds").write_bytes(bytes(4))
    return "a.ds", "a.ds.index: not found"


def _an_index(folder: Path) -> tuple[str, str]:
    (folder / "a.idx").write_bytes(b"")
    return "a.idx", "is an index. Give the file beside it, a.bin"


def _unknown(folder: Path) -> tuple[str, str]:
    (folder / "a.txt").write_bytes(b"text")
    return "a.txt", "of no known format"


def _missing(folder: Path) -> tuple[str, str]:
    return "gone.bin", "is not a file"


WRONG: dict[str, Callable[[Path], tuple[str, str]]] = {
    "an id beyond the vocabulary": _too_large,
    "a negative id": _negative,
    "half an id": _odd_size,
    "a header with another size": _lying_header,
    "an index of another file": _lying_index,
    "an index out of order": _unordered,
    "no index": _no_index,
    "an index instead of tokens": _an_index,
    "an unknown format": _unknown,
    "a missing file": _missing,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_one_line_and_leaves_no_data_set(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, message = WRONG[what](tmp_path)
    width = "wide" if what == "a negative id" else "narrow"
    with pytest.raises((ConfigError, CorpusError), match=message) as raised:
        adopt([name], str(tmp_path / "out"), TOKENIZERS[width])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out/manifest.json").exists()


def test_no_end_token_is_told_before_reading(tmp_path: Path) -> None:
    np.array([1, 2], np.uint16).tofile(tmp_path / "a.bin")
    made = Tokenizer(WordLevel({"a": 0, "b": 9}, unk_token="a")).to_str().encode()
    with pytest.raises(ConfigError, match="Name it by `--end-token`"):
        adopt(
            [str(tmp_path / "a.bin")], str(tmp_path / "out"), TextTokenizer.load(made, origin="t")
        )


@pytest.mark.parametrize("to", ["megatron", "datatrove"])
def test_damage_anywhere_is_an_error_or_the_same_rows(to: Format, tmp_path: Path) -> None:
    """Flipped bits, files cut short and longer ones: in the tokens and in the stitched file."""
    rows = random_rows(np.full(300, 40), vocabulary_size=1000)
    file = foreign(tmp_path, rows, to)
    adopt([str(file)], str(tmp_path / "out"), TOKENIZERS["narrow"])
    (stitched,) = (tmp_path / "out/train").iterdir()
    draw, whole, found = random.Random(0), lists_of(rows), {file: 0, stitched: 0}
    for number in range(600):
        victim = (file, stitched)[number % 2]
        good = victim.read_bytes()
        at = draw.randrange(len(good))
        if number % 4 == 1:
            at = draw.randrange(1000)  # the header and the pieces
        bad = {
            0: good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :],
            1: good[:at],
            2: good + b"\0",
        }[0 if number % 8 < 6 else number % 8 - 5]
        victim.write_bytes(bad)
        try:
            assert rows_in(tmp_path / "out") == whole
        except TokenfeedError as error:
            assert "\n" not in str(error)
            found[victim] += 1
        finally:
            victim.write_bytes(good)
    assert found[file] == 300, "every change of the tokens is found"
    assert found[stitched] > 100, "the rest is padding"


def test_a_file_that_is_gone_or_has_changed_is_named(tmp_path: Path) -> None:
    file = foreign(tmp_path, random_rows(np.full(50, 40), vocabulary_size=1000), "megatron")
    adopt([str(file)], str(tmp_path / "out"), TOKENIZERS["narrow"])
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(TokenfeedError, match=f"the adopted file {file} cannot be opened"):
        rows_in(tmp_path / "out")
    file.write_bytes(content + b"12")
    with pytest.raises(TokenfeedError, match=f"the adopted file {file} has 4,002 bytes, and had"):
        rows_in(tmp_path / "out")
    file.write_bytes(content)
    assert open_store(tmp_path / "out").name == str(tmp_path / "out")
    assert len(rows_in(tmp_path / "out")) == 50
