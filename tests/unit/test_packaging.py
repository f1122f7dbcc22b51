"""The folders map to one import name, layers point one way, and light things stay light."""

import ast
import sys
from pathlib import Path

import pytest
from support import ROOT

import tokenfeed

LAYERS = ["pipeline", "trainer", "integrations", "tools"]
"""Lowest first: a folder may import itself and those before it."""


def test_no_room_is_imported_under_a_second_name() -> None:
    assert not set(LAYERS) & set(sys.modules)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer: str) -> None:
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    for path in (ROOT / layer).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "tokenfeed" and len(parts) > 1:
                    assert parts[1] in allowed, f"{path.name} imports {name}"


ROOMS = {
    "pipeline": ["remote", "format", "planning", "caching", "windows", "feeding"],
    "trainer": [
        *("config", "stall", "watch", "distributed", "checkpoints", "data", "tasks", "models"),
        *("optim", "report", "loop"),
    ],
    "tools": [
        *("shell", "corpus", "encoding", "jobs", "data_sets", "pretokenizing"),
    ],
}
"""Lowest first: a room may import itself and the rooms before it."""


READING = {"pyarrow", "torch", "io", "mmap", "tokenfeed.pipeline.format.shard"}
"""What a pure room does without."""


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports, at its top and in functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


@pytest.mark.parametrize(
    ("layer", "room"), [(layer, room) for layer, rooms in ROOMS.items() for room in rooms]
)
def test_rooms_import_only_rooms_below_them(layer: str, room: str) -> None:
    rooms = {path.parent.name for path in (ROOT / layer).glob("*/__init__.py")}
    above = rooms - {*ROOMS[layer][: ROOMS[layer].index(room) + 1]}
    assert room in rooms
    for path in (ROOT / layer / room).rglob("*.py"):
        used = {
            name.split(".")[2]
            for name in imports_of(path)
            if name.startswith(f"tokenfeed.{layer}.")
        }
        assert not used & above, path


def test_every_room_has_a_place_in_the_order() -> None:
    for layer, rooms in ROOMS.items():
        assert {path.parent.name for path in (ROOT / layer).glob("*/__init__.py")} == {*rooms}


def test_what_plans_opens_no_file() -> None:
    for path in (ROOT / "pipeline" / "planning").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not READING & set(names), path
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                assert called not in {"open", "open_splits", "open_store"}, path
                assert not called.startswith("read"), path


EXTRAS = {"obstore", "boto3", "botocore", "huggingface_hub", "ray", "distributed"}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_package_that_may_be_missing_is_imported_where_it_is_used(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & EXTRAS, path


def test_contributing_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for layer in LAYERS:
        assert f"{layer}/" in text
        for path in (ROOT / layer).glob("*/__init__.py"):
            assert f"`{path.parent.name}`" in text, path


def test_all_names_of_the_front_door_can_be_had() -> None:
    for name in tokenfeed.__all__:
        assert getattr(tokenfeed, name).__doc__
    assert {*tokenfeed.__all__, "pretokenize"} <= {*dir(tokenfeed)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tokenfeed.nothing  # noqa: B018


def test_type_checkers_and_python_have_the_same_front_door() -> None:
    source = ast.parse((ROOT / "src/tokenfeed/__init__.py").read_text())
    branches = [node for node in source.body if isinstance(node, ast.If)]
    (typed,) = [node for node in branches if ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in ast.walk(typed) if isinstance(node, ast.ImportFrom)]
    told = {alias.name: str(node.module) for node in imports for alias in node.names}
    for name, module in told.items():
        assert getattr(tokenfeed, name).__module__ == module
    light = {name for name, module in told.items() if ".tools." not in module}
    assert {*light, "__version__"} == {*tokenfeed.__all__}, "an import of * needs no tokenizers"
