#!/usr/bin/env bash
# WikiText-103 and the checkpoint of Baevski and Auli 2019 (fairseq's transformer_lm.wiki103.adaptive), ready for convert.sh.
#   Data      WikiText-103: 190 MB to download, 540 MB of text; the checkpoint: about 1 GB. Downloads resume.
#   Hardware  any; 5 GB of disk
#   recipes/baevski_auli/prepare.sh
#   DATA=folder CHECKPOINT=model.pt DICT=dict.txt recipes/baevski_auli/prepare.sh    uses wiki.{train,valid,test}.tokens and a model
#                                                                                    that are there; nothing is downloaded
#   TOY=1 recipes/baevski_auli/prepare.sh    a few sentences, and a tiny transformer_lm_wiki103 trained on them
# The text has a known checksum. The checkpoint has none that was published: the first download's is kept beside it and holds from
# then on, unless MODEL_SHA256 gives one.
source "$(dirname "$0")/settings.sh"
source recipes/download.sh

TEXT_URL=${TEXT_URL:-https://wikitext.smerity.com/wikitext-103-v1.zip}
TEXT_SHA256=${TEXT_SHA256:-242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590}
MODEL_URL=${MODEL_URL:-https://dl.fbaipublicfiles.com/fairseq/models/lm/adaptive_lm_wiki103.v2.tar.bz2}
MODEL_SHA256=${MODEL_SHA256:-}
options=("TOY=$TOY")
[ -n "$TOY" ] || options+=("DATA=$(absolute "${DATA:-}")" "CHECKPOINT=$(absolute "${CHECKPOINT:-}")" "DICT=$(absolute "${DICT:-}")")
there=
if prepared "$OUT/data" "${options[@]}"; then there=1; fi
mkdir -p "$OUT"

if [ -n "$TOY" ]; then
    DATA=$OUT/text
    mkdir -p "$DATA"
    for split in train valid test; do # words that count up
        for i in $(seq 1 120); do
            seq -s ' ' -f 'w%g' $((i * 7 % 40)) $((i * 7 % 40 + 8))
        done >"$DATA/wiki.$split.tokens"
    done
    CHECKPOINT=$OUT/pretrained/checkpoint_last.pt DICT=
elif [ -z "${DATA:-}" ]; then
    download "$TEXT_URL" "$OUT/wikitext-103-v1.zip" "$TEXT_SHA256"
    DATA=$OUT/wikitext-103
    [ -f "$DATA/wiki.test.tokens" ] || "$PYTHON" -m zipfile -e "$OUT/wikitext-103-v1.zip" "$OUT"
fi
if [ -z "${CHECKPOINT:-}" ]; then
    download "$MODEL_URL" "$OUT/adaptive_lm_wiki103.v2.tar.bz2" "$MODEL_SHA256"
    CHECKPOINT=$OUT/adaptive_lm_wiki103.v2/model.pt
    [ -f "$CHECKPOINT" ] || tar -xjf "$OUT/adaptive_lm_wiki103.v2.tar.bz2" -C "$OUT"
fi
DICT=${DICT-$(dirname "$CHECKPOINT")/dict.txt}

if [ -z "$there" ]; then
    rm -rf "$OUT/data.part"
    fairseq preprocess --only-source ${DICT:+--srcdict "$DICT"} --destdir "$OUT/data.part" --workers "${WORKERS:-1}" \
        --trainpref "$DATA/wiki.train.tokens" --validpref "$DATA/wiki.valid.tokens" --testpref "$DATA/wiki.test.tokens"
    record "$OUT/data" "${options[@]}"
    mv "$OUT/data.part" "$OUT/data"
fi
if [ -n "$TOY" ] && [ ! -f "$CHECKPOINT" ]; then
    fairseq train "$OUT/data" --task language_modeling --arch transformer_lm_wiki103 "${shape[@]}" "${machine[@]}" \
        --save-dir "$(dirname "$CHECKPOINT")" --criterion adaptive_loss --ddp-backend legacy_ddp --tokens-per-sample $tokens \
        --batch-size 8 --optimizer adam --lr 0.01 --max-update 10 --no-epoch-checkpoints --seed 1
fi
ln -sfn "$(realpath "$CHECKPOINT")" "$OUT/pretrained.pt"
echo "$OUT/data and $OUT/pretrained.pt are ready"
