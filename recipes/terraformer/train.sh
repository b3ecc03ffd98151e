#!/usr/bin/env bash
# Trains a language model with the sizes of the medium Terraformer, dense or with one sparse part after the other.
#
# Paper:    Jaszczur et al. 2021; the sizes, dropout, optimizer and schedule of its medium model on C4
# Data:     OUT/bin of prepare.sh
# Hardware: GPUS workers share the batch of 64 segments of 512 tokens; not run at this size yet
# Time:     not measured at this size; recipes/README.md has estimates, and CHECK=1 measures yours
# Expected: the paper reports no perplexity on these data; sparse feed-forward layers come within 3% of dense ones on its own
# Usage:    recipes/terraformer/train.sh ROW [OPTION of fairseq-train]...     resumes from the last checkpoint of the row
#           recipes/terraformer/train.sh terraformer
#           GPUS=8 recipes/terraformer/train.sh softmax
#           CHECK=1 recipes/terraformer/train.sh terraformer  20 updates: speed, memory, disk, hours
#           TOY=1 recipes/terraformer/train.sh terraformer    a tiny model on the CPU, after TOY=1 prepare.sh
#
# ROW is dense (a Transformer of the same sizes), ffn (with sparse feed-forward layers), softmax (all sparse parts, softmax attention) or
# terraformer (all sparse parts, gated_delta). dense and ffn have sinusoidal positions; the convolutions and recurrent units of the
# others order the tokens. The learning rate is the inverse square root of the number of updates after 10,000 of warm-up, as published;
# Adafactor scales it by the size of each parameter.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
OUT=$(output_folder terraformer)
kinds="dense, ffn, softmax or terraformer"
need_row "$kinds" "$@"
row=$1
shift
need_folder "$OUT/bin" recipes/terraformer/prepare.sh
length=512 batch=64 updates=100000 warmup=10000
sizes=(--arch terraformer_lm_medium)
plain=(--no-reversible --token-positional-embeddings --output-sparsity 0 --ffn-sru 0 --qkv-sparsity 0 --mixer softmax)
if [ -n "$TOY" ]; then
    length=32 batch=4 updates=20 warmup=5
    sizes=(--arch terraformer_lm --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32
        --decoder-ffn-embed-dim 64)
fi
case $row in
    dense) model=("${plain[@]}" --ffn-sparsity 0) ;;
    ffn) model=("${plain[@]}") ;;
    softmax) model=(--mixer softmax) ;;
    terraformer) model=() ;;
    *) fail "ROW is $row; it must be $kinds" ;;
esac

default_precision=fp32 trial_of=terraformer
share $batch --batch-size
train "$OUT/runs/${RUN:-$row}" "$OUT/bin" --task stateful_language_modeling "${sizes[@]}" "${model[@]}" \
    --tokens-per-sample $length "${batch[@]}" --criterion cross_entropy \
    --optimizer adafactor --scale-parameter --lr 0.01 --lr-scheduler inverse_sqrt --warmup-updates $warmup \
    --max-update $updates --clip-norm 1.0 --no-epoch-checkpoints --log-format json --log-interval 100 "$@"
