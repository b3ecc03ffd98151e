#!/usr/bin/env bash
# The memory of fairseq-eval-lm while one stream goes through a model that carries its state from segment to segment.
#
# Data:     TOKENS random words, made here; the models are of random weights, after one update
# Hardware: one CPU core, 1 GB
# Time:     a minute of one core for each row
# Expect:   docs/results/streaming.md
# usage:    [OUT=folder] [TOKENS=1000000] [EVERY=50000] [ROWS="delta additive"] recipes/streaming/memory.sh      prints a table
#
# ROWS: an update rule, or a mixer
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${OUT:-outputs/streaming}
bin=${BIN:-.venv/bin}
rows=${ROWS:-delta srupp}
tokens=${TOKENS:-1000000}
export OMP_NUM_THREADS=1

mkdir -p "$out"
if [ ! -d "$out/bin-$tokens" ]; then
    "$bin/python" recipes/streaming/text.py "$tokens" >"$out/test.txt"
    head -n 100 "$out/test.txt" >"$out/train.txt"
    rm -rf "$out/bin.part"
    "$bin/fairseq-preprocess" --only-source --trainpref "$out/train.txt" --testpref "$out/test.txt" --destdir "$out/bin.part" \
        >"$out/preprocess.log" 2>&1
    mv "$out/bin.part" "$out/bin-$tokens"
fi
common=("$out/bin-$tokens" --user-dir fw_fairseq --task stateful_language_modeling --tokens-per-sample 256 --cpu --num-workers 0)
for row in $rows; do
    case $row in
        sum | gated | delta | decay | gated_delta | fwm) mixer=(--update-rule "$row") ;;
        *) mixer=(--mixer "$row") ;;
    esac
    "$bin/fairseq-train" "${common[@]}" --arch fast_weight_lm --decoder-layers 2 --decoder-embed-dim 64 --decoder-input-dim 64 \
        --decoder-output-dim 64 --decoder-ffn-embed-dim 128 --decoder-attention-heads 4 --no-token-positional-embeddings "${mixer[@]}" \
        --batch-size 1 --optimizer adam --max-update 1 --disable-validation --no-epoch-checkpoints \
        --save-dir "$out/$row" >"$out/$row.log" 2>&1 || { tail -n 3 "$out/$row.log" >&2; exit 1; }
    "$bin/python" recipes/streaming/measure.py "${EVERY:-50000}" "$out/$row.csv" "${common[@]}" --gen-subset test \
        --path "$out/$row/checkpoint_last.pt" >"$out/$row.eval.log" 2>&1 || { tail -n 3 "$out/$row.eval.log" >&2; exit 1; }
done
"$bin/python" recipes/streaming/table.py $(printf "$out/%s.csv " $rows)
