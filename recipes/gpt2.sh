#!/bin/bash
# Pre-train GPT-2 (124M) on one GPU, as its reproductions do, and print what it costs.
#
#   CORPUS='hf://datasets/HuggingFaceFW/fineweb@v1.4.0/sample/10BT/*.parquet' PRICE=2.5 recipes/gpt2.sh
#
# PRICE: of the GPU, per hour. Begin with TOKENS=50M: the cost line then shows the whole run.
set -euo pipefail
CORPUS=${CORPUS:-corpus/}
TOKENS=${TOKENS:-10B}
PRICE=${PRICE:-0}
PRESET=${PRESET:-auto,gpt2}
TRAIN=${TRAIN:---compile}             # further options of train

pretokenize "$CORPUS" gpt2-data/ ${OPTIONS---tokenizer gpt2}
train --shards gpt2-data/ --preset "$PRESET" --tokens "$TOKENS" --run-dir runs/gpt2 --resume auto $TRAIN
PRICE=$PRICE python - <<'END'
import json
import os

with open("runs/gpt2/report.json") as file:
    speed = json.load(file)["stall"]["real_tokens_per_s"]
for tokens in (1e9, 10e9, 100e9):
    hours = tokens / speed / 3600
    cost = hours * float(os.environ["PRICE"])
    print(f"{tokens / 1e9:.0f} B tokens / {speed:,.0f} tokens/s = {hours:,.1f} h, price {cost:,.2f}")
END
