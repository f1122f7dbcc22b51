"""Targets of conversations follow their records, and the summary names what was not read."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow as pa
import pytest
import torch
from pyarrow import feather, parquet
from support.commands import call
from support.training import make_config
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import tokenfeed
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.kinds import Kind
from tokenfeed.tools.pretokenize import main
from tokenfeed.trainer.data.datasets import run_manifest
from tokenfeed.trainer.tasks.registry import make_task

Message = dict[str, Any]

SPECIAL = ("<|endoftext|>", "<|t|>", "<call>")
TEMPLATE = """{% for m in messages %}<|t|>{{ m.role }}:{{ m.content or '' }}\
{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments }}{% endfor %}\
<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|t|>assistant:{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes and a template."""
    folder = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def answer(text: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def run(
    records: list[Any], folder: Path, model: Path, *options: object, task: str = "chat"
) -> tuple[list[str], list[str], Any]:
    """Run the command. Return the texts of its rows, what is learnt of each, and the output."""
    source = folder / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = ("--task", task, "--tokenizer", model, "--validation", 0)
    done = call(main, source, folder / "out", *given, *options)
    table = feather.read_table(folder / "out/train/00000.arrow", memory_map=False).to_pydict()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    learnt = []
    for ids, kinds in zip(table["input_ids"], table.get("kinds", []), strict=False):
        targets = [id_ for id_, kind in zip(ids, kinds, strict=True) if kind & 7 >= Kind.TEXT]
        learnt.append(tokenizer.decode(targets, skip_special_tokens=False))
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in table["input_ids"]]
    return texts, learnt, done


def test_messages_of_weight_0_are_not_learnt(tmp_path: Path, model: Path) -> None:
    messages = [user("2?"), answer("five", weight=0), user("No."), answer("four", weight=1)]
    worthless = [user("2?"), answer("five", weight=0)]
    records = [{"messages": messages}, {"messages": worthless}]
    _, learnt, done = run(records, tmp_path, model)
    assert learnt == ["four<|endoftext|>"]
    assert "1 messages of weight 0: not learnt" in done.stdout
    assert "only messages of weight 0" in (tmp_path / "out/rejects.jsonl").read_text()


def test_other_weights_are_a_warning_unless_kept(tmp_path: Path, model: Path) -> None:
    records = [{"messages": [user("2?"), answer("four", weight=0.5)]}]
    said = "1 messages have weights other than 0 and 1, not used: give --keep weight"
    for number, options in enumerate([(), ("--keep", "weight")]):
        (folder := tmp_path / str(number)).mkdir()
        assert (said in run(records, folder, model, *options)[2].stderr) == (not options)


WHOLE = {
    "chosen": [user("q"), answer("good")],
    "rejected": [user("q"), answer("bad")],
    "messages": [user("q"), answer("good")],
}
ANSWERS = {"chosen": answer("good"), "rejected": answer("bad")}
SHARE_GPT = {
    "conversations": [{"from": "human", "value": "q"}],
    "chosen": {"from": "gpt", "value": "good"},
    "rejected": {"from": "gpt", "value": "bad"},
}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", **WHOLE},
        WHOLE,
        {"messages": [user("q")], **ANSWERS},
        {"messages": [user("q")], "chosen": "good", "rejected": "bad"},
        SHARE_GPT,
    ],
)
def test_pairs_beside_messages_are_pairs(record: Any, tmp_path: Path, model: Path) -> None:
    texts, _, _ = run([record], tmp_path, model)
    begin = "<|t|>user:q<|endoftext|><|t|>assistant:"
    assert texts == [f"{begin}good<|endoftext|>{begin}bad<|endoftext|>"]


SYSTEM = {"role": "system", "content": "s"}
PARTS = [{"type": "text", "text": "q"}]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ([SYSTEM, user("q")], [user("q")]),
        ([user("q")], [SYSTEM, user("q")]),
        ([SYSTEM, user("q")], [SYSTEM, user("q") | {"weight": 0}]),
        ([SYSTEM, user(PARTS)], [user("q")]),
        ([SYSTEM, user("q")], []),
        ([SYSTEM], [user("q")]),
        (" q\n", [SYSTEM, user("q")]),
    ],
)
def test_messages_that_answers_repeat_are_written_once(
    prompt: str | list[Message], before: list[Message], tmp_path: Path, model: Path
) -> None:
    answers = {"chosen": [*before, answer("good")], "rejected": [*before, answer("bad")]}
    texts, _, _ = run([{"prompt": prompt, **answers}], tmp_path, model)
    begin = "<|t|>system:s<|endoftext|><|t|>user:q<|endoftext|><|t|>assistant:"
    assert texts == [f"{begin}good<|endoftext|>{begin}bad<|endoftext|>"]


def test_messages_after_a_prompt_are_kept(tmp_path: Path, model: Path) -> None:
    prompt = [user("yes"), answer("sure"), user("and?")]
    records = [
        {"prompt": prompt, "completion": [user("yes?"), answer("good")]},
        {"prompt": [user("q"), answer("Sure,")], "completion": [answer("Sure,")]},
    ]
    texts, _, _ = run(records, tmp_path, model)
    assert texts[0].count("<|t|>") == 5
    assert texts[1].count("Sure,") == 2


@pytest.mark.parametrize(
    "calls",
    [
        '[{"function": {"name": "f"}}]',
        {"function": {"name": "f"}},
        ["f"],
        [{"function": {"arguments": {}}}],
        [{"function": "f"}],
        [{"name": None}],
    ],
)
def test_calls_without_names_are_rejected(calls: Any, tmp_path: Path, model: Path) -> None:
    """A template would write a call without a name, which a model would learn."""
    records = [{"messages": [user("q"), answer("a", tool_calls=each)]} for each in (calls, [])]
    _, learnt, _ = run(records, tmp_path, model)
    assert learnt == ["a<|endoftext|>"]
    reason = "message 2 with tool_calls that are not a list of objects with a name"
    assert reason in (tmp_path / "out/rejects.jsonl").read_text()


@pytest.mark.parametrize("call_", ["1", "[[]]", "{}"])
def test_share_gpt_calls_without_names_are_rejected(
    call_: str, tmp_path: Path, model: Path
) -> None:
    messages = [{"from": "human", "value": "q"}, {"from": "function_call", "value": call_}]
    records = [{"conversations": messages}, {"conversations": [user("q"), answer("a")]}]
    assert run(records, tmp_path, model)[1] == ["a<|endoftext|>"]


SAID = "{% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}"
NESTED = SAID.replace("<|endoftext|>", "{% generation %}<|endoftext|>{% endgeneration %}")


@pytest.mark.parametrize(
    ("begin", "turn", "learnt"),
    [
        ("{% macro say(m) %}<|t|>" + SAID + "{% endmacro %}", "{{ say(m) }}", ["a<|endoftext|>"]),
        ("", "{% set said %}<|t|>" + SAID + "{% endset %}{{ said }}", ["a<|endoftext|>"]),
        ("", "{% filter trim %}<|t|>" + SAID + "{% endfilter %}", ["a<|endoftext|>"]),
        ("", "{% set said %}<|t|>" + SAID + "{% endset %}{{ said | length }}{{ said }}", []),
        ("", "<|t|>" + NESTED, []),
        ("{% macro say(m) %}" + SAID + "{% endmacro %}", "<|t|>{{ say(m) }}", ["a<|endoftext|>"]),
    ],
)
def test_what_generation_encloses_is_certain_or_rejected(
    begin: str, turn: str, learnt: list[str], tmp_path: Path, model: Path
) -> None:
    """Marks of the tag are in what a macro, {% set %} and {% filter %} write."""
    own = tmp_path / "own.jinja"
    is_said = "{% if m.role == 'assistant' %}" + turn + "{% else %}{{ m.content }}{% endif %}"
    own.write_text(begin + "{% for m in messages %}" + is_said + "{% endfor %}")
    source = tmp_path / "records.jsonl"
    source.write_text(json.dumps({"messages": [user("q"), answer("a")]}))
    if learnt:
        records = [{"messages": [user("q"), answer("a")]}]
        assert run(records, tmp_path, model, "--chat-template", own)[1] == learnt
        return
    given = ("--task", "chat", "--tokenizer", model, "--chat-template", own)
    done = call(main, source, tmp_path / "out", *given, expect=1)
    assert "it is not certain what {% generation %} encloses. Move the tag out" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("kind", ["dataset", "table", "bytes"])
def test_objects_have_the_messages_of_their_files(kind: str, tmp_path: Path, model: Path) -> None:
    """A table has every key in every object, and null where the object had none."""
    calls = [{"function": {"name": "f", "arguments": each}} for each in ({"a": 1}, {"b": 2})]
    rows: Any = [{"messages": [user("q"), answer("x", tool_calls=[each])]} for each in calls]
    if kind == "bytes":
        for row in rows:
            row["messages"][0]["content"] = b"q"
    else:
        rows = datasets.Dataset.from_list(rows) if kind == "dataset" else pa.Table.from_pylist(rows)
    tokenfeed.pretokenize(rows, tmp_path / "out", task="chat", tokenizer=model, validation=0)
    table = feather.read_table(tmp_path / "out/train/00000.arrow", memory_map=False)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [
        tokenizer.decode(ids, skip_special_tokens=False) for ids in table["input_ids"].to_pylist()
    ]
    begin = "<|t|>user:q<|endoftext|><|t|>assistant:x<call>f "
    assert texts == [f"{begin}{{'a': 1}}<|endoftext|>", f"{begin}{{'b': 2}}<|endoftext|>"]


def test_messages_stored_as_an_object_of_lists_are_read(tmp_path: Path, model: Path) -> None:
    """As a Sequence of `datasets`."""
    lists = {"from": ["human", "gpt"], "value": ["q", "a"]}
    short = {**lists, "value": ["q"]}
    records = [{"conversations": each} for each in (lists, short)]
    assert run(records, tmp_path, model)[1] == ["a<|endoftext|>"]


def test_other_names_of_labels_and_tools_are_a_warning(tmp_path: Path, model: Path) -> None:
    record = {"messages": [user("q"), answer("a")], "kto_tag": False, "functions": [{"name": "f"}]}
    done = run([record], tmp_path, model)[2]
    for other, own in (("kto_tag", "label"), ("functions", "tools")):
        remedy = f"give --field {own}={other} beside the other fields"
        assert f"the field `{other}` was not read (1 of 1 records): {remedy}" in done.stderr


def test_messages_beside_other_fields_are_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    given = ("--task", "chat", "--tokenizer", model, "--field", "messages=m")
    for others in (("prompt=p", "completion=c"), ("chosen=c", "rejected=r")):
        done = call(main, tmp_path / "a.jsonl", tmp_path / "out", *given, *others, expect=2)
        first = others[0].partition("=")[0]
        assert f"error: `--field` messages and {first}: expected messages alone, or" in done.stderr


def test_function_call_becomes_a_call(tmp_path: Path, model: Path) -> None:
    call_ = {"name": "depth", "arguments": '{"lake": 1}'}
    records = [{"messages": [user("q"), answer(text, function_call=call_)]} for text in ("", None)]
    records.append({"messages": [user("q"), answer("a", function_call="depth")]})
    _, learnt, _ = run(records, tmp_path, model)
    assert learnt == ['<call>depth {"lake": 1}<|endoftext|>'] * 2
    assert "function_call that is not one object" in (tmp_path / "out/rejects.jsonl").read_text()


@pytest.mark.parametrize("layout", ["prompt", "messages"])
def test_answers_labelled_false_are_rejected(layout: str, tmp_path: Path, model: Path) -> None:
    records: list[Any] = [{"prompt": "q", "completion": text} for text in ("good", "bad", "so")]
    if layout == "messages":
        records = [{"messages": [user("q"), answer(each["completion"])]} for each in records]
    labels = (True, False if layout == "prompt" else "False", None)  # as in CSV
    records = [each | {"label": label} for each, label in zip(records, labels, strict=True)]
    _, learnt, _ = run(records, tmp_path, model)
    assert learnt == ["good<|endoftext|>", "so<|endoftext|>"]
    assert "field `label` is false" in (tmp_path / "out/rejects.jsonl").read_text()


def test_instruction_input_and_output_are_read(tmp_path: Path, model: Path) -> None:
    records = [
        {"instruction": "Translate.", "input": "plum", "output": "Pflaume"},
        {"instruction": "Hi", "input": "", "output": "Ho"},
        {"instruction": "Hi", "output": "Ho"},
        {"instruction": "", "input": "Hi", "output": "Ho"},
    ]
    texts, learnt, done = run(records, tmp_path, model)
    hi = "<|t|>user:Hi<|endoftext|><|t|>assistant:Ho<|endoftext|>"
    first = "<|t|>user:Translate.\nplum<|endoftext|><|t|>assistant:Pflaume<|endoftext|>"
    assert texts == [first, hi, hi, hi]
    assert learnt[0] == "Pflaume<|endoftext|>"
    assert "not read" not in done.stdout


@pytest.mark.parametrize("task", ["chat", "complete"])
def test_an_input_that_is_not_read_is_a_warning(task: str, tmp_path: Path, model: Path) -> None:
    records = [{"instruction": "Translate.", "input": "plum", "output": "Pflaume"}] * 3
    given = ("--field", "prompt=instruction", "completion=output")
    done = run(records, tmp_path, model, *given, task=task)[2]
    assert "not read    fields: input (3 of 3 records)\n" in done.stdout
    remedy = "give --field prompt='{instruction}\\n{input}' completion=NAME"
    assert f"the field `input` was not read (3 of 3 records): {remedy}" in done.stderr


@pytest.mark.parametrize("joins", [False, True])
def test_parts_of_a_content_are_joined(joins: bool, tmp_path: Path, model: Path) -> None:
    """Python would write the list, in a template that takes texts."""
    content = [{"type": "text", "text": text} for text in ("A ", "plum?")]
    template = tmp_path / "own.jinja"
    parts = "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | join("
    parts += "attribute='text') }}{% endif %}"
    template.write_text(TEMPLATE.replace("{{ m.content or '' }}", parts) if joins else TEMPLATE)
    records = [{"messages": [user(content), answer("Yes.")]}] * 2
    texts, _, done = run(records, tmp_path, model, "--chat-template", template)
    assert texts == ["<|t|>user:A plum?<|endoftext|><|t|>assistant:Yes.<|endoftext|>"] * 2
    assert ("2 contents whose parts were joined" in done.stdout) == (not joins)


def test_what_is_not_read_is_said(tmp_path: Path, model: Path) -> None:
    messages = [user("q") | {"mood": 1}, answer("a", train=False), answer("b", mood=2)]
    record = {"messages": messages, "tools": [{"name": "f"}], "source": "web", "label": 3}
    done = run([record, {"messages": messages}], tmp_path, model)[2]
    assert (
        "not read    fields: source (1 of 2 records); keys of messages: mood (4), train (2); "
        "tools: not in the template (1 conversations); labels that are not true or false "
        "(1 records)\n"
    ) in done.stdout
    assert "warning: 1 conversations have tools, but the chat template" in done.stderr
    assert "warning: 2 messages have the key `train`, which was not read" in done.stderr
    assert "source" not in done.stderr


def test_systems_beside_other_system_messages_are_said(tmp_path: Path, model: Path) -> None:
    own = [SYSTEM, user("q"), answer("a")]
    records = [
        {"messages": own, "system": "other"},
        {"messages": own, "system": "s"},
        {"messages": own[1:], "system": "s"},
        {"messages": own, "system": ""},
    ]
    texts, _, done = run(records, tmp_path, model)
    assert len({*texts}) == 1
    said = "system: beside another system message (1 conversations)"
    assert f"not read    {said}" in done.stdout
    assert "warning: 1 conversations begin with another system message" in done.stderr


def test_a_label_of_a_pair_is_not_read(tmp_path: Path, model: Path) -> None:
    texts, _, done = run([{"prompt": "q", **ANSWERS, "label": False}], tmp_path, model)
    assert len(texts) == 1
    assert "not read    fields: label (1 of 1 records)\n" in done.stdout


def test_names_that_are_not_read_stay_on_their_line(tmp_path: Path, model: Path) -> None:
    messages = [user("q") | {"bad\nkey\x1b": 1}, answer("a") | {f"k{n}": n for n in range(150)}]
    done = run([{"messages": messages}], tmp_path, model)[2]
    assert "keys of messages: bad\ufffdkey\ufffd (1), k0 (1)," in done.stdout
    assert "k10 (1) and others\n" in done.stdout


def test_columns_that_are_not_read_are_said(tmp_path: Path, model: Path) -> None:
    parquet.write_table(pa.table({"text": ["a"], "url": ["b"]}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("text,url\na,b\n")
    (tmp_path / "a.json").write_text('[{"text": "a", "url": 1}]')
    (tmp_path / "a.txt").write_text("a")
    for file, said in (("parquet", "a column"), ("csv", "a column"), ("json", "1 of 1 records")):
        words = (tmp_path / f"a.{file}", tmp_path / file, "--tokenizer", model)
        assert f"not read    fields: url ({said})\n" in call(main, *words).stdout
    done = call(main, tmp_path / "a.txt", tmp_path / "txt", "--tokenizer", model)
    assert "not read" not in done.stdout


@pytest.mark.parametrize("is_text", [False, True])
def test_arguments_written_as_json_twice_are_said(
    is_text: bool, tmp_path: Path, model: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE.replace("c.function.arguments", "c.function.arguments | tojson"))
    arguments: Any = {"lake": "Müritz"}
    function = {"name": "depth", "arguments": json.dumps(arguments) if is_text else arguments}
    records = [{"messages": [user("q"), answer(None, tool_calls=[{"function": function}])]}]
    done = run(records, tmp_path, model, "--chat-template", template)[2]
    assert ("warning: 1 calls have arguments as a text" in done.stderr) == is_text
    assert ("give objects" in done.stdout) == is_text


def test_a_template_whose_tokens_are_unknown_is_a_warning(tmp_path: Path, model: Path) -> None:
    records = [{"messages": [user("q"), answer("a")]}]
    for number, (begin, said) in enumerate(
        [
            ("{{ bos_token }}", ["the chat template names bos_token, but no file"]),
            ("{{ eos_token }}", []),
            ("{% set bos_token = 'b' %}{{ bos_token }}", []),
            ("{# writes <|final|> #}", []),
            ("{% if '<|final|>' in messages[0].content %}{% endif %}", []),
            ("{{ messages[0].content.split('<|final|>')[0] }}", []),
            ("<|final|>", ["the chat template writes <|final|>, but the tokenizer has no such"]),
            ("{{ '<|final|>' }}", ["the chat template writes <|final|>"]),
        ]
    ):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "own.jinja").write_text(begin + TEMPLATE)
        done = run(records, folder, model, "--chat-template", folder / "own.jinja")[2]
        assert done.stderr.count("warning: ") == len(said)
        assert all(each in done.stderr for each in said)


BOTH = "{{ bos_token }}" + TEMPLATE.replace("<|endoftext|>", "{{ eos_token }}")
KNOWN = {"added_tokens_decoder": {"258": {"content": "<call>", "special": True}}}
FIRST, SECOND = (
    {"bos_token": "<|t|>", "eos_token": "<|endoftext|>"},
    {"bos_token": "<call>", "eos_token": "<|t|>"},
)


@pytest.mark.parametrize(
    ("config", "older_map"),
    [
        (FIRST, SECOND),
        (FIRST | KNOWN, SECOND),
        (dict.fromkeys(FIRST), SECOND),
        (FIRST, dict.fromkeys(FIRST)),
        (KNOWN | {"eos_token": "<|endoftext|>"}, FIRST),
        ({}, FIRST),
    ],
)
def test_tokens_of_templates_are_those_of_transformers(
    config: dict[str, Any], older_map: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(model, own := tmp_path / "model")
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    (own / "special_tokens_map.json").write_text(json.dumps(older_map))
    (own / "chat_template.jinja").write_text(BOTH)
    messages = [user("q"), answer("a")]
    texts, _, _ = run([{"messages": messages}], tmp_path, own)
    assert texts == [
        AutoTokenizer.from_pretrained(own).apply_chat_template(messages, tokenize=False)
    ]


@pytest.mark.parametrize(
    ("config", "template", "token"),
    [
        ({"bos_token": "<bos>"}, BOTH, "<bos>"),
        ({"bos_token": "<call>", "eos_token": "<eos>"}, BOTH, "<eos>"),
        ({"extra_special_tokens": ["<x>"]}, "<x>" + TEMPLATE, "<x>"),
        ({"additional_special_tokens": [{"content": "<x>"}]}, "<x>" + TEMPLATE, "<x>"),
        ({"added_tokens_decoder": {"300": {"content": "<x>"}}}, "<x>" + TEMPLATE, "<x>"),
        ({"eos_token": "<x>"}, "<x>" + TEMPLATE, "<x>"),
        ({"bos_token": "<bos>", "extra_special_tokens": ["<x>"]}, TEMPLATE, ""),
        ({"extra_special_tokens": "\u0394", "added_tokens_decoder": 1}, "\u0394" + TEMPLATE, ""),
    ],
)
def test_tokens_that_the_tokenizer_lacks_are_a_warning(
    config: dict[str, Any], template: str, token: str, tmp_path: Path, model: Path
) -> None:
    shutil.copytree(model, own := tmp_path / "model")
    (own / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"} | config))
    (own / "chat_template.jinja").write_text(template)
    done = run([{"messages": [user("q"), answer("a")]}], tmp_path, own)[2]
    said = f"the chat template writes {token}, but the tokenizer has no such token"
    assert done.stderr.count("warning: ") == done.stderr.count(said) == bool(token)


@pytest.mark.parametrize("tools", [None, [{"name": "f"}]])
@pytest.mark.parametrize("begin", ["", "\n", "\n  "])
@pytest.mark.parametrize("is_dict", [False, True])
def test_white_space_around_templates_with_names_is_kept(
    is_dict: bool, begin: str, tools: Any, tmp_path: Path, model: Path
) -> None:
    from transformers import AutoTokenizer

    named = {"default": begin + TEMPLATE, "tool_use": begin + "TOOLS" + TEMPLATE}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    shutil.copytree(model, own := tmp_path / "model")
    (own / "chat_template.jinja").unlink()
    config = {"eos_token": "<|endoftext|>", "chat_template": named if is_dict else listed}
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [user("q"), answer("a")]
    texts, _, _ = run([{"messages": messages, "tools": tools}], tmp_path, own)
    peer = AutoTokenizer.from_pretrained(own)
    assert texts == [peer.apply_chat_template(messages, tools=tools, tokenize=False)]


def test_empty_files_beside_a_tokenizer_are_refused(tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, own := tmp_path / "model")
    (own / "tokenizer_config.json").write_bytes(b"")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [user("q"), answer("a")]}))
    given = ("--task", "chat", "--tokenizer", own)
    done = call(main, tmp_path / "a.jsonl", tmp_path / "out", *given, expect=1)
    assert "tokenizer_config.json is not valid" in done.stderr


def test_padding_of_token_ids_is_left_out(tmp_path: Path, model: Path) -> None:
    records = [
        {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]},
        {"input_ids": [0, 8, 9], "attention_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]},
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1]},
        {"input_ids": [5, 6], "attention_mask": [2, 1]},
        {"input_ids": [5, 6, 7], "attention_mask": [0, 0, 0]},
        {"input_ids": [5]},
    ]
    done = run(records, tmp_path, model, task="ids")[2]
    table = feather.read_table(tmp_path / "out/train/00000.arrow", memory_map=False)
    assert table["input_ids"].to_pylist() == [[5, 6, 7], [8, 9]]
    rejects = (tmp_path / "out/rejects.jsonl").read_text()
    for reason in ("0 between ids", "2 number(s) for 3 id(s)", "other numbers than 0 and 1"):
        assert reason in rejects
    assert "7 read = 2 written + 1 empty + 4 rejected" in done.stdout


def test_padding_of_masked_ids_is_left_out(tmp_path: Path, model: Path) -> None:
    mask = [1, 1, 1, 0]
    records = [
        {"input_ids": [5, 6, 7, 0], "attention_mask": mask, "labels": [-100, 6, 7, -100], "w": mask}
    ]
    names = ("input_ids", "attention_mask", "labels")
    given = ("--field", *(f"{name}={name}" for name in names), "--keep", "w")
    texts, learnt, _ = run(records, tmp_path, model, *given, task="ids")
    assert [len(texts[0]), len(learnt[0])] == [3, 2]
    table = feather.read_table(tmp_path / "out/train/00000.arrow", memory_map=False)
    assert table["w"].to_pylist() == [[1, 1, 1]]


@pytest.mark.parametrize("name", ["loss_mask", "assistant_masks"])
def test_a_mask_that_is_not_read_is_a_warning(name: str, tmp_path: Path, model: Path) -> None:
    done = run([{"input_ids": [5, 6], name: [0, 1]}], tmp_path, model, task="ids")[2]
    remedy = f"give --field loss_mask={name} beside the other fields"
    assert f"the field `{name}` was not read (1 of 1 records): {remedy}" in done.stderr


@pytest.mark.parametrize("kind", ["list", "dataset", "table"])
def test_fields_of_objects_that_are_not_read_are_named(
    kind: str, tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": [user("q"), answer("a")], "kto_tag": False, "source": "web"}] * 2
    given: dict[str, Any] = {
        "list": rows,
        "dataset": datasets.Dataset.from_list(rows),
        "table": pa.Table.from_pylist(rows),
    }
    options: dict[str, Any] = {"task": "chat", "tokenizer": model, "validation": 0}
    done = tokenfeed.pretokenize(given[kind], tmp_path / "out", **options)
    expected = "fields: kto_tag (2 of 2 records), source (2 of 2 records)"
    assert done.summary.not_read == expected
    assert "the field `kto_tag` was not read (2 of 2 records)" in caplog.text


def test_padding_of_objects_is_left_out(tmp_path: Path, model: Path) -> None:
    rows = [{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}]
    given: dict[str, Any] = {"task": "ids", "tokenizer": model, "validation": 0}
    tokenfeed.pretokenize(rows, tmp_path / "out", **given)
    table = feather.read_table(tmp_path / "out/train/00000.arrow", memory_map=False)
    assert table["input_ids"].to_pylist() == [[5, 6]]


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_objects_of_datasets_keep_the_names_of_classes(
    task: Literal["classify", "tag"], tmp_path: Path, model: Path
) -> None:
    classes = datasets.ClassLabel(names=["neg", "neu", "pos"])
    if task == "classify":
        rows = datasets.Dataset.from_list([{"text": "a", "label": 2}, {"text": "b", "label": 0}])
        rows = rows.cast_column("label", classes)
    else:
        rows = datasets.Dataset.from_list([{"tokens": ["a", "b"], "tags": [0, 2]}])
        rows = rows.cast_column("tags", datasets.Sequence(classes))
    made = tokenfeed.pretokenize(rows, tmp_path / "out", task=task, tokenizer=model, validation=0)
    assert made.manifest.label_names == ("neg", "neu", "pos")


def test_losses_that_would_ignore_weights_refuse_them(tmp_path: Path, model: Path) -> None:
    import transformers

    from tokenfeed.integrations.transformers import ShardTrainer

    records = [{"messages": [user("2?"), answer("four", weight=0.5)]}]
    run(records, tmp_path, model, "--keep", "weight")
    said = "has the column `weight`, which this loss would ignore"
    config = make_config(tmp_path / "out", tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match=said):
        make_task(config, run_manifest(config), torch.device("cpu"))
    loader = tokenfeed.ShardLoader(str(tmp_path / "out"), batching=tokenfeed.Padded(64))
    args = transformers.TrainingArguments(str(tmp_path / "trainer"), max_steps=1, report_to=[])
    with loader, pytest.raises(ConfigError, match=said):
        ShardTrainer(model=torch.nn.Linear(1, 1), args=args, train_dataset=loader)


def test_numbers_that_mean_other_classes_in_another_file_are_refused(
    tmp_path: Path, model: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for file, names in (("a", ["neg", "pos"]), ("b", ["pos", "neg"])):
        rows = datasets.Dataset.from_dict({"text": ["x"], "label": [1]})
        cast = rows.cast_column("label", datasets.ClassLabel(names=names))
        cast.to_parquet(str(folder / f"{file}.parquet"))
    options = ("--task", "classify", "--tokenizer", model, "--validation", 0)
    done = call(main, folder, tmp_path / "out", *options, expect=1)
    for said in ("a.parquet has neg, pos; ", "b.parquet has pos, neg. Cast both"):
        assert said in done.stderr


def test_records_with_a_wrong_tool_or_thinking_cost_only_themselves(
    tmp_path: Path, model: Path
) -> None:
    good = [user("q"), answer("a")]
    records = [
        {"messages": [user("q"), answer("a", reasoning={"effort": "low"})]},
        {"messages": good, "tools": ["search"]},
        {"messages": good, "tools": [{"name": "search"}]},
        {"messages": [user("q"), answer("a", thinking=False)]},
        {"messages": [user("q"), answer(None, thinking=False)]},
    ]
    texts, _, _ = run(records, tmp_path, model)
    assert len(texts) == 2
    rejects = (tmp_path / "out/rejects.jsonl").read_text()
    assert "message 2 whose reasoning is dict, expected text" in rejects
    assert "field `tools` has a tool that is str, expected an object" in rejects


def test_every_field_of_a_wide_record_is_named(tmp_path: Path, model: Path) -> None:
    wide = {f"column number {n}, unused": 0 for n in range(20)}
    records = [{"input_ids": [5, 6], **wide, "loss_mask": [0, 1]}]
    _, _, done = run(records, tmp_path, model, task="ids")
    assert "the field `loss_mask` was not read" in done.stderr
    assert "column number 0, unused (1 of 1 records)" in done.stdout


def test_a_prompt_beside_messages_is_no_reason_for_advice(tmp_path: Path, model: Path) -> None:
    records = [{"messages": [user("q"), answer("a")], "prompt": "q", "prompt_id": "7"}]
    _, _, done = run(records, tmp_path, model)
    assert "prompt (1 of 1 records), prompt_id" in done.stdout
    assert "warning" not in done.stderr


def test_a_word_in_the_text_of_a_template_reads_no_key(tmp_path: Path, model: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("Never train.\n{# no loss_mask #}{% set mood = 'mood' %}" + TEMPLATE)
    messages = [user("q"), answer("a", train=False, loss_mask=0, mood=1)]
    _, _, done = run([{"messages": messages}], tmp_path, model, "--chat-template", template)
    for key in ("train", "loss_mask"):
        assert f"warning: 1 messages have the key `{key}`, which was not read" in done.stderr
    assert "mood" not in done.stdout


def test_other_ids_than_those_of_transformers_are_said(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    done = run([{"text": "a"}], tmp_path, folder, task="lm")[2]
    assert "tokenizer_config.json has `add_prefix_space` true, unlike tokenizer.json" in done.stderr
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": false}')
    Tokenizer(models.BPE(vocab={"a": 0, "<eos>": 1}, merges=[])).save(
        str(folder / "tokenizer.json")
    )
    done = run([{"text": "ab"}], folder, folder, task="lm")[2]
    assert "prefix" not in done.stderr
    assert "the tokenizer leaves out characters that its vocabulary lacks" in done.stderr


def test_many_unknown_tokens_are_a_warning(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    known = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    known.save(str(folder / "tokenizer.json"))
    said = "of the tokens of the first records are [UNK], because the tokenizer lacks"
    for text, is_said in (("a b", True), ("a a", False)):
        (tmp_path / text).mkdir()
        done = run([{"text": text}], tmp_path / text, folder, task="lm")[2]
        assert (f"warning: 50% {said}" in done.stderr) == is_said


def test_empty_answers_and_null_arguments_are_counted(tmp_path: Path, model: Path) -> None:
    call_ = {"function": {"name": "f", "arguments": {"city": "x", "day": None}}}
    records = [{"messages": [user("q"), answer(text)]} for text in ("", " \n", "a")]
    records.append({"messages": [user("q"), answer("", tool_calls=[call_])]})
    _, _, done = run(records, tmp_path, model)
    assert "1 calls with null arguments" in done.stdout
    assert "2 messages of the assistant with no text but white space" in done.stdout


def test_a_long_list_of_labels_is_cut(tmp_path: Path, model: Path) -> None:
    records = [{"text": "a", "label": label} for label in (0, 300)]
    _, _, done = run(records, tmp_path, model, task="classify")
    assert "301: 0, 1, 2, " in done.stdout
    assert "98, 99, ...\n" in done.stdout


def test_labels_with_fractions_name_the_way_on(tmp_path: Path, model: Path) -> None:
    table = pa.table({"text": ["a", "b"], "label": [1.0, None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1.0}\n')
    options = ("--task", "classify", "--tokenizer", model, "--validation", 0)
    for file in ("a.parquet", "a.jsonl"):
        done = call(main, tmp_path / file, tmp_path / "out", *options, expect=1)
        assert "Turn the labels into whole numbers, or learn numbers by" in done.stderr
