#!/bin/bash
# Next month's texts arrive while a run goes on: another folder, and a new stage of the same run.
# Rows that the run has read do not come again before the others.
#
#   CORPUS=may/ NEXT=june/ UNTIL=2B recipes/next_month.sh
#
# UNTIL: tokens of the run at which the new data come in. The run may not have read further: the
# part that it has read cannot change.
set -euo pipefail
CORPUS=${CORPUS:-corpus/}
NEXT=${NEXT:-next/}
UNTIL=${UNTIL:-1B}
STEPS=${STEPS:-10000}                # before the new data are there
MORE=${MORE:-100000}                 # in all
TRAIN=${TRAIN:-}                      # further options of train

pretokenize "$CORPUS" first/ ${OPTIONS:-}
cat > stages.yaml <<END
shards: {first/: 1}
mixing:
  - {shards: {first/: 1}, until_tokens: $UNTIL}
  - {shards: {first/: 1}}
END
train --config stages.yaml --run-dir runs/months --steps "$STEPS" $TRAIN

pretokenize "$NEXT" second/ --tokenizer first/       # the tokenizer of the first data set
cat > stages.yaml <<END
shards: {first/: 1, second/: 1}
mixing:
  - {shards: {first/: 1}, until_tokens: $UNTIL}
  - {shards: {first/: 0.5, second/: 0.5}}
END
train --config stages.yaml --run-dir runs/months --resume --steps "$MORE" $TRAIN
