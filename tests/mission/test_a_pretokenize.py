"""The mission, pretokenize: a test for each row of docs/mission.md, by public commands and API."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import call, run

from tokenfeed import Manifest
from tokenfeed.tools import shards

# ---------- m01 ----------

HUB_ROWS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "SST-2": (
        {"idx": 7, "sentence": "a fine film ", "label": 1},
        ["--task", "classify", "--field", "text=sentence"],
        ["a fine film", "label 1"],
    ),
    "SQuAD": (
        {
            "id": "5733",
            "context": "The tower is tall.",
            "question": "What is tall?",
            "answers": {"text": ["The tower"], "answer_start": [0]},
        },
        [
            *("--task", "complete", "--field", r"prompt={context}\n{question}\n"),
            "completion=answers.text[0]",
        ],
        ["The tower is tall.\nWhat is tall?\nThe tower"],
    ),
    "XSum": (
        {"document": "A long story.", "summary": "Short.", "id": "1"},
        ["--task", "complete", "--field", r"prompt={document}\nSummary: ", "completion=summary"],
        ["A long story.\nSummary: Short."],
    ),
    "CoNLL": (
        {"id": "0", "tokens": ["EU", "rejects"], "pos_tags": [22, 42], "ner_tags": [3, 0]},
        ["--task", "tag", "--field", "tags=ner_tags"],
        ["EU rejects"],
    ),
    "WMT": (
        {"translation": {"de": "Hallo Welt", "en": "Hello world"}},
        [
            *("--task", "complete", "--field", r"prompt={translation.en}\n"),
            "completion=translation.de",
        ],
        ["Hello world\nHallo Welt"],
    ),
    "documents": ({"text": "One document."}, ["--task", "lm"], ["One document."]),
    "chat": (
        {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes"}]},
        ["--task", "chat", "--chat-template", "chat.jinja"],
        ["user: Hi?\nassistant: Yes"],
    ),
}
"""Rows as the Hub stores them, the options for them, and what `shards cat` shows of a row."""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", HUB_ROWS)
def test_m02_text_for_every_task_of_the_users(
    name: str, kind: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    row, options, shown = HUB_ROWS[name]
    if kind == "jsonl":
        Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
    else:  # an object is a struct, or a struct of lists
        pq.write_table(pa.Table.from_pylist([row] * 5), "rows.parquet")
    run(f"rows.{kind}", "out", *options, "--tokenizer", tokenizer, "--validation", 0)
    printed = call(shards.main, "cat", "out").stdout
    assert all(text in printed for text in shown), printed
    assert Manifest.read("out").splits["train"].rows == 5


# ---------- m03 ----------

# ---------- m04 ----------
