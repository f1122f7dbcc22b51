"""The mission guards itself: docs/mission.md and these tests name the same 40 rows."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/mission.md"
ROW = re.compile(r"^\| (m\d\d) \| (.+?) \| (.+?) \| \[[^]]+\]\(([^)]+)\) \|$", re.MULTILINE)


def test_every_row_of_the_mission_has_its_tests_and_every_test_its_row() -> None:
    rows = {number: page for number, _, _, page in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    tests = {
        node.name.split("_")[1]
        for path in HERE.glob("test_?_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and re.match(r"test_m\d\d_", node.name)
    }
    assert sorted(rows) == [f"m{number:02}" for number in range(1, 41)]
    assert sorted(tests) == sorted(rows)
    assert all((PAGE.parent / page).exists() for page in rows.values())
