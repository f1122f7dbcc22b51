#!/bin/bash
# Tokenize a corpus on a Slurm cluster, in parts, into a bucket. All machines see CORPUS.
#
#   CORPUS=/data/corpus OUT=s3://bucket/out PARTS=16 recipes/slurm_to_bucket.sh
#
# A part that is killed starts again where it was (--requeue). The last job makes the data set, and
# does what failed parts left. Afterwards: train --shards s3://bucket/out
set -euo pipefail
CORPUS=${CORPUS:-/data/corpus}
OUT=${OUT:-s3://bucket/out}
PARTS=${PARTS:-16}
OPTIONS=${OPTIONS:---tokenizer gpt2}    # the same for all parts
CPUS=${CPUS:-8}

command="pretokenize $CORPUS $OUT $OPTIONS"
parts=$(sbatch --parsable --array="0-$((PARTS - 1))" --cpus-per-task="$CPUS" --requeue \
    --wrap "$command --part \$SLURM_ARRAY_TASK_ID/$PARTS")
sbatch --dependency="afterany:$parts" --cpus-per-task="$CPUS" --wrap "$command --finish"
echo "look at it: shards inspect $OUT"
