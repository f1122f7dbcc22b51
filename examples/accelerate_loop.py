"""A loop under `accelerate`, on documents packed into sequences of one length.

    accelerate launch examples/accelerate_loop.py out/ --steps 50
    accelerate launch examples/accelerate_loop.py out/ --steps 100 --resume

`prepare` gets the model and the optimizer, not the loader, which deals its batches to the ranks of
torch.distributed by itself and puts them on the device. `save_state` keeps its position.
"""

import contextlib
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from tiny import make_model, parse_args

from tokenfeed import Packed, ShardLoader


def main() -> None:
    args = parse_args(__doc__)
    accelerator = Accelerator()  # starts torch.distributed, so the loader comes after it
    loader = ShardLoader(
        args.data,
        batching=Packed(sequence_length=args.max_tokens // 4, rows=4),
        device=accelerator.device,
        gang_size=args.gang_size,
    )
    model = make_model(args.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(loader)

    step = 0
    if args.resume:
        step = max(int(path.name.removeprefix("step-")) for path in args.run_dir.glob("step-*"))
        accelerator.load_state(str(args.run_dir / f"step-{step}"))

    gang = []
    with loader:  # ends its workers
        for batch in loader:
            gang.append(batch)
            if not batch.ends_gang:
                continue
            mine = torch.tensor(sum(part.num_targets for part in gang), device=loader.device)
            targets = accelerator.reduce(mine).clamp(min=1)
            losses = []
            for part in gang:
                with contextlib.nullcontext() if part.ends_gang else accelerator.no_sync(model):
                    loss = model(**part, num_items_in_batch=targets).loss
                    accelerator.backward(loss * accelerator.num_processes)  # ranks are averaged
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            gang, step = [], step + 1
            accelerator.print(f"step {step} loss {accelerator.reduce(sum(losses)).item():.7f}")
            if step % args.save_every == 0:
                save(accelerator, args.run_dir / f"step-{step}")
            if step >= args.steps:
                break
    accelerator.end_training()


def save(accelerator: Accelerator, folder: Path) -> None:
    """Save under another name first: whatever is called step-... is whole."""
    temporary = folder.with_name("saving")
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)


if __name__ == "__main__":
    main()
