#!/usr/bin/env bash
# Measures the perplexity of a row of train.sh in one pass over the text, with the state carried over from segment to segment.
#
# Paper:    Jaszczur et al. 2021
# Data:     OUT/bin of prepare.sh and the best checkpoint of the row
# Hardware: one GPU, or a CPU with CPU=1
# Time:     not measured at this size
# Expected: a perplexity; rows are compared with each other
# Usage:    recipes/terraformer/eval.sh ROW [OPTION of fairseq-eval-lm]...     prints | row | split | perplexity |
#           SPLIT=valid recipes/terraformer/eval.sh terraformer
#
# Softmax attention sees the current segment only, so that --tokens-per-sample changes the numbers of dense, ffn and softmax.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
find_checkpoint terraformer "a row that train.sh has trained" "$@"
shift
split=${SPLIT:-test}
length=512
[ -z "$TOY" ] || length=32
log=$run/eval-$split.log
measure_text "$log" "$OUT/bin" "$split" --path "$checkpoint" --task stateful_language_modeling --tokens-per-sample "$length" \
    --batch-size 1 "$@"
echo "| $row | $split | $(perplexity "$log") |"
