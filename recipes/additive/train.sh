#!/usr/bin/env bash
# The experiment of "Additive Attention Is All You Need?" on WikiText-2: windows against all of the past against softmax attention.
#
# Data:     OUT/bin of prepare.sh
# Hardware: published on one RTX 2060, batches of 2
# Time:     published 24 minutes, softmax 36; not run at this size yet
# Expect:   published as curves only: windowed well ahead of additive without windows, and ahead of GPT-2
# usage:    [OUT=folder] recipes/additive/train.sh ROW [OPTION of fairseq-train]...      resumes from its last checkpoint
#           ROW: windowed, additive (all of the past), softmax (GPT-2 of this size), leap
#           toy: TOY=1 recipes/additive/train.sh windowed         a tiny model on the CPU, after TOY=1 prepare.sh
#
# 2048 tokens, 6 layers of width 128, 4 heads, AdamW 5e-4 with linear decay, weight decay 0.01, clipped at 1, label smoothing 0.1.
# Published with a T5 vocabulary; the number of updates is not published.
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

row=${1:?ROW is missing; it must be windowed, additive, softmax or leap}
shift
out=$(output_folder additive)
bin=${BIN:-.venv/bin}
launch=${LAUNCH:-$bin/fairseq-train}
length=2048 batch=${BATCH:-2} updates=${UPDATES:-10000}
[ -d "$out/bin" ] || { echo "train.sh: $out/bin is missing; run recipes/additive/prepare.sh with the same OUT and TOY first" >&2; exit 1; }

case $row in
    windowed) model=() ;;
    additive) model=(--window-sizes 0) ;;
    softmax) model=(--mixer softmax) ;;
    leap) model=(--mixer leap) ;;
    *) echo "train.sh: ROW is $row; it must be windowed, additive, softmax or leap" >&2; exit 2 ;;
esac
if [ -n "${TOY:-}" ]; then
    length=64 batch=2 updates=20
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64)
    model+=(--cpu --num-workers 0)
fi

# shellcheck disable=SC2086
exec $launch "$out/bin" --user-dir "$PWD/fw_fairseq" --task language_modeling --save-dir "${SAVE:-$out/runs/$row}" --arch additive_lm \
    "${model[@]}" --tokens-per-sample $length --batch-size "$batch" --required-batch-size-multiple 1 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
    --optimizer adam --adam-betas '(0.9, 0.999)' --weight-decay 0.01 --clip-norm 1.0 --lr 0.0005 --lr-scheduler polynomial_decay \
    --total-num-update "$updates" --max-update "$updates" --keep-last-epochs 1 --log-format json --log-interval 50 --seed 1 "$@"
