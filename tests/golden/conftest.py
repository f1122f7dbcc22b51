"""Golden values: what a version does to the last bit, kept in one JSON for each test file.

    python -m pytest tests/golden -n 0 --update-golden    rewrites values, says what changed

Each change of a value needs its reason in CHANGELOG.md.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the golden values of the tests that run, and print what changed",
    )


class Golden:
    """The values of a test file, by case."""

    def __init__(self, path: Path, *, is_updated: bool) -> None:
        self.path, self.is_updated = path, is_updated
        self.kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.made: dict[str, Any] = {}

    def expected(self, case: str, made: Any) -> Any:
        """The value of a case; with --update-golden the one that was just made."""
        if self.is_updated:
            self.made[case] = made
        return made if self.is_updated else self.kept[case]

    def write(self, cases: list[str]) -> Iterator[str]:
        """Rewrite the file with the values of these cases, and say what changed."""
        new = {case: value for case, value in (self.kept | self.made).items() if case in cases}
        for case in sorted(self.kept.keys() | new.keys()):
            if self.kept.get(case) != new.get(case):
                yield f"{self.path.name} {case}: {self.kept.get(case)} -> {new.get(case)}"
        lines = [f"{json.dumps(case)}: {json.dumps(new[case])}" for case in sorted(new)]
        self.path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    """The values of a test file, `test_NAME.py`, in `NAME.json`. `CASES` of the file names them."""
    path = Path(request.path).with_name(f"{request.path.stem.removeprefix('test_')}.json")
    values = Golden(path, is_updated=request.config.getoption("--update-golden", default=False))
    cases = [*request.module.CASES]
    if values.is_updated:
        yield values
        reporter = request.config.pluginmanager.getplugin("terminalreporter")
        assert reporter, "--update-golden needs `-n 0`"
        for line in values.write(cases):
            reporter.write_line(line)
        return
    assert {*values.kept} == {*cases}, "cases and values differ: see --update-golden"
    yield values
