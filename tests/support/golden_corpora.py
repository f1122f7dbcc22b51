"""Corpora of every task and format, and what is in the data sets made of them."""

import contextlib
import gzip
import hashlib
import json
import platform
import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from support.commands import run

Words = tuple[str | int | float, ...]

SPECIAL = ["</s>", "<s>", "<|im_start|>", "<|im_end|>", "<fim_prefix>", "<fim_suffix>"]
SPECIAL += ["<fim_middle>", "<pad>"]
MERGES = "t h,th e,Ġ the,i n,a n,Ġ s,e r,Ġs t,a l,Ġst al,Ġstal l,o k,ok e,n s,oke ns,f e,fe e,fee d"
PLAIN = ["the", "tokens", "of", "a", "stall", "feed", "windows", "déjà", "漢字", "🎉", "12345"]
WORDS = [*PLAIN, "def", "return(x):\n\t", "don't", "</s>"]
ANSWERS = ["yes", "no", "maybe"]
VERSIONS = {
    "python": platform.python_version().rpartition(".")[0],
    **{name: version(name) for name in ("pyarrow", "zstandard", "tokenizers", "gigatoken")},
}
"""What the bytes of files may depend on."""


def texts(count: int, most: int = 60, seed: int = 0, words: list[str] = WORDS) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(1, most))) for _ in range(count)]


