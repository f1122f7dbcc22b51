"""Templates are read from the post-processor: as the tokenizer frames a text, or refused."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

SPECIAL = [("[CLS]", 2), ("[SEP]", 3)]


def tokenizer(processor: object, words: tuple[str, str] = ("a", "b")) -> TextTokenizer:
    vocab = {words[0]: 0, words[1]: 1, "[CLS]": 2, "[SEP]": 3, "<unk>": 4}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor:
        made.post_processor = processor
    return TextTokenizer.load(made.to_str().encode(), origin="test")


def template(single: str, pair: str) -> object:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=SPECIAL)


PROCESSORS = {
    "none": None,
    "offsets alone": processors.ByteLevel(),
    "BERT": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "RoBERTa": processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "types of its own": template("[CLS]:5 $A [SEP]:1", "[CLS]:3 $A:2 [SEP] $B:5 [SEP]:7"),
    "in a sequence": processors.Sequence(
        [processors.ByteLevel(), template("[CLS] $A", "[CLS] $A $B:1")]
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("num_texts", [1, 2])
def test_rows_are_framed_as_the_tokenizer_frames_them(
    name: str, special: bool, num_texts: int
) -> None:
    made = tokenizer(PROCESSORS[name])
    expected = made.tokenizer.encode(*("a b", "b")[:num_texts], add_special_tokens=special)
    if special and expected.ids == [0, 1, 1][: num_texts + 1]:
        with pytest.raises(TokenizerError, match="has no template"):
            Template.from_tokenizer(made, num_texts=num_texts, special=True, end_id=None)
        return
    frame = Template.from_tokenizer(made, num_texts=num_texts, special=special, end_id=None)
    texts = [np.array([0, 1], np.uint16), np.array([1], np.uint16)][:num_texts]
    rows = [Ragged(text, np.array([len(text)])) for text in texts]
    assert frame.around(*rows).values.tolist() == expected.ids
    assert frame.types_around(*rows).values.tolist() == expected.type_ids


@pytest.mark.parametrize(
    ("single", "pair", "num_texts", "order"),
    [
        ("$A", "[CLS] $B [SEP] $A", 2, "B A"),
        ("$A", "[CLS] $A [SEP] $A $B", 2, "A A B"),
        ("$A [SEP] $A", "$A $B", 1, "A A"),
        ("$A $A", "$A $B", 2, "A A"),
        ("[CLS]", "$A $B", 1, "none of them"),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_a_template_with_texts_twice_or_in_another_order_is_refused(
    single: str, pair: str, num_texts: int, order: str, special: bool
) -> None:
    made = tokenizer(template(single, pair))
    with pytest.raises(TokenizerError, match=f"has {order} where"):
        Template.from_tokenizer(made, num_texts=num_texts, special=special, end_id=None)


def test_two_templates_are_refused() -> None:
    both = processors.Sequence([template("[CLS] $A", "$A $B"), PROCESSORS["BERT"]])
    with pytest.raises(TokenizerError, match=r"has \? A where A can"):
        Template.from_tokenizer(tokenizer(both), num_texts=1, special=True, end_id=None)


def test_a_tokenizer_without_latin_letters_has_its_template_too() -> None:
    made = tokenizer(PROCESSORS["BERT"], ("\u0430", "\u0431"))
    frame = Template.from_tokenizer(made, num_texts=1, special=True, end_id=None)
    assert [part.tolist() for part in frame.ids] == [[2], [3]]


def test_template_id_beyond_vocabulary_is_rejected() -> None:
    for processor in (
        processors.TemplateProcessing("[X] $A", "[X] $A $B", [("[X]", 65_546)]),
        processors.BertProcessing(("[SEP]", 65_546), ("[CLS]", 2)),
        processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 131_079)),
    ):
        made = tokenizer(processor)
        with pytest.raises(
            TokenizerError, match=r"has the id (65,546|131,079), expected ids below 5"
        ):
            Template.from_tokenizer(made, num_texts=1, special=True, end_id=None)
        frame = Template.from_tokenizer(made, num_texts=1, special=False, end_id=None)
        assert [len(part) for part in frame.ids] == [0, 0]
