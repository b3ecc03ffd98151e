#!/usr/bin/env bash
# Trains a byte-level language model on enwik8 that carries its state over from segment to segment.
#
# Paper:    Lei 2021 (SRU++). Rows: srupp (10 layers of width 3072), srupp5 and srupp10 (attention in every fifth or tenth layer),
#           srupp_large (width 6016), rescaled (srupp with the start and the highway of SRU, in fairseq's layers), transformer_xl
#           (12 layers of width 512), delta (the delta rule, 12 layers of width 512)
# Data:     OUT/bin of prepare.sh
# Hardware: one GPU of 24 GB; GPUS workers share the batch of 8 segments
# Time:     not run at this size yet; recipes/README.md has estimates, and CHECK=1 measures yours
# Expected: srupp 0.974 bits per character of the test text in the paper, with 108M parameters and SRUPP_MEMORY=3072 in eval.sh;
#           srupp_large 0.953, with 195M. The other rows have no published number of this size
# Usage:    recipes/enwik8/train.sh ROW [OPTION of fairseq-train]...      resumes from the last checkpoint of the row
#           recipes/enwik8/train.sh srupp
#           GPUS=8 recipes/enwik8/train.sh srupp --tokens-per-sample 1024 --batch-size 4       the batch of the paper
#           CHECK=1 recipes/enwik8/train.sh srupp     20 updates: speed, memory, disk, hours
#           TOY=1 recipes/enwik8/train.sh srupp       a tiny model on the CPU, after TOY=1 prepare.sh
#
# Learning rate, warm-up, weight decay, clipping, dropout and the number of updates are those of the paper's code, and the models of srupp,
# srupp5, srupp10 and srupp_large are its models: units alone, their start, their highway and their memory, which is the segment before.
# The optimizer is Adam (RAdam in the paper). docs/differences.md has all differences.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
renamed LENGTH "pass --tokens-per-sample"
OUT=$(output_folder enwik8)
kinds="srupp, srupp5, srupp10, srupp_large, rescaled, transformer_xl or delta"
need_row "$kinds" "$@"
row=$1
shift
length=512 batch=8 updates=400000 warmup=16000 lr=0.0003 drop=0.22
need_folder "$OUT/bin" recipes/enwik8/prepare.sh

segment=$(given --tokens-per-sample $length "$@")
[ "$row" != srupp_large ] || drop=0.32 lr=0.0004
srupp=(--arch srupp_lm_enwik8_base --dropout $drop --srupp-dropout $drop --sru-dropout $drop --attention-dropout $drop
    --srupp-memory "$segment" --srupp-segment "$segment")
published=(--sru-init xavier --no-srupp-rescale --no-sru-input-bias --units-alone --no-decoder-final-norm --no-scale-embedding
    --output-dropout $drop)
small=(--arch fast_weight_lm --decoder-layers 12 --decoder-embed-dim 512 --decoder-input-dim 512 --decoder-output-dim 512 --dropout 0.2
    --decoder-ffn-embed-dim 2048 --decoder-normalize-before --share-decoder-input-output-embed --no-token-positional-embeddings)
case $row in
    srupp) model=("${srupp[@]}" "${published[@]}") ;;
    srupp_large)
        model=("${srupp[@]}" "${published[@]}" --decoder-embed-dim 6016 --decoder-input-dim 6016 --decoder-output-dim 6016
            --srupp-width 752) ;;
    srupp5 | srupp10)
        every=${row#srupp}
        [ -z "$TOY" ] || every=2
        model=("${srupp[@]}" "${published[@]}" --mixer-pattern "sru*$((every - 1)),srupp" --sru-projection 768 --sru-projection-norm
            --sru-projection-dropout 0.22 --no-sru-rescale) ;;
    rescaled) model=("${srupp[@]}" --share-decoder-input-output-embed) ;;
    transformer_xl) model=("${small[@]}" --mixer transformer_xl --xl-memory "$segment" --xl-segment "$segment") ;;
    delta) model=("${small[@]}") ;;
    *) fail "ROW is $row; it must be $kinds" ;;
esac
if [ -n "$TOY" ]; then
    length=32 batch=4 updates=20 warmup=5
    case $row in srupp* | rescaled) model+=(--srupp-width 16) ;; esac
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32)
fi

default_precision=fp32 trial_of=enwik8
share $batch --batch-size
train "$OUT/runs/${RUN:-$row}" "$OUT/bin" --task stateful_language_modeling "${model[@]}" \
    --tokens-per-sample $length "${batch[@]}" --criterion fast_weight_cross_entropy \
    --optimizer adam --adam-betas '(0.9, 0.999)' --weight-decay 0.1 --lr $lr --lr-scheduler cosine --warmup-updates $warmup \
    --max-update $updates --clip-norm 1.0 --no-epoch-checkpoints --log-format json --log-interval 100 "$@"
