#!/usr/bin/env bash
# Measures how fast the models of table.sh compute forward and backward, in turns and without training.
#
# Paper:    none
# Data:     DATA as for table.sh
# Hardware: one CPU core
# Time:     not measured
# Expected: the table "Training speed" in docs/results/wikitext2.md
# Usage:    DATA=folder recipes/wikitext2/speed.sh [ROW]... [OPTION of fairseq-train]...
#           DATA=folder ROUNDS=15 recipes/wikitext2/speed.sh softmax additive additive_all sru srupp leap delta_elu
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/wikitext2/rows.sh"
named=()
for row in "${rows[@]}"; do
    own_options "$row"
    [[ ${own[*]} != *--criterion* ]] || fail "ROW is $row; speed.sh measures rows with an adaptive output only"
    named+=("$row=${own[*]}")
done
exec "$PYTHON" "$ROOT/recipes/wikitext2/speed.py" "$OUT/data" "${ROUNDS:-15}" "${named[@]}" -- --user-dir "$ROOT/fw_fairseq" \
    "${model[@]}" "${adaptive[@]}" "${options[@]}"
