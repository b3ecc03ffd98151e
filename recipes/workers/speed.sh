#!/usr/bin/env bash
# Measures the training speed of two workers against one, each with one thread.
#
# Paper:    none. Rows: RULE-WHAT; by default sum and delta, each with batches (split between the workers), streams (each segment shared
#           by --sequence-parallel 2) and long (one stream of long segments, which only --sequence-parallel can share)
# Data:     Python's own language reference, which the interpreter contains; nothing is downloaded
# Hardware: 2 free CPU cores
# Time:     7 minutes
# Expected: the table in docs/distributed.md: medians of the speeds that fairseq logs every 5 updates, without the first
# Usage:    recipes/workers/speed.sh [ROW]... [OPTION of fairseq-train]...
#           UPDATES=60 recipes/workers/speed.sh delta-streams delta-long
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
renamed RULES "rows are arguments, for example delta-batches"
OUT=$(output_folder workers)
split_rows "$@"
[ ${#rows[@]} -gt 0 ] || rows=({sum,delta}-{batches,streams,long})
updates=${UPDATES:-30}
machine=(--cpu --num-workers 0)
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore

for row in "${rows[@]}"; do
    [[ $row =~ ^[a-z_]+-(batches|streams|long)$ ]] || fail "ROW is $row; it must be RULE-batches, RULE-streams or RULE-long"
done
no_toy "leave TOY out, and set UPDATES=10 for short rows"
if [ ! -d "$OUT/data" ]; then
    language_reference "$OUT/text"
    binarise "$OUT/data" -- --only-source --thresholdsrc 3 --trainpref "$OUT/text/train.txt" --validpref "$OUT/text/valid.txt"
fi

speed() { # WORKERS OPTION...: tokens per second
    local log=$OUT/train.log
    logged "$log" torchrun --standalone --nproc-per-node "$1" -m fairseq_cli.train "$OUT/data" --user-dir "$ROOT/fw_fairseq" \
        "${machine[@]}" --distributed-backend gloo --ddp-backend legacy_ddp --task stateful_language_modeling --arch fast_weight_lm \
        --no-token-positional-embeddings --decoder-layers 3 --decoder-embed-dim 256 --decoder-input-dim 256 --decoder-output-dim 256 \
        --decoder-ffn-embed-dim 1024 --share-decoder-input-output-embed --dropout 0 --optimizer adam --lr 1e-3 --clip-norm 1 \
        --max-update "$updates" --no-save --disable-validation --log-format json --log-interval 5 "${@:2}" "${options[@]}"
    grep -oE '"wps": "[0-9.]+"' "$log" | grep -oE '[0-9.]+' | tail -n +2 | sort -n | awk '{x[NR] = $1} END {print x[int((NR + 1) / 2)]}'
}

echo "| rule | what | one worker, tokens/s | two workers, tokens/s | times as fast |"
echo "|---|---|---:|---:|---:|"
for row in "${rows[@]}"; do
    rule=${row%%-*} what=${row#*-}
    case $what in
        batches) shape=(--tokens-per-sample 256 --batch-size 16) two=(--batch-size 8) ;;
        streams) shape=(--tokens-per-sample 256 --batch-size 16) two=(--sequence-parallel 2) ;;
        long) shape=(--tokens-per-sample 4096 --batch-size 1) two=(--sequence-parallel 2) ;;
    esac
    alone=$(speed 1 --update-rule "$rule" "${shape[@]}")
    shared=$(speed 2 --update-rule "$rule" "${shape[@]}" "${two[@]}")
    awk -v row="| $rule | $what |" -v a="$alone" -v b="$shared" 'BEGIN {printf "%s %.0f | %.0f | %.2f |\n", row, a, b, b / a}'
done
