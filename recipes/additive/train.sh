#!/usr/bin/env bash
# Trains one model of the paper's experiment on WikiText-2: additive attention with and without windows, and softmax attention.
#
# Paper:    "Additive Attention Is All You Need?". Rows: windowed, additive (all of the past), softmax (a GPT-2 of this size), leap
# Data:     OUT/bin of prepare.sh
# Hardware: one RTX 2060 in the paper; GPUS workers share the batch of 2 segments
# Time:     24 minutes in the paper, 36 for softmax; not run at this size yet
# Expected: curves only: windowed is well ahead of additive, and ahead of softmax
# Usage:    recipes/additive/train.sh ROW [OPTION of fairseq-train]...      resumes from the last checkpoint of the row
#           recipes/additive/train.sh windowed
#           UPDATES=20000 recipes/additive/train.sh softmax
#           TOY=1 recipes/additive/train.sh windowed      a tiny model on the CPU, after TOY=1 prepare.sh
#
# Segments of 2048 tokens, 6 layers of width 128 with 4 heads, AdamW at 5e-4 with linear decay, weight decay 0.01, clipping at 1, label
# smoothing 0.1. The paper has the vocabulary of T5 and does not give the number of updates.
source "$(dirname "$0")/../lib.sh"
find_programs
renamed BATCH "pass --batch-size"
OUT=$(output_folder additive)
kinds="windowed, additive, softmax or leap"
need_row "$kinds" "$@"
row=$1
shift
length=2048 updates=${UPDATES:-10000}
need_folder "$OUT/bin" recipes/additive/prepare.sh

case $row in
    windowed) model=() ;;
    additive) model=(--window-sizes 0) ;;
    softmax) model=(--mixer softmax) ;;
    leap) model=(--mixer leap) ;;
    *) fail "ROW is $row; it must be $kinds" ;;
esac
if [ -n "$TOY" ]; then
    length=64 updates=20
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64)
fi

batch=$(share 2)
train "$OUT/runs/${RUN:-$row}" "$OUT/bin" --task language_modeling --arch additive_lm "${model[@]}" \
    --tokens-per-sample $length --batch-size "$batch" --required-batch-size-multiple 1 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
    --optimizer adam --adam-betas '(0.9, 0.999)' --weight-decay 0.01 --clip-norm 1.0 --lr 0.0005 --lr-scheduler polynomial_decay \
    --total-num-update "$updates" --max-update "$updates" --keep-last-epochs 1 --log-format json --log-interval 50 "$@"
