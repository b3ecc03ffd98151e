#!/usr/bin/env bash
# Perplexity of the best checkpoint in windows of 1024 tokens, CONTEXT of them not scored.
#   Data      what finetune.sh left in OUT; START=1 evaluates what convert.sh left
#   Hardware  one GPU, or a CPU with patience
#   Expected  see finetune.sh, which has the numbers of the paper's kind in its log: the best on the validation text
#   RULE=decay M=32 recipes/gpt2/eval.sh
#   SPLIT=test CONTEXT=512 RULE=softmax recipes/gpt2/eval.sh
source "$(dirname "$0")/settings.sh"

path=$OUT/$NAME/checkpoint_best.pt
[ -z "${START:-}" ] || path=$OUT/$NAME/start.pt
split=${SPLIT:-valid} context=${CONTEXT:-0}
log=$OUT/$NAME/eval-$split-$context${START:+-start}.log
fairseq eval_lm "$OUT/data" --user-dir fw_fairseq --task sliding_language_modeling --path "$path" --gen-subset "$split" "${machine[@]}" \
    --tokens-per-sample $tokens --context-window "$context" --batch-size "${BATCH:-8}" >"$log" 2>&1 || { tail -n 20 "$log" >&2; exit 1; }
echo "$NAME, $split, context $context: $(sed -n 's/.*Perplexity: //p' "$log")"
