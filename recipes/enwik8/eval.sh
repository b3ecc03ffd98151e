#!/usr/bin/env bash
# Bits per character of a run of train.sh: the whole text in one pass, memories carried along.
#
# Data:     OUT/bin of prepare.sh and the run's checkpoint_best.pt
# Hardware: one GPU, or CPU=--cpu
# Expect:   the row's number in the head of train.sh
# usage:    [OUT=folder] [SPLIT=test] [SRUPP_MEMORY=n] recipes/enwik8/eval.sh ROW
#           prints | row | split | bits per character |
#
# SRUPP_MEMORY: how many bytes before it each byte sees in the attention of srupp and srupp5; 512 as in training if not given.
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

row=${1:?ROW is missing; it must be srupp, srupp5 or delta}
out=$(output_folder enwik8)
bin=${BIN:-.venv/bin}
split=${SPLIT:-test}
checkpoint=${SAVE:-$out/runs/$row}/checkpoint_best.pt
[ -f "$checkpoint" ] || { echo "eval.sh: $checkpoint is missing; run recipes/enwik8/train.sh $row first" >&2; exit 1; }
length=512 cpu=(${CPU:-})
if [ -n "${TOY:-}" ]; then
    length=32 cpu=(--cpu --num-workers 0)
fi
memory=()
[ -z "${SRUPP_MEMORY:-}" ] || memory=(--model-overrides "{'srupp_memory': $SRUPP_MEMORY}")
printed=$("$bin/fairseq-eval-lm" "$out/bin" --user-dir "$PWD/fw_fairseq" --path "$checkpoint" --gen-subset "$split" \
    --task stateful_language_modeling --tokens-per-sample $length --batch-size 1 "${memory[@]}" "${cpu[@]}" 2>&1) ||
    { echo "$printed" | tail -n 3 >&2; exit 1; }
echo "| $row${SRUPP_MEMORY:+, memory $SRUPP_MEMORY} | $split | $(echo "$printed" | sed -n 's/.*Loss (base 2): \([0-9.]*\).*/\1/p') |"
