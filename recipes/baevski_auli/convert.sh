#!/usr/bin/env bash
# Replaces the attention of the pretrained model by fast weights with M features.
#
# Paper:    Mao 2022, table 3. Rows: RULE-M, a rule (sum, gated, delta, decay, gated_delta) and the width of queries and keys per head;
#           the paper has decay-32 and decay-64. The rows abc-M and linformer-M of finetune.sh are not converted
# Data:     OUT of prepare.sh
# Hardware: any CPU, 2 GB of memory; OUT/ROW/start.pt has 1 GB
# Time:     half a minute for a checkpoint of this size without the state of the optimizer
# Expected: OUT/ROW/start.pt
# Usage:    recipes/baevski_auli/convert.sh ROW [OPTION of fw-convert]...
#           recipes/baevski_auli/convert.sh decay-32
#           recipes/baevski_auli/convert.sh delta-64 --force      writes over a start.pt that is there
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/baevski_auli/rows.sh"
read_row "$@"
case $rule in abc | linformer) fail "ROW is $row; $rule starts from nothing and is not converted" ;; esac
need_file "$OUT/pretrained.pt" recipes/baevski_auli/prepare.sh

if [ -f "$OUT/$row/start.pt" ] && [ $# = 1 ] && [ -z "${FORCE:-}" ]; then
    echo "$OUT/$row/start.pt is there and stays; --force writes over it" >&2
    exit 0
fi
convert_row baevski_auli "$OUT/pretrained.pt" "${attention[@]}" ${FORCE:+--force} "${@:2}"
