"""The measure of mixing says what it should of orders that are known."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.shuffle.__main__ import Measure
from benchmarks.shuffle.case import delivered, open_loader
from benchmarks.shuffle.corpora import CORPORA, Corpus, tenths, write_shards
from benchmarks.shuffle.metrics import (
    Order,
    by_rows,
    full_shuffle,
)

ROWS = 40_000
STEP = "64k"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    lengths = np.random.default_rng(3).integers(50, 200, ROWS)
    return Corpus(lengths, tenths(lengths))


@pytest.fixture(scope="module")
def measure(corpus: Corpus) -> Measure:
    return Measure(corpus, 32)


def in_order(corpus: Corpus, order: np.ndarray) -> Order:
    return by_rows(order, corpus.lengths, 32)


def test_a_full_shuffle_is_as_far_from_the_corpus_as_a_full_shuffle(
    corpus: Corpus, measure: Measure
) -> None:
    found = measure.describe([full_shuffle(corpus.lengths, 32, seed) for seed in (10, 11)])
    assert found["deviation"][STEP] == pytest.approx(1, abs=0.1)
    assert found["correlation"][STEP] == pytest.approx(0, abs=0.15)
    assert found["neighbours"]["distance"] == pytest.approx(1, abs=0.03)
    assert found["neighbours"]["near"] == pytest.approx(1, abs=0.3)
    assert found["again"]["pairs"] == pytest.approx(found["again"]["chance"], rel=0.2)
    assert found["again"]["batches"] == 0
    assert found["drift"] < 0.2


def test_a_sorted_order_is_far_from_it_and_every_epoch_the_same(
    corpus: Corpus, measure: Measure
) -> None:
    sorted_order = in_order(corpus, np.arange(ROWS))
    found = measure.describe([sorted_order, sorted_order])
    assert found["deviation"][STEP] > 20
    assert found["correlation"][STEP] > 0.8
    assert found["neighbours"]["distance"] < 0.001
    assert found["again"]["pairs"] == found["again"]["batches"] == 1
    assert found["drift"] == pytest.approx(10)


@pytest.mark.parametrize("policy", [("Padded", 2048), ("Packed", 256, 4), ("Fixed", 16)])
def test_what_is_measured_of_us_is_every_token_once_with_the_padding_that_stats_say(
    tmp_path: Path, policy: tuple[str, int]
) -> None:
    corpus = CORPORA["2,000 documents"](1.0)
    lengths = corpus.lengths
    write_shards(tmp_path / "shards", corpus)
    name, *arguments = policy
    settings = {"policy": name, "arguments": arguments, "workers": 0, "window_tokens": 400_000}
    loader = open_loader(settings, tmp_path / "shards")
    order = delivered(loader)
    assert np.bincount(order.rows, order.tokens).tolist() == lengths.tolist()
    assert np.bincount(order.rows[order.whole]).tolist() == [1] * len(lengths)
    assert order.padding == pytest.approx(loader.stats().padding, abs=1e-6)
