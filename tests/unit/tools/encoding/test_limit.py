"""`--limit` where records turn out to be unusable only when they are encoded."""

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from support.pretokenizing import make

from tokenfeed.pipeline.format.manifest import Manifest


@pytest.mark.parametrize("num_good", [3, 25, 40])
def test_limit_counts_records_that_can_be_encoded(
    num_good: int, tokenizer: Path, tmp_path: Path
) -> None:
    """Ids beyond the vocabulary are found by the encoder only: the candidates run out twice."""
    rows = [[5, number] for number in range(num_good)] + [[5, 1000 + n] for n in range(400)]
    data = tmp_path / "ids.jsonl"
    data.write_text("".join(f"{json.dumps({'input_ids': row})}\n" for row in rows))
    options: dict[str, Any] = {"task": "ids", "validation": 0.0, "limit": 20, "shard_size": "3KB"}
    make(data, tmp_path / "out", tokenizer, **options)
    ledger = Manifest.read(tmp_path / "out").ledger
    assert ledger.written == min(num_good, 20)
    left_out = ledger.left_out or 0
    assert ledger.read == len(rows) == ledger.written + ledger.rejected + left_out
    if num_good > 20:
        hashes = sorted(
            (xxhash.xxh3_64_intdigest(b"".join(n.to_bytes(4, "little") for n in row)), row)
            for row in rows
        )
        last = [hash_ for hash_, row in hashes if row[1] < num_good][19]
        assert left_out == sum(hash_ > last for hash_, _ in hashes)
