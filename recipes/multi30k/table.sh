#!/usr/bin/env bash
# Trains translation models with softmax and linear attention under one small budget and prints their table, by the recipe of WMT14.
#
# Paper:    none; a small relative of Schlag et al. 2021, table 1, on Multi30k English-German
# Data:     DATA, a folder with train, val and test_2016_flickr, each in .en and .de (29,000 image captions); nothing is downloaded
# Hardware: one CPU core, 1 GB of memory
# Time:     13 (softmax) to 22 minutes (dpfp2) of processor time for a row of 1400 updates of 1024 tokens
# Expected: the table in docs/results/multi30k.md
# Usage:    DATA=folder recipes/multi30k/table.sh [ROW]... [OPTION of fairseq-train]...
#           DATA=folder UPDATES=1000 recipes/multi30k/table.sh softmax dpfp2
#           DATA=folder TEST="test_2016_flickr test_2017_flickr" recipes/multi30k/table.sh      a row for each test set
#
# Rows are those of recipes/wmt14/train.sh. A second call resumes each row from its last checkpoint; finished rows are only evaluated again.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
renamed ROWS "rows are arguments"
no_toy "leave TOY out, and set UPDATES=10 for short rows"
split_rows "$@"
[ ${#rows[@]} -gt 0 ] || rows=(softmax dpfp2 linear prescaled128 performer128 dpfp2-decoder linear-decoder performer128-decoder)
OUT=$(output_folder multi30k)
updates=${UPDATES:-1400}
[ -n "${DATA:-}" ] || fail "DATA is missing; it must be the folder with train, val and test_2016_flickr, each in .en and .de"
export OUT CPU=1

VALID=val TEST=${TEST:-test_2016_flickr} BPE=8000 LOWERCASE=1 "$ROOT/recipes/wmt14/prepare.sh"

echo "| row | detokenised BLEU | tokenised, compounds split | sentences/s |"
echo "|---|---:|---:|---:|"
for row in "${rows[@]}"; do
    export RUN=$row-$updates
    SHAPE=iwslt_de_en logged "$OUT/runs/$RUN.log" "$ROOT/recipes/wmt14/train.sh" "$row" \
        --encoder-layers 3 --decoder-layers 3 --encoder-embed-dim 256 --decoder-embed-dim 256 --encoder-ffn-embed-dim 512 \
        --decoder-ffn-embed-dim 512 --encoder-attention-heads 4 --decoder-attention-heads 4 --encoder-normalize-before \
        --decoder-normalize-before --dropout 0.1 --weight-decay 1e-4 --clip-norm 1.0 --lr 0.002 --lr-scheduler polynomial_decay \
        --warmup-updates 200 --total-num-update "$updates" --max-update "$updates" --max-tokens 1024 --update-freq 1 --disable-validation \
        --no-epoch-checkpoints --log-interval 25 "${options[@]}"
    CHECKPOINT=checkpoint_last.pt BEAM=5 LENPEN=1 "$ROOT/recipes/wmt14/eval.sh" "$row"
done
