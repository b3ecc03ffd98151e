#!/usr/bin/env bash
# Measures the memory of fairseq-eval-lm while it reads one long stream whose state is carried over from segment to segment.
#
# Paper:    none. Rows: an update rule, a mixer or another row of recipes/mixers.sh; delta and srupp by default
# Data:     TOKENS random words, made here; the models have random weights, after one update
# Hardware: one CPU core, 1 GB of memory
# Time:     a minute of one core for each row
# Expected: the table in docs/results/streaming.md
# Usage:    recipes/streaming/memory.sh [ROW]... [OPTION of fairseq-train]...
#           TOKENS=200000 EVERY=10000 recipes/streaming/memory.sh additive
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/mixers.sh"
renamed ROWS "rows are arguments"
no_toy "leave TOY out, and set TOKENS=20000 and EVERY=2000 for a short text"
OUT=$(output_folder streaming)
split_rows "$@"
[ ${#rows[@]} -gt 0 ] || rows=(delta srupp)
tokens=${TOKENS:-1000000}
machine=(--cpu --num-workers 0)
export OMP_NUM_THREADS=1

data=$OUT/bin-$tokens
if [ ! -d "$data" ]; then
    mkdir -p "$OUT"
    "$PYTHON" "$ROOT/recipes/streaming/text.py" "$tokens" >"$OUT/test.txt"
    head -n 100 "$OUT/test.txt" >"$OUT/train.txt"
    binarise "$data" "TOKENS=$tokens" -- --only-source --trainpref "$OUT/train.txt" --testpref "$OUT/test.txt"
fi
task=(--task stateful_language_modeling --tokens-per-sample 256)
tables=()
for row in "${rows[@]}"; do
    case $row in
        sum | gated | delta | decay | gated_delta | fwm) mixer=(--update-rule "$row") ;; # with the defaults of the models
        *) if own_options "$row"; then mixer=("${own[@]}"); else mixer=(--mixer "$row"); fi ;;
    esac
    logged "$OUT/$row.log" train "$OUT/$row" "$data" "${task[@]}" --arch fast_weight_lm --decoder-layers 2 --decoder-embed-dim 64 \
        --decoder-input-dim 64 --decoder-output-dim 64 --decoder-ffn-embed-dim 128 --decoder-attention-heads 4 \
        --no-token-positional-embeddings "${mixer[@]}" --batch-size 1 --optimizer adam --max-update 1 --disable-validation \
        --no-epoch-checkpoints "${options[@]}"
    logged "$OUT/$row.eval.log" "$PYTHON" "$ROOT/recipes/streaming/measure.py" "${EVERY:-50000}" "$OUT/$row.csv" "$data" \
        --user-dir "$ROOT/fw_fairseq" "${task[@]}" "${machine[@]}" --gen-subset test --path "$OUT/$row/checkpoint_last.pt"
    tables+=("$OUT/$row.csv")
done
"$PYTHON" "$ROOT/recipes/streaming/table.py" "${tables[@]}"
