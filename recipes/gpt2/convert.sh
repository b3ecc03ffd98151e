#!/usr/bin/env bash
# Replaces the attention of GPT-2, tuned on the text, by the fast weights of one row.
#
# Paper:    Mao 2022, tables 1 and 2. Rows: softmax (GPT-2 itself), local_attention (a window of 32 tokens), and RULE-M-VARIANT: a rule
#           (sum, gated, delta, decay, gated_delta), the width of queries and keys per head (4, 16 and 32 in the paper), and baseline
#           (with attention norm), norm (without it) or phi (without attention norm and without feature map)
# Data:     OUT of prepare.sh
# Hardware: any CPU, 2 GB of memory
# Time:     half a minute, 7 seconds of processor time; OUT/ROW/start.pt has 0.5 GB
# Expected: OUT/ROW/start.pt
# Usage:    recipes/gpt2/convert.sh ROW [OPTION of fw-convert]...
#           recipes/gpt2/convert.sh softmax && recipes/gpt2/finetune.sh softmax      first, so that the other rows start from it
#           recipes/gpt2/convert.sh gated-4-norm
#           recipes/gpt2/convert.sh local_attention
#           recipes/gpt2/convert.sh decay-16-phi --force      writes over a start.pt that is there
#
# The paper tunes GPT-2 on The Pile first and converts that model (section 4). Rows but softmax therefore start from the best checkpoint of
# the row softmax, OUT/softmax/checkpoint_best.pt; where it is not there, they start from GPT-2 itself, and a line says so. The rows
# delta-M-baseline divide the output and not what an erase reads, as the paper does.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/gpt2/rows.sh"
read_row "$@"
need_folder "$OUT/pretrained" recipes/gpt2/prepare.sh

start=$OUT/pretrained tuned=$OUT/softmax/checkpoint_best.pt
if [ "$row" != softmax ]; then
    if [ -f "$tuned" ]; then start=$tuned; else echo "$tuned is not there: $row starts from GPT-2 itself, unlike the paper's" >&2; fi
fi
# A start that was made before the row softmax was tuned is not that of the paper: fw-convert then asks for --force.
if [ -f "$OUT/$row/start.pt" ] && [ $# = 1 ] && [ -z "${FORCE:-}" ] && { [ "$row" = softmax ] || [ ! "$tuned" -nt "$OUT/$row/start.pt" ]; }; then
    echo "$OUT/$row/start.pt is there and stays; --force writes over it" >&2
    exit 0
fi
convert_row gpt2 "$start" "${attention[@]}" ${FORCE:+--force} "${@:2}"
