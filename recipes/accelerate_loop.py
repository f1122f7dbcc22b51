"""A loop under `accelerate`, on documents packed into sequences of one length.

Do not pass the loader to `prepare`: it would split the batches over the ranks a second time. Keep
`gradient_accumulation_steps` of the Accelerator at 1: `step.divisor` includes the accumulation.

accelerate launch recipes/accelerate_loop.py out/ --steps 50
accelerate launch recipes/accelerate_loop.py out/ --steps 100 --resume
"""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from tiny import make_model, parse_args

from tokenfeed import Packed, ShardLoader
from tokenfeed.integrations.steps import steps


def main() -> None:
    args = parse_args(__doc__)
    accelerator = Accelerator()
    batching = Packed(sequence_length=args.max_tokens // 4, batch_size=4)
    loader = ShardLoader(
        args.data,
        batching=batching,
        device=accelerator.device,
        micro_batches_per_step=args.micro_batches_per_step,
    )
    accelerator.register_for_checkpointing(loader)
    model = make_model(args.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    done = 0
    if args.resume:
        done = max(int(path.name.removeprefix("step-")) for path in args.run_dir.glob("step-*"))
        accelerator.load_state(str(args.run_dir / f"step-{done}"))

    with loader:  # ends its workers
        for number, step in enumerate(steps(loader), start=done + 1):
            losses = []
            for batch in step.accumulate(model):
                loss = model(**batch, num_items_in_batch=step.divisor).loss
                accelerator.backward(loss)
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            loss = accelerator.reduce(sum(losses), reduction="mean")
            accelerator.print(f"step {number} loss {loss.item():.7f}")
            if number % args.save_every == 0:
                save(accelerator, args.run_dir / f"step-{number}")
            if number >= args.steps:
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
