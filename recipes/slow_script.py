"""A script whose data set is slow. Find out what it waits for, without changing it:

tokenfeed stall recipes/slow_script.py

`make demo` runs this, and draws the picture of the README.
"""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[Tensor]):
    """Rows that take a millisecond each, as rows that are tokenized when they are needed."""

    def __len__(self) -> int:
        return 3200

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.001)
        return torch.randn(64)


torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
optimizer = torch.optim.AdamW(model.parameters())

for rows in DataLoader(Rows(), batch_size=8):
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
