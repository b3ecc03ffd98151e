#!/usr/bin/env bash
# Measures the bits per character of a row of train.sh in one pass over the whole text, with the state carried over.
#
# Paper:    Lei 2021 (SRU++)
# Data:     OUT/bin of prepare.sh and the best checkpoint of the row
# Hardware: one GPU, or a CPU with CPU=1
# Time:     not measured at this size
# Expected: the row's number in the head of train.sh
# Usage:    recipes/enwik8/eval.sh ROW [OPTION of fairseq-eval-lm]...     prints | row | split | bits per character |
#           SPLIT=valid recipes/enwik8/eval.sh delta
#           SRUPP_MEMORY=3072 recipes/enwik8/eval.sh srupp
#
# SRUPP_MEMORY is how many bytes back each byte sees in the attention of srupp, srupp5, srupp10, srupp_large and rescaled. Without it, byte i
# of a segment sees i bytes more than the memory of training.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
find_checkpoint enwik8 "srupp, srupp5, srupp10, srupp_large, rescaled, transformer_xl or delta" "$@"
shift
split=${SPLIT:-test} length=512 memory=()
[ -z "$TOY" ] || length=32
[ -z "${SRUPP_MEMORY:-}" ] || memory=(--model-overrides "{'srupp_memory': $SRUPP_MEMORY, 'srupp_segment': 1}")
log=$run/eval-$split${SRUPP_MEMORY:+-memory$SRUPP_MEMORY}.log
measure_text "$log" "$OUT/bin" "$split" --path "$checkpoint" --task stateful_language_modeling --tokens-per-sample $length \
    --batch-size 1 "${memory[@]}" "$@"
echo "| $row${SRUPP_MEMORY:+, memory $SRUPP_MEMORY} | $split | $(bits "$log") |"
