#!/usr/bin/env bash
# The published Transformer of Baevski and Auli 2019, and WikiText-103 in its dictionary.
#
# Data:     downloaded: adaptive_lm_wiki103.v2 (1 GB; fw-convert checks what is in it) and WikiText-103 (190 MB, checked by SHA-256).
#           MODEL=folder with model.pt and dict.txt, and DATA=folder with the text, take what is there
# Hardware: any CPU, 16 GB, 8 GB of disk
# Expect:   OUT/model/model.pt, OUT/model/dict.txt, OUT/bin
# usage:    [MODEL=folder] [DATA=folder] [OUT=folder] recipes/baevski_auli/prepare.sh       finished files stay: run it again to go on
#           TOY=1 recipes/baevski_auli/prepare.sh       a tiny Transformer, trained here for some seconds, in its place
set -euo pipefail
cd "$(dirname "$0")/../.."

export OUT=${OUT:-outputs/baevski_auli} BIN=${BIN:-.venv/bin}
model=$OUT/model
url=https://dl.fbaipublicfiles.com/fairseq/models/lm/adaptive_lm_wiki103.v2.tar.bz2

mkdir -p "$model"
if [ -n "${TOY:-}" ]; then
    bash recipes/wikitext103/prepare.sh
    if [ ! -f "$model/model.pt" ]; then
        "$BIN/fairseq-train" "$OUT/bin" --task language_modeling --arch transformer_lm --decoder-layers 2 --decoder-embed-dim 32 \
            --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 4 --decoder-normalize-before \
            --adaptive-input --adaptive-input-cutoff 500,1000 --adaptive-softmax-cutoff 500,1000 --tie-adaptive-weights \
            --criterion adaptive_loss --ddp-backend legacy_ddp --optimizer adam --lr 0.005 --tokens-per-sample 32 --batch-size 16 --max-update 60 --cpu \
            --num-workers 0 --no-epoch-checkpoints --disable-validation --save-dir "$model" >"$OUT/toy.log" 2>&1 ||
            { tail -n 3 "$OUT/toy.log" >&2; exit 1; }
        cp "$OUT/bin/dict.txt" "$model/dict.txt"
        mv "$model/checkpoint_last.pt" "$model/model.pt"
    fi
    exit 0
fi
if [ -n "${MODEL:-}" ]; then
    model=$MODEL
elif [ ! -f "$model/model.pt" ]; then
    curl --fail --location --continue-at - --output "$OUT/model.tar.bz2" "$url"
    rm -rf "$model.part"
    mkdir "$model.part"
    tar -xjf "$OUT/model.tar.bz2" -C "$model.part" --strip-components 1
    rm -r "$model"
    mv "$model.part" "$model"
fi
for file in model.pt dict.txt; do
    [ -f "$model/$file" ] || { echo "prepare.sh: $model has no $file; MODEL must have model.pt and dict.txt" >&2; exit 1; }
done
[ "$model" = "$OUT/model" ] || cp "$model/model.pt" "$model/dict.txt" "$OUT/model/"
DICT=$OUT/model/dict.txt bash recipes/wikitext103/prepare.sh
