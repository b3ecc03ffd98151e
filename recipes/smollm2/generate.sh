#!/usr/bin/env bash
# Exports a row to a folder of transformers, and measures there what a generated token takes after short and long texts.
#
# Paper:    none
# Data:     OUT of prepare.sh and a checkpoint of the row, as for eval.sh
# Hardware: one CPU core, 4 GB of memory
# Time:     2 minutes of processor time
# Expected: OUT/ROW/folder; processor time and numbers kept for each of LENGTHS, and greedy continuations of PROMPT
# Usage:    recipes/smollm2/generate.sh ROW
#           CHECKPOINT=start.pt LENGTHS=256 PROMPT="The old cat" recipes/smollm2/generate.sh softmax
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/smollm2/rows.sh"
find_programs
read_row "$@"
checkpoint=$OUT/$row/${CHECKPOINT:-all/checkpoint_last.pt}
need_file "$checkpoint" "recipes/smollm2/finetune.sh $row"
logged "$OUT/$row/export.log" "$PYTHON" -m fw_fairseq.tools.export_hf "$checkpoint" "$OUT/$row/folder.part" --data "$OUT/data" --tokenizer "$OUT/model"
rm -rf "$OUT/$row/folder"
mv "$OUT/$row/folder.part" "$OUT/$row/folder"
"$PYTHON" "$ROOT/recipes/smollm2/generate.py" "${LENGTHS:-256,4096}" "${PROMPT:-The history of the city begins}" "$OUT/$row/folder"
