#!/usr/bin/env bash
# GPT-2 with fast weights in place of attention, a row of tables 1 and 2 of Mao 2022.
#   Data      what prepare.sh left in OUT
#   Hardware  a CPU; 2 GB of memory
#   RULE=gated M=4 VARIANT=norm recipes/gpt2/convert.sh    settings.sh says what there is
#   RULE=local_attention recipes/gpt2/convert.sh
source "$(dirname "$0")/settings.sh"

mkdir -p "$OUT/$NAME"
"$PYTHON" -m fw_fairseq.tools.convert "$OUT/pretrained" "$OUT/$NAME/start.pt" --rule "$RULE" "${attention[@]}" ${FORCE:+--force} |
    tee "$OUT/$NAME/convert.txt"
