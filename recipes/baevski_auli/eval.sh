#!/usr/bin/env bash
# Test perplexity at context 0 and 480 of segments of 512, of a fine-tuned model or of the Transformer that it came from.
#
# Data:     OUT/bin of prepare.sh, a run of finetune.sh
# Hardware: one GPU, or CPU=--cpu
# Expect:   the numbers in the head of finetune.sh
# usage:    [OUT=folder] [RULE=decay] recipes/baevski_auli/eval.sh M|transformer      prints | model | M | context 0 | context 480 |
set -euo pipefail
cd "$(dirname "$0")/../.."

m=${1:?M, the features of a head, or transformer is missing}
out=${OUT:-outputs/baevski_auli}
rule=${RULE:-decay}
bin=${BIN:-.venv/bin}
checkpoint=${SAVE:-$out/runs/$rule-$m}/checkpoint_last.pt
sliding=(--task sliding_language_modeling --batch-size 16) # many windows at once
if [ "$m" = transformer ]; then
    rule=transformer m=- checkpoint=$out/model/model.pt sliding=(--task language_modeling)
fi
[ -f "$checkpoint" ] || { echo "eval.sh: $checkpoint is missing; run recipes/baevski_auli/finetune.sh $m first" >&2; exit 1; }
length=512 context=480
cpu=(${CPU:-})
if [ -n "${TOY:-}" ]; then
    length=32 context=24 cpu=(--cpu --num-workers 0)
fi

perplexity() { # OPTION...: on the test text
    local printed
    printed=$("$bin/fairseq-eval-lm" "$out/bin" --user-dir "$PWD/fw_fairseq" --path "$checkpoint" --gen-subset test \
        --tokens-per-sample "$length" "${cpu[@]}" "$@" 2>&1) || { echo "$printed" | tail -n 3 >&2; exit 1; }
    echo "$printed" | sed -n 's/.*Perplexity: //p'
}

echo "| $rule | $m | $(perplexity --task language_modeling) | $(perplexity "${sliding[@]}" --context-window "$context") |"
