"""What commands and functions answer to wrong uses: one line with the value and the fix.

Each file of `messages` is a transcript: a command or an expression, and what it answers. All run in
one folder, which `make_files` fills. This writes the answers anew, and prints what changes:

    PYTHONPATH=tests python tests/outside/test_messages.py
"""

import contextlib
import csv
import json
import re
import shlex
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.commands import call, run
from support.data_sets import byte_tokenizer

import tokenfeed
from tokenfeed import Fixed, Mixture, Packed, Padded, ShardLoader, Stage

TABLES = sorted((Path(__file__).parent / "messages").glob("*.txt"))
CASE = re.compile(r"^(?:\$|>>>) .*$", re.MULTILINE)
COMMANDS = ("pretokenize", "train", "shards", "report", "main")


def cases_of(table: str) -> dict[str, str]:
    """The uses in a transcript, and the answer to each."""
    text = "\n".join(line for line in table.splitlines() if not line.startswith("#"))
    uses = CASE.findall(text)
    assert len({*uses}) == len(uses), "a use occurs twice"
    return dict(zip(uses, map(str.strip, CASE.split(text)[1:]), strict=True))


def make_files(folder: Path) -> None:
    """Fill a folder with what the uses name."""
    texts = [f"document {number}, with some words and a line\n" for number in range(40)]
    with contextlib.chdir(folder):
        byte_tokenizer(texts, end="</s>").save("tokenizer.json")
        _write_lines("docs.jsonl", [{"text": text} for text in texts])
        _write_lines("chat.jsonl", [{"messages": _said(text)} for text in texts])
        nested = {"context": "Tall.", "meta": {"q": ["What?", "Who?"], "n": 3}, "extra": 0}
        _write_lines("nested.jsonl", [nested, nested])
        _write_lines("ids.jsonl", [{"input_ids": [1, 2, number]} for number in range(9)])
        with open("classes.csv", "w", newline="") as file:
            rows = [
                (text, ("yes", "no")[len(text) % 2], number) for number, text in enumerate(texts)
            ]
            csv.writer(file).writerows([("text", "label", "stars"), *rows])
        for name, content in {
            "bad.jsonl": "{\n[]\n",
            "bad.json": "{",
            "empty.txt": "",
            "bad.yaml": "steps: [",
            "typo.yaml": "stepz: 3\n",
            "list.yaml": "- 1\n",
            "type.yaml": "steps: many\n",
            "plain.jinja": "{{ messages[0].content }}",
            "broken.jinja": "{% for m in messages %}",
        }.items():
            Path(name).write_text(content)
        Path("picture.png").write_bytes(b"\x89PNG\0")
        Path("bad.parquet").write_bytes(b"PAR1")
        Path("empty").mkdir()
        known = "--tokenizer", "tokenizer.json"
        run("docs.jsonl", "lm", *known, "--validation", 0.2)
        run("classes.csv", "classes", *known, "--task", "classify", "--validation", 0.2)
        run("ids.jsonl", "ids", *known, "--task", "ids")
        shutil.copytree("lm", "damaged")
        shard = Path("damaged/train/00000.arrow")
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        shutil.copytree("lm", "short")
        (Path("short/train/00000.arrow")).write_bytes(data[:-9])
        shutil.copytree("lm", "lost")
        Path("lost/train/00000.arrow").unlink()
        shutil.copytree("lm", "edited")
        manifest = Path("edited/manifest.json")
        manifest.write_text(manifest.read_text().replace('"lm"', '"tag"'))
        shutil.copytree("lm", "newer")
        manifest = Path("newer/manifest.json")
        manifest.write_text(
            manifest.read_text().replace('"format_version": 1', '"format_version": 9')
        )
        call(_main("train"), *TRAIN, "--run-dir", "run")


TRAIN = ("--shards", "lm", "--model", "shallow", "--steps", 2, "--sequence-length", 32)
TRAIN += ("--device", "cpu")


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text}]


def _write_lines(path: str, records: list[Any]) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def _main(command: str) -> Any:
    return import_module(f"tokenfeed.tools.{command}").main


def answer_of(use: str) -> str:
    """What a use prints or raises, in the current folder."""
    shutil.rmtree("out", ignore_errors=True)
    mark, _, words = use.partition(" ")
    if mark == "$":
        name, *given = shlex.split(words)
        told = _called(name.replace("tokenfeed", "main"), given)
    else:
        told = _evaluated(words)
    told = told.replace(str(Path.cwd()), "FOLDER")
    return re.sub(
        r"\b[0-9a-f]{16}\b", "CHECKSUM", re.sub(r"[\d,]+ bytes, got [\d,]+", "N bytes, got N", told)
    )


def _called(name: str, words: list[str]) -> str:
    """The error of a command and its exit code; all that it prints if it ends without an error."""
    done = call(_main(name), *words, expect=None)
    lines = done.stderr.splitlines()
    if lines and lines[-1].startswith("error: "):
        lines = lines[-1:]
    return "\n".join([*done.stdout.splitlines(), *lines, f"[{done.returncode}]"])


def _evaluated(expression: str) -> str:
    """The error that an expression raises."""
    names = {"tokenfeed": tokenfeed, "pretokenize": tokenfeed.pretokenize}
    names |= {"Fixed": Fixed, "Mixture": Mixture, "Packed": Packed, "Padded": Padded}
    names |= {"ShardLoader": ShardLoader, "Stage": Stage}
    try:
        eval(expression, names)
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()
    return "nothing is raised"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the uses, which is the current one."""
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    with contextlib.chdir(folder):
        yield folder


@pytest.mark.parametrize(
    ("table", "use"),
    [(table, use) for table in TABLES for use in cases_of(table.read_text())],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_a_wrong_use_is_answered_as_the_table_says(table: Path, use: str, files: Path) -> None:
    answer = answer_of(use)
    assert answer == cases_of(table.read_text())[use]
    assert "Traceback" not in answer
    assert use.startswith(">>>") or answer.endswith(("[1]", "[2]"))
    assert not Path("out/manifest.json").exists()


def main() -> None:
    """Write the answers of this version into the transcripts, and print what changes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_files(Path(folder))
        for table in TABLES:
            text = table.read_text()
            known = cases_of(text)
            written = []
            for line in text.splitlines():
                if line.startswith("#"):
                    written.append(f"{line}\n")
                elif line in known:
                    answer = answer_of(line)
                    written.append(f"{line}\n{answer}\n")
                    if answer != known[line]:
                        print(f"{line}\n- {known[line]}\n+ {answer}")
            table.write_text("\n".join(written))


if __name__ == "__main__":
    main()
