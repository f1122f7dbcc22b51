"""The folders map to one import name, layers point one way, and light things stay light."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support import ROOT, warm
from support.commands import call
from support.training import make_config, run

from tokenfeed.tools import pretokenize, shards, train

LAYERS = ["pipeline", "trainer", "integrations", "tools"]
"""Lowest first: a folder may import itself and those before it."""


def run_python(code: str, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


def test_no_generic_name_is_importable_from_elsewhere(tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([n for n in {LAYERS} if u.find_spec(n)])"
    assert run_python(code, tmp_path).strip() == "[]"


IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
    if name.endswith("tools.shards"):  # which reads no corpus
        from tokenfeed.tools.shell.command_line import subcommand
        list(map(subcommand, sys.modules[name].SUBCOMMANDS.values()))
        assert "torch" not in sys.modules, name
        assert not [each for each in sys.modules if "tools.corpus.formats" in each]
"""


def test_planning_reading_workers_and_commands_import_no_torch() -> None:
    light = ["shards", "pretokenize"]
    modules = ["tokenfeed", *(f"tokenfeed.tools.{name}" for name in light)]
    modules.append("tokenfeed.pipeline.feeding.worker")
    for room in ("format", "planning", "windows"):
        files = (ROOT / "pipeline" / room).glob("[a-z]*.py")
        modules += [f"tokenfeed.pipeline.{room}.{path.stem}" for path in files]
    subprocess.run([sys.executable, "-c", IMPORT_EACH, *modules], check=True)


RUN_COMMAND = """
import sys
from importlib import import_module
sys.argv = sys.argv[1:]
try: import_module(f"tokenfeed.tools.{sys.argv[0]}").main()
finally: assert not {"torch", "datasets"} & sys.modules.keys()
"""


@pytest.fixture(scope="module")
def run_dir(lm_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("run")
    run(make_config(lm_rows, folder, steps=1))
    return folder


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("pretokenize --help", 0, ("CORPUS... OUT", "--tokenizer", "--help-all")),
        ("pretokenize --help-all", 0, ("Default: 32768.", "--json")),
        ("train --help", 0, ("--preset", "--help-all")),
        ("train --help-all", 0, ("--micro-batch-tokens",)),
        ("train --shards nowhere", 1, ()),
        ("report .", 0, ("trained",)),
    ],
)
def test_commands_that_train_nothing_import_no_torch(
    words: str, code: int, said: tuple[str, ...], run_dir: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", RUN_COMMAND, *words.split()],
        cwd=run_dir,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stderr
    assert all(each in result.stdout for each in said)
    errors = result.stderr.splitlines()
    assert not code or (len(errors) == 1 and errors[0].startswith("error: ") and not result.stdout)


WITHOUT_TOKENIZERS = """
import sys
from support import warm
for package in ("tokenfeed", "tokenizers", "datasets"):
    warm.forget(package)
sys.modules["tokenizers"] = sys.modules["datasets"] = None
from tokenfeed import *
"""


def test_the_loader_needs_neither_tokenizers_nor_datasets() -> None:
    done = warm.run(["-c", WITHOUT_TOKENIZERS])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [pretokenize, train, shards])
def test_every_command_explains_itself_on_a_page(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = call(command.main, "--help").stdout
    assert "usage" in shown.lower()
    assert len(shown.splitlines()) <= 50
