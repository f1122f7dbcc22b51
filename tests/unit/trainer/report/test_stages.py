"""The stages of a run's data in its report: planned against delivered tokens."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.trainer.report.run_report import tokens_of_stages

SHARES = st.floats(0, 1).map(lambda share: {"a": share, "b": 1 - share})
COUNTS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), min_size=1, max_size=12)


def test_tokens_between_two_lines_are_divided_as_planned() -> None:
    half, only = {"a": 0.5, "b": 0.5}, {"a": 1.0}
    found = tokens_of_stages(
        [(100, half, half), (None, only, only)], [{"a": 49, "b": 51}, {"a": 149, "b": 51}]
    )
    assert [stage.planned for stage in found] == [half | {"a": 50.0, "b": 50.0}, {"a": 100.0}]
    assert [stage.delivered for stage in found] == [{"a": 49.0, "b": 51.0}, {"a": 100.0, "b": 0.0}]
    changing = [(100, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}), (None, only, only)]
    assert tokens_of_stages(changing, [{"a": 50}])[0].planned == {"a": 37.5, "b": 12.5}
    assert len(tokens_of_stages(changing, [{"a": 100}])) == 1, "the second has not begun"


@given(COUNTS, st.lists(st.integers(1, 300), max_size=3), st.data())
def test_no_token_is_lost_and_none_counted_twice(
    counts: list[tuple[int, int]], lengths: list[int], data: st.DataObject
) -> None:
    ends = [*accumulate(lengths), None]
    stages = [(end, data.draw(SHARES), data.draw(SHARES)) for end in ends]
    sums = list(accumulate(counts, lambda one, other: (one[0] + other[0], one[1] + other[1])))
    found = tokens_of_stages(stages, [{"a": a, "b": b} for a, b in sums])
    planned, delivered = (
        sum(sum(each.values()) for each in parts)
        for parts in ([s.planned for s in found], [s.delivered for s in found])
    )
    assert planned == pytest.approx(sum(sums[-1])) == delivered
    for nth, name in enumerate("ab"):
        assert sum(s.delivered[name] for s in found) == pytest.approx(sums[-1][nth])
