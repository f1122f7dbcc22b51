"""Shuffles in folders that others have left, with memory that cannot do, over files that change."""

import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from command import files_of
from data_sets import VOCABULARY_SIZE, MakeDataset, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfeed.pipeline.errors import ConfigError, ShardFormatError
from tokenfeed.pipeline.format.manifest import JOURNAL_FILE, Manifest
from tokenfeed.pipeline.format.schema import shard_schema
from tokenfeed.pipeline.sizes import bytes_of
from tokenfeed.tools.options import Options
from tokenfeed.tools.outputs.output import FolderOutput
from tokenfeed.tools.pretokenizing.make import make_dataset
from tokenfeed.tools.pretokenizing.shuffled import make_shuffled_dataset
from tokenfeed.tools.run.claim import UNSHUFFLED_FOLDER
from tokenfeed.tools.shuffling.partition import Columns, Placed, read_section, write_partition
from tokenfeed.tools.shuffling.run import Settings, shuffle_dataset

EDGES = np.array([0, 10, 10, 30, 59])


def test_an_unfinished_shuffle_is_not_taken_over_while_its_journal_has_no_line(
    make_dataset_of_rows: MakeDataset, corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    make_dataset(
        Options(paths=(str(corpus), str(out)), tokenizer=str(tokenizer), shuffle=True),
        output=FolderOutput(out / UNSHUFFLED_FOLDER),
    )
    (out / JOURNAL_FILE).touch()
    before = files_of(out)
    plain = Options(paths=(str(corpus), str(out)), tokenizer=str(tokenizer))
    with pytest.raises(ConfigError, match="unfinished run of `pretokenize --shuffle`"):
        make_dataset(plain)
    with pytest.raises(ConfigError, match="unfinished run of `pretokenize --shuffle`"):
        shuffle_dataset(make_dataset_of_rows([1, 2, 3]), out, Settings(seed=0, workers=1))
    assert files_of(out) == before
    make_shuffled_dataset(
        Options(paths=(str(corpus), str(out)), tokenizer=str(tokenizer), shuffle=True)
    )
    assert Manifest.read(out).shuffled is not None


@pytest.fixture
def make_dataset_of_rows(make_dataset: MakeDataset) -> MakeDataset:
    """The fixture, beside the function that has its name."""
    return make_dataset


@pytest.fixture(scope="module", params=[False, True], ids=["as it is", "compressed"])
def partition(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partition")
    parts = random_rows(np.arange(1, 60)).parts(EDGES)
    sections = [Placed(part, np.arange(len(part))) for part in parts]
    write_partition(folder, "good", sections, columns(), compressed=request.param)
    return folder / "good"


def columns() -> Columns:
    return Columns.from_schema(shard_schema(VOCABULARY_SIZE, ()))


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_whatever_happens_to_a_partition_it_is_named(partition: Path, data: st.DataObject) -> None:
    good = partition.read_bytes()
    bucket = data.draw(st.integers(0, len(EDGES) - 2))
    expected = read_section(partition, bucket, len(EDGES) - 1, columns())
    table = len(good) - struct.calcsize("<5Q") * (len(EDGES) - 1)
    places = st.integers(0, len(good) - 1) | st.integers(table, len(good) - 1)
    damage = data.draw(st.dictionaries(places, st.integers(0, 255), max_size=8))
    content = bytearray(good)
    for place, byte in damage.items():
        content[place] = byte
    damaged = partition.with_name("damaged")
    damaged.write_bytes(content[: data.draw(st.integers(0, len(good)) | st.just(len(good)))])
    try:
        section = read_section(damaged, bucket, len(EDGES) - 1, columns())
    except ShardFormatError as error:
        assert f"{damaged}: this temporary file is damaged" in str(error)
    else:
        assert np.array_equal(section.rows.ids, expected.rows.ids)
        assert np.array_equal(section.places, expected.places)


def test_memory_in_which_sections_would_be_dust_is_refused(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    source, out = make_dataset(np.full(60_000, 60)), tmp_path / "out"
    with pytest.raises(ConfigError, match="`--memory` 1 bytes: is too little for 10 MB") as caught:
        shuffle_dataset(source, out, Settings(seed=0, workers=1, memory_bytes=1))
    assert not out.exists()
    (least,) = re.findall(r"at least (\w+)\.", str(caught.value))
    enough = bytes_of(least, flag="--memory")
    shuffle_dataset(source, out, Settings(seed=0, workers=1, memory_bytes=enough))


@pytest.mark.parametrize("digits", [20, 400, sys.int_info.default_max_str_digits + 100])
def test_a_size_that_no_machine_has_is_no_size(digits: int) -> None:
    with pytest.raises(ConfigError, match=r"`--memory` '999.*expected a size like 256MB"):
        bytes_of("9" * digits, flag="--memory")
