"""The page of a run: well-formed, whole by itself, true to the values, made of what is there."""

import json
import re
import tempfile
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from support.commands import call
from support.reports import full_lines, report_of, stall_of, write_run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools import report as report_command
from tokenfeed.trainer.report.compare import Comparison
from tokenfeed.trainer.report.page import RunData, page_of, write_page
from tokenfeed.trainer.stall import StallReport
from tokenfeed.trainer.stall.plots import Plot, Series, compact, thinned
from tokenfeed.trainer.stall.stall_report import Sample

Values = st.floats(-1e9, 1e9).map(lambda value: round(value, 6))
_VOID = {"meta"}


def run_of(
    report: dict[str, Any], lines: list[dict[str, Any]] | None = None, **settings: Any
) -> RunData:
    """A run as it is read from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "report.json").write_text(json.dumps(report))
        (path / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines or ())
        )
        if settings:
            (path / "config.yaml").write_text(yaml.safe_dump(settings))
        return RunData.of_folder(path)


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


def test_a_page_is_well_formed_and_asks_nobody_for_anything() -> None:
    page = page_of(run_of(report_of(rows_by_length=[0, 3, 9]), full_lines(), shards="x"))
    checked = Checked(page)
    assert checked.addresses == []
    assert not {"script", "link", "img", "iframe", "object"} & set(checked.tags)
    assert "url(" not in page
    assert "@import" not in page
    drawings = re.findall(r"(?s)<svg.*?</svg>", page)
    assert len(drawings) == 8 + 11  # a plot each, and samples in five legends
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_every_plot_can_be_read_without_eyes_and_without_a_mouse() -> None:
    page = page_of(run_of(report_of(rows_by_length=[4]), full_lines()))
    figures = re.findall(r"(?s)<figure.*?</figure>", page)
    assert len(figures) == 8
    for figure in figures:
        assert 'tabindex="0"' in figure
        assert 'role="img" aria-label="' in figure
        assert len(re.sub("<[^>]*>", "", figure.split("</svg>\n<p>")[1].split("</p>")[0])) > 15
    assert page.count("<summary>values</summary>") == 8


@pytest.mark.parametrize("missing", ["real_tokens_per_s", "loss_last", "validation_loss_last"])
def test_what_is_not_known_is_left_out(missing: str) -> None:
    stall = stall_of(**{missing: None} if missing == "real_tokens_per_s" else {})
    page = page_of(run_of(report_of(**{missing: None, "stall": stall})))
    Checked(page)
    assert "None" not in page
    assert "<figure" not in page


def test_page_says_why_nothing_was_measured() -> None:
    for queued, why in ((3, "3 steps so far, all of them warm-up"), (0, "no step has ended")):
        stall = stall_of(stall=None, steps=0, queued_steps=queued, real_tokens_per_s=None)
        page = page_of(run_of(report_of(stall=stall, real_tokens_per_s=None, finished=False)))
        Checked(page)
        assert why in page
        assert "stopped before its end" in page


def test_names_are_text_and_no_markup() -> None:
    nasty = "<b>&\"runs'"
    advice = [{"cause": "data", "text": f"{nasty} `--flag <x>`", "change": "", "gain": 9.8}]
    report = report_of(model=nasty, device=nasty, stall=stall_of(advice=advice))
    page = page_of(run_of(report, full_lines(), shards=nasty))
    Checked(page)
    assert "<b>&" not in page
    assert "<code>--flag &lt;x&gt;</code> <b>(up to 10.8 times as fast)</b>" in page


def test_page_shows_metrics_of_the_last_split() -> None:
    first, second = {"loss": 1.0, "accuracy": 0.5}, {"loss": 2.0, "accuracy": 0.25}
    page = page_of(run_of(report_of(metrics={"validation": first, "test": second})))
    assert "accuracy, test</span><b>0.25</b>" in page
    assert "accuracy, validation" not in page


def test_smaller_causes_are_summed_and_nothing_is_lost() -> None:
    causes = {f"cause {number}": number / 1000 for number in range(1, 13)}
    page = page_of(run_of(report_of(), [{"step": n, "stall_causes": causes} for n in (10, 20)]))
    (figure,) = re.findall(r"(?s)<figure.*?</figure>", page)
    names = re.findall(r"<th>([^<]+)</th>", figure.split("<tbody>")[0])
    assert names == ["step", *(f"cause {number}" for number in range(12, 6, -1)), "the rest"]
    shares = [float(share) for share in re.findall(r"<td>([\d.]+)%</td>", figure)[:7]]
    assert sum(shares) == pytest.approx(100 * sum(causes.values()), abs=0.4)


@pytest.mark.parametrize(
    ("stall", "labels"),
    [
        (0.0001, ["0%", "0.2%", "0.4%", "0.6%", "0.8%", "1%"]),  # small values look small
        (0.3, ["0%", "10%", "20%", "30%"]),
    ],
)
def test_axis_of_stall_has_different_labels(stall: float, labels: list[str]) -> None:
    lines = [{"step": n, "stall_causes": {"data": stall}} for n in (10, 20)]
    page = page_of(run_of(report_of(), lines))
    assert re.findall(r'text-anchor="end">([^<]+)</text>', page) == labels


def box_on_a_phone(label: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a label of 22 pixels, as a browser draws it."""
    text, x, y = label.text or "", float(label.get("x", "0")), float(label.get("y", "0"))
    width = sum(21.0 if letter in "%M" else 12.7 for letter in text)
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[label.get("text-anchor", "start")] * width
    return left, y - 20, left + width, y + 5


