"""`tokenfeed stall` beside a stopwatch that it does not read, on scripts that stay as they are.

Waits are long and the work is small, so that two points are milliseconds a step: on a machine in
use, a thread may lose its core between the two clocks.
"""

from pathlib import Path

import pytest
from support import named_cuda

from benchmarks.stall_tools.any_script import check, is_good

pytestmark = pytest.mark.slow

FETCH = "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch"
NEXT = "torch.utils.data.dataloader._BaseDataLoaderIter.__next__"
LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(240, 8), torch.zeros(240, 4))
for rows, targets in DataLoader(data, batch_size=4):
    loss = (model(rows.to(device)) - targets.to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done on", device)
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_share_is_that_of_a_stopwatch_on_a_device_in_name_only(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if lack := named_cuda.why_not():
        pytest.skip(lack)
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    library = named_cuda.build(tmp_path_factory.getbasetemp().parent)
    faults = [[FETCH, 0.08, False], [NEXT, 0.0, True]]
    found = check([str(script)], "data", faults, named_cuda=library)
    assert is_good(found), found
    assert found["truth"] > 0.2
    assert "done on cuda" in found["stdout"]
