#!/usr/bin/env bash
# Runs lm-evaluation-harness on a row's folder, with a task that needs no download: the words of TEST_LINES paragraphs of the test text.
#
# Paper:    none
# Data:     DATA with test.txt, OUT/ROW/folder of export.sh; lm_eval, on the PATH or in BIN, of the package lm-eval[hf]
# Hardware: one CPU core, 3 GB of memory
# Time:     2 minutes of processor time for 20 paragraphs
# Expected: the table of lm_eval
# Usage:    DATA=folder recipes/smollm2/harness.sh ROW [OPTION of lm_eval]...
#           DATA=folder TEST_LINES=5 recipes/smollm2/harness.sh softmax
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/smollm2/rows.sh"
[ -z "${BIN:-}" ] || PATH=$BIN:$PATH
read_row "$@"
need_data
need_folder "$OUT/$row/folder" "recipes/smollm2/export.sh $row"
command -v lm_eval >/dev/null || fail "lm_eval is not on the PATH; install lm-eval[hf], or set BIN to the folder that has it"
task=$(absolute "$OUT/harness")
mkdir -p "$task"
awk -v left="${TEST_LINES:-20}" 'NF > 20 && left-- > 0' "$DATA/test.txt" >"$task/paragraphs.txt"
cat >"$task/paragraphs.yaml" <<END_OF_TASK
task: paragraphs
dataset_path: text
dataset_kwargs: {data_files: {test: $task/paragraphs.txt}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
END_OF_TASK
HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 lm_eval --model hf --device cpu --batch_size 1 --include_path "$task" --tasks paragraphs \
    --model_args "pretrained=$OUT/$row/folder,trust_remote_code=True" "${@:2}"
