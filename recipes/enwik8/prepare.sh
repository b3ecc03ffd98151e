#!/usr/bin/env bash
# enwik8, the first 100 MB of an English Wikipedia, byte by byte, or a file of your own.
#
# Data:     downloaded (36 MB, its size and the text's checked), or DATA=file; the last twentieth is test text, the one before valid
# Hardware: any CPU, 4 GB, 1 GB of disk; WORKERS processes
# Time:     not run on the whole text here
# Expect:   OUT/bin with a dictionary of 208 entries: 204 bytes that occur beside the new line, and fairseq's 4
# usage:    [DATA=file] [OUT=folder] [SHA256=sum of the text] recipes/enwik8/prepare.sh      finished files stay: run it again to go on
#           TOY=1 recipes/enwik8/prepare.sh          the text of recipes/demo instead, to try all of this in a minute; OUT then ends in _toy
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/download.sh
source recipes/prepared.sh

out=$(output_folder enwik8)
bin=${BIN:-.venv/bin}
data=${DATA:-}
url=https://mattmahoney.net/dc/enwik8.zip
size=100000000

options=("TOY=${TOY:-}" "DATA=$(absolute "$data")" "SHA256=${SHA256:-}")
if prepared "$out/bin" "${options[@]}"; then
    exit 0
fi
mkdir -p "$out"
if [ -z "$data" ]; then
    data=$out/enwik8
    if [ -n "${TOY:-}" ]; then
        "$bin/python" recipes/demo/corpus.py "$out/text"
        head -c 20000 "$out/text/train.txt" >"$data"
    elif [ ! -f "$data" ]; then
        download "$url" "$out/download.zip" ""
        rm -rf "$out/part"
        "$bin/python" -m zipfile -e "$out/download.zip" "$out/part"
        [ "$(wc -c <"$out/part/enwik8")" = $size ] || { echo "prepare.sh: $url is not the $size bytes that it was" >&2; exit 1; }
        mv "$out/part/enwik8" "$data"
    fi
fi
[ -f "$data" ] || { echo "prepare.sh: DATA is $data, which is not a file" >&2; exit 1; }
if [ -n "${SHA256:-}" ]; then
    echo "$SHA256  $data" | sha256sum --check --quiet || { echo "prepare.sh: $data has another checksum than SHA256" >&2; exit 1; }
fi
bytes=$(wc -c <"$data")
"$bin/python" recipes/enwik8/bytes.py "$data" "$out/bytes" $((bytes / 20)) $((bytes / 20))
rm -rf "$out/bin.part"
"$bin/fairseq-preprocess" --only-source --workers "${WORKERS:-$(nproc)}" --destdir "$out/bin.part" \
    --trainpref "$out/bytes/train.txt" --validpref "$out/bytes/valid.txt" --testpref "$out/bytes/test.txt" >"$out/preprocess.log" 2>&1 ||
    { tail -n 3 "$out/preprocess.log" >&2; exit 1; }
record "$out/bin" "${options[@]}"
mv "$out/bin.part" "$out/bin"
