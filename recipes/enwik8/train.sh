#!/usr/bin/env bash
# Trains a byte-level language model on enwik8 that carries its state over from segment to segment.
#
# Paper:    Lei 2021 (SRU++ base). Rows: srupp (10 layers of width 3072), srupp5 (attention in every fifth layer), delta (the
#           delta rule, 12 layers of width 512)
# Data:     OUT/bin of prepare.sh
# Hardware: one GPU of 24 GB; GPUS workers share the batch of 8 segments
# Time:     not run at this size yet; recipes/README.md has estimates
# Expected: srupp 0.974 bits per character of the test text in the paper, with 108M parameters and SRUPP_MEMORY=3072 in eval.sh. The
#           other rows have no published number
# Usage:    recipes/enwik8/train.sh ROW [OPTION of fairseq-train]...      resumes from the last checkpoint of the row
#           recipes/enwik8/train.sh srupp
#           GPUS=8 recipes/enwik8/train.sh srupp --tokens-per-sample 1024 --batch-size 4       the batch of the paper
#           TOY=1 recipes/enwik8/train.sh srupp       a tiny model on the CPU, after TOY=1 prepare.sh
#
# Learning rate, warm-up, weight decay, clipping and the number of updates are those of the paper's code. Two things differ from it: dropout
# is 0.2 (0.22 in the paper), and the optimizer is Adam (RAdam in the paper).
source "$(dirname "$0")/../lib.sh"
find_programs
renamed BATCH "pass --batch-size, the segments of one worker, or set GPUS, the workers that share the batch"
renamed LENGTH "pass --tokens-per-sample"
OUT=$(output_folder enwik8)
kinds="srupp, srupp5 or delta"
need_row "$kinds" "$@"
row=$1
shift
length=512 batch=8 updates=400000 warmup=16000
need_folder "$OUT/bin" recipes/enwik8/prepare.sh

srupp=(--arch srupp_lm_enwik8_base --share-decoder-input-output-embed --srupp-dropout 0.2)
[ -z "$TOY" ] || srupp+=(--srupp-width 16)
case $row in
    srupp) model=("${srupp[@]}") ;;
    srupp5) model=("${srupp[@]}" --mixer-pattern "sru*4,srupp" --sru-projection 768) ;;
    delta) model=(--arch fast_weight_lm --decoder-layers 12 --decoder-embed-dim 512 --decoder-input-dim 512 --decoder-output-dim 512
        --decoder-ffn-embed-dim 2048 --decoder-normalize-before --share-decoder-input-output-embed --no-token-positional-embeddings) ;;
    *) fail "ROW is $row; it must be $kinds" ;;
esac
if [ -n "$TOY" ]; then
    length=32 batch=4 updates=20 warmup=5
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32)
fi

batch=$(share $batch)
train "$OUT/runs/${RUN:-$row}" "$OUT/bin" --task stateful_language_modeling "${model[@]}" \
    --tokens-per-sample $length --batch-size "$batch" --criterion fast_weight_cross_entropy --dropout 0.2 \
    --optimizer adam --adam-betas '(0.9, 0.999)' --weight-decay 0.1 --lr 0.0003 --lr-scheduler cosine --warmup-updates $warmup \
    --max-update $updates --clip-norm 1.0 --keep-last-epochs 1 --log-format json --log-interval 100 "$@"
