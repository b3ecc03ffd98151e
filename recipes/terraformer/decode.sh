#!/usr/bin/env bash
# Continues a prompt with a row of train.sh, one token at a time and without a batch, as Terraformer is measured.
#
# Paper:    Jaszczur et al. 2021
# Data:     OUT/bin of prepare.sh, the best checkpoint of the row, and the prompt: one line of words on the standard input
# Hardware: one CPU core: sparse layers read few weights for a token
# Time:     docs/results/sparse.md
# Expected: a text of TOKENS words, the prompt included, and a line | row | tokens | tokens/s |
# Usage:    echo the | recipes/terraformer/decode.sh ROW [OPTION of fairseq-interactive]...
#           echo the | TOKENS=200 recipes/terraformer/decode.sh terraformer
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
OUT=$(output_folder terraformer)
need_row "a row that train.sh has trained" "$@"
row=$1 run=$OUT/runs/${RUN:-$1} tokens=${TOKENS:-64}
shift
checkpoint=$run/${CHECKPOINT:-checkpoint_best.pt}
need_file "$checkpoint" "recipes/terraformer/train.sh $row"
log=$run/decode.log
logged "$log" fairseq-interactive "$OUT/bin" --user-dir "$ROOT/fw_fairseq" --task stateful_language_modeling --path "$checkpoint" \
    --cpu --num-workers 0 --beam 1 --sampling --sampling-topk 10 --unkpen 100 --min-len "$tokens" --max-len-b "$tokens" "$@"
grep -P '^H-' "$log" | cut -f 3
seconds=$(sed -nE 's/^W-0\t([0-9.]+)\tseconds/\1/p' "$log")
echo "| $row | $tokens | $(awk -v n="$tokens" -v s="$seconds" 'BEGIN {printf "%.1f", n / s}') |"
