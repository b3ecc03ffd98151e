#!/usr/bin/env bash
# Bits per character of a run of train.sh, without label smoothing: independent of the vocabulary.
#
# Data:     OUT of prepare.sh and the run's checkpoint_best.pt
# Hardware: one GPU, or CPU=--cpu
# Expect:   published as curves only, of the valid text
# usage:    [OUT=folder] [SPLIT=valid] recipes/additive/eval.sh ROW         prints | row | split | perplexity of a piece | bits per character |
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

row=${1:?ROW is missing; it must be windowed, additive, softmax or leap}
out=$(output_folder additive)
bin=${BIN:-.venv/bin}
split=${SPLIT:-valid}
checkpoint=${SAVE:-$out/runs/$row}/checkpoint_best.pt
[ -f "$checkpoint" ] || { echo "eval.sh: $checkpoint is missing; run recipes/additive/train.sh $row first" >&2; exit 1; }
length=2048 cpu=(${CPU:-})
if [ -n "${TOY:-}" ]; then
    length=64 cpu=(--cpu --num-workers 0)
fi
printed=$("$bin/fairseq-eval-lm" "$out/bin" --user-dir "$PWD/fw_fairseq" --path "$checkpoint" --gen-subset "$split" \
    --tokens-per-sample $length --batch-size 2 "${cpu[@]}" 2>&1) || { echo "$printed" | tail -n 3 >&2; exit 1; }
tokens=$(echo "$printed" | sed -n 's/.*Evaluated \([0-9,]*\) tokens.*/\1/p' | tr -d ,)
bits=$(echo "$printed" | sed -n 's/.*Loss (base 2): \([0-9.]*\).*/\1/p')
perplexity=$(echo "$printed" | sed -n 's/.*Perplexity: //p')
awk -v row="$row" -v split_="$split" -v p="$perplexity" -v bits="$bits" -v tokens="$tokens" -v characters="$(cat "$out/pieces/$split.characters")" \
    'BEGIN {printf "| %s | %s | %s | %.3f |\n", row, split_, p, bits * tokens / characters}'
