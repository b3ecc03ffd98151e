#!/usr/bin/env bash
# Measures the perplexity of a row of train.sh as the paper does: a sliding window that scores one word at a time, or one pass over
# the whole text for the rows that carry their state over.
#
# Paper:    Schlag et al. 2021, tables 2 to 5; Lei 2021
# Data:     OUT/bin of prepare.sh and the best checkpoint of the row
# Hardware: one GPU, or a CPU with CPU=1
# Time:     on one CPU core 53 ms a word for small-delta, 3.6 hours for the test text; in one pass (_stream) 20 minutes for medium-delta
# Expected: the row's number in the head of train.sh
# Usage:    recipes/wikitext103/eval.sh ROW [OPTION of fairseq-eval-lm]...      prints | row | split | perplexity |
#           SPLIT=valid recipes/wikitext103/eval.sh small-delta
#           TEST_WORDS=1000 recipes/wikitext103/eval.sh small-delta      the first words alone
#           XL_MEMORY=64 recipes/wikitext103/eval.sh medium-transformer_xl_stream
#           XL_MEMORY=15 XL_SEGMENT=1 recipes/wikitext103/eval.sh medium-transformer_xl_stream
#           SRUPP_MEMORY=2560 recipes/wikitext103/eval.sh base-srupp
#
# SRUPP_MEMORY is how many tokens back each token of srupp sees. XL_MEMORY is the memory of transformer_xl, and XL_SEGMENT the length of
# its segments, by default as long as the memory: token i of a segment sees the memory and i tokens more. Without these variables, the
# memory is that of training. The logs stay in the run's folder, where docs/results/figures/tables.py schlag2 OUT (to schlag5) collects them.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
find_checkpoint wikitext103 "a row that train.sh has trained" "$@"
shift
split=${SPLIT:-test}
length=384
case $row in small-*) length=256 ;; esac
[ -z "$TOY" ] || length=32
case $row in
    *_stream | *_stream_schlag | *-srupp*) window=(--task stateful_language_modeling --tokens-per-sample "$length" --batch-size 1) ;;
    *) window=(--task sliding_language_modeling --tokens-per-sample "$length" --context-window $((length - 1)) --batch-size 64) ;;
esac
case $row in
    *-srupp*) option=srupp_memory memory=${SRUPP_MEMORY:-} ;;
    *) option=xl_memory memory=${XL_MEMORY:-} ;;
esac
segment=1
[ $option = srupp_memory ] || segment=${XL_SEGMENT:-$memory}
[ -z "$memory" ] || window+=(--model-overrides "{'$option': $memory, '${option%memory}segment': $segment}")
log=$run/eval-$split${memory:+-memory$memory}.log
measure_text "$log" "$OUT/bin" "$split" --path "$checkpoint" "${window[@]}" "$@"
echo "| $row${memory:+, memory $memory} | $split | $(perplexity "$log") |"
