"""A begin token stands before every piece of a packed batch, and changes nothing else."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.delivery import open_loader, spans

from tokenfeed import Packed
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.policies import policy_of, saved_policy

TOKEN = 7


def test_state_with_a_begin_token_resumes_and_is_told_apart(folder: Path) -> None:
    batching = Packed(64, 4, begin_token=TOKEN)
    loader = open_loader(folder, batching)
    list(islice(loader, 5))
    state, rest = loader.state_dict(), [spans(batch) for batch in loader]
    again = open_loader(folder, batching)
    again.load_state_dict(state)
    assert [spans(batch) for batch in again] == rest
    assert policy_of(saved_policy(batching)) == batching
    for other in (Packed(64, 4), Packed(64, 4, begin_token=TOKEN + 1)):
        with pytest.raises(Exception, match="saved with batching="):
            open_loader(folder, other).load_state_dict(state)
    assert "begin_token" not in repr(Packed(64, 4))


def test_origins_do_not_count_the_token(folder: Path) -> None:
    loader = open_loader(folder, Packed(64, 4, begin_token=TOKEN))
    batch = next(iter(loader))
    sizes = [stop - start for _, _, start, stop, *_ in loader.explain(batch)]
    assert sizes == batch.piece_lengths.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"begin_token": -1}, "`begin_token`=-1: expected"),
        ({"begin_token": "<bos>"}, "`begin_token`='<bos>': expected"),
        ({"begin_token": 7, "split": True}, "`begin_token`=7 cannot be added with `split`=True"),
        ({"begin_token": 7, "long_rows": "crop"}, "cannot be added with `long_rows`='crop'"),
        ({"begin_token": 7, "sequence_length": 1}, "leaves no room in `sequence_length`=1"),
        ({"begin_token": 10**6}, "`begin_token`=1000000: the vocabulary has only "),
    ],
    ids=str,
)
def test_begin_token_that_cannot_be_is_refused(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_loader(folder, Packed(**{"sequence_length": 64, "batch_size": 4} | settings))
