"""ShardDataset under torch's own DataLoader, for code that insists on one.

    python recipes/plain_dataloader.py out/

An item is a whole window, decoded by a worker; iterating it builds the batches, on the CPU. A state
to save, and a device, are ShardLoader's part.
"""

import torch
from tiny import make_model, parse_args
from torch.utils.data import DataLoader

from tokenfeed import Padded, ShardDataset


def main() -> None:
    args = parse_args(__doc__)
    model = make_model(args.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    windows = DataLoader(
        ShardDataset(args.data, Padded(args.max_tokens)), batch_size=None, num_workers=2
    )
    for step, batch in enumerate((batch for window in windows for batch in window), start=1):
        loss = model(**batch, num_items_in_batch=max(1, batch.num_targets)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.7f}")
        if step >= args.steps:
            break


if __name__ == "__main__":
    main()
