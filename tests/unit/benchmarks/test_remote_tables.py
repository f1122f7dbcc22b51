"""What benchmarks/remote/ measured becomes the tables of docs/benchmarks.md."""

from typing import Any

from benchmarks.remote.tables import TABLES

MEDIAN = {"median": 1.234, "min": 0.5, "max": 150.2}


def entry(loader: str, case: str, **more: Any) -> dict[str, Any]:
    return {"loader": loader, "case": case, **more}


def test_a_loader_that_failed_says_how_and_the_others_what_they_did() -> None:
    results = [
        entry("tokenfeed", "cold", first_batch_s=MEDIAN, requests=1234, bytes=5_600_000),
        entry("tokenfeed", "outage", wait_p99_ms=MEDIAN, requests=7, bytes=0, retries=12)
        | {"same_batches": False},
        entry("peer", "cold", failed="OSError: gone"),
        entry("peer", "loop", wait_p99_ms=MEDIAN, requests=5, bytes=1),
    ]
    header, ours, peer = TABLES["remote/peers"](results)
    assert len(header) == len(ours) == len(peer)
    assert ours[:5] == ["tokenfeed", "1.23 s [0.50, 150]", "\u2013", "1,234", "6"]
    assert peer[1] == "OSError: gone"
    assert "1.23 ms [0.50, 150]" in peer
    header, *rows = TABLES["remote/own"](results)
    assert [row[0] for row in rows] == ["cold", "outage"]
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][-1] == "\u2013"
    assert rows[1][-2:] == ["12", "none"]
