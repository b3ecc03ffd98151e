#!/usr/bin/env bash
# Measures what a generated token takes after short and long texts, the rows in turn, and continues texts.
#
# Paper:    none
# Data:     OUT/ROW/folder of export.sh
# Hardware: one CPU core, 3 GB of memory for two rows
# Time:     2 minutes of processor time for two rows
# Expected: processor time and numbers kept for each of LENGTHS and each row, and greedy continuations of PROMPTS, one a line
# Usage:    recipes/smollm2/generate.sh ROW...
#           LENGTHS=256 PROMPTS="The old cat" recipes/smollm2/generate.sh softmax gated_delta-window
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/smollm2/rows.sh"
find_programs
read_row "$@"
folders=()
for name; do
    read_row "$name"
    need_folder "$OUT/$row/folder" "recipes/smollm2/export.sh $row"
    folders+=("$OUT/$row/folder")
done
prompts=${PROMPTS:-The history of the city begins
In 1998 , the band released
The species lives in}
"$PYTHON" "$ROOT/recipes/smollm2/generate.py" "${LENGTHS:-256,4096}" "$prompts" "${folders[@]}"
