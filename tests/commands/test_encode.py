"""Ids are those of `tokenizers`, whatever the tokenizer; training is deterministic."""

import subprocess
import sys
from pathlib import Path

from support.corpora import ODD_TEXTS

from tokenfeed.tools.encoding.engines import ReferenceEngine
from tokenfeed.tools.encoding.tokenizer import TextTokenizer


def test_training_twice_gives_the_same_bytes_with_any_number_of_threads(tmp_path: Path) -> None:
    for index in range(30):
        (tmp_path / f"{index}.txt").write_text(f"{index} some words {index * 7919} " * 50)
    script = (
        "import sys; from pathlib import Path\n"
        "from tokenfeed.tools.corpus.records import FieldKind\n"
        "from tokenfeed.tools.corpus.sources import find_corpus\n"
        "from tokenfeed.tools.encoding.training import train_tokenizer_json\n"
        "from tokenfeed.tools.corpus.units import cut_units\n"
        "corpus = find_corpus((sys.argv[1],), out=Path('nowhere'), field='text')\n"
        "units = cut_units(corpus.sources, 5000)\n"
        "sys.stdout.buffer.write(train_tokenizer_json(\n"
        "    units, fields={'text': FieldKind.TEXT}, vocabulary_size=500, seed=int(sys.argv[2])))\n"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), "3"],
            env={"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            check=True,
        ).stdout
        for threads in ("1", "3")
    ]
    assert made[0] == made[1]
    tokenizer = TextTokenizer.load(made[0], origin="trained")
    assert (tokenizer.end_token, tokenizer.end_id) == ("<|endoftext|>", 0)
    for text in ODD_TEXTS:
        ids = ReferenceEngine(tokenizer).encode([text.encode()]).values
        assert tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
