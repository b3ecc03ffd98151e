#!/usr/bin/env bash
# Test perplexity at context 0 and 480: segments of 512 words, all scored, then windows of 512 whose last 32 are.
#   Data      what finetune.sh left in OUT; MODEL=pretrained tests the softmax model it all began with
#   Hardware  one GPU, or a CPU with patience
#   Expected  see finetune.sh
#   recipes/baevski_auli/eval.sh
#   MODEL=pretrained recipes/baevski_auli/eval.sh
source "$(dirname "$0")/settings.sh"

MODEL=${MODEL:-$NAME}
path=$OUT/$MODEL/checkpoint_last.pt
[ "$MODEL" = pretrained ] && path=$OUT/pretrained.pt
mkdir -p "$OUT/eval"
for window in 0 $context; do
    task=sliding_language_modeling
    { [ "$window" = 0 ] || [ "$MODEL" = pretrained ]; } && task=language_modeling
    fairseq eval_lm "$OUT/data" --user-dir fw_fairseq --task $task --path "$path" --gen-subset test "${machine[@]}" \
        --tokens-per-sample $tokens --context-window "$window" --batch-size "${BATCH:-8}" >"$OUT/eval/$MODEL-$window.log" 2>&1 ||
        { tail -n 20 "$OUT/eval/$MODEL-$window.log" >&2; exit 1; }
    echo "$MODEL, context $window: $(sed -n 's/.*Perplexity: //p' "$OUT/eval/$MODEL-$window.log")"
done
