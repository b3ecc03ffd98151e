#!/usr/bin/env bash
# Fine-tunes one row on the text: first the new parts, towards what the softmax of their layer gave, then attention on words.
#
# Paper:    the two stages are those of LoLCATs (Zhang et al. 2024), which has low-rank adapters in the second
# Data:     OUT of prepare.sh and OUT/ROW/start.pt of convert.sh
# Hardware: one CPU core and 4 GB of memory with CPU=1, or one GPU
# Time:     5 s of processor time for each of NEW updates of 512 tokens, 10 s for each of UPDATES
# Expected: OUT/ROW/new/checkpoint_last.pt after the first NEW updates, OUT/ROW/all/checkpoint_last.pt after UPDATES more
# Usage:    CPU=1 recipes/smollm2/finetune.sh ROW [OPTION of fairseq-train]...       resumes from the last checkpoint of the row
#           CPU=1 NEW=100 UPDATES=400 recipes/smollm2/finetune.sh gated_delta-half-window
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/smollm2/rows.sh"
of_form NEW '[0-9]+' "a whole number"
find_programs
read_row "$@"
need_file "$OUT/$row/start.pt" "recipes/smollm2/convert.sh $row"
new=${NEW:-500} updates=${UPDATES:-2000}
[ "$row" != softmax ] || new=0 # it has no new parts
default_precision=bf16

fit() { # FOLDER START UPDATES LR OPTION...
    SAVE_EVERY=${SAVE_EVERY:-100} train "$1" "$OUT/data" --task language_modeling --arch pretrained_lm --options-from "$2" \
        --finetune-from-model "$2" --tokens-per-sample 512 --batch-size 1 --optimizer adam \
        --adam-betas '(0.9, 0.95)' --clip-norm 1.0 --lr "$4" --lr-scheduler polynomial_decay --warmup-updates $(($3 / 20)) \
        --max-update "$3" --disable-validation --no-epoch-checkpoints --log-format json --log-interval "${LOG_INTERVAL:-10}" "${@:5}"
}

start=$OUT/$row/start.pt
if [ "$new" != 0 ]; then
    fit "$OUT/$row/new" "$start" "$new" 3e-2 --train-only new --criterion attention_transfer "${@:2}"
    start=$OUT/$row/new/checkpoint_last.pt
fi
fit "$OUT/$row/all" "$start" "$updates" 3e-4 --train-only attention --criterion cross_entropy "${@:2}"
