"""Documentation uses plain English: CONTRIBUTING.md, "Prose"."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

PAGES = ("docs", "recipes", "CONTRIBUTING.md", "README.md", "CHANGELOG.md")
"""Markdown to check: files and folders."""
CODE: tuple[str, ...] = (
    "integrations",
    "pipeline",
    "src/tokenfeed/__init__.py",
    "tools",
    "trainer/checkpoints",
    "trainer/config",
    "trainer/data",
    "trainer/distributed",
    "trainer/loop",
    "trainer/models",
    "trainer/optim",
    "trainer/report",
    "trainer/stall",
    "trainer/tasks",
    "trainer/watch",
)
"""Folders whose docstrings, comments and messages are checked, such as "pipeline"."""
FORBIDDEN = {
    r"\b(?:is|are|was|were|be) (?:told|hired)\b": "logs, returns, stores",
    r"\b(?:is|are) none\b": "None if missing, empty",
    r"\b(?:is|are) no (?:setting|option)\b": "unknown setting, unknown option",
    r"\bthat there (?:is|are) not\b": "unknown",
    r"\bin the (?:mean|median)\b": "on average; the median is",
    r"\bwhoever\b": "name the subject",
    r"\bis said (?:of|to be)\b": "name the subject",
    r"\bwhat is not said\b": "options you leave out",
    r"(?:^|[.:;] )(?:Of what|Those of|Those that|So long|By which|For who)\b": "subject first",
    r"\bfor who\b": "for users who; needs",
    r"\bof two that\b": "name the two",
    r"\bhangs on\b": "depends on",
}
FENCE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`|<!--.*?-->", re.MULTILINE | re.DOTALL)


def prose_of(path: Path) -> str:
    """Return the prose of a file: Markdown without code, or the strings and comments of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return FENCE.sub(lambda code: "\n" * code[0].count("\n"), text)
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    comments = re.findall(r"(?:^|\s)# (.*)", text)
    return "\n".join([*strings, *comments])


def found_in(text: str) -> list[str]:
    """Return the forbidden phrases in a text, each with advice."""
    joined = re.sub(r"[ \t]*\n[ \t]*(?=\S)", " ", text)
    return [
        f"{match[0].strip()!r}: {advice}"
        for pattern, advice in FORBIDDEN.items()
        for match in re.finditer(pattern, joined, re.IGNORECASE)
    ]


def files() -> Iterator[Path]:
    for name in (*PAGES, *CODE):
        path = ROOT / name
        suffix = "*.py" if name in CODE else "*.md"
        found = [path] if path.is_file() else sorted(path.rglob(suffix))
        yield from found


def test_prose_has_no_forbidden_phrase() -> None:
    found = {path.relative_to(ROOT).as_posix(): found_in(prose_of(path)) for path in files()}
    assert len(found) > 200
    assert {name: phrases for name, phrases in found.items() if phrases} == {}


@pytest.mark.parametrize(
    "sentence",
    [
        "A pattern that finds nothing is refused, and the nearest names are told.",
        "Lines have 13 tokens in the mean.",
        "A checkpoint that is half written is none.",
        "A name that there is not is refused.",
        "Whoever\nencodes the units.",
        "Done. Those of a run, in their order.",
    ],
)
def test_forbidden_phrase_is_found(sentence: str) -> None:
    assert found_in(sentence)
