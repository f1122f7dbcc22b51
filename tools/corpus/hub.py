"""Data sets of the hub, and whatever else `datasets` can load: their Arrow files in its cache.

`hub:OWNER/NAME` or `hub:OWNER/NAME:CONFIG` is loaded by `datasets`, which downloads and converts it
once; from then on its files are read like any other Arrow file. A local folder that `datasets` can
load goes the same way.
"""

from collections.abc import Iterator

from tokenfeed.pipeline.errors import CorpusError

__all__ = ["HUB_PREFIX", "hub_files"]

HUB_PREFIX = "hub:"


def hub_files(name: str) -> Iterator[tuple[str, str]]:
    """The Arrow files of a data set, each with its split.

    Args:
        name: `hub:` and an id, perhaps with `:` and a configuration.

    Raises:
        CorpusError: It cannot be loaded.
    """
    import datasets  # seconds that only its users should pay

    identity, _, configuration = name.removeprefix(HUB_PREFIX).partition(":")
    try:
        splits = datasets.load_dataset(identity, configuration or None)
    except Exception as error:  # whatever a script, a server or a parser of theirs may raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CorpusError(f"{name}: cannot be loaded by `datasets`: {reason}") from error
    for split, data in splits.items():
        if not data.cache_files:
            raise CorpusError(f"{name}: `datasets` keeps it in memory; save it by `save_to_disk`.")
        for file in data.cache_files:
            yield file["filename"], str(split)
