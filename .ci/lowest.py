"""Print the lowest versions that pyproject.toml allows, and the torch of constraints.txt."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Print them as pip takes them with `-c`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for asked in map(Requirement, project["dependencies"]):
        bounds = [each.version for each in asked.specifier if each.operator == ">="]
        if asked.name != "torch":  # each is gigabytes
            print(f"{asked.name}=={bounds[0]}")
    print(next(line for line in (ROOT / "constraints.txt").open() if line.startswith("torch==")))


if __name__ == "__main__":
    main()
