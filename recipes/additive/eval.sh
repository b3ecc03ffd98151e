#!/usr/bin/env bash
# Measures perplexity and bits per character of a row of train.sh, without label smoothing. Bits per character do not depend on the
# vocabulary.
#
# Paper:    "Additive Attention Is All You Need?"
# Data:     OUT of prepare.sh and the best checkpoint of the row
# Hardware: one GPU, or a CPU with CPU=1
# Time:     not measured at this size
# Expected: the row's number in the head of train.sh
# Usage:    recipes/additive/eval.sh ROW [OPTION of fairseq-eval-lm]...
#           prints | row | split | perplexity of a piece | bits per character |
#           SPLIT=test recipes/additive/eval.sh windowed
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
find_checkpoint additive "windowed, additive, softmax, leap or adapted" "$@"
shift
split=${SPLIT:-valid} length=2048
[ -z "$TOY" ] || length=64
log=$run/eval-$split.log
measure_text "$log" "$OUT/bin" "$split" --path "$checkpoint" --tokens-per-sample $length --batch-size 2 "$@"
tokens=$(sed -n 's/.*Evaluated \([0-9,]*\) tokens.*/\1/p' "$log" | tr -d ,)
awk -v row="$row" -v split_="$split" -v p="$(perplexity "$log")" -v bits="$(bits "$log")" -v tokens="$tokens" \
    -v characters="$(cat "$OUT/pieces/$split.characters")" \
    'BEGIN {printf "| %s | %s | %s | %.3f |\n", row, split_, p, bits * tokens / characters}'
