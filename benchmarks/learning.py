"""Are the defaults of `train` worth it on small labelled sets? Beside ten lines of scikit-learn.

Each set is divided into folds. Both learn from the same rows, and neither is tuned on the rows that
are held out. `train` gets no option but --shards. Texts: TF-IDF of words and logistic regression.
Tags: logistic regression on the words and their shapes, and those of the neighbours. The sets are
functions of the standard library by package, descriptions of Debian packages by section, and the
JSON Lines of --data, such as reviews.jsonl. Needs `pip install scikit-learn`. Refuted by a mean
score below that of scikit-learn.

usage: python -m benchmarks.learning [--data FOLDER] [--folds 3] [--set NAME] [-- OPTIONS OF TRAIN]
"""

import argparse
import ast
import functools
import json
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.protocol import write_result

Row = dict[str, Any]

_ROWS, _CLASSES, _SEED = 2000, 8, 0
_HELD_OUT = 0.2


def functions() -> list[Row]:
    """Functions of the standard library, by the top-level package that they are from."""
    rows = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/**/*.py")):
        package = path.relative_to(sysconfig.get_path("stdlib")).parts[0]
        if package not in ("test", "site-packages", "dist-packages"):
            text = path.read_text(errors="ignore")
            lines = text.split("\n")
            sources = [_source(lines, node) for node in _functions_of(text)]
            rows += [{"text": source, "label": package} for source in sources]
    return _balanced([row for row in rows if len(row["text"]) > 400])


def _functions_of(text: str) -> Iterator[ast.FunctionDef]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _source(lines: list[str], node: ast.FunctionDef) -> str:
    """As `ast.get_source_segment`, which splits the file into lines again for each function."""
    assert node.end_lineno is not None
    last = lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode()
    return "\n".join([*lines[node.lineno - 1 : node.end_lineno - 1], last])[node.col_offset :]


def descriptions() -> list[Row]:
    """Descriptions of Debian packages by section; empty where apt has no list of packages."""
    try:
        found = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = []
    for record in found.stdout.decode(errors="ignore").split("\n\n"):
        fields = dict(re.findall(r"^(Description|Section): (.*)$", record, re.MULTILINE))
        if len(fields) == 2 and "dummy" not in fields["Description"]:
            label = fields["Section"].split("/")[-1]
            rows.append({"text": fields["Description"], "label": label})
    return _balanced(rows)


def _balanced(rows: list[Row]) -> list[Row]:
    """As many rows of each of the largest classes."""
    random.Random(_SEED).shuffle(rows)
    rows = list({row["text"]: row for row in rows}.values())
    names = [name for name, _ in Counter(row["label"] for row in rows).most_common(_CLASSES)]
    parts = [[row for row in rows if row["label"] == name] for name in names]
    size = min(_ROWS // _CLASSES, *map(len, parts)) if parts else 0
    return [row for part in parts for row in part[:size]]


def given(folder: Path) -> dict[str, Path]:
    """The sets of a folder: NAME.jsonl or NAME.train.jsonl. Test splits are not read."""
    paths = [p for p in sorted(folder.glob("*.jsonl")) if not re.search(r"\.(test|valid)", p.name)]
    rows = {path: _read(path)[0] for path in paths}
    return {p.name.split(".")[0]: p for p, row in rows.items() if {"label", "tags"} & row.keys()}


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()[:_ROWS]]


def divided(rows: list[Row], fold: int) -> tuple[list[Row], list[Row]]:
    """Rows to learn from, and rows that are held out."""
    rows = random.Random(_SEED + fold).sample(rows, len(rows))
    held_out = int(_HELD_OUT * len(rows))
    return rows[held_out:], rows[:held_out]


def by_train(learnt: list[Row], held_out: list[Row], options: list[str]) -> dict[str, Any]:
    """`pretokenize` and `train` by their defaults; the metrics of the held-out rows."""
    task = "tag" if "tags" in learnt[0] else "classify"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder, programs = Path(name), Path(sys.executable).parent
        for file, rows in (("train", learnt), ("test", held_out)):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{file}.jsonl").write_text(lines)
        files = [folder / "train.jsonl", folder / "test.jsonl"]
        split = ["--task", task, "--split", "test=test.jsonl"]
        _call(programs / "pretokenize", *files, folder / "shards", *split)
        shards = ["--shards", folder / "shards", "--run-dir", folder / "run"]
        _call(programs / "train", *shards, *options)
        report = json.loads((folder / "run" / "report.json").read_bytes())
    seconds = time.perf_counter() - began
    return report["metrics"]["test"] | {"seconds": seconds, "steps": report["steps"]}


