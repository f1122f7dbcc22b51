#!/bin/bash
# Train adapters first, then the head, then everything, on a T4: fp16 with a scaled loss, and the
# largest step that fits. When the notebook is gone, start the same command on a new machine.
#
#   ROWS=reviews.jsonl PLACE=/content/drive/MyDrive/reviews recipes/phases_on_t4.sh
#
# ROWS: JSON Lines with `text` and `label`. PLACE: a mounted drive or a bucket.
set -euo pipefail
ROWS=${ROWS:-rows.jsonl}
MODEL=${MODEL:-google-bert/bert-base-uncased}
HEAD=${HEAD:-classifier.*}            # names of the head's weights: score.* in decoders
PRESET=${PRESET:-t4}
PLACE=${PLACE:-}
TRAIN=${TRAIN:-}                      # further options of train

pretokenize "$ROWS" rows/ --task classify --tokenizer "$MODEL" ${OPTIONS---add-special-tokens}
cat > phases.yaml <<END
shards: rows/
model: hf:$MODEL
run_dir: runs/phases
phases:
  - {name: adapters, lora: 16, learning_rate: 2e-4}
  - {name: head, trainable: '$HEAD', learning_rate: 1e-3}
  - {name: everything, from: best, learning_rate: 1e-5}
END
train --config phases.yaml --preset "$PRESET" --resume auto ${PLACE:+--upload "$PLACE"} \
    --export models/classifier $TRAIN
