#!/usr/bin/env bash
# Two workers against one, each with one thread: tokens per second of training. "batches" are split between workers as ever, "streams"
# are shared by --sequence-parallel 2, "long" is one stream of long segments, which only --sequence-parallel can split.
#
# Data:     Python's own language reference out of the interpreter; nothing is downloaded
# Hardware: 2 free CPU cores
# Time:     about 5 minutes on them, DATA prepared once included
# Expect:   a table in Markdown; medians of the speeds that fairseq logs, without the first
# usage:    [OUT=folder] [UPDATES=50] [RULES="sum delta"] recipes/workers.sh [OPTION of fairseq-train]...
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-outputs/workers}
updates=${UPDATES:-50}
rules=${RULES:-sum delta}
bin=${BIN:-.venv/bin}
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore

mkdir -p "$out"
if [ ! -f "$out/data/valid.idx" ]; then
    "$bin/python" recipes/demo/corpus.py "$out/text"
    "$bin/fairseq-preprocess" --only-source --thresholdsrc 3 --destdir "$out/data" --trainpref "$out/text/train.txt" \
        --validpref "$out/text/valid.txt" >"$out/preprocess.log" 2>&1
fi

speed() { # WORKERS RULE OPTION... ; tokens per second
    local workers=$1 log
    log=$out/train-$1-$2.log
    set -- --update-rule "${@:2}"
    "$bin/torchrun" --standalone --nproc-per-node "$workers" -m fairseq_cli.train "$out/data" --user-dir fw_fairseq --cpu \
        --distributed-backend gloo --ddp-backend legacy_ddp --distributed-world-size "$workers" --num-workers 0 \
        --task stateful_language_modeling --arch fast_weight_lm --no-token-positional-embeddings --decoder-layers 3 \
        --decoder-embed-dim 256 --decoder-input-dim 256 --decoder-output-dim 256 --decoder-ffn-embed-dim 1024 \
        --share-decoder-input-output-embed --dropout 0 --optimizer adam --lr 1e-3 --clip-norm 1 --max-update "$updates" \
        --no-save --disable-validation --log-format json --log-interval 5 "$@" >"$log" 2>&1 || { tail -n 20 "$log" >&2; exit 1; }
    grep -oE '"wps": "[0-9.]+"' "$log" | grep -oE '[0-9.]+' | tail -n +2 | sort -n | awk '{x[NR] = $1} END {print x[int((NR + 1) / 2)]}'
}

echo "| rule | what | one worker, tokens/s | two workers, tokens/s | times as fast |"
echo "|---|---|---:|---:|---:|"
row() { # RULE WHAT OPTION... -- OPTIONS of one -- OPTIONS of two
    local rule=$1 what=$2 one two
    one=$(speed 1 "$rule" "${common[@]}" "${single[@]}" "${given[@]}")
    two=$(speed 2 "$rule" "${common[@]}" "${double[@]}" "${given[@]}")
    awk -v r="$rule" -v w="$what" -v a="$one" -v b="$two" 'BEGIN {printf "| %s | %s | %.0f | %.0f | %.2f |\n", r, w, a, b, b / a}'
}

given=("$@")
for rule in $rules; do
    common=(--tokens-per-sample 256)
    single=(--batch-size 16) double=(--batch-size 8)
    row "$rule" batches
    double=(--batch-size 16 --sequence-parallel 2)
    row "$rule" streams
    common=(--tokens-per-sample 4096 --batch-size 1) single=() double=(--sequence-parallel 2)
    row "$rule" long
done
