#!/usr/bin/env bash
# Makes enwik8, the first 100 MB of an English Wikipedia, or a file of your own ready for train.sh, byte by byte.
#
# Paper:    Lei 2021 (SRU++)
# Data:     downloads enwik8 (36 MB; the size of the text is checked, and its sum with SHA256), or takes the file DATA. The last twentieth
#           is test text, the twentieth before it is validation text
# Hardware: any CPU, 0.4 GB of memory, 0.7 GB of disk
# Time:     5 minutes of processor time on all cores together
# Expected: OUT/bin with a dictionary of 208 entries: 204 bytes that occur beside the new line, and fairseq's 4
# Usage:    recipes/enwik8/prepare.sh                       a second call continues where the first one stopped
#           DATA=file OUT=folder SHA256=sum recipes/enwik8/prepare.sh
#           TOY=1 recipes/enwik8/prepare.sh                 a small text, to try all steps on a CPU in a minute
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
OUT=$(output_folder enwik8)
data=${DATA:-}
url=https://mattmahoney.net/dc/enwik8.zip
size=100000000

made_with=("TOY=$TOY" "DATA=$(absolute "$data")" "SHA256=${SHA256:-}")
if prepared "$OUT/bin" "${made_with[@]}"; then
    exit 0
fi
if [ -z "$data" ]; then
    data=$OUT/enwik8
    if [ -n "$TOY" ]; then
        language_reference "$OUT/text"
        head -c 20000 "$OUT/text/train.txt" >"$data"
    elif [ ! -f "$data" ]; then
        download "$url" "$OUT/download.zip"
        rm -rf "$OUT/part"
        "$PYTHON" -m zipfile -e "$OUT/download.zip" "$OUT/part"
        [ "$(wc -c <"$OUT/part/enwik8")" = $size ] || fail "the file in $url has not $size bytes; it is not enwik8"
        mv "$OUT/part/enwik8" "$data"
    fi
fi
[ -f "$data" ] || fail "DATA is $data, which is not a file"
if [ -n "${SHA256:-}" ]; then
    echo "$SHA256  $data" | sha256sum --check --quiet || fail "$data has another checksum than SHA256"
fi
part=$(($(wc -c <"$data") / 20))
"$PYTHON" "$ROOT/recipes/enwik8/bytes.py" "$data" "$OUT/bytes" $part $part
binarise "$OUT/bin" "${made_with[@]}" -- --only-source \
    --trainpref "$OUT/bytes/train.txt" --validpref "$OUT/bytes/valid.txt" --testpref "$OUT/bytes/test.txt"