@pytest.mark.slow
@example(ys=[[3.0], [1.0]], stacked=True, from_zero=False, is_share=False)
@example(ys=[[0.3], [0.1]], stacked=True, from_zero=True, is_share=True)
@given(
    ys=st.lists(st.lists(Values, min_size=1, max_size=20), min_size=1, max_size=7),
    stacked=st.booleans(),
    from_zero=st.booleans(),
    is_share=st.booleans(),
)
def test_drawing_lies_within_the_picture_and_labels_apart(
    ys: list[list[float]], stacked: bool, from_zero: bool, is_share: bool
) -> None:
    if stacked:
        ys = [[abs(value) for value in one[: min(map(len, ys))]] for one in ys]
    series = [Series(f"s{n}", list(range(len(one))), one) for n, one in enumerate(ys)]
    form = (lambda share: f"{100 * share:.3g}%") if is_share else compact
    plot = Plot("title", "reading", series, stacked=stacked, from_zero=from_zero, format=form)
    drawing = ElementTree.fromstring(f"<svg>{plot.drawing()}</svg>")
    for element in drawing.iter():
        for name, size in (("x", 720), ("y", 280), ("cx", 720), ("cy", 280)):
            assert -0.1 <= float(element.get(name, "0")) <= size + 0.1
    boxes = [box_on_a_phone(label) for label in drawing.iter("text")]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= 720
        assert 0 <= top < bottom <= 280
    for one, other in combinations(boxes, 2):
        is_beside = one[2] <= other[0] or other[2] <= one[0]
        assert is_beside or one[3] <= other[1] or other[3] <= one[1]
    for path in drawing.iter("path"):
        numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", path.get("d", ""))]
        assert all(-0.1 <= number <= 720.1 for number in numbers)


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


def test_a_page_is_written_of_what_a_killed_run_left(tmp_path: Path) -> None:
    lines = "".join(json.dumps(line) + "\n" for line in full_lines(3)) + '{"step": 40, "lo'
    folder = write_run(tmp_path / "run", report_of(), lines)
    Checked(write_page(folder).read_text())
    assert len(RunData.of_folder(folder).lines) == 3


def test_folder_without_a_report_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no report.json. Give the folder of a run"):
        write_page(tmp_path)
    damaged = ["{", "[]", '"x"', "[" * 10**5, '{"stall": {}}', json.dumps(report_of(stall={}))]
    damaged += [json.dumps(report_of(metrics={"test": "x"}))]
    damaged += [json.dumps(report_of(stall=stall_of(causes=[]))), json.dumps(report_of(remote=[]))]
    for number, text in enumerate(damaged):
        folder = write_run(tmp_path / str(number), text)
        with pytest.raises(ConfigError, match=r"report.json is damaged, or from another version"):
            write_page(folder)


ODD_LINES = [
    '{"step": 5, "stall_causes": []}',
    '{"step": 5, "stall_causes": "x"}',
    '{"step": 5, "stall_causes": {"data": null}}',
    '{"step": 5, "stall_causes": {"data": NaN}}',
    '{"step": 5, "loss": 1%s}' % ("0" * 400),
    '{"step": 5, "loss": -1e308}\n{"step": 6, "loss": 1e308}',
    '{"step": 5, "real_tokens_per_s": 5e-324}',
    '{"step": 5, "gpu_bytes": []}',
    '{"step": "x"}',
    "[" * 10**5,
    "\x00",
]


@pytest.mark.parametrize("line", ODD_LINES, ids=range(len(ODD_LINES)))
def test_damaged_metrics_line_is_left_out(line: str, tmp_path: Path) -> None:
    good = json.dumps(full_lines(1)[0]) + "\n"
    run = RunData.of_folder(write_run(tmp_path / "run", report_of(), f"{good}{line}\n"))
    Checked(page_of(run))
    assert run.lines[0].loss == 9.0


