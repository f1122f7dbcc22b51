"""The folders map to one import name, layers point one way, and light things stay light."""

import ast
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from places import ROOT

import tokenfeed
from tokenfeed.pipeline.format.manifest import FileInfo
from tokenfeed.pipeline.planning.policies import Padded

LAYERS = ["pipeline", "trainer", "integrations", "tools"]
"""Lowest first: a folder may import itself and those before it."""
SCRIPTS = ["pretokenize", "train", "shards"]


def run_python(code: str, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


def test_no_generic_name_is_importable_from_elsewhere(tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([n for n in {LAYERS} if u.find_spec(n)])"
    assert run_python(code, tmp_path).strip() == "[]"


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
    "pipeline": ["format", "planning", "windows", "feeding"],
    "tools": ["corpus", "encoding", "run", "pretokenizing", "shuffling"],
}
"""Lowest first: a room may import itself and those before it."""
READING = {"pyarrow", "torch", "io", "mmap", "tokenfeed.pipeline.format.shard"}
"""What a pure room does without."""


@pytest.mark.parametrize(
    ("layer", "room"), [(layer, room) for layer, rooms in ROOMS.items() for room in rooms]
)
def test_imports_inside_a_layer_point_one_way(layer: str, room: str) -> None:
    later = ROOMS[layer][ROOMS[layer].index(room) + 1 :]
    for path in (ROOT / layer / room).glob("*.py"):
        for name in later:
            assert f"tokenfeed.{layer}.{name}" not in path.read_text(), path


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


@pytest.mark.parametrize("room", ["format", "planning", "windows"])
def test_what_plans_and_reads_is_free_of_torch(room: str, tmp_path: Path) -> None:
    modules = [path.stem for path in (ROOT / "pipeline" / room).glob("[a-z]*.py")]
    imports = ", ".join(f"tokenfeed.pipeline.{room}.{module}" for module in modules)
    code = f"import sys, {imports}; print('torch' in sys.modules)"
    assert run_python(code, tmp_path).strip() == "False"


def test_a_worker_is_free_of_torch(tmp_path: Path) -> None:
    code = "import sys, tokenfeed.pipeline.feeding.worker; print('torch' in sys.modules)"
    assert run_python(code, tmp_path).strip() == "False"


def test_pretokenize_starts_without_torch(tmp_path: Path) -> None:
    code = "import sys, tokenfeed.tools.pretokenize; print('torch' in sys.modules)"
    assert run_python(code, tmp_path).strip() == "False"


def test_the_loader_needs_neither_tokenizers_nor_datasets(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['tokenizers'] = sys.modules['datasets'] = None;"
    run_python(f"{blocked} from tokenfeed import *", tmp_path)


def test_all_names_of_the_front_door_can_be_had() -> None:
    for name in tokenfeed.__all__:
        assert getattr(tokenfeed, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tokenfeed.nothing  # noqa: B018


def test_the_front_door_is_free_of_torch(tmp_path: Path) -> None:
    code = "import sys, tokenfeed; tokenfeed.Padded; print('torch' in sys.modules)"
    assert run_python(code, tmp_path).strip() == "False"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_explains_itself_on_one_screen(script: str, tmp_path: Path) -> None:
    command = Path(sys.executable).with_name(script)
    width = {**os.environ, "COLUMNS": "120"}
    shown = subprocess.run(
        [command, "--help"], cwd=tmp_path, env=width, check=True, capture_output=True, text=True
    ).stdout
    assert "usage" in shown.lower()
    assert len(shown.splitlines()) <= 60


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_processes_unpickle_our_classes(method: str) -> None:
    values = [Padded(max_tokens=5), FileInfo(file="a", bytes=1, xxh3="0")]
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        assert list(pool.map(repr, values)) == [repr(value) for value in values]
