#!/usr/bin/env bash
# Runs lm-evaluation-harness on the folder of a row, with a task that needs no download: the words of the test text's first LINES
# paragraphs.
#
# Paper:    none
# Data:     DATA with test.txt, OUT/ROW/folder of generate.sh; lm_eval (lm-eval[hf]) in HARNESS or on the PATH, beside transformers
# Hardware: one CPU core, 3 GB of memory
# Time:     some minutes
# Expected: the table of lm_eval, with the perplexity of words
# Usage:    DATA=folder recipes/smollm2/harness.sh ROW [OPTION of lm_eval]...
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/smollm2/rows.sh"
read_row "$@"
need_data
need_folder "$OUT/$row/folder" "recipes/smollm2/generate.sh $row"
tasks=$(absolute "$OUT/harness")
mkdir -p "$tasks"
"${HARNESS:+$HARNESS/}python" - "$DATA/test.txt" "$tasks" "${LINES:-20}" <<'END'
import json, sys
text, folder, count = sys.argv[1:]
lines = [line.strip() for line in open(text, encoding="utf-8") if len(line.split()) > 20][: int(count)]
open(f"{folder}/lines.jsonl", "w").write("".join(json.dumps({"text": line}) + "\n" for line in lines))
open(f"{folder}/words.yaml", "w").write(f"""task: local_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/lines.jsonl}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
""")
END
HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 "${HARNESS:+$HARNESS/}lm_eval" --model hf --device cpu --batch_size 1 --include_path "$tasks" \
    --model_args "pretrained=$OUT/$row/folder,trust_remote_code=True" --tasks local_words "${@:2}"
