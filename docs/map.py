"""Print the map of the code: each file with the first line of its docstring, room by room."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/tokenfeed", "pipeline", "integrations", "trainer", "tools")


def code_map() -> str:
    """Return the map as Markdown: a section per folder, a table per room."""
    sections = ["# Where things are", ""]
    for folder in FOLDERS:
        rooms = sorted({path.parent for path in (ROOT / folder).rglob("*.py")})
        for room in rooms:
            sections += [f"## {room.relative_to(ROOT)}/", ""]
            if about := _first_line(room / "__init__.py"):
                sections += [about, ""]
            files = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
            if files:
                sections += ["| file | what it is for |", "|---|---|"]
                sections += [f"| `{path.name}` | {_first_line(path)} |" for path in files]
                sections.append("")
    return "\n".join(sections)


def _first_line(path: Path) -> str:
    """Return the first paragraph of a file's docstring on one line; empty if it has none."""
    if not path.is_file():
        return ""
    about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(about.partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    print(code_map())
