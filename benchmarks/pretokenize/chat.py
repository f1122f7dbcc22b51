"""How fast is `pretokenize --task chat` beside TRL, and does it learn the same tokens?

TRL tokenizes by `datasets.map`: for each conversation, `apply_chat_template` of `transformers` with
`return_assistant_tokens_mask`. The same call runs here in as many processes, over the first part of
the corpus, which is enough to know its rate. `--templates` compares ids and masks for every
template in a folder, such as `trl/chat_templates` of TRL's wheel. `--renderers` compares them with
the package `renderers`, for the families that it knows and the folder has.

    python -m benchmarks.pretokenize.chat --tokenizers gpt2/ qwen3/ --template qwen3_training.jinja
    python -m benchmarks.pretokenize.chat --tokenizers llama3/ --templates trl/chat_templates
    python -m benchmarks.pretokenize.chat --tokenizers qwen3/ llama3/ --renderers trl/chat_templates
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.protocol import summary, write_result
from tokenfeed.tools.encoding.chat import ChatTemplate
from tokenfeed.tools.encoding.engines import ReferenceEngine
from tokenfeed.tools.encoding.tasks.chat import ChatEncoder
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

REPEATS, WORKERS, PEER_CONVERSATIONS = 3, 2, 4000
VARIABLES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
TOKEN = re.compile(
    r"<\|[A-Za-z_▁|]+\|>|<\uff5c[^\uff5c>]+\uff5c>|<(?:start_of_turn|end_of_turn|turn\||\|turn)>"
)
TAG = re.compile(r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>")
"""Matches tokens that are no special tokens in the tokenizers of models."""

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
        example["messages"], tools=example.get("tools"), chat_template=source, return_dict=True,
        return_assistant_tokens_mask=True,
    )
data.map(tokenize, num_proc={WORKERS}, remove_columns=data.column_names)
print(turns / (time.perf_counter() - started))
"""

FAMILIES = {
    "qwen3": "qwen3.jinja",
    "qwen3.5": "qwen3_5_think.jinja",
    "qwen3.6": "qwen3_6.jinja",
    "qwen3.8": "qwen3_8.jinja",
    "qwen3-vl": "qwen3_vl.jinja",
    "llama-3": "llama3_2.jinja",
    "deepseek-v3": "deepseekv3.jinja",
    "glm-4.5": "glm4moe.jinja",
    "gemma4": "gemma4.jinja",
    "nemotron-3": "nemotron_3_nano.jinja",
    "nemotron-3-ultra": "nemotron_3_ultra.jinja",
    "nemotron-3.5": "nemotron_3_5_lightning.jinja",
}
"""The templates of families that `renderers` knows. The renderer of gpt-oss needs a network."""
FIRST_TOKENS = {
    "llama-3": "<|begin_of_text|>",
    "deepseek-v3": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "gemma4": "<bos>",
}
"""The first token of a conversation in some families."""

ODD = ["hi", "", "  lead", " trail ", "\n\nx\n", "é漢字🎉", "e\u0301", "</think>", "assistant\n"]
ODD += ["<think>a</think>b", '{"a": 1}', "<tool_response>x</tool_response>", "<|im_end|>", "x" * 50]
TOOLS = [
    {"type": "function", "function": {"name": "get", "description": "d", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "c"}}}}}
]  # fmt: skip


def tokenizer_with(folder: Path, tokens: set[str], target: Path) -> Path:
    """Write the tokenizer with more tokens, of which all but tags are special."""
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in sorted(tokens):
        is_special = TAG.fullmatch(text) is None
        made.add_tokens([AddedToken(text, normalized=False, special=is_special)])
    target.mkdir(exist_ok=True)
    made.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps(VARIABLES))
    return target


