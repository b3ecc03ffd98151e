#!/usr/bin/env bash
# The pretrained model with fast weights of m features in place of attention.
#   Data      what prepare.sh left in OUT
#   Hardware  a CPU; 2 GB of memory
#   Time      half a minute for a checkpoint of this size without optimizer state
#   recipes/baevski_auli/convert.sh
#   M=64 recipes/baevski_auli/convert.sh
#   RULE=delta MAP=relu NORM=sum recipes/baevski_auli/convert.sh
source "$(dirname "$0")/settings.sh"

mkdir -p "$OUT/$NAME"
"$PYTHON" -m fw_fairseq.tools.convert "$OUT/pretrained.pt" "$OUT/$NAME/start.pt" --rule "$RULE" --feature-dim "$M" \
    --feature-map "$MAP" --feature-norm "$NORM" ${FORCE:+--force} | tee "$OUT/$NAME/convert.txt"