def _call(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True)


def by_sklearn(learnt: list[Row], held_out: list[Row]) -> dict[str, float]:
    """The same by scikit-learn."""
    from sklearn.feature_extraction import DictVectorizer  # pyright: ignore[reportMissingImports]
    from sklearn.feature_extraction.text import TfidfVectorizer  # pyright: ignore[reportMissingImports]
    from sklearn.linear_model import LogisticRegression  # pyright: ignore[reportMissingImports]
    from sklearn.metrics import f1_score  # pyright: ignore[reportMissingImports]
    from sklearn.pipeline import make_pipeline  # pyright: ignore[reportMissingImports]

    began = time.perf_counter()
    if "tags" in learnt[0]:
        model = make_pipeline(DictVectorizer(), LogisticRegression(max_iter=200))
        model.fit(_words(learnt), [tag for row in learnt for tag in row["tags"]])
        predicted = model.predict(_words(held_out))
        return _tag_scores(held_out, [*predicted]) | {"seconds": time.perf_counter() - began}
    model = make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000))
    model.fit([row["text"] for row in learnt], [row["label"] for row in learnt])
    predicted = model.predict([row["text"] for row in held_out])
    true = np.array([row["label"] for row in held_out])
    return {
        "accuracy": float((predicted == true).mean()),
        "macro_f1": float(f1_score(true, predicted, average="macro")),
        "seconds": time.perf_counter() - began,
    }


def _words(rows: list[Row]) -> list[dict[str, Any]]:
    """Features of each word: itself, its shape and its end, and the neighbours."""
    found = []
    for row in rows:
        around = ["<", *row["tokens"], ">"]
        for before, word, after in zip(around, row["tokens"], around[2:], strict=False):
            shape = re.sub("[a-z]+", "a", re.sub("[A-Z]+", "A", re.sub("[0-9]+", "0", word)))
            found.append(
                {"word": word.lower(), "shape": shape, "end": word[-3:], "before": before.lower()}
                | {"after": after.lower(), "title": word.istitle()}
            )
    return found


def _tag_scores(rows: list[Row], predicted: list[str]) -> dict[str, float]:
    """Accuracy, and span F1 by the code that scores `train`."""
    from tokenfeed.trainer.tasks.label_tasks import TagScheme, spans

    true = [tag for row in rows for tag in row["tags"]]
    names = tuple(sorted({*true, *predicted}))
    scheme, number = TagScheme.from_names(names), {name: n for n, name in enumerate(names)}
    assert scheme is not None
    ends = np.concatenate([np.arange(1, len(r["tags"]) + 1) == len(r["tags"]) for r in rows])
    both = [
        {*map(tuple, spans(np.array([number[tag] for tag in tags]), ends, scheme).tolist())}
        for tags in (true, predicted)
    ]
    f1 = 2 * len(both[0] & both[1]) / max(1, len(both[0]) + len(both[1]))
    right = sum(one == other for one, other in zip(true, predicted, strict=True))
    return {"accuracy": right / len(true), "span_f1": f1}


def main() -> None:
    """Measure, print and write results/labels.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--set", dest="names", action="append")
    parser.add_argument("--trial", action="store_true", help="print, and write no results")
    parser.add_argument("options", nargs="*", help="options of `train`, behind --")
    args = parser.parse_args()
    sets: dict[str, Callable[[], list[Row]]] = {
        "functions": functions,
        "descriptions": descriptions,
    }
    for name, path in given(args.data).items() if args.data else ():
        sets[name] = functools.partial(_read, path)
    results = []
    for name in args.names or sets:
        if not (rows := sets[name]()):
            continue
        score = "span_f1" if "tags" in rows[0] else "macro_f1"
        found: dict[str, list[float]] = {"train": [], "scikit-learn": [], "seconds": []}
        for fold in range(args.folds):
            learnt, held_out = divided(rows, fold)
            ours = by_train(learnt, held_out, args.options)
            theirs = by_sklearn(learnt, held_out)
            print(name, fold, ours, theirs, file=sys.stderr, flush=True)
            found["train"].append(ours[score])
            found["scikit-learn"].append(theirs[score])
            found["seconds"].append(ours["seconds"])
        means = {system: round(statistics.mean(values), 4) for system, values in found.items()}
        spread = round(statistics.stdev(found["train"]), 4) if args.folds > 1 else None
        results.append({"set": name, "rows": len(rows), "score": score, **means, "spread": spread})
        print(json.dumps(results[-1]), flush=True)
    if not args.trial:
        print(write_result("labels", results))


if __name__ == "__main__":
    main()
