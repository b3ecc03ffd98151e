#!/usr/bin/env bash
# WikiText-103, or your own text, binarised for fairseq.
#
# Data:     downloaded (190 MB, checked by SHA-256), or DATA=folder with train.txt, valid.txt, test.txt or wiki.*.tokens
# Hardware: any CPU, 16 GB, 3 GB of disk; WORKERS processes
# Time:     not run on the whole text here
# Expect:   OUT/bin with a dictionary of 267,744 entries
# usage:    [DATA=folder] [OUT=folder] [DICT=dict.txt] recipes/wikitext103/prepare.sh      finished files stay: run it again to go on
#           TOY=1 recipes/wikitext103/prepare.sh          the text of recipes/demo instead, to try all of this in a minute; OUT then ends in _toy
#
# DICT: a dictionary to keep to, that of a pretrained model.
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/download.sh
source recipes/prepared.sh

out=$(output_folder wikitext103)
bin=${BIN:-.venv/bin}
data=${DATA:-}
url=https://wikitext.smerity.com/wikitext-103-v1.zip
sum=242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590

made_with=("TOY=${TOY:-}" "DATA=$(absolute "$data")" "DICT=$(absolute "${DICT:-}")")
if prepared "$out/bin" "${made_with[@]}"; then
    exit 0
fi
mkdir -p "$out"
if [ -z "$data" ]; then
    data=$out/text
    if [ -n "${TOY:-}" ]; then
        "$bin/python" recipes/demo/corpus.py "$data"
    elif [ ! -d "$data" ]; then
        download "$url" "$out/download.zip" "$sum"
        rm -rf "$data.part"
        "$bin/python" -m zipfile -e "$out/download.zip" "$data.part"
        mv "$data.part/wikitext-103" "$data"
        rm -r "$data.part"
    fi
fi
options=(--only-source --workers "${WORKERS:-$(nproc)}")
for split in train valid test; do
    for file in "$data/$split.txt" "$data/wiki.$split.tokens" ""; do
        [ ! -f "$file" ] || break
    done
    [ -n "$file" ] || { echo "prepare.sh: $data has neither $split.txt nor wiki.$split.tokens; DATA must have one of them" >&2; exit 1; }
    options+=("--${split}pref" "$file")
done
[ -z "${DICT:-}" ] || options+=(--srcdict "$DICT")
rm -rf "$out/bin.part"
"$bin/fairseq-preprocess" "${options[@]}" --destdir "$out/bin.part" >"$out/preprocess.log" 2>&1 ||
    { tail -n 3 "$out/preprocess.log" >&2; exit 1; }
record "$out/bin" "${made_with[@]}"
mv "$out/bin.part" "$out/bin"
