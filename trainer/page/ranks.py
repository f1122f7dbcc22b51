"""The stall of each rank, as a table."""

from html import escape

from tokenfeed.trainer.stall.ranks import RankStall
from tokenfeed.trainer.stall.report import StallReport
from tokenfeed.trainer.stall.table import late_rank, main_of, slowest_line

__all__ = ["rank_table"]


def rank_table(report: StallReport) -> str:
    """A row for each rank; empty for a single process."""
    ranks = [each for each in report.ranks if each.steps]
    if not ranks:
        return ""
    late = late_rank(report)
    rows = "".join(_row(each, late is not None and each.rank == late.rank) for each in ranks)
    return (
        f"<h3>Ranks</h3><p>{escape(_sentence(slowest_line(report)))} A rank that finishes a step "
        "early waits for the last one; this wait is its <code>communication</code>.</p>"
        '<div class=scroll tabindex="0"><table><thead><tr><th>rank</th><th>stall</th>'
        "<th>communication</th><th>waited for others</th><th class=text>most of its own</th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div>"
    )


def _row(rank: RankStall, is_late: bool) -> str:
    name = f"{rank.rank} (late)" if is_late else str(rank.rank)
    communication = rank.causes.get("communication", 0.0)
    return (
        f"<tr><th>{name}</th><td>{rank.fraction:.2%}</td><td>{communication:,.2f} s</td>"
        f"<td>{rank.waited_seconds:,.2f} s</td><td class=text>{escape(main_of(rank))}</td></tr>"
    )


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:]}."
