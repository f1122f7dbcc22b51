"""Every command and code block of the README and of docs/ runs as it stands there.

The blocks of a page become one script, in order, as a reader would paste them: Python as it is,
shell commands by bash, and a block with a title is the file of that name. The script runs in a
folder with a small corpus; where a page does not make `out/` itself, it is there too.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from support import ROOT, warm
from support.commands import SMALL

import tokenfeed
from benchmarks import resume
from tokenfeed.tools.doctor import Doctor
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.shards import SUBCOMMANDS
from tokenfeed.tools.shell.command_line import subcommand
from tokenfeed.tools.stall import Stall
from tokenfeed.tools.train_settings import Command

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS, MORE_ROOMS = ("pipeline/format",), ("pipeline", "tools")
"""Whose source files are the corpus, cut into documents: every run of a page reads all of it, so it
is small, but for the long ones, which want several windows."""
PIECE_LINES = 12
MOST_WORDS = 40_000
"""Of docs/. A new paragraph takes the place of an old one."""
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?"
    r"(?P<indent>^ *)```(?P<language>\w*)(?: title=\"(?P<title>[\w.]+)\")?\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
SHORT = {"docs/how/formats.md", "docs/how/packing.md"}
"""Run by `make test-fast` too; the others take from 5 to 60 s, most of it imports."""
LONG = {"docs/how/gpus.md", "docs/how/loop.md"}
"""Run by `make test-long`: a quarter of a minute and more each."""
DESCRIBED = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OF_OTHERS = {
    "--logdir",  # of tensorboard
    "--lr",  # of somebody's script
    "--data",
    *(
        "--check",
        "--idle",
        "--only",
        "--peer-python",
        "--renderers",
        "--repeats",
        "--rounds",
        "--traceml",
    ),  # benchmarks
    *("--minutes", "--parser", "--first"),  # the fuzzer
    *("--help", "--help-all", "--stat", "--strict"),
    *("--append", "--html"),  # withdrawn
    *("--index-url", "--no-deps"),  # pip
    *("--nproc-per-node", "--standalone", "--max-restarts", "--nnodes"),  # torchrun
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--nodes", "--ntasks-per-node", "--gpus-per-node"),  # sbatch
    *("--parsable", "--array", "--cpus-per-task", "--requeue", "--wrap", "--dependency"),
    *("--nworkers", "--nthreads"),  # dask worker
    *("--memory", "--shuffle"),  # withdrawn: decision 1
    *("--objective", "--learning-rate-reference-tokens", "--init-from"),  # rejected: decision 1
    *("--trainable", "--upload", "--gpu", "--profile"),  # removed: decision 1
    "--no-check",  # zstd
}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    code: str
    reason: str | None
    """Why it is not run."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        reason = match["reason"]
        found.append(Block(match["language"], match["title"], code, reason))
    return found


def runs(block: Block) -> bool:
    return block.language not in ("text", "toml", "diff") and block.reason is None


FORKED_WORKERS = """
from support.processes import FORKING
from tokenfeed.pipeline import processes
processes.subprocess = FORKING
del FORKING, processes
"""
"""A page has a dozen loaders, and a worker that is a program imports for a quarter of a second."""


def script_of(blocks: list[Block]) -> str:
    """What a reader does with the blocks of a page, one after the other."""
    lines = ["import pathlib, subprocess", FORKED_WORKERS]
    for block in filter(runs, blocks):
        if block.title:
            lines.append(f"pathlib.Path({block.title!r}).write_text({block.code!r})")
        elif block.language == "sh":
            lines.append(
                f"subprocess.run(['bash', '-euo', 'pipefail', '-c', {block.code!r}], check=True)"
            )
        else:
            lines.append(block.code)
    return "\n".join(lines)


def pieces_of(text: str) -> Iterator[str]:
    """A few lines each: of so many documents some are for validation, as with a real corpus."""
    lines = iter(text.splitlines(keepends=True))
    while piece := "".join(islice(lines, PIECE_LINES)):
        yield piece


