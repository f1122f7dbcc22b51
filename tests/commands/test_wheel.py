"""What `pip install` gives: all modules, and the main job with nothing there but what is declared.

The environment is empty but for links to the installed files of what the wheel asks for, as far as
that asks for more: an import that is not declared fails, and nothing is downloaded.
"""

import os
import runpy
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from shutil import copy2, copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from support import ROOT

LAYERS = ["pipeline", "trainer", "integrations", "tools"]
BUILT_FROM = ["pyproject.toml", "README.md", "LICENSE", "src", *LAYERS]
NO_RUBBISH = ignore_patterns("__pycache__", "*.egg-info")
JOB = """
import sys
import tokenfeed
from tokenfeed import Padded, ShardLoader

with ShardLoader("out", batching=Padded(512)) as loader:
    batch = next(iter(loader))
print(tokenfeed.__file__, tokenfeed.__version__, batch["input_ids"].numel() > 0)
from tokenfeed.tools.train import main
words = "--shards out --run-dir run --sequence-length 32 --micro-batch-tokens 64 --step-tokens 64"
sys.argv = ["train", *words.split(), "--eval-tokens", "64", "--steps", "2"]
main()
"""
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""

pytestmark = pytest.mark.slow


def user_environ() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return kept | {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Archives:
    """What an upload consists of."""

    sdist: Path
    wheel: Path


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in a folder of its own."""

    folder: Path

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def run(self, command: str, *arguments: str) -> str:
        """Run one of its commands beside it, as a user would who never saw the repository."""
        return subprocess.run(
            [self.folder / "bin" / command, *arguments],
            cwd=self.folder,
            env=user_environ(),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def link(self, installed: Distribution) -> None:
        """Give it the files of a distribution that is installed here."""
        tops = {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (self.packages / top).exists():  # a namespace, as `nvidia`, has several owners
                (self.packages / top).symlink_to(str(installed.locate_file(top)))


def modules_of(names: Iterator[str]) -> set[str]:
    """The files of the package, by their place in it."""
    within = (name.partition("tokenfeed/") for name in names if not name.endswith("/"))
    return {place for before, found, place in within if found and before in ("", "src/")}


def asked_by(installed: Distribution, extras: set[str]) -> Iterator[Requirement]:
    """What a distribution needs here to be of use with some extras."""
    for line in installed.requires or ():
        asked = Requirement(line)
        if not asked.marker or any(asked.marker.evaluate({"extra": e}) for e in extras | {""}):
            yield asked


def link_declared(to: Environment, asking: Distribution) -> None:
    """Link what a distribution asks for, and what that asks for."""
    seen: set[str] = set()
    waiting = list(asked_by(asking, set()))
    while waiting:
        asked = waiting.pop()
        if str(asked) not in seen:
            seen.add(str(asked))
            installed = distribution(asked.name)
            to.link(installed)
            waiting += asked_by(installed, asked.extras)


def pip_on(environment: Environment, *arguments: str) -> None:
    """Run pip upon an environment that has none."""
    pip = [sys.executable, "-m", "pip", "--python", environment.folder / "bin" / "python"]
    subprocess.run([*pip, *arguments], env=user_environ(), check=True)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in BUILT_FROM:
        copy = copy2 if (ROOT / name).is_file() else copytree
        options = {} if copy is copy2 else {"symlinks": True, "ignore": NO_RUBBISH}
        copy(ROOT / name, source / name, **options)
    build = [sys.executable, "-c", BUILD, dist]  # needs no network
    subprocess.run(build, cwd=source, stdout=subprocess.DEVNULL, check=True)
    return Archives(next(dist.glob("*.tar.gz")), next(dist.glob("*.whl")))


@pytest.fixture(scope="module")
def environment(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("user"))
    venv.create(made.folder)
    pip_on(made, "install", "--quiet", "--no-deps", "--no-index", str(archives.wheel))
    (wheel,) = distributions(path=[str(made.packages)])
    link_declared(made, wheel)
    pip_on(made, "check")
    return made


def test_both_archives_hold_every_module(archives: Archives) -> None:
    modules = (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
    data = {"py.typed", "trainer/stall/style.css"}
    for pattern in ("trainer/stall/*.html", "trainer/presets/*.yaml"):
        data |= {f"{path.relative_to(ROOT)}" for path in ROOT.glob(pattern)}
    kept = {"__init__.py", "__main__.py", *data, *(f"{path.relative_to(ROOT)}" for path in modules)}
    with tarfile.open(archives.sdist) as sdist:
        files = (member.name for member in sdist if member.isfile())
        assert modules_of(name.partition("/")[2] for name in files) == kept
        tops = {member.name.split("/")[1] for member in sdist if "/" in member.name}
    assert tops <= {*BUILT_FROM, "PKG-INFO", "setup.cfg"}, "neither tests nor results"
    with zipfile.ZipFile(archives.wheel) as wheel:
        assert modules_of(iter(wheel.namelist())) == kept


def test_sdists_of_one_commit_have_the_same_bytes(tmp_path: Path) -> None:
    set_times = runpy.run_path(str(ROOT / ".ci/package.py"))["set_times"]
    paths = tmp_path / "sooner.tar.gz", tmp_path / "later.tar.gz"
    for path, names in zip(paths, ("ab", "ba"), strict=True):
        with tarfile.open(path, "w:gz") as sdist:
            for name in names:
                (tmp_path / name).write_text(name)
                os.utime(tmp_path / name, (len(str(path)), len(str(path))))
                sdist.add(tmp_path / name, f"tokenfeed-1/{name}")
        set_times(path, 10**9)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_main_job_runs_from_the_wheel_alone(environment: Environment) -> None:
    lines = [f"{number} tokens are fed to step {number % 7}." for number in range(2000)]
    (environment.folder / "text.txt").write_text("\n\n".join(lines))
    environment.run("pretokenize", "text.txt", "out", "--vocab-size", "300")
    assert {"train", "report", "shards", "tokenfeed"} <= {
        path.name for path in (environment.folder / "bin").iterdir()
    }
    place, version, filled = environment.run("python", "-c", JOB).splitlines()[0].split()
    assert Path(place).is_relative_to(environment.packages)
    assert (version, filled) == (distribution("tokenfeed").version, "True")
    assert (environment.folder / "run" / "metrics.jsonl").exists()
