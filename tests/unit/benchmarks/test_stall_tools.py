"""benchmarks/stall_tools/: the script that TraceML gets, the stopwatch, and the tables."""

import ast
from typing import Any

import pytest

from benchmarks.stall_tools.__main__ import (
    SCRIPT,
    in_turns,
    share_of_stopwatch,
    with_traceml,
)
from benchmarks.stall_tools.overhead import overhead
from benchmarks.stall_tools.tables import cost_table, overhead_table, share_table


def test_traceml_gets_the_same_loop_inside_its_bracket() -> None:
    source = SCRIPT.read_text()
    changed, _ = with_traceml(source, is_loader=True)
    before, after = ast.parse(source), ast.parse(changed)
    loops = [each for each in before.body if isinstance(each, ast.For)]
    changed_loops = [each for each in after.body if isinstance(each, ast.For)]
    bracket = changed_loops[0].body[0]
    assert len(loops) == len(changed_loops) == 1
    assert isinstance(bracket, ast.With)
    assert list(map(ast.unparse, bracket.body)) == list(map(ast.unparse, loops[0].body))
    others = [ast.unparse(each) for each in after.body if not isinstance(each, ast.For)]
    for each in before.body:
        if not isinstance(each, ast.For):
            others.remove(ast.unparse(each))
    assert others == ["import traceml_ai as traceml", "traceml.init(mode='auto')"]


def test_changed_lines_are_counted_apart_from_indented_ones() -> None:
    source = SCRIPT.read_text()
    body = next(each for each in ast.parse(source).body if isinstance(each, ast.For)).body
    first, last = body[0].lineno, body[-1].end_lineno
    assert last is not None
    assert with_traceml(source, is_loader=True)[1] == [3, last - first + 1]
    wrapped, changes = with_traceml(source, is_loader=False)
    assert changes == [4, last - first + 1]
    assert "enumerate(traceml.wrap_dataloader_fetch(timing(batches)), 1)" in wrapped


def test_stopwatch_counts_from_the_warm_up_to_the_last_step() -> None:
    steps = [float(at) for at in range(10)]
    timed = [(0.5, 1.5), (3.5, 4.5), (6.0, 6.5), (8.75, 11.0)]
    found = share_of_stopwatch({"steps": steps, "timed": timed})
    assert found == pytest.approx((0.5 + 0.5 + 0.25) / 5)


def entry(fault: str, tool: str, seconds: float, **more: Any) -> dict[str, Any]:
    found = {"fault": fault, "tool": tool, "seconds": seconds, "cpu_seconds": seconds / 2}
    return found | {"truth": 0.2, "lines_changed": [0, 0]} | more


def test_tables_pair_runs_side_by_side_and_keep_the_first_share() -> None:
    results = []
    for seconds in (10.0, 20.0):
        results += [
            entry("save", "python", seconds),
            entry("save", "tokenfeed", seconds + 1, verdict="SAVES TAKE TIME", share=0.201),
            entry("save", "traceml", seconds + 15, verdict="X", share=None, lines_changed=[3, 19]),
        ]
    results[1]["share"] = 0.19
    shares, costs = share_table(results), cost_table(results)
    ours = ["save", "`tokenfeed stall`", "SAVES TAKE TIME", "19.0%", "20.0%", "0"]
    assert shares[1:] == [ours, ["save", "TraceML", "X", "not measured", "20.0%", "3 + 19"]]
    assert costs[1] == ["`tokenfeed stall`", "2", "1.0 [1.0, 1.0]", "0.5 [0.5, 0.5]"]
    assert costs[2] == ["TraceML", "2", "15.0 [15.0, 15.0]", "7.5 [7.5, 7.5]"]


def test_runs_alternate_and_each_tool_runs_each_fault() -> None:
    runs = list(in_turns())
    assert [tool for _, tool in runs[:3]] == ["python", "tokenfeed", "traceml"]
    assert len({fault for fault, _ in runs}) == 8
    by_tool = {tool: [f for f, t in runs if t == tool] for _, tool in runs}
    assert by_tool["python"] == by_tool["tokenfeed"] == by_tool["traceml"]


def test_overhead_is_measured_and_in_the_table_apart_from_runs() -> None:
    found = overhead(1, steps=3, pairs=2)
    assert found["microseconds_a_step"]["median"] > 0
    runs = [entry("save", tool, 1.0, share=0.2, verdict="X") for tool in ("python", "tokenfeed")]
    runs += [entry("save", "traceml", 2.0, share=0.2, verdict="X"), found]
    assert len(overhead_table(runs)) == 2
    assert overhead_table(runs)[1][0] == "1 ms"
    assert len(share_table(runs)) == len(cost_table(runs)) == 3
