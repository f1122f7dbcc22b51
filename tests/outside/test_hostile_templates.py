"""Hostile chat templates: each ends in one line, by fuel, a refusal, or the end of a worker.

The first group makes a template fail in each record. Templates of the second group do what no fuel
pays for: they would overflow the stack, fill the memory or not end. The system ends the worker.
"""

import json
from pathlib import Path

import pytest
from support import warm

from tokenfeed import pretokenize

LOOP = "{% for i in range(100000) %}"
NEW = "{% set n = namespace() %}{% set n.x = [1] %}"
TWICE = NEW + "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
DEEP = NEW + LOOP + "{% set n.x = [n.x] %}{% endfor %}"

REJECTED = {
    "loops": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "range": "{{ range(10**12) }}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "call": "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "class": "{{ messages.__class__.__init__.__globals__ }}",
    "class by name": "{{ messages | attr('__class__') | attr('__mro__') }}",
    "text": "{{ 'a' * 10**10 }}",
    "texts": "{% set x = 'a' * 10**7 %}" + LOOP + "{{ x }}{% endfor %}",
    "doubled": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}",
    "doubled by format": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}"
    "{% set n.x = '{}{}'.format(n.x, n.x) %}{% endfor %}{{ n.x | length }}",
    "join": "{{ (['a' * 10**6] * 10**5) | join }}",
    "replace": "{{ ('a' * 10**7) | replace('a', 'b' * 1000) }}",
    "replace nothing": "{{ ('a' * 10**7).replace('', 'b' * 10000) }}",
    "indent": "{{ ('a\n' * 10**6) | indent(10**6) }}",
    "format": "{{ '%999999999d' | format(1) }}",
    "format method": "{{ '{:999999999}'.format(1) }}",
    "include": "{% include 'text' %}",
    "import": "{% import 'os' as x %}{{ x.environ }}",
    "no such filter": "{{ 'a' | center(10**9) }}",
    "undefined": "{{ nothing.at.all }}",
    "division": "{{ 1 // 0 }}",
    "power": "{{ 10 ** 10**9 }}",
    "surrogate": "{{ '\\ud800' }}",
    "method": "{{ messages.append }}",
    "method of a message": "{% for m in messages %}{{ m.items }}{% endfor %}",
    "method in upper case": "{{ [messages[0].get] | string | upper }}",
}
REFUSED = {
    "parentheses": "{{ " + "(" * 2000 + ")" * 2000 + " }}",
    "operators": "{{ 1" + "+1" * 100_000 + " }}",
    "tags": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "branches": "{% if 0 %}" + "{% elif 0 %}" * 100_000 + "{% endif %}",
    "unclosed": "{% if",
    "unclosed comments": "{#" * 400_000,
    "unclosed tags": "{% set " * 140_000,
    "unclosed outputs": "{{" * 400_000,
    "unclosed texts": "{{ '" + "\\'\"" * 200_000,
    "raw": "{% raw %}" + "{#{%{{ set " * 90_000 + "{% endraw %}",
    "long": "a" * 2_000_000,
    "deep": DEEP + "{{ n.x }}",
    "deep equals": DEEP.replace("1", "2") + "{{ n.x == [n.x] }}" + "{{ n.x | tojson }}",
    "namespace": "{% set n = namespace() %}{% set m = n %}{% set n.x = m %}{{ n }}",
    "namespace of a block": "{% with n = namespace() %}{% set n.x = n %}{{ n }}{% endwith %}",
    "namespace in a loop": NEW + "{% for m in [n] %}{% set n.x = m %}{% endfor %}{{ n }}",
    "memory": "{% set x = ['a' * 10**6] * 10000 %}{{ x | string | length }}",
    "list": LOOP + "{% set x = messages.extend(messages) %}{% endfor %}",
}
NEVER_ENDING = {
    "tree": TWICE + "{{ n.x | string | length }}",
    "list": NEW + "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
}
ARGUMENTS = ("self", "conversations", "chat_template", "continue_final_message", "tokenfeed_begin")
"""Variables that a record may give to its template, with names that libraries use."""
CHATML = (
    "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}"
)

LAUNCH = """
import os, sys
from tokenfeed.tools.pretokenize import main
process = os.fork()
if not process:
    sys.exit(main())
_, status, used = os.wait4(process, 0)
print(os.waitstatus_to_exitcode(status), used.ru_maxrss)
"""
"""A process's memory counts from the one that forks it, which has half a GB here. Workers start as
on a command line."""


def ended(template: str, folder: Path, tokenizer: Path) -> tuple[int, list[str], int]:
    """Return the exit code of a run with a template, its lines on stderr, and its memory in MB."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (folder / "t.jinja").write_text(template + CHATML)
    words = ["chats.jsonl", "out", "--task", "chat", "--tokenizer", tokenizer]
    done = warm.run(["-c", LAUNCH, *words, "--chat-template", "t.jinja"], cwd=folder)
    assert done.returncode == 0, done.stderr
    code, kilobytes = map(int, done.stdout.splitlines()[-1].split())
    return code, done.stderr.splitlines(), kilobytes >> 10


@pytest.mark.parametrize("name", [*REJECTED, *REFUSED])
def test_a_hostile_template_ends_in_one_line(name: str, tmp_path: Path, tokenizer: Path) -> None:
    template = (REJECTED | REFUSED)[name]
    code, lines, megabytes = ended(template, tmp_path, tokenizer)
    assert code == 1
    assert [line for line in lines if "error: " in line] == lines[-1:]
    assert "Traceback" not in "".join(lines)
    assert ("address in memory" in lines[-1]) == name.startswith("method")
    assert megabytes < 2500
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", NEVER_ENDING)
def test_a_template_that_does_not_end_is_ended(name: str, tmp_path: Path, tokenizer: Path) -> None:
    code, lines, _ = ended(NEVER_ENDING[name], tmp_path, tokenizer)
    assert code == 1
    assert "If the chat template was the reason" in lines[-1]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_record_with_a_reserved_argument_ends_no_run(
    name: str, tmp_path: Path, tokenizer: Path
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": messages, "chat_template_kwargs": {name: True}}, {"messages": messages}]
    (tmp_path / "t.jinja").write_text(CHATML)
    made = pretokenize(
        records,
        tmp_path / "out",
        task="chat",
        tokenizer=tokenizer,
        chat_template=tmp_path / "t.jinja",
        validation=0,
    )
    assert made.summary.documents + len(made.rejects) == 2
    assert made.summary.documents >= 1


def test_a_template_may_write_an_address_that_a_message_has(
    tmp_path: Path, tokenizer: Path
) -> None:
    messages = [
        {"role": "user", "content": "what is <A object at 0x7F00>?"},
        {"role": "assistant", "content": "b"},
    ]
    (tmp_path / "t.jinja").write_text(CHATML.replace("m.content", "m.content | lower"))
    made = pretokenize(
        [{"messages": messages}],
        tmp_path / "out",
        task="chat",
        tokenizer=tokenizer,
        chat_template=tmp_path / "t.jinja",
        validation=0,
    )
    assert made.summary.documents == 1