def write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of the commands, which start warm."""
    folder = tmp_path_factory.mktemp("commands") / "bin"
    with warm.serve_commands(folder, SMALL):
        yield folder


@pytest.fixture(scope="module")
def environment(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Commands and this Python come first, and nothing asks the network."""
    return os.environ | {
        "PATH": os.pathsep.join(
            [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        "OMP_NUM_THREADS": "1",
    }


Prepare = Callable[[bool], Path]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Prepare:
    """What a reader of a page has; more of it for a long one."""

    @cache
    def prepare(is_long: bool) -> Path:
        return prepare_reader(
            tmp_path_factory.mktemp("reader"), MORE_ROOMS if is_long else ROOMS, environment
        )

    return prepare


def prepare_reader(folder: Path, rooms: tuple[str, ...], environment: dict[str, str]) -> Path:
    """Source files, documents, labelled records; and `out/` made of these."""
    for path in sorted(path for room in rooms for path in (ROOT / room).rglob("*.py")):
        name = "_".join(path.relative_to(ROOT).with_suffix("").parts)
        inside = folder / "corpus" / ("shards" if "shard" in path.name else "others")
        inside.mkdir(parents=True, exist_ok=True)
        for number, piece in enumerate(pieces_of(path.read_text(encoding="utf-8"))):
            (inside / f"{name}_{number}.py").write_text(piece, encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for path in PAGES if path.parent.name != "decisions"]
    write_lines(folder / "documents.jsonl", [{"text": text} for text in texts])
    sentences = [f"sentence {number} says a word or two" for number in range(60)]
    records: list[dict[str, object]] = [
        {"text": sentence, "label": ("joy", "anger")[number % 2]}
        for number, sentence in enumerate(sentences)
    ]
    write_lines(folder / "emotion.train.jsonl", records[:40])
    write_lines(folder / "emotion.test.jsonl", records[40:])
    write_lines(
        folder / "translate.jsonl",
        [
            {"prompt": f"Say it in capitals: {each}\n", "completion": each.upper()}
            for each in sentences
        ],
    )
    write_lines(
        folder / "chunks.jsonl",
        [{"tokens": each.split(), "tags": ["B", *"IIIIII"]} for each in sentences],
    )
    command = ["pretokenize", "corpus/", "out/"]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return folder


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Which of the suites run a page."""
    if name in SHORT:
        return []
    return [pytest.mark.slow, pytest.mark.long] if name in LONG else [pytest.mark.slow]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=marks_of(name_of(page)))
        for page in PAGES
        if any(map(runs, blocks_of(page)))
    ],
)
def test_every_block_of_a_page_runs(
    page: Path, prepared: Prepare, environment: dict[str, str], tmp_path: Path
) -> None:
    script = script_of(blocks_of(page))
    folder = tmp_path / "reader"
    makes_out = re.search(r"pretokenize .* out/", script) is not None
    ignored = shutil.ignore_patterns("out") if makes_out else None
    shutil.copytree(prepared(name_of(page) in LONG), folder, ignore=ignored)
    (folder / "page.py").write_text(script)
    if name_of(page) in LONG:  # torchrun starts `train` itself, with the model as it is
        environment = environment | {"PATH": environment["PATH"].partition(os.pathsep)[2]}
    done = warm.run(["page.py"], cwd=folder, env=environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_what_does_not_run_says_why() -> None:
    reasons = [block.reason for page in PAGES for block in blocks_of(page) if block.reason]
    assert all(re.match("needs |takes (hours|ten minutes)", reason) for reason in reasons)
    assert len(reasons) <= 24, "run what can run here"


def test_links_lead_to_files_that_the_site_contains() -> None:
    """Without mkdocs, which `make docs` installs: by the patterns in docs/site.py."""
    patterns = re.findall(r'"([\w*./]+)"', (ROOT / "docs" / "site.py").read_text())
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "recipes" / "README.md"]:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"
            name = (page.parent / target).resolve().relative_to(ROOT).as_posix()
            shown = name.startswith("docs/") or any(fnmatch(name, each) for each in patterns)
            assert shown, f"{name_of(page)}: {target} is missing in docs/site.py"


def test_pages_name_options_that_there_are() -> None:
    commands: list[Any] = [Options, Command, Doctor, Stall, *map(subcommand, SUBCOMMANDS.values())]
    known = {f"--{field.name.replace('_', '-')}" for each in commands for field in fields(each)}
    for page in PAGES:
        named = set(OPTION.findall(page.read_text(encoding="utf-8")))
        assert named <= known | OF_OTHERS, page


def test_api_pages_describe_what_there_is() -> None:
    described = [name for page in PAGES for name in DESCRIBED.findall(page.read_text())]
    assert {f"tokenfeed.{name}" for name in tokenfeed.__all__} - set(described) == {
        "tokenfeed.__version__"
    }
    for name in described:
        home, _, last = name.rpartition(".")
        assert hasattr(import_module(home), last) or find_spec(name), name


def test_figures_are_those_of_the_results() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = warm.run(["-m", "benchmarks.readme", "--check"], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr


def words_of(page: Path) -> int:
    """Count what a reader reads: without code, and without the bars and dashes of tables."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_pages_are_few_and_short() -> None:
    pages = PAGES[1:]
    assert len([page for page in pages if page.parent.name == "how"]) == 13
    decisions = [page for page in pages if page.parent.name == "decisions"]
    assert len(decisions) == 14
    assert max(len(page.read_text().splitlines()) for page in decisions) <= 60
    assert sum(map(words_of, pages)) <= MOST_WORDS
    assert words_of(PAGES[0]) <= 900


def test_pages_begin_with_help_for_readers_in_the_wrong_place() -> None:
    for page in PAGES[1:]:
        title, blank, first, *_ = page.read_text(encoding="utf-8").splitlines()
        assert title.startswith("# ")
        assert blank == ""
        assert first.startswith("*"), page


def test_anchors_of_links_exist() -> None:
    """As the site makes them; anchors of generated API pages are checked by mkdocs."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "recipes" / "README.md"]:
        for target, anchor in re.findall(
            r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")
        ):
            file = page.parent / target if target else page
            if file.suffix == ".md" and not anchor.startswith("tokenfeed"):
                assert anchor in anchors_of(file), f"{name_of(page)}: {target}#{anchor}"


@cache
def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).lower()) for title in titles}


def test_readme_picture_and_demo_agree() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/demo_picture.py"))
    svg = ElementTree.parse(drawn["PICTURE"]).getroot()
    shown = [text.text or "" for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    script = drawn["SCRIPT"].read_text(encoding="utf-8")
    assert set(drawn["loop_of"](script)) <= set(shown), "the script has changed: draw it again"
    assert set(drawn["readme_example"]()) <= set(shown), "the README has changed: draw it again"
    readme = PAGES[0].read_text(encoding="utf-8")
    [report] = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    assert drawn["quoted"](report.splitlines()) == report
    assert " ".join(report.split()) in " ".join(" ".join(shown).split())
    assert "docs/images/demo.svg" in readme
    demo = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    assert "docs/demo_picture.py demo/picture.svg" in demo


@pytest.mark.slow
def test_demo_has_the_verdict_and_the_line_that_the_readme_quotes(tmp_path: Path) -> None:
    """With a quarter of its rows."""
    drawn = runpy.run_path(str(ROOT / "docs/demo_picture.py"))
    short = drawn["measure"].__globals__["SCRIPT"] = tmp_path / drawn["SCRIPT"].name
    short.write_text(drawn["SCRIPT"].read_text().replace("return 3200", "return 800"))
    report, samples = drawn["measure"]()
    assert samples
    line = re.search(r"slow_script\.py:\d+", PAGES[0].read_text(encoding="utf-8"))
    assert line
    assert line[0] in "\n".join(report)


def test_badges_are_of_this_version() -> None:
    for name, badge in runpy.run_path(str(ROOT / "docs/badges.py"))["badges"]().items():
        assert (ROOT / "docs/images" / name).read_text(encoding="utf-8") == badge
        assert f"docs/images/{name}" in PAGES[0].read_text(encoding="utf-8")


def test_plot_of_the_resumed_run_is_of_its_results() -> None:
    results = json.loads((ROOT / "benchmarks/results/resume.json").read_text())["results"]
    svg = (ROOT / "benchmarks/results/resume.svg").read_text(encoding="utf-8")
    assert svg == resume.picture(results)
    whole, _, resumed = results
    pairs = zip(whole["losses"][resumed["first"] - 1 :], resumed["losses"], strict=True)
    assert all(abs(one - other) < 1e-4 for one, other in pairs)


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]


ELSEWHERE = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)
MKDOCS = shutil.which("mkdocs") or shutil.which("mkdocs", path=ROOT / ".venv-docs" / "bin")


def test_search_of_the_site_needs_no_other_site() -> None:
    """The plugin `offline` loads a script from elsewhere, unless one of this name is given."""
    [script] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra"]["polyfills"]
    assert "iframe-worker" in script
    assert "window.Worker" in (ROOT / "docs" / script).read_text()


@pytest.mark.skipif(MKDOCS is None, reason="mkdocs is not installed: `make docs` installs it")
def test_built_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    assert MKDOCS is not None
    subprocess.run(
        [MKDOCS, "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES) / 2
    for page in pages:
        assert ELSEWHERE.findall(page.read_text(encoding="utf-8")) == [], page
