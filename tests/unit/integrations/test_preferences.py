"""Pairs of conversations: both are in one row, and come back as prompt and answers."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tokenfeed import Fixed, ShardLoader, pretokenize
from tokenfeed.integrations.preferences import preference_pairs
from tokenfeed.pipeline.errors import ConfigError

TEMPLATE = """{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}\
{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"""
WORDS = ["?", "system", "user", "assistant", "end", *"abcdefgh"]
PROMPT = [{"role": "user", "content": "a b"}]
TEXTS = {"prompt": "a b", "chosen": "c d", "rejected": "c e f"}
EXPECTED = ["user a b end assistant c d end", "user a b end assistant c e f end"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["end"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def made(tokenizer: Path, rows: list[Any], field: dict[str, str] | None = None) -> Any:
    out, named = tokenizer / "pairs", field or {}
    return pretokenize(rows, out, task="chat", tokenizer=tokenizer, field=named, validation=0)


def words(ids: list[int]) -> str:
    return " ".join(WORDS[id_] for id_ in ids)


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


MESSAGES = {"prompt": PROMPT, "chosen": answer("c d"), "rejected": answer("c e f")}
WHOLE = {"chosen": PROMPT + answer("c d"), "rejected": PROMPT + answer("c e f")}


@pytest.mark.parametrize("record", [TEXTS, MESSAGES, WHOLE, WHOLE | {"prompt": "a b"}])
def test_pairs_come_back_as_prompt_and_answers(tokenizer: Path, record: dict[str, Any]) -> None:
    made(tokenizer, [record] * 3)
    pairs = [*preference_pairs(tokenizer / "pairs")]
    assert len(pairs) == 3
    for pair in pairs:
        prompt, chosen, rejected = (
            words(pair[f"{n}_ids"]) for n in ("prompt", "chosen", "rejected")
        )
        assert prompt == "user a b end assistant"
        assert [f"{prompt} {chosen}", f"{prompt} {rejected}"] == EXPECTED


def test_prompt_ends_before_the_answers_differ(tokenizer: Path) -> None:
    chosen = [*PROMPT, *answer("c"), {"role": "user", "content": "d"}, *answer("e")]
    rejected = [*PROMPT, *answer("c"), {"role": "user", "content": "f"}, *answer("e")]
    made(tokenizer, [{"chosen": chosen, "rejected": rejected}])
    (pair,) = preference_pairs(tokenizer / "pairs")
    assert words(pair["prompt_ids"]) == "user a b end assistant c end user"
    assert words(pair["rejected_ids"]) == "f end assistant e end"
    (pair,) = preference_pairs(tokenizer / "pairs", targets={"thinking"})  # of which it has none
    assert words(pair["prompt_ids"]) == "user a b end assistant c end user"
    (pair,) = preference_pairs(tokenizer / "pairs", targets="assistant")
    assert words(pair["prompt_ids"]) == "user a b end assistant"


def test_data_sets_without_pairs_are_refused(tokenizer: Path) -> None:
    rows = [{"messages": PROMPT + answer("c")}]
    pretokenize(rows, tokenizer / "chat", task="chat", tokenizer=tokenizer, validation=0)
    with pytest.raises(ConfigError, match="has a row that is no pair"):
        next(preference_pairs(tokenizer / "chat"))
    texts = [{"text": "a b"}, {"text": "c d"}]
    pretokenize(texts, tokenizer / "texts", tokenizer=tokenizer, validation=0)
    with pytest.raises(ConfigError, match="texts: has no pairs, because its task is lm"):
        next(preference_pairs(tokenizer / "texts"))
    with pytest.raises(ConfigError, match="expected both chosen and rejected"):
        made(tokenizer, rows, {"prompt": "prompt", "chosen": "chosen"})


def test_pair_is_rejected_if_one_conversation_is(tokenizer: Path) -> None:
    rows = [TEXTS | {"rejected": 3}, TEXTS | {"chosen": "end"}, TEXTS | {"rejected": None}, TEXTS]
    reasons = [reject["reason"] for reject in made(tokenizer, rows).rejects]
    assert len(reasons) == 3
    assert "`rejected`" in reasons[0]
    assert "chosen: message 2 has the text of the special token 'end'" in reasons[1]
    assert len([*preference_pairs(tokenizer / "pairs")]) == 1


@pytest.mark.parametrize("targets", ["assistant", "last", {"text"}, "all"])
def test_loader_learns_the_chosen_answer(tokenizer: Path, targets: Any) -> None:
    made(tokenizer, [TEXTS])
    loader = ShardLoader(tokenizer / "pairs", batching=Fixed(1), num_workers=0, targets=targets)
    (batch,) = loader
    assert words(batch["input_ids"][0].tolist()) == " ".join(EXPECTED)
    learnt = words([id_ for id_ in batch["labels"][0].tolist() if id_ >= 0])
    assert learnt == (" ".join(EXPECTED)[5:] if targets == "all" else "c d end")
