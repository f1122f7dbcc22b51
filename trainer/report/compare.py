"""Two runs, or two loops with a meter, side by side: as lines of text, as a page, for programs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokenfeed.trainer.report.page import RunData, plots_of
from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.stall_page import page_templates, save_page
from tokenfeed.trainer.stall.stall_report import Interval

COMPARISON_FILE = "compare.html"
_MOST_CAUSES, _MOST_SETTINGS = 4, 3
_LEAST_CAUSE = 0.005
"""A cause gets a row if it takes this share of the time of one of the runs."""
_OWN = ("run_dir", "config")
"""Settings that differ between any two runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A figure of both runs."""

    name: str
    a: float | None
    b: float | None
    """None if unknown."""
    a_interval: Interval | None = None
    b_interval: Interval | None = None
    """95 % intervals, as far as they are known."""
    is_share: bool = False

    @property
    def is_same(self) -> bool:
        """Whether each figure lies within the interval of the other one."""
        if None in (self.a, self.b, self.a_interval, self.b_interval):
            return False
        return _holds(self.b_interval, self.a) and _holds(self.a_interval, self.b)

    @property
    def cells(self) -> tuple[str, str, str]:
        """The figure of each run, and the difference, in words."""
        return self._text(self.a, self.a_interval), self._text(self.b, self.b_interval), self._more

    def _text(self, value: float | None, interval: Interval | None) -> str:
        if value is None:
            return "not measured"
        form: Callable[[float], str] = "{:.2%}".format if self.is_share else _digits
        ends = [form(end) for end in interval or ()]
        return form(value) + (f" [{', '.join(ends)}]" if len({*ends}) > 1 else "")

    @property
    def _more(self) -> str:
        if self.a is None or self.b is None:
            return ""
        if self.a == self.b:
            return "none"
        if self.is_same:
            return "none: within both intervals"
        if self.is_share:
            points = 100 * abs(self.b - self.a)
            return f"{points:.2f} points {'more' if self.b > self.a else 'less'}"
        if not self.a:
            return ""
        return f"{abs(self.b / self.a - 1):.1%} {'more' if self.b > self.a else 'less'}"


def _holds(interval: Interval | None, value: float | None) -> bool:
    return interval is not None and value is not None and interval[0] <= value <= interval[1]


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two runs."""

    a: RunData
    b: RunData
    rows: list[Row]
    settings: dict[str, tuple[Any, Any]]
    """Settings that differ, with the value of each run; None if a run does not have the setting.
    If a run recorded no settings, only what its report records is compared, such as the device."""
    unrecorded: list[str]
    """Which of the runs "a" and "b" recorded no settings. Loops with only a meter record none."""

    @classmethod
    def of(cls, a: Path, b: Path) -> "Comparison":
        """Compare the runs, or the reports of meters, in two folders.

        Raises:
            ConfigError: A folder holds no report.
        """
        runs = RunData.of_folder(a), RunData.of_folder(b)
        return cls(
            a=runs[0],
            b=runs[1],
            rows=[*_rows(*runs)],
            settings=_changed(*runs),
            unrecorded=[name for name, run in zip("ab", runs, strict=True) if not run.config],
        )

    @property
    def names(self) -> tuple[str, str]:
        """The folders' names; their paths if the names are equal."""
        a, b = self.a.folder, self.b.folder
        return (a.name, b.name) if a.name != b.name else (str(a), str(b))

    @property
    def not_recorded(self) -> str:
        """Which of the runs recorded no settings, in words; empty if both did."""
        if len(self.unrecorded) == 1:
            return f"not recorded in {self.names['ab'.index(self.unrecorded[0])]}"
        return "not recorded" * bool(self.unrecorded)

    def summary(self) -> str:
        """The comparison in at most 14 lines."""
        table: list[tuple[str, ...]] = [
            ("", *self.names),
            ("verdict", self.a.stall.verdict, self.b.stall.verdict),
            *((row.name, *row.cells) for row in self.rows),
        ]
        count = len(self.settings)
        more = ". The page has all of them" if count > _MOST_SETTINGS else ""
        differ = f"{count or 'none'} differ{'s' * (count < 2)}{more}"
        table.append(("settings", self.not_recorded or differ))
        table += [(f"  {name}", *map(_shown, pair)) for name, pair in self.settings.items()]
        table = table[: len(table) - max(0, count - _MOST_SETTINGS)]
        widths = [max(len(row[at]) for row in table if len(row) > 2) for at in range(3)]
        return "\n".join(
            "  ".join(
                f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=False)
            ).rstrip()
            for row in table
        )

    def as_dict(self) -> dict[str, Any]:
        """The comparison for programs."""
        sides = {
            name: {
                "folder": str(run.folder),
                **{key: getattr(run.stall, key) for key in ("verdict", "reason", "next_step")},
            }
            for name, run in (("a", self.a), ("b", self.b))
        }
        rows = [dataclasses.asdict(row) | {"is_same": row.is_same} for row in self.rows]
        recorded = {name: name not in self.unrecorded for name in sides}
        settings = self.settings or (None if self.unrecorded else {})
        return sides | {"rows": rows, "settings": settings, "settings_recorded": recorded}

    def write(self) -> Path:
        """Write compare.html into the second folder, atomically, and return its path."""
        return save_page(self.b.folder, self.page(), COMPARISON_FILE)

    def page(self) -> str:
        """The comparison as a page."""
        plots = zip(self.names, (plots_of(run)[0] for run in (self.a, self.b)), strict=True)
        return (
            page_templates()
            .get_template("compare.html")
            .render(
                a=self.a,
                b=self.b,
                rows=self.rows,
                settings={name: map(_shown, pair) for name, pair in self.settings.items()},
                not_recorded=self.not_recorded,
                names=self.names,
                plots=[(name, plot) for name, plot in plots if plot.series],
            )
        )


