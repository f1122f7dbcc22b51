"""Golden values of shards: what `pretokenize` makes of thirteen corpora, to the byte.

`shards.json` has for each corpus the digest of every file, the counts of records, the rejects, and
the number of rows and a digest of every decoded column. Bytes may change with the version of a
library, and `versions` says of which versions they are. With other versions the tests compare what
the files say: counts and columns.
"""

from pathlib import Path
from typing import Any

import pytest
from support.golden_corpora import CORPORA, VERSIONS, make

CASES = ["versions", *CORPORA]


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_becomes_the_golden_bytes_with_any_workers(
    name: str, tmp_path: Path, golden: Any
) -> None:
    made = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        made.append(make(name, folder, workers))
    assert made[0] == made[1]
    expected = golden.expected(name, made[0])
    if golden.expected("versions", VERSIONS) != VERSIONS:
        expected, made[0] = (
            {what: value[what] for what in ("ledger", "columns")} for value in (expected, made[0])
        )
    assert made[0] == expected