def write_corpus(path: Path, turns: int, *, tools: bool) -> None:
    """Conversations of two to ten messages, with words of the documentation, but no tags.

    With `tools`, each conversation lists three functions, and half of its questions need a call.
    """
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    draw, words = random.Random(0), [word for word in text.split() if "<" not in word]

    def said(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    names = [f"get_{number}" for number in range(60)]
    with open(path, "w", encoding="utf-8") as file:
        while turns > 0:
            messages: list[dict[str, Any]] = []
            offered = draw.sample(names, 3)
            for _ in range(draw.randint(1, 5)):
                messages.append({"role": "user", "content": said(40)})
                if tools and draw.random() < 0.5:
                    name, id_ = draw.choice(offered), f"call_{draw.getrandbits(48):x}"
                    arguments = {"query": said(8), "limit": draw.randint(1, 100)}
                    function = {"name": name, "arguments": arguments}
                    calls = [{"id": id_, "type": "function", "function": function}]
                    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
                    messages.append({"role": "tool", "content": said(40), "tool_call_id": id_})
                messages.append({"role": "assistant", "content": said(120)})
            turns -= len(messages)
            listed = [function_named(name) for name in offered]
            file.write(json.dumps({"messages": messages} | ({"tools": listed} if tools else {})))
            file.write("\n")


def function_named(name: str) -> dict[str, Any]:
    """Return the description of a function for templates."""
    properties = {"query": {"type": "string"}, "limit": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


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


Expected = Callable[[list[dict[str, Any]], list[Any] | None], tuple[list[int], list[Any]]]
"""Returns the ids and the mask of a conversation with tools."""


def of_transformers(tokenizer: Any, source: str) -> Expected:
    """Return a function that calls `apply_chat_template`."""

    def expected(messages: list[dict[str, Any]], tools: list[Any] | None) -> Any:
        found = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=source,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return found["input_ids"], found["assistant_masks"]

    return expected


class Asked:
    """A tokenizer that notes the tokens for which a renderer asks."""

    name_or_path, unk_token_id, eos_token_id = "", None, 0

    def __init__(self) -> None:
        self.tokens: set[str] = set()

    def convert_tokens_to_ids(self, token: str) -> int:
        """Note the token."""
        self.tokens.add(token)
        return len(self.tokens)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Note the text, which is a token."""
        return [self.convert_tokens_to_ids(text)]

    def get_vocab(self) -> dict[str, int]:
        """Return no tokens."""
        return {}


def of_renderers(tokenizer: Any, family: str) -> Expected:
    """Return a function that calls the renderer of a family."""
    import renderers

    made = renderers.create_renderer(tokenizer, renderers.config_from_name(family))

    def expected(messages: list[dict[str, Any]], tools: list[Any] | None) -> Any:
        found = renderers.build_training_sample(made, messages, tools=tools)
        return found.token_ids, found.loss_mask

    return expected


def compare(source: str, folder: Path, count: int, family: str = "") -> Counter[str]:
    """Count conversations by how ids and mask compare with those of `transformers`, or with the
    renderer of a family.
    """
    from transformers import PreTrainedTokenizerFast

    asked, variables = Asked(), VARIABLES | {"bos_token": FIRST_TOKENS.get(family, "<|im_start|>")}
    if family:
        of_renderers(asked, family)
    tokens = {*TOKEN.findall(source), *variables.values(), *asked.tokens}
    with tempfile.TemporaryDirectory() as name:
        made = tokenizer_with(folder, tokens, Path(name))
        json_bytes = (made / "tokenizer.json").read_bytes()
        theirs = PreTrainedTokenizerFast(tokenizer_file=f"{made}/tokenizer.json", **variables)
    expects = of_renderers(theirs, family) if family else of_transformers(theirs, source)
    loaded = TextTokenizer.load(json_bytes, origin=folder, splits_special=True)
    added = loaded.tokenizer.get_added_tokens_decoder().values()
    special = tuple(token.content for token in added if token.special)
    template = ChatTemplate(source=source, special_tokens=special, variables=variables)
    task = ChatEncoder(chat_template=template, splits_special=True, names={"tools": "tools"})
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
            expected_ids, expected_mask = expects(messages[number], tools[number])
        except Exception:
            found["the template fails"] += 1
            continue
        mask = np.array(expected_mask, bool)
        if number in samples.unusable:
            found["nothing to learn" if not mask.any() else "rejected here"] += 1
        elif expected_ids != ids[number].tolist():
            found["other ids"] += 1
        elif (mask == (ours := kinds[number] & 4 > 0)).all():
            found["identical"] += 1
        else:
            found[_difference(theirs, ids[number], mask, ours)] += 1
    return found


def _difference(tokenizer: Any, ids: np.ndarray, mask: np.ndarray, ours: np.ndarray) -> str:
    """Return how our mask differs: by a reason that holds for every token, or unexplained."""
    more, fewer = mask & ~ours, ours & ~mask
    texts = [tokenizer.decode([id_]) for id_ in ids[more]]
    begins = ~np.roll(mask, 1) & np.roll(ours, -1)
    reasons = []
    if more.any() and {text.strip() for text in texts} <= {"<think>", ""} and "<think>" in texts:
        reasons.append("<think> is in the prompt")
    elif more.any() and (np.roll(ours, 1) & ~np.roll(mask, -1))[more].all():
        reasons.append("the next header as a stop token")
    elif more.any():
        reasons.append("a header in the first token" if begins[more].all() else "unexplained")
    if fewer.any() and {tokenizer.decode([id_]) for id_ in ids[fewer]} == {"\n"}:
        after = ~np.roll(ours, 1)[fewer]
        reasons.append("a line break after the prompt" if after.all() else "unexplained")
    elif fewer.any():
        is_cut = all("\ufffd" in tokenizer.decode([id_]) for id_ in ids[fewer])
        reasons.append("a last character in several tokens" if is_cut else "unexplained")
    return " and ".join(reasons)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizers", type=Path, nargs="+", required=True)
    parser.add_argument("--template", type=Path, help="a template with {%% generation %%}")
    parser.add_argument("--templates", type=Path, help="a folder of templates to compare")
    parser.add_argument("--renderers", type=Path, help="a folder of templates to compare")
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--conversations", type=int, default=2000)
    given = parser.parse_args()
    if given.templates:
        for path in sorted(given.templates.glob("*.jinja")):
            source = path.read_text(encoding="utf-8")
            if re.search(r"\{%-?\s*generation", source):
                counts = compare(source, given.tokenizers[0], given.conversations)
                print(path.name, dict(counts), flush=True)
        return
    if given.renderers:
        for family, name in FAMILIES.items():
            source = (given.renderers / name).read_text(encoding="utf-8")
            alike = (each for each in given.tokenizers if each.name[:4] == family[:4])
            own = next(alike, given.tokenizers[0])
            counts = compare(source, own, given.conversations, family)
            print(family, name, dict(counts), flush=True)
        return
    results = []
    for folder, has_tools in itertools.product(given.tokenizers, (False, True)):
        results += measure(folder, given.template, given.turns, has_tools=has_tools)
        print(json.dumps(results[-2:], indent=1), flush=True)
    write_result("chat", results, template=given.template.name, workers=WORKERS)


def measure(folder: Path, template: Path, turns: int, *, has_tools: bool) -> list[dict[str, Any]]:
    """Return the rates of both programs for one tokenizer, in turns per second."""
    rates: dict[str, list[float]] = {"tokenfeed": [], "datasets.map": []}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        tokenizer = tokenizer_with(folder, {*VARIABLES.values()}, work / "tokenizer")
        write_corpus(work / "corpus.jsonl", turns, tools=has_tools)
        for _ in range(REPEATS):
            rates["tokenfeed"].append(
                ours(work / "corpus.jsonl", tokenizer, template, work / "out")
            )
            rates["datasets.map"].append(peer(work / "corpus.jsonl", tokenizer, template, work))
    case = {"tokenizer": folder.name, "tool_calls": has_tools, "turns": turns}
    return [{"loader": name, **case, "turns_per_s": summary(each)} for name, each in rates.items()]


if __name__ == "__main__":
    main()
