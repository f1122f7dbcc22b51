"""The page of a run: well-formed, whole by itself, true to the values, made of what is there."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.page.comparison import compare
from tokenfeed.trainer.page.page import page_of, write_page
from tokenfeed.trainer.page.plot import Plot, Series, draw, thinned
from tokenfeed.trainer.page.run_data import RunData
from tokenfeed.trainer.page.scale import Scale, short

Values = st.floats(-1e9, 1e9).map(lambda value: round(value, 6))
_VOID = {"meta"}


def report_of(**changes: Any) -> dict[str, Any]:
    """As the first release wrote it."""
    return {
        "run_dir": "runs/first",
        "finished": True,
        "steps": 200,
        "skipped_steps": 0,
        "tokens": 400_000,
        "seconds": 60.0,
        "real_tokens_per_s": 6000.0,
        "padding": 0.01,
        "stall": {
            "fraction": 0.05,
            "parts": {
                "data": {"fraction": 0.04, "seconds": 2.0},
                "log": {"fraction": 0.01, "seconds": 0.5},
                "checkpoint": {"fraction": 0.0, "seconds": 0.0},
            },
            "window_steps": 195,
            "window_seconds": 50.0,
            "method": "host clock",
        },
        "loss_first": 9.0,
        "loss_last": 5.5,
        "validation_loss_first": 9.0,
        "validation_loss_last": 5.6,
        "model": "tiny",
        "parameters": 2_200_000,
        "vocabulary_size": 8192,
        "device": "cpu",
        "precision": "fp32",
        "versions": {"torch": "2.13"},
    } | changes


def run_of(report: dict[str, Any], lines: list[dict[str, Any]], **more: Any) -> RunData:
    return RunData(folder=Path("runs/first"), report=report, lines=lines, **more)


class Checked(HTMLParser):
    """Every element that is opened is closed, in its order; what is asked for is noted."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset")
        ]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def full_lines(count: int = 30) -> list[dict[str, Any]]:
    return [
        {
            "step": 10 * number,
            "loss": 9.0 / number,
            "validation_loss": 9.1 / number,
            "learning_rate": 1e-3,
            "gradient_norm": 1.0,
            "real_tokens_per_s": 6000.0,
            "stall_causes": {"data": 0.04, "log": 0.01, "copy": 0.0},
            "step_seconds": {"p50": 0.01, "max": 0.05},
            "gpu": {"memory_bytes": 8e9, "power_watts": 250.0},
        }
        for number in range(1, count + 1)
    ]


def test_a_page_is_well_formed_and_asks_nobody_for_anything() -> None:
    page = page_of(run_of(report_of(), full_lines(), settings={"shards": "x"}, lengths=[0, 3, 9]))
    checked = Checked(page)
    assert checked.addresses == []
    assert not {"script", "link", "img", "iframe", "object"} & set(checked.tags)
    assert "url(" not in page
    assert "@import" not in page
    drawings = re.findall(r"<svg.*?</svg>", page)
    assert len(drawings) == 9 + 6  # a plot each, and samples in three legends
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_every_plot_can_be_read_without_eyes_and_without_a_mouse() -> None:
    page = page_of(run_of(report_of(), full_lines(), lengths=[4]))
    figures = re.findall(r"<figure.*?</figure>", page)
    assert len(figures) == 9
    for figure in figures:
        assert 'tabindex="0"' in figure
        assert 'role="img" aria-label="' in figure
        assert len(re.sub("<[^>]*>", "", figure.split("</svg><p>")[1].split("</p>")[0])) > 15
    assert page.count("<summary>values</summary>") == 8


def test_what_the_device_waited_for_is_said_of_every_cause_that_is_known() -> None:
    report = report_of()
    report["stall"]["parts"]["of <tomorrow>"] = {"fraction": 0.01, "seconds": 0.1}
    page = page_of(run_of(report, []))
    Checked(page)
    assert "<th>data<span class=soft>a batch that was not ready</span></th>" in page
    assert "<th>of &lt;tomorrow&gt;</th>" in page


