#!/usr/bin/env bash
# The pretrained Transformer of prepare.sh as a fast-weight model, M features a head (Mao 2022, sec. 5: 32 and 64).
#
# Hardware: one CPU core, 2 GB
# Time:     half a minute
# usage:    [OUT=folder] [RULE=decay] recipes/baevski_auli/convert.sh M            writes OUT/RULE-M.pt; a finished one stays
set -euo pipefail
cd "$(dirname "$0")/../.."

m=${1:?M, the features of a head, is missing: 32 or 64}
out=${OUT:-outputs/baevski_auli}
rule=${RULE:-decay}
[ -f "$out/model/model.pt" ] || { echo "convert.sh: $out/model/model.pt is missing; run recipes/baevski_auli/prepare.sh first" >&2; exit 1; }
[ -f "$out/$rule-$m.pt" ] || "${BIN:-.venv/bin}/fw-convert" "$out/model/model.pt" "$out/$rule-$m.pt" --rule "$rule" --feature-dim "$m"
