#!/usr/bin/env bash
# Two workers against one, each with one thread: tokens per second of training. "batches" are split between workers as ever, "streams"
# are shared by --sequence-parallel 2, "long" is one stream of long segments, which only --sequence-parallel can split.
#
# Data:     Python's own language reference out of the interpreter; nothing is downloaded
# Hardware: 2 free CPU cores
# Time:     7 minutes on them
# Expect:   the table in docs/distributed.md; medians of the speeds that fairseq logs every 5 updates, without the first
# usage:    [OUT=folder] [UPDATES=30] [RULES="sum delta"] recipes/workers.sh [OPTION of fairseq-train]...
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-outputs/workers}
updates=${UPDATES:-30}
rules=${RULES:-sum delta}
bin=${BIN:-.venv/bin}
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore

mkdir -p "$out"
if [ ! -f "$out/data/valid.idx" ]; then
    "$bin/python" recipes/demo/corpus.py "$out/text"
    "$bin/fairseq-preprocess" --only-source --thresholdsrc 3 --destdir "$out/data" --trainpref "$out/text/train.txt" \
        --validpref "$out/text/valid.txt" >"$out/preprocess.log" 2>&1
fi

given=("$@")
speed() { # WORKERS OPTION... ; tokens per second
    local workers=$1 log=$out/train.log
    "$bin/torchrun" --standalone --nproc-per-node "$workers" -m fairseq_cli.train "$out/data" --user-dir fw_fairseq --cpu \
        --distributed-backend gloo --ddp-backend legacy_ddp --num-workers 0 --task stateful_language_modeling --arch fast_weight_lm \
        --no-token-positional-embeddings --decoder-layers 3 --decoder-embed-dim 256 --decoder-input-dim 256 --decoder-output-dim 256 \
        --decoder-ffn-embed-dim 1024 --share-decoder-input-output-embed --dropout 0 --optimizer adam --lr 1e-3 --clip-norm 1 \
        --max-update "$updates" --no-save --disable-validation --log-format json --log-interval 5 "${@:2}" "${given[@]}" >"$log" 2>&1 ||
        { tail -n 20 "$log" >&2; exit 1; }
    grep -oE '"wps": "[0-9.]+"' "$log" | grep -oE '[0-9.]+' | tail -n +2 | sort -n | awk '{x[NR] = $1} END {print x[int((NR + 1) / 2)]}'
}

row() { # RULE WHAT OPTIONS_OF_ONE OPTIONS_OF_TWO
    local one two
    # shellcheck disable=SC2086
    one=$(speed 1 --update-rule "$1" $3) two=$(speed 2 --update-rule "$1" $4)
    awk -v row="| $1 | $2 |" -v a="$one" -v b="$two" 'BEGIN {printf "%s %.0f | %.0f | %.2f |\n", row, a, b, b / a}'
}

echo "| rule | what | one worker, tokens/s | two workers, tokens/s | times as fast |"
echo "|---|---|---:|---:|---:|"
for rule in $rules; do
    many="--tokens-per-sample 256 --batch-size 16" long="--tokens-per-sample 4096 --batch-size 1"
    row "$rule" batches "$many" "$many --batch-size 8"
    row "$rule" streams "$many" "$many --sequence-parallel 2"
    row "$rule" long "$long" "$long --sequence-parallel 2"
done
