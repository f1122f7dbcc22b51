"""Data sets of other runs, folders of odd names, machines that refuse: one line, or it works."""

import pytest
from delivery import MakeDataset, open_loader

from tokenfeed import Mixture


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_relative_folder_is_found_after_the_working_directory_changed(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    folders = [make_dataset([9] * 20), make_dataset([9] * 20)]
    monkeypatch.chdir(folders[0].parent)
    names = [folder.name for folder in folders]
    with open_loader(Mixture(dict.fromkeys(names, 0.5)), num_workers=num_workers) as loader:  # type: ignore[arg-type]
        monkeypatch.chdir("/")
        assert sum(batch.num_tokens for batch in loader) == 360
        assert list(loader.stats().epoch_tokens) == names
