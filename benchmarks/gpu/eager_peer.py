"""The operators of a step of `transformers.Trainer` with GPT-2, on a CUDA device in name only.

Autocast of a GPU chooses other dtypes than that of a CPU, so the device has to be named before
torch is imported: this is a process of its own. It prints one line of JSON.

usage: python -m benchmarks.gpu.eager_peer LIBRARY TOKENS
"""

import json
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests"))

LENGTH = 1024


def main(library: Path, tokens: int) -> None:
    from support import named_cuda

    torch: Any = named_cuda.begin(library)
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2 import modeling_gpt2

    from benchmarks.gpu.operators import dispatched

    # Rows are full, so no mask is needed. transformers finds that out from the values of the mask,
    # but tensors have no values here.
    modeling_gpt2.create_causal_mask = lambda *_, **__: None
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**dropouts, attn_implementation="sdpa", use_cache=False)
    with named_cuda.device():
        model = GPT2LMHeadModel(config).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.zeros((tokens // LENGTH, LENGTH), dtype=torch.int64, device="cuda")

        def micro_batch() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()

        micro_batch()
        update()
        optimizer.zero_grad()
        with dispatched("forward and backward") as passes:
            micro_batch()
        with dispatched("optimizer") as updates:
            update()
    print(json.dumps([astuple(operator) for operator in (*passes, *updates)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