def _rows(a: RunData, b: RunData) -> Iterator[Row]:
    first, second = a.stall, b.stall
    yield Row(
        name="stall",
        a=first.stall,
        b=second.stall,
        a_interval=first.interval,
        b_interval=second.interval,
        is_share=True,
    )
    size: dict[Cause, float] = {
        cause: max(one.causes[cause].fraction for one in (first, second))
        for cause in first.causes.keys() & second.causes.keys()
    }
    shown: list[Cause] = [cause for cause in size if size[cause] >= _LEAST_CAUSE]
    shown.sort(key=lambda cause: (-size[cause], cause))
    for cause in shown[:_MOST_CAUSES]:
        yield Row(
            name=f"  {cause}",
            a=None if first.stall is None else first.causes[cause].fraction,
            b=None if second.stall is None else second.causes[cause].fraction,
            a_interval=first.causes[cause].interval,
            b_interval=second.causes[cause].interval,
            is_share=True,
        )
    yield Row(
        name="ms a step",
        a=_milliseconds(first.step_seconds),
        b=_milliseconds(second.step_seconds),
    )
    speeds, name = (first.all_tokens_per_s, second.all_tokens_per_s), "real tokens/s"
    if None in speeds and first.of_rank + second.of_rank:  # the sum over the ranks is not known
        speeds, name = (first.real_tokens_per_s, second.real_tokens_per_s), "real tokens/s a rank"
    yield Row(name=name, a=speeds[0], b=speeds[1])
    if first.padding is not None or second.padding is not None:
        yield Row(name="padding", a=first.padding, b=second.padding, is_share=True)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _changed(a: RunData, b: RunData) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, among those that both runs recorded."""
    first, second = _settings(a), _settings(b)
    both = first | second if a.config and b.config else first.keys() & second.keys()
    names = [name for name in first | second if name in both and name not in _OWN]
    return {
        name: (first.get(name), second.get(name))
        for name in names
        if first.get(name) != second.get(name)
    }


def _settings(run: RunData) -> dict[str, Any]:
    """Return the settings of a run by name, and what else its speed depends on."""
    found: dict[str, Any] = {}
    with contextlib.suppress(yaml.YAMLError):  # a damaged file
        _flatten(yaml.safe_load(run.config), "", found)
    found |= {"device": run.stall.device, "ranks": run.stall.world_size}
    return found | {f"{name} version": text for name, text in _versions(run).items()}


def _versions(run: RunData) -> dict[str, str]:
    return {} if run.report is None else run.report.versions


def _flatten(value: Any, name: str, into: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _flatten(part, f"{name}.{key}" if name else str(key), into)
    elif name:
        into[name] = value


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
