#!/usr/bin/env bash
# Replaces the attention of SmolLM2-135M by the heads of one row.
#
# Paper:    none. Rows: softmax, and RULE[-half|-quarter][-window]: a rule in all layers, or half or a quarter of the layers left as they
#           are, from the first on; with softmax over the last 64 tokens beside the memory, as in LoLCATs
# Data:     OUT of prepare.sh
# Hardware: any CPU, 3 GB of memory
# Time:     half a minute
# Expected: OUT/ROW/start.pt and the list of parameters, OUT/ROW/convert.txt
# Usage:    recipes/smollm2/convert.sh ROW [OPTION of fw-convert]...
#           recipes/smollm2/convert.sh gated_delta-half-window
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/smollm2/rows.sh"
find_programs
read_row "$@"
need_folder "$OUT/model" recipes/smollm2/prepare.sh
convert_row smollm2 "$OUT/model" "${conversion[@]}" --force "${@:2}"
