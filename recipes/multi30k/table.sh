#!/usr/bin/env bash
# Multi30k English-German: softmax attention and linear attention under one budget, on a laptop, with the recipe of WMT14.
#
# Data:     DATA=folder with train, val and test_2016_flickr, each .en and .de (29,000 sentences of image captions). Not downloaded here.
# Hardware: a CPU core, 1 GB; a row of 1400 updates of 1024 tokens takes about 13 (softmax) to 22 minutes (dpfp2) of processor time
# Expect:   the table in docs/results/multi30k.md
# usage:    DATA=folder [OUT=folder] [UPDATES=1400] [ROWS="softmax dpfp2 dpfp2:decoder"] recipes/multi30k/table.sh
#
# A row is one of recipes/wmt14/train.sh, all three attentions linear; with ":decoder" only those that follow the colon.
# Each row resumes from its last checkpoint, and a finished one is only evaluated again.
set -euo pipefail
cd "$(dirname "$0")/../.."

export OUT=${OUT:-outputs/multi30k}
updates=${UPDATES:-1400}
rows=${ROWS:-softmax dpfp2 linear performer128 dpfp2:decoder linear:decoder performer128:decoder}

VALID=val TEST=test_2016_flickr BPE=8000 LOWERCASE=1 recipes/wmt14/prepare.sh

echo "| row | detokenised BLEU | tokenised, compounds split | sentences/s |"
echo "|---|---:|---:|---:|"
for row in $rows; do
    folder=${row/:/-}-$updates
    attentions=encoder,decoder,cross
    [ "${row#*:}" = "$row" ] || attentions=${row#*:}
    mkdir -p "$OUT/runs"
    SAVE=$OUT/runs/$folder SHAPE=iwslt_de_en PRECISION='' ATTENTIONS=$attentions recipes/wmt14/train.sh "${row%%:*}" \
        --encoder-layers 3 --decoder-layers 3 --encoder-embed-dim 256 --decoder-embed-dim 256 --encoder-ffn-embed-dim 512 \
        --decoder-ffn-embed-dim 512 --encoder-attention-heads 4 --decoder-attention-heads 4 --encoder-normalize-before \
        --decoder-normalize-before --dropout 0.1 --weight-decay 1e-4 --clip-norm 1.0 --lr 0.002 --lr-scheduler polynomial_decay \
        --warmup-updates 200 --total-num-update "$updates" --max-update "$updates" --max-tokens 1024 --update-freq 1 --disable-validation \
        --no-epoch-checkpoints --log-interval 25 --cpu --num-workers 0 >>"$OUT/runs/$folder.log" 2>&1 ||
        { tail -n 3 "$OUT/runs/$folder.log" >&2; exit 1; }
    CHECKPOINT=checkpoint_last.pt BEAM=5 LENPEN=1 recipes/wmt14/eval.sh "$folder" --cpu --num-workers 0
done
