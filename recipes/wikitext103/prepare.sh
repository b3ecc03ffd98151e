#!/usr/bin/env bash
# Makes WikiText-103, or your own text, ready for train.sh: one dictionary and the binary files of fairseq.
#
# Paper:    Schlag et al. 2021, tables 2 to 5
# Data:     downloads WikiText-103 (190 MB, checked by SHA-256), or takes train.txt, valid.txt and test.txt, or wiki.*.tokens, of DATA,
#           such as outputs/baevski_auli/wikitext-103
# Hardware: any CPU, 0.5 GB of memory; 1 GB of disk for the text and 0.4 GB for OUT/bin
# Time:     5 minutes of processor time on all cores together
# Expected: OUT/bin with a dictionary of 267,744 entries
# Usage:    recipes/wikitext103/prepare.sh                  a second call continues where the first one stopped
#           DATA=folder OUT=folder recipes/wikitext103/prepare.sh
#           DICT=dict.txt recipes/wikitext103/prepare.sh    uses this dictionary, for example that of a pretrained model
#           TOY=1 recipes/wikitext103/prepare.sh            a small text, to try all steps on a CPU in a minute
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
OUT=$(output_folder wikitext103)
data=${DATA:-}
url=https://wikitext.smerity.com/wikitext-103-v1.zip
sum=242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590

made_with=("TOY=$TOY" "DATA=$(absolute "$data")" "DICT=$(absolute "${DICT:-}")")
if prepared "$OUT/bin" "${made_with[@]}"; then
    exit 0
fi
[ -z "${DICT:-}" ] || [ -f "$DICT" ] || fail "DICT is $DICT, which is not a file"
if [ -z "$data" ]; then
    data=$OUT/text
    if [ -n "$TOY" ]; then
        language_reference "$data"
    elif [ ! -d "$data" ]; then
        download "$url" "$OUT/download.zip" "$sum"
        rm -rf "$data.part"
        "$PYTHON" -m zipfile -e "$OUT/download.zip" "$data.part"
        mv "$data.part/wikitext-103" "$data"
        rm -r "$data.part"
    fi
fi
for split in train valid test; do
    [ -f "$data/$split.txt" ] || [ -f "$data/wiki.$split.tokens" ] ||
        fail "$data has neither $split.txt nor wiki.$split.tokens; DATA must have one of them"
done
DATA=$data
need_texts
[ -z "${DICT:-}" ] || texts+=(--srcdict "$DICT")
binarise "$OUT/bin" "${made_with[@]}" -- --only-source "${texts[@]}"
