"""Adopted files: the same rows as they came with, read in place, and never wrong ones."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import lists_of, random_rows, rows_in, write_rows
from support.object_server import Remote
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tokenfeed import Packed, Padded, ShardLoader
from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenfeedError
from tokenfeed.pipeline.format.schema import Rows
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
    made.add_special_tokens(["</s>"])
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


@pytest.mark.parametrize("to", ENDINGS)
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=80),
    width=st.sampled_from([*WIDTHS]),
    small=st.booleans(),
)
def test_there_and_back_gives_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    to: Format,
    lengths: list[int],
    width: str,
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
    file = four_sequences(tmp_path, [0, 2, 2, 3, 4])
    made = adopt([file], str(tmp_path / "out"), TOKENIZERS["narrow"])
    assert rows_in(tmp_path / "out") == [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12]]
    assert (made.ledger.read, made.ledger.written, made.ledger.empty) == (4, 3, 1)


def test_file_of_numpy_save_is_adopted_without_its_header(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, END, 3, END], np.uint16))
    adopt([str(tmp_path / "a.npy")], str(tmp_path / "out"), TOKENIZERS["narrow"])
    assert rows_in(tmp_path / "out") == [[1, 2, END], [3, END]]


def save(
    path: Path, values: list[int], dtype: Any = np.uint16, header: tuple[int, ...] = ()
) -> str:
    """Write ids, after a header of 256 numbers if it has any."""
    numbers = np.array([*header, *[0] * (256 - len(header))] if header else [], np.int32)
    path.write_bytes(numbers.tobytes() + np.array(values, dtype).tobytes())
    return str(path)


def four_sequences(folder: Path, documents: list[int]) -> str:
    """Write 12 ids as Megatron, with the first sequence of each document, and the end."""
    lengths, places = np.array([2, 3, 4, 3], np.int32), np.array([0, 2, 5, 9])
    index = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([8])
    index += np.array([4, len(documents)], np.uint64).tobytes() + lengths.tobytes()
    index += (places * 2).tobytes() + np.array(documents, np.int64).tobytes() + bytes(4)
    (folder / "a.idx").write_bytes(index)
    return save(folder / "a.bin", [*range(1, 13)])


def negative(folder: Path) -> str:
    file = foreign(folder, random_rows(np.full(5, 4), vocabulary_size=70_000), "megatron", "wide")
    ids = np.fromfile(file, np.int32)
    ids[3] = -1
    return save(file, ids, np.int32)


def five_rows(folder: Path, ends: list[int], width: int = 2) -> str:
    """Write 5 rows of 4 tokens as datatrove, with other ends of rows or a wider type."""
    file = foreign(folder, random_rows(np.full(5, 4), vocabulary_size=1000), "datatrove")
    np.array(ends, np.uint64).tofile(f"{file}.index")
    if width == 4:
        save(file, np.fromfile(file, np.uint16), np.uint32)
        Path(f"{file}.metadata").write_text("tokenizer|4\n20\n")
    return str(file)


def table(folder: Path) -> str:
    np.save(folder / "a.npy", np.ones((3, 4), np.uint16))
    return str(folder / "a.npy")


WRONG: dict[str, tuple[Callable[[Path], str], str]] = {
    "an id beyond the vocabulary": (
        lambda folder: save(folder / "a.bin", [1, 2, 5000, 7]),
        "a.bin, token 2: has the id 5,000, and the tokenizer has 1,000 ids",
    ),
    "a negative id": (negative, "token 3: has the id -1"),
    "half an id": (
        lambda folder: save(folder / "a.bin", [1, 2, 3], np.uint8),
        "has 3 bytes, which are no ids of 2 bytes each",
    ),
    "a header with another size": (
        lambda folder: save(folder / "a.bin", [0, 0], header=(20240520, 1, 9)),
        "no ids of 9 of 2 bytes each after 1024 bytes of a header",
    ),
    "an unknown header": (
        lambda folder: save(folder / "a.bin", [1, 2], header=(20240521, 1, 2)),
        "begins with an unknown header",
    ),
    "an index of another file": (
        lambda folder: five_rows(folder, [4, 8]),
        "the index has rows of 8 tokens, the file has 20",
    ),
    "an index out of order": (
        lambda folder: five_rows(folder, [8, 4, 20]),
        "its rows are out of order",
    ),
    "an index whose differences overflow": (
        lambda folder: five_rows(folder, [2**63 - 1, 2**63 + 21, 20]),
        "its rows are out of order",
    ),
    "documents whose differences overflow": (
        lambda folder: four_sequences(folder, [0, 2**63 - 1, 5 - 2**63, 4]),
        "its documents are out of order",
    ),
    "no index": (lambda folder: save(folder / "a.ds", [0, 0]), "a.ds.index: not found"),
    "ids of another width": (
        lambda folder: five_rows(folder, [4, 8, 12, 16, 20], width=4),
        "has ids of 4 bytes, and a data set with 1,000 ids has 2 bytes each",
    ),
    "ids of four bytes whose index was lost": (
        lambda folder: save(folder / "a.bin", [*range(1, 20)], np.int32),
        "every second id of two bytes is 0, so the ids have four bytes",
    ),
    "ids of four bytes in a file of OLMo": (
        lambda folder: save(folder / "a.npy", [*range(1, 20)], np.uint32),
        "every second id of two bytes is 0, so the ids have four bytes",
    ),
    "an array of two dimensions": (table, "a header that says uint16 of the shape"),
    "an index instead of tokens": (
        lambda folder: save(folder / "a.idx", []),
        "is an index. Give the file beside it, a.bin",
    ),
    "an unknown format": (
        lambda folder: save(folder / "a.txt", [7]),
        "For texts, use `pretokenize`",
    ),
    "a missing file": (lambda folder: str(folder / "gone.bin"), "is not a file"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_one_line_and_leaves_no_data_set(what: str, tmp_path: Path) -> None:
    make, message = WRONG[what]
    width = "wide" if what == "a negative id" else "narrow"
    with pytest.raises((ConfigError, CorpusError), match=message):
        adopt([make(tmp_path)], str(tmp_path / "out"), TOKENIZERS[width])
    assert not (tmp_path / "out/manifest.json").exists()


def test_file_without_end_tokens_is_one_row_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, ids, is_warned in (("none", [1, 2, 3], True), ("one", [1, END, 3], False)):
        caplog.clear()
        file = save(tmp_path / f"{name}.bin", ids)
        adopt([file], str(tmp_path / name), TOKENIZERS["narrow"])
        assert [token for row in rows_in(tmp_path / name) for token in row] == ids
        assert ("has no end token (id 7)" in caplog.text) == is_warned


def test_files_given_twice_and_splits_without_files_are_refused(tmp_path: Path) -> None:
    file, link = save(tmp_path / "a.bin", [1, 7]), tmp_path / "link.bin"
    link.symlink_to(file)
    for paths, splits, message in (
        ([file, str(link)], (), "link.bin: is the file .*a.bin, whose rows would be there twice"),
        ([file], (("test", "*.npy"),), "`--split test=.*no file matches it"),
    ):
        with pytest.raises(ConfigError, match=message):
            adopt(paths, str(tmp_path / "out"), TOKENIZERS["narrow"], splits)
    name = os.fsdecode(os.fsencode(file).replace(b"a.bin", b"caf\xe9.bin"))
    Path(name).write_bytes(Path(file).read_bytes())
    with pytest.raises(ConfigError, match="name is not UTF-8"):
        adopt([name], str(tmp_path / "out"), TOKENIZERS["narrow"])


def test_no_end_token_is_told_before_reading(tmp_path: Path) -> None:
    np.array([1, 2], np.uint16).tofile(tmp_path / "a.bin")
    made = Tokenizer(WordLevel({"a": 0, "b": 9}, unk_token="a")).to_str().encode()
    with pytest.raises(ConfigError, match="Name it by `--end-token`"):
        adopt(
            [str(tmp_path / "a.bin")], str(tmp_path / "out"), TextTokenizer.load(made, origin="t")
        )


def damaged(good: bytes, draw: random.Random) -> bytes:
    """Flip a bit, cut the end off, or add a byte."""
    at, kind = draw.randrange(len(good)), draw.randrange(10)
    if draw.randrange(2):
        at = min(at, draw.randrange(1100))  # headers and the first pieces
    if kind == 0:
        return good[:at]
    if kind == 1:
        return good + b"\0"
    return good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :]


FLIPS = [pytest.param(36, id="few"), pytest.param(1000, id="many", marks=pytest.mark.long)]


@pytest.mark.parametrize("number", FLIPS)
@pytest.mark.parametrize("to", ENDINGS)
def test_damage_after_adopting_is_found_when_rows_are_read(
    to: Format, number: int, tmp_path: Path
) -> None:
    """In the tokens and in the stitched file. A change may be in the padding of Arrow."""
    rows = random_rows(np.full(120, 40), vocabulary_size=1000)
    file = foreign(tmp_path, rows, to)
    adopt([str(file)], str(tmp_path / "out"), TOKENIZERS["narrow"])
    (stitched,) = (tmp_path / "out/train").iterdir()
    draw, found = random.Random(0), {file: 0, stitched: 0}
    for victim in [file, stitched] * (number // 2):
        good = victim.read_bytes()
        victim.write_bytes(damaged(good, draw))
        try:
            assert rows_in(tmp_path / "out") == lists_of(rows)
        except TokenfeedError:
            found[victim] += 1
        victim.write_bytes(good)
    header = 0 if to != "llm.c" else number // 4  # no token depends on it any more
    assert found[file] >= number // 2 - header
    assert found[stitched] > number // 8


@pytest.mark.parametrize("to", ENDINGS)
def test_files_in_a_bucket_are_read_there_and_verified(
    to: Format, tmp_path: Path, remote: Remote
) -> None:
    rows = random_rows(np.random.default_rng(0).integers(1, 900, 90), vocabulary_size=1000)
    file = foreign(tmp_path, rows, to)
    remote.put_folder(file.parent)
    host = f"http://127.0.0.1:{remote.proxy.port}/{remote.prefix}"
    for number, address in enumerate((f"s3://{remote.prefix}", host)):
        out = tmp_path / f"out{number}"
        manifest = adopt([f"{address}/{file.name}"], str(out), TOKENIZERS["narrow"])
        assert rows_in(out) == lists_of(rows)
        assert list(find_problems(out, manifest)) == []
        assert sum(path.stat().st_size for path in (out / "train").iterdir()) < 15_000
    batching, data = Packed(512, batch_size=2), tmp_path / "data"
    loaders = [ShardLoader(path, batching=batching, num_workers=0) for path in (out, data)]
    for one, other in zip(*loaders, strict=True):
        assert (one["labels"] == other["labels"]).all()
    good = remote.content(file.name)
    remote.put(file.name, good[:-3] + b"\0" + good[-2:])
    with pytest.raises(TokenfeedError, match="fails its checksum"):
        rows_in(out)
    remote.put(file.name, good[:-3])
    with pytest.raises(TokenfeedError, match=f"{file.name}.* cut short"):
        rows_in(out)
    del remote.server.objects[f"{remote.prefix}/{file.name}"]
    with pytest.raises(TokenfeedError, match=f"{file.name}"):
        rows_in(out)
    with pytest.raises(ConfigError, match="stores the address"):
        adopt([f"{host}/{file.name}?token=x"], str(tmp_path / "no"), TOKENIZERS["narrow"])


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
