#!/usr/bin/env bash
# WikiText-2, or your own text, in the pieces of a SentencePiece vocabulary trained on it.
#
# Data:     DATA=folder with train.txt, valid.txt, test.txt. Not downloaded here
# Hardware: any CPU; needs the extra gpt2, for its tokenizers
# Expect:   OUT/bin and OUT/pieces/tokenizer.json
# usage:    DATA=folder [OUT=folder] [VOCABULARY=8000] recipes/additive/prepare.sh      finished files stay: run it again to go on
#           TOY=1 recipes/additive/prepare.sh          the text of recipes/demo, to try all of this in a minute; OUT then ends in _toy
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

out=$(output_folder additive)
bin=${BIN:-.venv/bin}
vocabulary=${VOCABULARY:-8000}
if [ -n "${TOY:-}" ]; then
    vocabulary=500 DATA=$out/text
fi
data=${DATA:?DATA must be the folder with train.txt, valid.txt and test.txt}
options=("TOY=${TOY:-}" "DATA=$(absolute "$data")" "VOCABULARY=$vocabulary")
if prepared "$out/bin" "${options[@]}"; then
    exit 0
fi
mkdir -p "$out"
[ -z "${TOY:-}" ] || "$bin/python" recipes/demo/corpus.py "$data"
"$bin/python" recipes/additive/pieces.py "$data" "$out/pieces" "$vocabulary"
for split in valid test; do
    wc -m <"$data/$split.txt" >"$out/pieces/$split.characters"
done
rm -rf "$out/bin.part"
"$bin/fairseq-preprocess" --only-source --workers "${WORKERS:-$(nproc)}" --destdir "$out/bin.part" \
    --trainpref "$out/pieces/train.txt" --validpref "$out/pieces/valid.txt" --testpref "$out/pieces/test.txt" >"$out/preprocess.log" 2>&1 ||
    { tail -n 3 "$out/preprocess.log" >&2; exit 1; }
record "$out/bin" "${options[@]}"
mv "$out/bin.part" "$out/bin"
