#!/usr/bin/env bash
# Makes WikiText-103 and the checkpoint of Baevski and Auli 2019 (fairseq's transformer_lm.wiki103.adaptive) ready for convert.sh.
#
# Paper:    Mao 2022, table 3
# Data:     downloads WikiText-103 (190 MB, 540 MB of text, checked by SHA-256) and the checkpoint (about 1 GB; no sum is published, that
#           of the first download holds unless MODEL_SHA256 gives one), or takes wiki.{train,valid,test}.tokens or {train,valid,test}.txt
#           of DATA, such as outputs/wikitext103/text, and CHECKPOINT with its dictionary DICT. Downloads resume
# Hardware: any CPU, 0.5 GB of memory; 5 GB of disk
# Time:     5 minutes of processor time on all cores together
# Expected: OUT/data for fairseq, OUT/pretrained.pt
# Usage:    recipes/baevski_auli/prepare.sh                 a second call continues where the first one stopped
#           DATA=folder CHECKPOINT=model.pt DICT=dict.txt recipes/baevski_auli/prepare.sh
#           TOY=1 recipes/baevski_auli/prepare.sh           a few sentences and a tiny transformer_lm_wiki103 trained on them, on a CPU
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/baevski_auli/rows.sh"

TEXT_URL=${TEXT_URL:-https://wikitext.smerity.com/wikitext-103-v1.zip}
TEXT_SHA256=${TEXT_SHA256:-242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590}
MODEL_URL=${MODEL_URL:-https://dl.fbaipublicfiles.com/fairseq/models/lm/adaptive_lm_wiki103.v2.tar.bz2}
if [ -z "$TOY" ]; then # before the first minute
    [ -z "${CHECKPOINT:-}" ] || [ -f "$CHECKPOINT" ] || fail "CHECKPOINT is $CHECKPOINT, which is not a file"
    dictionary=${DICT-${CHECKPOINT:+$(dirname "$CHECKPOINT")/dict.txt}}
    [ -z "$dictionary" ] || [ -f "$dictionary" ] || fail "DICT is $dictionary, which is not a file; it must be the dictionary of CHECKPOINT"
    [ -z "${DATA:-}" ] || need_texts
fi
made_with=("TOY=$TOY")
[ -n "$TOY" ] || made_with+=("DATA=$(absolute "${DATA:-}")" "CHECKPOINT=$(absolute "${CHECKPOINT:-}")" "DICT=$(absolute "${DICT:-}")")
there=
if prepared "$OUT/data" "${made_with[@]}"; then there=1; fi
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
    download "$MODEL_URL" "$OUT/adaptive_lm_wiki103.v2.tar.bz2" "${MODEL_SHA256:-}"
    CHECKPOINT=$OUT/adaptive_lm_wiki103.v2/model.pt
    [ -f "$CHECKPOINT" ] || tar -xjf "$OUT/adaptive_lm_wiki103.v2.tar.bz2" -C "$OUT"
fi
DICT=${DICT-$(dirname "$CHECKPOINT")/dict.txt}

if [ -z "$there" ]; then
    need_texts
    binarise "$OUT/data" "${made_with[@]}" -- --only-source ${DICT:+--srcdict "$DICT"} "${texts[@]}"
fi
if [ -n "$TOY" ] && [ ! -f "$CHECKPOINT" ]; then
    train "$(dirname "$CHECKPOINT")" "$OUT/data" --task language_modeling --arch transformer_lm_wiki103 "${shape[@]}" \
        --criterion adaptive_loss --ddp-backend legacy_ddp --tokens-per-sample $tokens \
        --batch-size 8 --optimizer adam --lr 0.01 --max-update 10 --no-epoch-checkpoints
fi
[ -f "$CHECKPOINT" ] || fail "CHECKPOINT is $CHECKPOINT, which is not a file"
ln -sfn "$(realpath "$CHECKPOINT")" "$OUT/pretrained.pt"
echo "$OUT/data and $OUT/pretrained.pt are ready"