def test_a_cause_of_which_nothing_would_show_is_no_row() -> None:
    report = report_of()
    report["stall"]["parts"]["log"] = {"fraction": 4e-5, "seconds": 0.1}
    assert "<th>log" not in page_of(run_of(report, []))


@pytest.mark.parametrize("missing", ["real_tokens_per_s", "loss_last", "validation_loss_last"])
def test_what_is_not_known_is_left_out(missing: str) -> None:
    page = page_of(run_of(report_of(**{missing: None}), []))
    Checked(page)
    assert "None" not in page
    assert "<figure" not in page


def test_a_run_that_ended_in_its_warm_up_has_a_page() -> None:
    stall = report_of()["stall"] | {"fraction": None, "window_steps": 0, "window_seconds": 0.0}
    page = page_of(run_of(report_of(stall=stall, real_tokens_per_s=None, finished=False), []))
    Checked(page)
    assert "the first steps are warm-up" in page
    assert "stopped before its end" in page


def test_names_are_text_and_no_markup() -> None:
    nasty = "<b>&\"runs'"
    settings = {"shards": nasty}
    report = report_of(run_dir=nasty, model=nasty, device=nasty)
    report["stall"]["advice"] = [{"text": f"{nasty} `--flag <x>`", "gain": None}]
    page = page_of(run_of(report, full_lines(), settings=settings))
    Checked(page)
    assert "<b>&" not in page
    assert "<code>--flag &lt;x&gt;</code>" in page


def test_page_shows_metrics_of_the_last_split() -> None:
    first, second = {"loss": 1.0, "accuracy": 0.5}, {"loss": 2.0, "accuracy": 0.25}
    page = page_of(run_of(report_of(metrics={"validation": first}), []))
    assert "accuracy, validation</span><b>0.5</b>" in page
    page = page_of(run_of(report_of(metrics={"validation": first, "test": second}), []))
    assert "accuracy, test</span><b>0.25</b>" in page
    assert "accuracy, validation" not in page


def test_smaller_causes_are_summed_and_nothing_is_lost() -> None:
    causes = {f"cause {number}": number / 1000 for number in range(1, 13)}
    lines = [{"step": step, "stall_causes": causes} for step in (10, 20)]
    page = page_of(run_of(report_of(), lines))
    (figure,) = re.findall(r"<figure.*?</figure>", page)
    names = re.findall(r"<th>([^<]+)</th>", figure.split("<tbody>")[0])
    assert names == ["step", *(f"cause {number}" for number in range(12, 6, -1)), "the rest"]
    shares = [float(share) for share in re.findall(r"<td>([\d.]+)%</td>", figure)[:7]]
    assert sum(shares) == pytest.approx(100 * sum(causes.values()), abs=0.4)


@pytest.mark.slow
@example(ys=[[3.0], [1.0]], stacked=True, from_zero=False)
@given(
    ys=st.lists(st.lists(Values, min_size=1, max_size=20), min_size=1, max_size=7),
    stacked=st.booleans(),
    from_zero=st.booleans(),
)
def test_all_that_is_drawn_lies_within_the_picture(
    ys: list[list[float]], stacked: bool, from_zero: bool
) -> None:
    if stacked:
        ys = [[abs(value) for value in one[: min(map(len, ys))]] for one in ys]
    series = [Series(f"s{n}", list(range(len(one))), one) for n, one in enumerate(ys)]
    figure = draw(Plot("title", "reading", series, stacked=stacked, from_zero=from_zero))
    drawing = ElementTree.fromstring(re.findall(r"<svg viewBox=\"0 0 720.*?</svg>", figure)[0])
    for element in drawing.iter():
        for name, size in (("x", 720), ("y", 260), ("cx", 720), ("cy", 260)):
            assert -0.1 <= float(element.get(name, "0")) <= size + 0.1
    for path in drawing.iter("path"):
        numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", path.get("d", ""))]
        assert all(-0.1 <= number <= 720.1 for number in numbers)


