"""How fast is `pretokenize --task chat` beside TRL, and does it learn the same tokens?

TRL tokenizes by `datasets.map`: for each conversation, `apply_chat_template` of `transformers` with
`return_assistant_tokens_mask`. The same call runs here in as many processes, over the first part of
the corpus, which is enough to know its rate. `--templates` compares ids and masks for every
template in a folder, such as `trl/chat_templates` of TRL's wheel.

    python -m benchmarks.pretokenize.chat --tokenizer gpt2/ --template qwen3_training.jinja
    python -m benchmarks.pretokenize.chat --tokenizer llama3/ --templates trl/chat_templates
"""

import argparse
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.protocol import summary, write_result
from tokenfeed.tools.encoding.chat import ChatTemplate
from tokenfeed.tools.encoding.engines import ReferenceEngine
from tokenfeed.tools.encoding.tasks import ChatEncoder
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

REPEATS, WORKERS, PEER_CONVERSATIONS = 3, 2, 4000
VARIABLES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
TOKEN = re.compile(
    r"<\|[A-Za-z_▁|]+\|>|<\uff5c[^\uff5c>]+\uff5c>|<(?:start_of_turn|end_of_turn|turn\||\|turn)>"
)

MAP = f"""
import json, sys, time
started = time.perf_counter()
import datasets
from transformers import PreTrainedTokenizerFast
datasets.disable_progress_bars()
path, tokenizer, template, cache = sys.argv[1:5]
made = PreTrainedTokenizerFast(tokenizer_file=tokenizer, **{VARIABLES})
source = open(template, encoding="utf-8").read()
data = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
turns = sum(map(len, data["messages"]))
def tokenize(example):
    return made.apply_chat_template(
        example["messages"], chat_template=source, return_dict=True,
        return_assistant_tokens_mask=True,
    )
data.map(tokenize, num_proc={WORKERS}, remove_columns=data.column_names)
print(turns / (time.perf_counter() - started))
"""

ODD = ["hi", "", "  lead", " trail ", "\n\nx\n", "é漢字🎉", "e\u0301", "</think>", "assistant\n"]
ODD += ["<think>a</think>b", '{"a": 1}', "<tool_response>x</tool_response>", "<|im_end|>", "x" * 50]
TOOLS = [
    {"type": "function", "function": {"name": "get", "description": "d", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "c"}}}}}
]  # fmt: skip


def tokenizer_with(folder: Path, tokens: set[str], target: Path) -> Path:
    """Write the tokenizer with more special tokens."""
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens([AddedToken(text, normalized=False) for text in sorted(tokens)])
    target.mkdir(exist_ok=True)
    made.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps(VARIABLES))
    return target


