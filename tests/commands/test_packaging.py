"""The folders map to one import name, layers point one way, and light things stay light."""

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from support import ROOT
from support.hub_models import write_shards

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


def test_shards_starts_without_what_reads_a_corpus(tmp_path: Path) -> None:
    loaded = "[name for name in sys.modules if name.startswith('tokenfeed.tools.corpus.formats')]"
    code = f"import sys, tokenfeed.tools.data_sets.command; print({loaded})"
    assert run_python(code, tmp_path).strip() == "[]"


def test_the_loader_needs_neither_tokenizers_nor_datasets(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['tokenizers'] = sys.modules['datasets'] = None;"
    run_python(f"{blocked} from tokenfeed import *", tmp_path)


def test_the_front_door_is_free_of_torch(tmp_path: Path) -> None:
    code = "import sys, tokenfeed; tokenfeed.Padded; print('torch' in sys.modules)"
    assert run_python(code, tmp_path).strip() == "False"


def test_numpy_loader_imports_no_torch(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", "lm")
    code = """if True:
        import sys
        from tokenfeed import Packed, ShardLoader
        for workers in (0, 1):
            with ShardLoader("shards", batching=Packed(32, 2), device="numpy",
                             num_workers=workers) as loader:
                batch = next(iter(loader))
                values = [*batch.values(), batch.targets, batch.cu_seqlens]
                state = loader.state_dict()
                loader.load_state_dict(state)
                print(type(values[0]).__name__, loader.device, 'torch' in sys.modules)
    """
    assert run_python(code, tmp_path).split() == ["ndarray", "numpy", "False"] * 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_explains_itself_on_a_page(script: str, tmp_path: Path) -> None:
    command = Path(sys.executable).with_name(script)
    width = {**os.environ, "COLUMNS": "120"}
    shown = subprocess.run(
        [command, "--help"], cwd=tmp_path, env=width, check=True, capture_output=True, text=True
    ).stdout
    assert "usage" in shown.lower()
    assert len(shown.splitlines()) <= (120 if script == "train" else 80)  # in framed groups


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_processes_unpickle_our_classes(method: str) -> None:
    values = [Padded(max_tokens=5), FileInfo(file="a", bytes=1, xxh3="0")]
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        assert list(pool.map(repr, values)) == [repr(value) for value in values]
