#!/usr/bin/env bash
# Measures the perplexity of a row in windows of 1024 tokens, of which the first CONTEXT are not scored.
#
# Paper:    Mao 2022, tables 1 and 2. The log of finetune.sh has the numbers of the paper's kind, the best on validation text
# Data:     OUT of prepare.sh and the best checkpoint of the row
# Hardware: one GPU, or a CPU with CPU=1
# Time:     on one CPU core 5 ms of processor time a token
# Expected: the row's number in the head of finetune.sh
# Usage:    recipes/gpt2/eval.sh ROW [OPTION of fairseq-eval-lm]...
#           recipes/gpt2/eval.sh decay-32-phi
#           SPLIT=test CONTEXT=512 recipes/gpt2/eval.sh softmax
#           CHECKPOINT=start.pt recipes/gpt2/eval.sh decay-32-phi      before fine-tuning
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/gpt2/rows.sh"
renamed START "set CHECKPOINT=start.pt"
read_row "$@"
run=$OUT/${RUN:-$row}
checkpoint=$run/${CHECKPOINT:-checkpoint_best.pt}
need_file "$checkpoint" "recipes/gpt2/finetune.sh $row"
split=${SPLIT:-valid} context=${CONTEXT:-0}
log=$run/eval-$split-$context${CHECKPOINT:+-${CHECKPOINT%.pt}}.log
measure_text "$log" "$OUT/data" "$split" --task sliding_language_modeling --path "$checkpoint" --tokens-per-sample $tokens \
    --context-window "$context" --batch-size 8 "${@:2}"
echo "$row, $split, context $context: $(perplexity "$log")"
