#!/usr/bin/env bash
# Exports a row to a folder that stands alone with transformers.
#
# Paper:    none
# Data:     OUT of prepare.sh and a checkpoint of the row, as for eval.sh
# Hardware: one CPU core, 4 GB of memory
# Time:     2 minutes of processor time
# Expected: OUT/ROW/folder, once its logits are those of the checkpoint and it generates in a process of its own
# Usage:    recipes/smollm2/export.sh ROW [OPTION of fw-export-hf]...
#           CHECKPOINT=start.pt recipes/smollm2/export.sh softmax
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/smollm2/rows.sh"
find_programs
read_row "$@"
checkpoint=$OUT/$row/${CHECKPOINT:-all/checkpoint_last.pt}
need_file "$checkpoint" "recipes/smollm2/finetune.sh $row"
folder=$OUT/$row/folder
rm -rf "$folder.part"
logged "$OUT/$row/export.log" "$PYTHON" -m fw_fairseq.tools.export_hf "$checkpoint" "$folder.part" --data "$OUT/data" --tokenizer "$OUT/model" "${@:2}"
rm -rf "$folder"
mv "$folder.part" "$folder"
echo "$folder is ready"
