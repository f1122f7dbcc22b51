#!/bin/bash
# Classify texts with a pretrained encoder: rows of `text` and `label`, tested on a split of its own.
#
#   TRAIN_ROWS=sst2.train.jsonl TEST_ROWS=sst2.test.jsonl recipes/classify.sh
#
# Small set? Leave out --model: the built-in model often is better, and takes seconds on a CPU.
set -euo pipefail
TRAIN_ROWS=${TRAIN_ROWS:-train.jsonl}
TEST_ROWS=${TEST_ROWS:-test.jsonl}
MODEL=${MODEL:-google-bert/bert-base-uncased}
TRAIN=${TRAIN:-}                      # further options of train

pretokenize "$TRAIN_ROWS" "$TEST_ROWS" labelled/ --task classify --split test="*$TEST_ROWS" \
    --tokenizer "$MODEL" ${OPTIONS---add-special-tokens}
train --shards labelled/ --model "hf:$MODEL" --run-dir runs/classify --export models/classes $TRAIN
python - <<'END'
import json

with open("runs/classify/report.json") as file:
    print("test:", json.load(file)["metrics"]["test"])
END
