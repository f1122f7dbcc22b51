"""`--field` with values inside fields, and with texts made of several fields."""

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.commands import call, error_of, run

import tokenfeed
from tokenfeed.tools import shards

ROW = {"context": "Tall.", "meta": {"q": ["What?", "Who?"], "n": 3, "none": None}, "extra": 0}


def texts_of(rows: list[dict[str, Any]], field: str, tokenizer: Path, folder: Path) -> list[str]:
    """The texts of a data set of the field `text`, one for each row."""
    source = folder / "rows.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ("--tokenizer", tokenizer, "--validation", 0)
    run(source, folder / "out", "--field", f"text={field}", *options)
    printed = call(shards.main, "cat", folder / "out", "--json").stdout
    return [json.loads(line)["text"].removesuffix("</s>") for line in printed.splitlines()]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("meta.q[0]", "What?"),
        ("meta.q[-1]", "Who?"),
        (r"{context}\n{meta.q[0]}\t{meta.n}{meta.none}", "Tall.\nWhat?\t3"),
        (r"{{{context}}}\\n", r"{Tall.}\n"),
        ("{context}", "Tall."),
    ],
)
def test_field_path_or_template_gives_the_text(
    field: str, text: str, tokenizer: Path, tmp_path: Path
) -> None:
    assert texts_of([ROW], field, tokenizer, tmp_path) == [text]


def test_column_with_a_dot_in_its_name_is_read_as_before(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"meta.q": "flat", "meta": {"q": "nested"}}]
    assert texts_of(rows, "meta.q", tokenizer, tmp_path) == ["flat"]


def test_fields_of_csv_are_joined(tokenizer: Path, tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("a", "b.c"), ("one", "two"), ("é", "")])
    field = "text={a}, {b.c}"
    message = error_of(tmp_path / "rows.csv", tmp_path / "o", "--field", field)
    assert "no column `b`; it has: a, b.c" in message
    run(tmp_path / "rows.csv", tmp_path / "o", "--field", "text=b.c", "--tokenizer", tokenizer)


def test_objects_of_datasets_have_the_same_paths(tokenizer: Path, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(
        [{"answers": {"text": ["Yes"], "start": [0]}, "q": "Is it?"}, {"answers": None, "q": "So?"}]
    )
    made = tokenfeed.pretokenize(
        rows,
        tmp_path / "out",
        task="complete",
        field={"prompt": "{q}\n", "completion": "answers.text[0]"},
        tokenizer=tokenizer,
        validation=0,
    )
    assert made.summary.documents == 1
    assert [reject["reason"] for reject in made.rejects] == [
        "field `answers.text[0]` needs an object before 'text', got null"
    ]


def test_label_inside_an_object_is_counted(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"text": "a b", "of": {"label": name}} for name in ("yes", "no", "yes")]
    made = tokenfeed.pretokenize(
        rows, tmp_path / "o", task="classify", field={"label": "of.label"}, tokenizer=tokenizer
    )
    assert made.manifest.label_names == ("no", "yes")
