#!/usr/bin/env bash
# GPT-2 small and a text in its tokens, ready for convert.sh.
#   Data      DATA=folder with train, valid and test, .jsonl as The Pile is (a document in "text" on each line) or .txt (documents end
#             with a line <|endoftext|>). The Pile, 825 GB, has no place to download from; the paper used a small part of it.
#             GPT-2: 550 MB, downloads resume
#   Hardware  any; the encoder makes about 1 MB of text a second into tokens; 5 bytes of disk for each byte of text
#   DATA=folder recipes/gpt2/prepare.sh
#   DATA=folder MODEL=folder recipes/gpt2/prepare.sh    uses a GPT-2 that is there: config.json, weights, vocab.json, merges.txt
#   TOY=1 recipes/gpt2/prepare.sh    the text of recipes/demo, and a tiny GPT-2 of random numbers
# The files of GPT-2 have no published checksums: those of the first download are kept beside them and hold from then on.
source "$(dirname "$0")/settings.sh"
source recipes/download.sh

MODEL_URL=${MODEL_URL:-https://huggingface.co/openai-community/gpt2/resolve/main}
options=("TOY=$TOY")
[ -n "$TOY" ] || options+=("DATA=$(absolute "${DATA:-}")" "MODEL=$(absolute "${MODEL:-}")")
there=
if prepared "$OUT/data" "${options[@]}"; then there=1; fi
mkdir -p "$OUT"
if [ -n "$TOY" ]; then
    DATA=$OUT/text MODEL=$OUT/toy
    "$PYTHON" recipes/demo/corpus.py "$OUT/corpus"
    mkdir -p "$DATA"
    for split in train valid test; do head -n 100 "$OUT/corpus/$split.txt" >"$DATA/$split.txt"; done
    "$PYTHON" recipes/gpt2/toy.py "$MODEL"
fi
: "${DATA:?DATA must be the folder with train, valid and test, .jsonl or .txt}"
if [ -z "${MODEL:-}" ]; then
    MODEL=$OUT/gpt2
    mkdir -p "$MODEL"
    for file in config.json vocab.json merges.txt model.safetensors; do
        download "$MODEL_URL/$file" "$MODEL/$file" ""
    done
fi
ln -sfn "$(realpath "$MODEL")" "$OUT/pretrained"
if [ -z "$there" ]; then
    "$PYTHON" -m fw_fairseq.tools.convert "$MODEL" "$OUT/dictionary/softmax.pt" --rule softmax --force >"$OUT/convert.log"
    "$PYTHON" recipes/gpt2/encode.py "$MODEL" "$DATA" "$OUT/tokens"
    rm -rf "$OUT/data.part"
    fairseq preprocess --only-source --srcdict "$OUT/dictionary/dict.txt" --destdir "$OUT/data.part" --workers "${WORKERS:-1}" \
        --trainpref "$OUT/tokens/train" --validpref "$OUT/tokens/valid" --testpref "$OUT/tokens/test"
    record "$OUT/data" "${options[@]}"
    mv "$OUT/data.part" "$OUT/data"
fi
echo "$OUT/data and $OUT/pretrained are ready"
