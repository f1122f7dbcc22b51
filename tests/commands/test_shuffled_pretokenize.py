"""`pretokenize --shuffle`: what `pretokenize` and `shards shuffle` make, by one command."""

from pathlib import Path

from command import error_of, files_of, kill_at, run, run_json

from tokenfeed.tools.run.claim import UNSHUFFLED_FOLDER
from tokenfeed.tools.run.journal import says_its_recipe


def test_a_run_killed_in_either_part_is_continued_by_the_same_command_alone(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    options = ("--tokenizer", tokenizer, "--shard-size", "100KB", "--validation", "0")
    expected = tmp_path / "expected"
    run(corpus, expected, *options, "--shuffle", "--workers", "2")
    out = tmp_path / "out"
    kills, parts = 0, set()
    while kill_at(4 + 5 * kills, "pretokenize", corpus, out, *options, "--shuffle"):
        kills += 1
        begun = {path.name for path in out.iterdir()}
        part = ".journal.jsonl" in begun and says_its_recipe(out)
        if (begun & {UNSHUFFLED_FOLDER, ".journal.jsonl"}) and part not in parts:
            parts.add(part)
            said = "another command" if part else "unfinished run of `pretokenize --shuffle`"
            assert said in error_of(corpus, out, *options, expect=2)
    assert parts == {False, True}
    assert files_of(out) == files_of(expected)


def test_a_corpus_may_lie_around_the_output(corpus: Path, tokenizer: Path) -> None:
    out, options = corpus / "out", ("--tokenizer", tokenizer, "--shuffle")
    assert kill_at(20, "pretokenize", corpus, out, *options)
    assert run_json(corpus, out, *options)["documents"] == 260


def test_a_corpus_without_a_document_leaves_nothing(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "empty.txt").touch()
    out = tmp_path / "out"
    said = error_of(tmp_path / "empty.txt", out, "--tokenizer", tokenizer, "--shuffle")
    assert "every document is empty" in said
    assert not out.exists()
