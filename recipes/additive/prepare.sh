#!/usr/bin/env bash
# Makes WikiText-2, or your own text, ready for train.sh, in the pieces of a SentencePiece vocabulary that is trained on it.
#
# Paper:    "Additive Attention Is All You Need?"
# Data:     DATA, a folder with train.txt, valid.txt and test.txt; nothing is downloaded
# Hardware: any CPU; needs the extra gpt2, for its tokenizers
# Time:     a minute for WikiText-2 on one core of an AMD EPYC
# Expected: OUT/bin and OUT/pieces/tokenizer.json
# Usage:    DATA=folder recipes/additive/prepare.sh         a second call continues where the first one stopped
#           DATA=folder OUT=folder VOCABULARY=8000 recipes/additive/prepare.sh
#           TOY=1 recipes/additive/prepare.sh               a small text, to try all steps on a CPU in a minute
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
own_text additive 8000
"$PYTHON" "$ROOT/recipes/additive/pieces.py" "$OUT/pieces" "$vocabulary" "${texts[1]}" "${texts[3]}" "${texts[5]}"
wc -m <"${texts[3]}" >"$OUT/pieces/valid.characters"
wc -m <"${texts[5]}" >"$OUT/pieces/test.characters"
binarise "$OUT/bin" "${made_with[@]}" -- --only-source \
    --trainpref "$OUT/pieces/train.txt" --validpref "$OUT/pieces/valid.txt" --testpref "$OUT/pieces/test.txt"
