#!/usr/bin/env bash
# Measures the perplexity of a row on the test text: in segments of 512 tokens, in windows of 512 of which half are context, and as one
# stream whose memory carries over.
#
# Paper:    none
# Data:     OUT of prepare.sh and a checkpoint of the row: the last of finetune.sh, or start.pt before it
# Hardware: one CPU core with CPU=1, or one GPU
# Time:     4 s of processor time for 512 tokens in segments
# Expected: for softmax before fine-tuning what recipes/smollm2/reference.py OUT/model DATA/test.txt gives for fairseq's segments
# Usage:    CPU=1 recipes/smollm2/eval.sh ROW [OPTION of fairseq-eval-lm]...
#           CPU=1 CHECKPOINT=start.pt recipes/smollm2/eval.sh softmax
#           CPU=1 TEST_WORDS=4000 WAYS="segments" recipes/smollm2/eval.sh gated_delta-half-window
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/smollm2/rows.sh"
find_programs
read_row "$@"
name=${CHECKPOINT:-all/checkpoint_last.pt}
checkpoint=$OUT/$row/$name
need_file "$checkpoint" "recipes/smollm2/finetune.sh $row"
for way in ${WAYS:-segments sliding stream}; do
    case $way in
        segments) given=(--task language_modeling --batch-size 1) ;;
        sliding) given=(--task sliding_language_modeling --context-window 256 --batch-size 1) ;;
        stream) given=(--task stateful_language_modeling --batch-size 1) ;;
        *) fail "WAYS has $way; each must be segments, sliding or stream" ;;
    esac
    log=$OUT/$row/eval-$way-${name//\//-}.log
    measure_text "$log" "$OUT/data" "${SPLIT:-test}" --path "$checkpoint" --tokens-per-sample 512 "${given[@]}" "${@:2}"
    echo "$row, $name, $way: $(perplexity "$log")"
done
