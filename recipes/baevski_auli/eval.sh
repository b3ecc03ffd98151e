#!/usr/bin/env bash
# Measures test perplexity at context 0 (segments of 512 words, all scored) and at context 480 (windows of 512, the last 32 scored).
#
# Paper:    Mao 2022, table 3
# Data:     OUT of prepare.sh and the last checkpoint of the row; the row pretrained is the softmax model that all start from
# Hardware: one GPU, or a CPU with CPU=1
# Time:     on one CPU core 67 ms of processor time a word for both contexts
# Expected: the row's numbers in the head of finetune.sh
# Usage:    recipes/baevski_auli/eval.sh ROW [OPTION of fairseq-eval-lm]...
#           recipes/baevski_auli/eval.sh decay-32
#           recipes/baevski_auli/eval.sh pretrained
#           TEST_WORDS=1000 recipes/baevski_auli/eval.sh decay-32      the first words alone
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/baevski_auli/rows.sh"
if [ "${1:-}" = pretrained ]; then
    row=pretrained checkpoint=$OUT/pretrained.pt
    need_file "$checkpoint" recipes/baevski_auli/prepare.sh
else
    read_row "$@"
    checkpoint=$OUT/${RUN:-$row}/${CHECKPOINT:-checkpoint_last.pt}
    need_file "$checkpoint" "recipes/baevski_auli/finetune.sh $row"
fi
for window in 0 $context; do
    task=sliding_language_modeling
    if [ "$window" = 0 ] || [ "$row" = pretrained ]; then task=language_modeling; fi
    log=$OUT/eval/${RUN:-$row}-$window.log
    measure_text "$log" "$OUT/data" test --task $task --path "$checkpoint" --tokens-per-sample $tokens --context-window "$window" \
        --batch-size 8 "${@:2}"
    echo "$row, context $window: $(perplexity "$log")"
done