def test_the_table_of_a_plot_has_its_values() -> None:
    series = [Series("a", [1, 2, 3], [1, 2, 3]), Series("b", [2, 4], [20, 40])]
    rows = re.findall(r"<tr>(.*?)</tr>", draw(Plot("t", "r", series)).split("<tbody>")[1])
    cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]
    assert cells == [["1", "1", ""], ["2", "2", "20"], ["3", "3", ""], ["4", "", "40"]]


def test_nothing_to_see_is_no_plot() -> None:
    assert draw(Plot("t", "r", [Series("a", [], [])])) == ""


@given(ys=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), most=st.integers(1, 50))
def test_fewer_points_keep_the_mean_and_the_last_step(ys: list[float], most: int) -> None:
    series = Series("a", list(range(len(ys))), ys)
    found = thinned(series, most)
    assert len(found.xs) == len(found.ys) <= most
    assert found.xs[-1] == len(ys) - 1
    ends = [-1, *found.xs]
    counts = [int(b - a) for a, b in pairwise(ends)]
    total = sum(count * value for count, value in zip(counts, found.ys, strict=True))
    assert total == pytest.approx(sum(ys), rel=1e-6, abs=1e-3)


@given(low=Values, span=st.floats(1e-3, 1e9))
def test_ticks_are_round_few_and_within(low: float, span: float) -> None:
    scale = Scale(low, low + span, 0, 100)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 7
    room = 1e-6 * span + 1e-12 * abs(low)
    assert all(low - room <= tick <= low + span + room for tick in ticks)
    assert (scale(scale.low), scale(scale.high)) == (0, pytest.approx(100))


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (0.05, "0.05"), (999, "999"), (1234, "1,234"), (35_000, "35k"), (1.2e6, "1.2M")],
)
def test_numbers_are_short(value: float, said: str) -> None:
    assert short(value) == said


def write_run(folder: Path, report: dict[str, Any] | str, lines: str = "") -> Path:
    folder.mkdir()
    text = report if isinstance(report, str) else json.dumps(report)
    (folder / "report.json").write_text(text)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def test_a_page_is_written_of_what_a_killed_run_left(tmp_path: Path) -> None:
    lines = "".join(json.dumps(line) + "\n" for line in full_lines(3)) + '{"step": 40, "lo'
    folder = write_run(tmp_path / "run", report_of(), lines)
    Checked(write_page(folder).read_text())
    assert len(RunData.of_run(folder).lines) == 3


def test_a_folder_without_a_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no report.json. Give the folder of a run"):
        write_page(tmp_path)
    for text in ("{", "[]", '"x"'):
        folder = write_run(tmp_path / f"run{len(text)}{text[0]}", text)
        with pytest.raises(ConfigError, match=r"report.json is no report of `train`"):
            write_page(folder)


def test_two_runs_are_told_apart_by_figures_causes_and_settings() -> None:
    stall = {"fraction": 0.2, "parts": {"data": {"fraction": 0.2, "seconds": 9.0}}}
    other = report_of(real_tokens_per_s=9000.0, stall=stall, metrics={"test": {"accuracy": 0.5}})
    found = compare(
        run_of(report_of(), [], settings={"run_dir": "a", "seed": 1, "steps": 200}),
        run_of(other, [], settings={"run_dir": "b", "seed": 2, "steps": 200, "keep": 3}),
    )
    figures = {row.name: row for row in found.figures}
    assert (figures["real tokens a second"].one, figures["real tokens a second"].other) == (
        "6,000",
        "9,000",
    )
    assert figures["real tokens a second"].change == "+50.0%"
    assert figures["loss"].change == ""
    assert (figures["test accuracy"].one, figures["test accuracy"].other) == ("", "0.5000")
    assert [(row.name, row.one, row.other) for row in found.causes] == [
        ("stall", "5.00%", "20.00%"),
        ("data", "4.00%", "20.00%"),
        ("log", "1.00%", "0.00%"),
    ]
    assert [(row.name, row.one, row.other) for row in found.settings] == [
        ("--seed", "1", "2"),
        ("--keep", "not set", "3"),
    ]