def tokenizer(*, template: bool = False) -> None:
    """Write a byte-level BPE, with a few merges and no training."""
    merges = [(one, two) for one, two in (pair.split(" ") for pair in MERGES.split(","))]
    ids = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    made = Tokenizer(models.BPE({each: id for id, each in enumerate(ids)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    _save(made, template=template)


def pieces_tokenizer() -> None:
    """Write a BPE as SentencePiece makes them: a mark for each space, bytes for rare letters."""
    merges = [(o, t) for o, t in (pair.replace("Ġ", "▁").split(" ") for pair in MERGES.split(","))]
    rare = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = [*SPECIAL, *rare, "▁", *"abcdefghijklmnopqrstuvwxyz", *map("".join, merges)]
    model = models.BPE(
        {each: id for id, each in enumerate(ids)}, merges, unk_token="<pad>", byte_fallback=True
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    _save(made, template=False)


def word_tokenizer() -> None:
    """Write a WordPiece as BERT's: lower case, words, and parts of words."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789éà漢字🎉().,:'\"<>/"
    words = ["the", "token", "##s", "stall", "window", "##ll", "de", "##ja"]
    ids = [*SPECIAL, "[UNK]", *letters, *(f"##{letter}" for letter in letters), *words]
    made = Tokenizer(models.WordPiece({each: id for id, each in enumerate(ids)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    _save(made, template=True)


def _save(made: Tokenizer, *, template: bool) -> None:
    made.add_special_tokens(SPECIAL)
    if template:
        pair = "<s> $A </s> $B:1 </s>:1"
        marks = [("<s>", 1), ("</s>", 0)]
        made.post_processor = processors.TemplateProcessing("<s> $A </s>", pair, marks)
    made.save("tokenizer.json")


def lines(path: str, records: list[Any], more: bytes = b"") -> bytes:
    """Write records as lines of JSON, and some bytes after them."""
    data = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records).encode() + more
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data)
    return data


def documents() -> Words:
    """Text files and lines of JSON; the tokenizer is trained."""
    for number, text in enumerate(texts(30, most=300)):
        Path(f"in/{number:02}.txt").write_text(text)
    lines("in/more.jsonl", [{"text": text} for text in texts(200, seed=1)])
    return "--vocab-size", 400, "--validation", 0.1, "--shard-size", "8KB"


HOSTILE = (
    rb"""{"text": "\ud800 alone"}
{"text": "two", "text": "one"}
{"text": "end"
{"text": null}
{"text": 1}
{"text": ["a"]}
{"text": "\u0000 and \u001f"}
{"other": "x"}
BLANK
[1, 2]
"text"
{"text": NaN}
{"text": 1e999}
{"text": "a forged </s> <|im_end|> end"}
{"text": "   "}
{"text": ""}
{"text": "\r\n\t"}
""".replace(b"BLANK", b"\n   ")
    + (
        b'{"text": "\xff\xfe"}\n{"text": "crlf"}\r\n\xef\xbb\xbf{"text": "mark"}\n'
        + b"[" * 100_000
        + b'\n{"text": "'
        + b"long " * 10_000
        + b'"}\n{"text": "'
        + b"a" * 3000
        + b'"}\n{"text": "the last has no end of line"}'
    )
)


def hostile() -> Words:
    """Whatever a line or a file may be."""
    tokenizer()
    lines("in/a.jsonl", [{"text": text} for text in texts(50)], HOSTILE)
    for name, data in {
        "latin.txt": "déjà".encode("latin-1"),
        "nul.txt": b"a\0b",
        "mark.txt": "\ufeffmark".encode(),
        "empty.txt": b"",
        "picture.png": b"\x89PNG\r\n\x1a\n\0\0",
        "empty.jsonl": b"",
        "cut.json": b'[{"text": "one"}, {"text": "two"}, {"te',
    }.items():
        Path("in", name).write_bytes(data)
    return "--max-record", "20KB", "--shard-size", "1KB"


def folders() -> Words:
    """Several files of several formats, in splits that their names give, and a limit."""
    tokenizer()
    for number in range(6):
        path = f"in/part{number % 3}/{'test' if number == 4 else 'b'}{number}.jsonl"
        lines(path, [{"body": {"text": [text]}} for text in texts(40, seed=number)])
    records = [{"body": {"text": [text]}} for text in texts(40, seed=9)]
    Path("in/part1/list.json").write_text(json.dumps(records))
    lines("in/part2/left-out.jsonl", records)
    return (
        *("--field", "text=body.text[0]", "--split", "test=test*", "--exclude", "left-*"),
        *("--limit", 150, "--validation", 0.2, "--shard-size", "4KB"),
    )


def compressed() -> Words:
    """gzip of several members, zstd, and one of each that is cut short."""
    tokenizer()
    data = [lines("a", [{"text": text} for text in texts(60, seed=seed)]) for seed in range(3)]
    Path("in/a.jsonl.gz").write_bytes(b"".join(gzip.compress(part, mtime=0) for part in data))
    Path("in/b.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, data)))
    Path("in/c.txt.gz").write_bytes(gzip.compress(data[0], mtime=0))
    Path("in/cut.jsonl.gz").write_bytes(gzip.compress(data[1], mtime=0)[:-40])
    Path("in/cut.jsonl.zst").write_bytes(zstandard.compress(data[2])[:-40])
    return "--shard-size", "4KB", "--validation", 0.3


def delimited() -> Words:
    """CSV with quotes, some of them wrong, and rows of a wrong length: pairs with a class."""
    word_tokenizer()
    rows = [
        f'"{text}","""quoted"", {text}",{ANSWERS[number % 3]}'
        for number, text in enumerate(t.replace('"', "") for t in texts(120, most=20))
    ]
    rows[30:30] = ["only,two", "a,b,yes,more", ",,no", '"a\nb",c,no', "a,b,"]
    rows += ['"a" b,c,yes', '"never closed,x,yes', "and more"]
    more = "".join(f"{text},number {n},yes\n" for n, text in enumerate(texts(40, words=PLAIN)))
    Path("in/b.csv").write_text(f"one,two,class\n{more}")
    Path("in/a.csv").write_text("\ufeffone,two,class\n" + "\r\n".join(rows) + "\n")
    return (
        *("--task", "classify", "--field", "text=one", "pair=two", "label=class"),
        *("--add-special-tokens", "--shard-size", "4KB", "--validation", 0.25),
    )


def parquet() -> Words:
    """Parquet with several row groups, nested columns and nulls: texts with a number."""
    pieces_tokenizer()
    rows = [
        {
            "review": {"body": text if number % 60 else None},
            "stars": number / 7 if number % 70 else None,
        }
        for number, text in enumerate(texts(200))
    ]
    pq.write_table(pa.Table.from_pylist(rows), "in/a.parquet", row_group_size=32)
    odd = {
        "review": [{"body": "nan"}, {"body": "inf"}, {"body": ""}],
        "stars": [float("nan"), float("inf"), 1.0],
    }
    pq.write_table(pa.table(odd), "in/b.parquet")
    return (
        *("--task", "score", "--field", "text=review.body", "score=stars"),
        *("--shard-size", "4KB", "--validation", 0.2, "--end-token", "<pad>"),
    )


def arrow() -> Words:
    """Arrow with several record batches: words and their tags, some without a partner."""
    tokenizer(template=True)
    names, rows = ["O", "B-A", "I-A"], []
    for number, text in enumerate(texts(150, most=12)):
        words = text.split()
        tags = [names[(number + k) % 3] for k in range(len(words) + (number % 17 == 0))]
        rows.append({"words": [] if number == 5 else words, "tags": [] if number == 5 else tags})
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file("in/a.arrow", table.schema) as writer:
        for batch in table.to_batches(max_chunksize=10):
            writer.write_batch(batch)
    return "--task", "tag", "--field", "tokens=words", "--add-special-tokens", "--shard-size", "4KB"


def completions() -> Words:
    """Prompts made of two fields, and their completions."""
    tokenizer()
    parts = zip(texts(90, seed=1), texts(90, most=8, seed=2), texts(90, seed=3), strict=True)
    records = [{"context": a, "question": b, "answer": c} for a, b, c in parts]
    records[10:10] = [
        {"context": "no question", "answer": "x"},
        {"context": "", "question": "", "answer": ""},
    ]
    lines("in/a.jsonl", [*records, {"context": "a", "question": "b", "answer": ""}])
    return (
        *("--task", "complete", "--field", "prompt={context}\n{question}", "completion=answer"),
        *("--shard-size", "8KB"),
    )


TEMPLATE = """{{ bos }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def conversation(number: int, said: list[str]) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": said[0]}] if number % 3 == 0 else []
    roles = ["user", "assistant"] * (1 + number % 3)
    return first + [{"role": r, "content": c} for r, c in zip(roles, said[1:], strict=False)]


def chat() -> Words:
    """Conversations, a weight for each message, and messages that cannot be used."""
    tokenizer()
    Path("chat.jinja").write_text(TEMPLATE)
    said = texts(700, most=15, words=PLAIN)
    records: list[Any] = []
    for number in range(80):
        messages = conversation(number, said[number * 7 :])
        weighed = [message | {"weight": k / 2} for k, message in enumerate(messages)]
        records.append({"messages": weighed})
    records[20:20] = [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "who"}]},
        {"messages": [{"role": "user", "content": "no answer", "weight": 1}]},
        {"messages": conversation(1, said)},
        {"messages": "text"},
        {"messages": [{"role": "user", "content": "a forged <|im_end|>"}]},
    ]
    lines("in/a.jsonl", records)
    return (
        *("--task", "chat", "--chat-template", "chat.jinja", "--template-argument", "bos=<s>"),
        *("--keep", "weight", "--shard-size", "4KB", "--validation", 0.2),
    )


def preferences() -> Words:
    """Prompts with a chosen and a rejected answer."""
    tokenizer()
    Path("chat.jinja").write_text(TEMPLATE)
    parts = (texts(60, seed=seed, words=PLAIN) for seed in (1, 2, 3))
    records = [
        {"prompt": [{"role": "user", "content": a}]}
        | {
            key: [{"role": "assistant", "content": text}]
            for key, text in (("chosen", b), ("rejected", c))
        }
        for a, b, c in zip(*parts, strict=True)
    ]
    lines(
        "in/a.jsonl", [*records, {"prompt": records[0]["prompt"], "chosen": records[0]["chosen"]}]
    )
    return (
        *("--task", "chat", "--chat-template", "chat.jinja", "--template-argument", "bos="),
        *("--shard-size", "8KB"),
    )


def ids() -> Words:
    """Ids that are copied, with a mask and a weight of each, and ids that do not exist."""
    tokenizer()
    draw, records = random.Random(0), []
    for _ in range(120):
        size = draw.randint(1, 50)
        row = [draw.randrange(280) for _ in range(size)]
        kept = [draw.random() for _ in range(size)]
        records.append({"input_ids": row, "loss_mask": [k % 3 > 0 for k in range(size)], "w": kept})
    records[50]["input_ids"][0] = 100_000
    records[51]["loss_mask"].append(True)
    records[52]["input_ids"][0] = -1
    records[53]["w"].pop()
    records[54] = {"input_ids": [], "loss_mask": [], "w": []}
    lines("in/a.jsonl", records)
    return (
        *("--task", "ids", "--field", "loss_mask=loss_mask", "--keep", "w", "--max-rejects", 7),
        *("--shard-size", "4KB", "--validation", 0.1),
    )


def many() -> Words:
    """More rows than a record batch holds, and then more tokens than one holds."""
    tokenizer()
    rows = [[number % 280] for number in range(60_000)]
    rows += [[(number + k) % 280 for k in range(50)] for number in range(3000)]
    lines("in/a.jsonl", [{"input_ids": row} for row in rows])
    return "--task", "ids", "--validation", 0.1


def code() -> Words:
    """Source files, half of them rearranged to fill in the middle; special tokens are ids. Eight
    files fill a shard exactly."""
    tokenizer(template=True)
    for number, text in enumerate(texts(40, most=240, seed=5)):
        cut = text.encode()[:1000].decode(errors="ignore").encode()
        Path(f"in/{number:02}.py").write_bytes(cut.ljust(1000, b"."))
    return (
        *("--fim-rate", 0.5, "--fim-spm-rate", 0.4, "--seed", 7, "--shard-size", "8KB"),
        *("--add-special-tokens", "--special-tokens-in-text", "split"),
    )


CORPORA: dict[str, Callable[[], Words]] = {
    made.__name__: made
    for made in (
        *(documents, hostile, folders, compressed, delimited, parquet, arrow, completions, chat),
        *(preferences, ids, many, code),
    )
}


def make(name: str, folder: Path, workers: int) -> dict[str, Any]:
    """Make the data set of a corpus in an empty folder, and return what is in it."""
    with contextlib.chdir(folder):
        Path("in").mkdir()
        words = CORPORA[name]()
        ballast = [{"unused": "x" * 2_100_000}]  # less than this is encoded without workers
        Path("in/zz.json").write_text(json.dumps(ballast))
        if Path("tokenizer.json").exists():
            words = "--tokenizer", "tokenizer.json", *words
        run("in", "out", *words, "--workers", workers)
        return value_of(Path("out"))


def value_of(out: Path) -> dict[str, Any]:
    """The digest of each file, the counts of records, and a digest of each decoded column."""
    found = sorted(path for path in out.rglob("*") if path.is_file())
    manifest = json.loads((out / "manifest.json").read_text())
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    return {
        "columns": {split: columns(out, split) for split in manifest["splits"]},
        "ledger": manifest["ledger"],
        "rejects": [f"{each['file']}:{each.get('record')}: {each['reason']}" for each in rejects],
        "files": {
            path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in found
            if path.name != ".made_by.json"
        },
    }


def columns(out: Path, split: str) -> dict[str, Any]:
    """The number of rows, and a digest of each column's values over all shards."""
    tables = [pa.ipc.open_file(path).read_all() for path in sorted((out / split).glob("*.arrow"))]
    table = pa.concat_tables(tables)
    digests = {
        name: hashlib.sha256(json.dumps(table[name].to_pylist()).encode()).hexdigest()[:32]
        for name in table.column_names
    }
    return {"rows": table.num_rows, **digests}
