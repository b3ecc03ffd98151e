#!/usr/bin/env bash
# A byte-level language model on enwik8, memories carried from segment to segment.
#
# Data:     OUT/bin of prepare.sh
# Hardware: one GPU of 24 GB for BATCH=8; with N GPUs a batch is split over them: BATCH is that of one
# Time:     not run at this size yet
# Expect:   published for SRU++ base, 108M parameters: 0.974 bits per character of the test text with 3072 bytes of attention
#           (Lei 2021; SRUPP_MEMORY=3072 eval.sh). srupp5 and delta have no published number
# usage:    [OUT=folder] [LENGTH=n] [BATCH=n] recipes/enwik8/train.sh ROW [OPTION of fairseq-train]...      resumes from its last checkpoint
#           ROW: srupp (10 layers of width 3072), srupp5 (attention in every fifth layer), delta (12 layers of width 512)
#           toy: TOY=1 recipes/enwik8/train.sh srupp         a tiny model on the CPU, after TOY=1 prepare.sh
#
# Learning rate, warm-up, decay, clipping and the number of updates are those of the publication's code, dropout nearly (0.22 there). It
# trains on segments of 1024, 4 of them on each of 8 GPUs (LENGTH=1024 BATCH=4), with RAdam where this has Adam.
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

row=${1:?ROW is missing; it must be srupp, srupp5 or delta}
shift
out=$(output_folder enwik8)
bin=${BIN:-.venv/bin}
launch=${LAUNCH:-$bin/fairseq-train}
length=${LENGTH:-512} batch=${BATCH:-8} updates=400000 warmup=16000
[ -d "$out/bin" ] || { echo "train.sh: $out/bin is missing; run recipes/enwik8/prepare.sh with the same OUT and TOY first" >&2; exit 1; }

case $row in
    srupp) model=(--arch srupp_lm_enwik8_base --share-decoder-input-output-embed) ;;
    srupp5) model=(--arch srupp_lm_enwik8_base --share-decoder-input-output-embed --mixer-pattern "sru*4,srupp" --sru-projection 768) ;;
    delta) model=(--arch fast_weight_lm --decoder-layers 12 --decoder-embed-dim 512 --decoder-input-dim 512 --decoder-output-dim 512
        --decoder-ffn-embed-dim 2048 --decoder-normalize-before --share-decoder-input-output-embed --no-token-positional-embeddings) ;;
    *) echo "train.sh: ROW is $row; it must be srupp, srupp5 or delta" >&2; exit 2 ;;
esac
if [ -n "${TOY:-}" ]; then
    length=32 batch=4 updates=20 warmup=5
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --srupp-width 16 --cpu --num-workers 0)
fi

# shellcheck disable=SC2086
exec $launch "$out/bin" --user-dir "$PWD/fw_fairseq" --task stateful_language_modeling --save-dir "${SAVE:-$out/runs/$row}" "${model[@]}" \
    --tokens-per-sample $length --batch-size "$batch" --criterion fast_weight_cross_entropy --dropout 0.2 --srupp-dropout 0.2 \
    --optimizer adam --adam-betas '(0.9, 0.999)' --weight-decay 0.1 --lr 0.0003 --lr-scheduler cosine --warmup-updates $warmup \
    --max-update $updates --clip-norm 1.0 --keep-last-epochs 1 --log-format json --log-interval 100 --seed 1 "$@"