@given(
    st.sampled_from(["report.json", "metrics.jsonl", "config.yaml"]),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=3),
    st.booleans(),
)
def test_flipped_bits_never_give_a_traceback(name: str, places: list[int], is_run: bool) -> None:
    rank = {"rank": 0, "steps": 5, "seconds": 2.0, "causes": {"data": 0.5}, "fraction": 0.25}
    slow = {"rank": 0, "cause": "work", "step_seconds": 0.1, "cost": 0.2}
    sample = {"step": 9, "steps": 4, "seconds": 2.0, "tokens": 90, "causes": {"data": 0.5}}
    run = {"total": 9.0, "before": 2.0, "warmup": 1.0, "after": 1.0}
    stall = stall_of(ranks=[rank | {"waited_seconds": 0.1}], slowest_rank=slow)
    stall |= {"samples": [sample], "run": run}
    waits = dict.fromkeys(("p50", "p95", "p99", "max"), 0.1)
    store = dict.fromkeys(("requests", "bytes", "retries", "outage_s", "hits", "damaged"), 5)
    report = report_of(stall=stall, rows_by_length=[0, 3, 9], metrics={"test": {"accuracy": 0.5}})
    report["remote"] = store | {"wait_s": waits}
    report = report if is_run else {"stall": stall}
    with tempfile.TemporaryDirectory() as parent:
        lines = "".join(json.dumps(line | {"steps_per_s": 4.0}) + "\n" for line in full_lines(9))
        folder = write_run(Path(parent) / "run", report, lines)
        (folder / "config.yaml").write_text("seed: 7\nshards: x\nrun_dir: y\n" * is_run)
        content = bytearray((folder / name).read_bytes() or b" ")
        for place in places:
            content[place // 8 % len(content)] ^= 1 << place % 8
        (folder / name).write_bytes(content)
        try:
            run = RunData.of_folder(folder)
        except ConfigError:
            return
        assert run.summary()
        assert page_of(run)
        comparison = Comparison.of(write_run(Path(parent) / "other", report, lines), folder)
        assert comparison.summary()
        assert comparison.page()
        assert comparison.as_dict()


def test_report_command_needs_no_store_and_no_writable_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", report_of())
    (folder / "config.yaml").write_text("shards: http://127.0.0.1:9/x\n")
    (folder / "report.html").mkdir()  # root may write to a read-only folder, but not here
    ended = call(report_command.main, folder)
    assert ended.stdout.startswith("model    tiny")
    assert ended.stderr == f"warning: {folder}/report.html: not written: Is a directory\n"


def test_report_of_a_meter_has_a_page_and_is_read_again(tmp_path: Path) -> None:
    report = StallReport(**stall_of(causes={}))
    page = report.write(tmp_path / "loop")
    assert page == tmp_path / "loop" / "report.html"
    Checked(page.read_text())
    page.unlink()
    ended = call(report_command.main, tmp_path / "loop")
    assert ended.stdout == f"{report}\npage     {page}\n"
    assert json.loads(call(report_command.main, tmp_path / "loop", "--json").stdout)["steps"] == 195
    Checked(page.read_text())


def test_page_of_a_meter_plots_its_samples(tmp_path: Path) -> None:
    """200 steps of 0.1 s; from step 105 on, the data takes half of the time."""
    samples = [
        Sample(
            step=step,
            steps=step - 5,
            seconds=0.1 * (step - 5),
            tokens=50 * (step - 5),
            causes={"data": 0.05 * max(0, step - 105)},
        )
        for step in (55, 105, 155, 205)
    ]
    stall = StallReport(**stall_of(causes={}, samples=samples))
    page = stall.write(tmp_path).read_text()
    Checked(page)
    figures = re.findall(r"(?s)<figure.*?</figure>", page)
    assert [re.findall("<h3>(.*?)</h3>", figure)[0] for figure in figures] == [
        "Stall by cause",
        "Seconds a step",
        "Real tokens a second",
    ]
    cells = [re.findall(r"<tr><th>(\d+)</th><td>(.*?)</td>", figure) for figure in figures]
    steps = ["55", "105", "155", "205"]
    assert cells[0] == list(zip(steps, ["0%", "0%", "50%", "50%"], strict=True))
    assert cells[1] == [(step, "0.1") for step in steps]
    assert cells[2] == [(step, "500") for step in steps]
    assert page_of(RunData.of_folder(tmp_path)) == page


def test_page_begins_with_verdict_reason_and_next_step() -> None:
    verdict = {"verdict": "WAITS FOR DATA", "reason": "batches < 5", "next_step": "raise `--x`"}
    page = page_of(run_of(report_of(stall=stall_of(**verdict)), full_lines()))
    Checked(page)
    shown = page.split("</h1>")[1]
    places = [shown.index(part) for part in ("WAITS FOR DATA", "Batches &lt; 5.", "class=cards")]
    assert places == sorted(places)
    assert "Next: raise <code>--x</code>." in shown
