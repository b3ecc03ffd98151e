#!/usr/bin/env bash
# Trains one model of the paper's experiment on WikiText-2: additive attention with and without windows, and softmax attention.
#
# Paper:    "Additive Attention Is All You Need?". Rows: windowed, additive (all of the past), softmax (a GPT-2 of this size), leap (the
#           later form of the same author, with its own windows), adapted (windowed, in the form of this project)
# Data:     OUT/bin of prepare.sh
# Hardware: one RTX 2060 in the paper; GPUS workers share the batch of 2 segments
# Time:     24 minutes in the paper, 36 for softmax; not run at this size yet
# Expected: the best validation perplexity of a piece within 20 epochs, from the authors' notebook (FastLM.ipynb at a7eb70f): additive
#           93.93 (epoch 14), windowed 57.39 (15), softmax 67.89 (20), 5.6M parameters each, with the 32,100 pieces of T5
# Usage:    recipes/additive/train.sh ROW [OPTION of fairseq-train]...      resumes from the last checkpoint of the row
#           recipes/additive/train.sh windowed
#           UPDATES=20000 recipes/additive/train.sh softmax      instead of 20 epochs
#           recipes/additive/train.sh windowed --label-smoothing 0.1 --weight-decay 0.01      as the text of the paper has it
#           CHECK=1 recipes/additive/train.sh windowed    20 updates: speed, memory, disk, hours
#           TOY=1 recipes/additive/train.sh windowed      a tiny model on the CPU, after TOY=1 prepare.sh
#
# Segments of 2048 tokens, 6 layers of width 128 with 4 heads, batches of 2, Adam at 5e-4 with linear decay, clipping at 1, no weight decay
# and no label smoothing, as in the notebook that the numbers come from. The pieces are those of prepare.sh, so compare bits per
# character, or the rows with each other; docs/differences.md says what else differs.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
OUT=$(output_folder additive)
kinds="windowed, additive, softmax, leap or adapted"
need_row "$kinds" "$@"
row=$1
shift
length=2048
need_folder "$OUT/bin" recipes/additive/prepare.sh
tokens=$(($(stat -c %s "$OUT/bin/train.bin") / 2)) # fairseq stores numbers below 65,500 in two bytes
updates=${UPDATES:-$((20 * ((tokens + 2 * length - 1) / (2 * length))))}

case $row in
    windowed) model=(--arch additive_lm_published) ;;
    additive) model=(--arch additive_lm_published --window-sizes 0) ;;
    softmax) model=(--arch additive_lm --mixer softmax --no-scale-output --attention-dropout 0.1 --activation-dropout 0) ;;
    leap) model=(--arch leap_lm_published) ;;
    adapted) model=(--arch additive_lm) ;;
    *) fail "ROW is $row; it must be $kinds" ;;
esac
if [ -n "$TOY" ]; then
    length=64 updates=20
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64)
fi

default_precision=fp32 trial_of=additive
share 2 --batch-size
train "$OUT/runs/${RUN:-$row}" "$OUT/bin" --task language_modeling "${model[@]}" \
    --tokens-per-sample $length "${batch[@]}" --required-batch-size-multiple 1 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0 \
    --optimizer adam --adam-betas '(0.9, 0.999)' --weight-decay 0 --clip-norm 1.0 --lr 0.0005 --lr-scheduler polynomial_decay \
    --total-num-update "$updates" --max-update "$updates" --no-epoch-checkpoints --log-format json --log-interval 50 "$@"