def write_corpus(path: Path, turns: int) -> None:
    """Conversations of two to ten messages, with words of the documentation, but no tags."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    draw, words = random.Random(0), [word for word in text.split() if "<" not in word]
    with open(path, "w", encoding="utf-8") as file:
        while turns > 0:
            messages = []
            for _ in range(draw.randint(1, 5)):
                for role, most in (("user", 40), ("assistant", 120)):
                    content = " ".join(draw.choices(words, k=draw.randint(1, most)))
                    messages.append({"role": role, "content": content})
            turns -= len(messages)
            file.write(json.dumps({"messages": messages}) + "\n")


def ours(corpus: Path, tokenizer: Path, template: Path, out: Path) -> float:
    """Turns per second of a run into a new folder."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "tokenfeed.tools.pretokenize", str(corpus), str(out)]
    command += ["--task", "chat", "--tokenizer", str(tokenizer), "--workers", str(WORKERS)]
    command += ["--chat-template", str(template), "--special-tokens-in-text", "split"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    with open(corpus, encoding="utf-8") as file:
        return sum(len(json.loads(line)["messages"]) for line in file) / seconds


def peer(corpus: Path, tokenizer: Path, template: Path, folder: Path) -> float:
    """Turns per second of `datasets.map` over the first conversations."""
    part = folder / "part.jsonl"
    with open(corpus, encoding="utf-8") as file:
        part.write_text("".join(itertools.islice(file, PEER_CONVERSATIONS)))
    arguments = (part, tokenizer / "tokenizer.json", template, folder / "cache")
    command = [sys.executable, "-W", "ignore", "-c", MAP, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(folder / "cache")
    return float(done.stdout.split()[-1])


def conversation(draw: random.Random, *, tools: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": draw.choice(ODD)} for _ in range(draw.choice([0, 1, 1, 2]))
    ]
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": draw.choice(ODD) + draw.choice(ODD)})
        if tools and draw.random() < 0.4:
            function = {"name": "get", "arguments": {"city": draw.choice(ODD), "days": 3}}
            calls = [{"type": "function", "function": function}]
            messages.append({"role": "assistant", "content": draw.choice(ODD), "tool_calls": calls})
            messages.append({"role": "tool", "name": "get", "content": draw.choice(ODD)})
        answer = {"role": "assistant", "content": draw.choice(ODD) + draw.choice(ODD)}
        thinking = {"reasoning_content": draw.choice(ODD)} if draw.random() < 0.3 else {}
        messages.append({**answer, **thinking})
    return messages


def compare(source: str, folder: Path, count: int) -> Counter[str]:
    """Count conversations by how ids and mask compare with those of `transformers`."""
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as name:
        made = tokenizer_with(folder, {*TOKEN.findall(source), *VARIABLES.values()}, Path(name))
        json_bytes = (made / "tokenizer.json").read_bytes()
        theirs = PreTrainedTokenizerFast(tokenizer_file=f"{made}/tokenizer.json", **VARIABLES)
    loaded = TextTokenizer.load(json_bytes, origin=folder, splits_special=True)
    added = loaded.tokenizer.get_added_tokens_decoder().values()
    special = tuple(token.content for token in added if token.special)
    template = ChatTemplate(source=source, special_tokens=special, variables=VARIABLES)
    task = ChatEncoder(chat_template=template, splits_special=True, tools="tools")
    draw = random.Random(0)
    messages = [conversation(draw, tools=number % 2 > 0) for number in range(count)]
    tools = [TOOLS if number % 4 == 3 else None for number in range(count)]
    samples = task.with_tokenizer(json_bytes).encode(
        {"messages": messages, "tools": tools}, ReferenceEngine(loaded).encode, Template((), (), ())
    )
    ids, kinds = (samples.per_token[name].rows() for name in ("input_ids", "kinds"))
    found: Counter[str] = Counter()
    for number in range(count):
        try:
            expected = theirs.apply_chat_template(
                messages[number],
                tools=tools[number],
                chat_template=source,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception:
            found["the template fails"] += 1
            continue
        mask = np.array(expected["assistant_masks"], bool)
        if number in samples.unusable:
            found["nothing to learn" if not mask.any() else "rejected here"] += 1
        elif expected["input_ids"] != ids[number].tolist():
            found["other ids"] += 1
        elif (mask == (kinds[number] & 4 > 0)).all():
            found["identical"] += 1
        else:
            seam = "seam" if samples.counts["split_tokens"][number] else "mask"
            found[f"other {seam}"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--template", type=Path, help="a template with {%% generation %%}")
    parser.add_argument("--templates", type=Path, help="a folder of templates to compare")
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--conversations", type=int, default=2000)
    given = parser.parse_args()
    if given.templates:
        for path in sorted(given.templates.glob("*.jinja")):
            source = path.read_text(encoding="utf-8")
            if re.search(r"\{%-?\s*generation", source):
                print(path.name, dict(compare(source, given.tokenizer, given.conversations)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = tokenizer_with(given.tokenizer, {*VARIABLES.values()}, folder / "tokenizer")
        write_corpus(folder / "corpus.jsonl", given.turns)
        rates: dict[str, list[float]] = {"tokenfeed": [], "datasets.map": []}
        for _ in range(REPEATS):
            arguments = (folder / "corpus.jsonl", tokenizer, given.template)
            rates["tokenfeed"].append(ours(*arguments, folder / "out"))
            rates["datasets.map"].append(peer(*arguments, folder))
        results = [{"loader": name, "turns_per_s": summary(each)} for name, each in rates.items()]
        print(json.dumps(results, indent=1))
        write_result("chat", results, tokenizer=given.tokenizer.name, template=given.template.name)


if __name__ == "__main__":
    main()
