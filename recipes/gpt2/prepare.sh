#!/usr/bin/env bash
# Makes GPT-2 small and a text in its tokens ready for convert.sh.
#
# Paper:    Mao 2022, tables 1 and 2
# Data:     DATA, a folder with train, valid and test, as .jsonl in the form of The Pile (each line has a document in "text") or as .txt
#           (documents end with a line <|endoftext|>). The Pile, 825 GB, is no longer offered for download; the paper uses a small part of
#           it. GPT-2 (550 MB) is downloaded, or taken from MODEL; its files have no published sums, those of the first download hold
# Hardware: any CPU; 5 bytes of disk for each byte of text
# Time:     on each core one second for a MB of text to encode, and half of that to binarise; encoding continues where a call that was killed stopped
# Expected: OUT/data for fairseq, OUT/pretrained
# Usage:    DATA=folder recipes/gpt2/prepare.sh             a second call continues where the first one stopped
#           DATA=folder MODEL=folder recipes/gpt2/prepare.sh      takes config.json, weights, vocab.json and merges.txt of MODEL
#           TOY=1 recipes/gpt2/prepare.sh                   a small text and a tiny GPT-2 of random numbers, on a CPU
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/gpt2/rows.sh"

MODEL_URL=${MODEL_URL:-https://huggingface.co/openai-community/gpt2/resolve/main}
made_with=("TOY=$TOY")
[ -n "$TOY" ] || made_with+=("DATA=$(absolute "${DATA:-}")" "MODEL=$(absolute "${MODEL:-}")")
there=
if prepared "$OUT/data" "${made_with[@]}"; then there=1; fi
if [ -n "$TOY" ]; then
    DATA=$OUT/text MODEL=$OUT/toy
    language_reference "$OUT/corpus"
    mkdir -p "$DATA"
    for split in train valid test; do head -n 100 "$OUT/corpus/$split.txt" >"$DATA/$split.txt"; done
    "$PYTHON" "$ROOT/recipes/gpt2/toy.py" "$MODEL"
fi
[ -n "${DATA:-}" ] || fail "DATA is missing; it must be the folder with train, valid and test, .jsonl or .txt"
for split in train valid test; do
    [ -f "$DATA/$split.jsonl" ] || [ -f "$DATA/$split.txt" ] || fail "$DATA has neither $split.jsonl nor $split.txt; DATA must have one of them"
done
if [ -n "${MODEL:-}" ]; then
    for file in config.json vocab.json merges.txt; do [ -f "$MODEL/$file" ] || fail "$MODEL/$file is missing; MODEL must be a folder of GPT-2"; done
else
    MODEL=$OUT/gpt2
    for file in config.json vocab.json merges.txt model.safetensors; do
        download "$MODEL_URL/$file" "$MODEL/$file"
    done
fi
mkdir -p "$OUT"
ln -sfn "$(realpath "$MODEL")" "$OUT/pretrained"
if [ -z "$there" ]; then
    say "encoding the text, processes: $WORKERS"
    logged "$OUT/convert.log" "$PYTHON" -m fw_fairseq.tools.convert "$MODEL" "$OUT/dictionary/softmax.pt" --rule softmax --force
    "$PYTHON" "$ROOT/recipes/gpt2/encode.py" "$MODEL" "$DATA" "$OUT/tokens" "$WORKERS"
    binarise "$OUT/data" "${made_with[@]}" -- --only-source --srcdict "$OUT/dictionary/dict.txt" \
        --trainpref "$OUT/tokens/train" --validpref "$OUT/tokens/valid" --testpref "$OUT/tokens/test"
fi
echo "$OUT/data and $OUT/pretrained are ready"
