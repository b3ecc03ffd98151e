#!/usr/bin/env bash
# Measures the perplexity of a row in windows of 1024 tokens, of which the first CONTEXT are not scored.
#
# Paper:    Mao 2022, tables 1 and 2. The log of finetune.sh has the numbers of the paper's kind, the best on validation text
# Data:     OUT of prepare.sh and the best checkpoint of the row
# Hardware: one GPU, or a CPU with CPU=1
# Time:     not measured at this size
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
checkpoint=$OUT/$row/${CHECKPOINT:-checkpoint_best.pt}
need_file "$checkpoint" "recipes/gpt2/finetune.sh $row"
split=${SPLIT:-valid} context=${CONTEXT:-0}
log=$OUT/$row/eval-$split-$context${CHECKPOINT:+-${CHECKPOINT%.pt}}.log
logged "$log" fairseq-eval-lm "$OUT/data" --user-dir "$ROOT/fw_fairseq" --task sliding_language_modeling --path "$checkpoint" \
    --gen-subset "$split" --tokens-per-sample $tokens --context-window "$context" --batch-size 8 "${machine[@]}" "${@:2}"
echo "$row, $split, context $context: $(perplexity "$log")"
