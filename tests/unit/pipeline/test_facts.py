"""Summaries: one line per fact, with aligned values."""

from tokenfeed.pipeline.text import count_of, facts


def test_facts_aligns_values_and_further_lines() -> None:
    assert facts({"rows": "12", "stall": "5%\nof 60 s", "gone": ""}) == (
        "rows     12\nstall    5%\n         of 60 s"
    )
    assert facts({"a": "1", "fingerprint": "x"}) == "a           1\nfingerprint x"


def test_count_of_one_is_singular() -> None:
    assert [count_of(number, "file") for number in (0, 1, 2500)] == [
        "0 files",
        "1 file",
        "2,500 files",
    ]
