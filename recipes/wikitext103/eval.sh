#!/usr/bin/env bash
# Perplexity of a run of train.sh as the publication computes it: a sliding window that scores one word at a time, or, for rows with
# carry-over, the whole text in one pass.
#
# Data:     OUT/bin of prepare.sh and the run's checkpoint_best.pt
# Hardware: one GPU, or CPU=--cpu
# Expect:   the row's number in the head of train.sh
# usage:    [OUT=folder] [SPLIT=test] [XL_MEMORY=n] [SRUPP_MEMORY=n] recipes/wikitext103/eval.sh SIZE ROW
#           prints | size | row | split | perplexity |
#
# XL_MEMORY, SRUPP_MEMORY: how many tokens back transformer_xl and srupp see; as in training if not given. What was printed is kept in
# the run's folder, where fw-plot tables schlag2 OUT (to schlag5) collects it.
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

size=${1:?SIZE must be small, medium or base} row=${2:?ROW is missing; the head of train.sh lists them}
out=$(output_folder wikitext103)
bin=${BIN:-.venv/bin}
split=${SPLIT:-test}
checkpoint=${SAVE:-$out/runs/$size-$row}/checkpoint_best.pt
[ -f "$checkpoint" ] || { echo "eval.sh: $checkpoint is missing; run recipes/wikitext103/train.sh $size $row first" >&2; exit 1; }
length=256
[ "$size" = small ] || length=384
cpu=(${CPU:-})
if [ -n "${TOY:-}" ]; then
    length=32 cpu=(--cpu --num-workers 0)
fi
case $row in
    *_stream | srupp*) options=(--task stateful_language_modeling --tokens-per-sample "$length" --batch-size 1) ;;
    *) options=(--task sliding_language_modeling --tokens-per-sample "$length" --context-window $((length - 1)) --batch-size 64) ;;
esac
case $row in
    srupp*) option=srupp_memory memory=${SRUPP_MEMORY:-} ;;
    *) option=xl_memory memory=${XL_MEMORY:-} ;;
esac
[ -z "$memory" ] || options+=(--model-overrides "{'$option': $memory}")
log=${checkpoint%/*}/eval-$split${memory:+-memory$memory}.log
"$bin/fairseq-eval-lm" "$out/bin" --user-dir "$PWD/fw_fairseq" --path "$checkpoint" --gen-subset "$split" \
    "${options[@]}" "${cpu[@]}" >"$log.part" 2>&1 || { tail -n 3 "$log.part" >&2; exit 1; }
mv "$log.part" "$log"
echo "| $size | $row${memory:+, memory $memory} | $split | $(sed -n 's/.*Perplexity: //p' "$log") |"
