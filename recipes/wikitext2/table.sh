#!/usr/bin/env bash
# WikiText-2: softmax attention, the update rules and the other mixers under one budget, on a laptop.
#
# Data:     DATA=folder with train.txt, valid.txt, test.txt: WikiText-2, word level, <unk> kept (CC BY-SA). Not downloaded here.
# Hardware: one CPU core; 6 minutes a row at 1500 updates of 1024 tokens, 700 MB.
# Expect:   the tables in docs/results/wikitext2.md.
# usage:    DATA=folder [OUT=folder] [UPDATES=1500] [ROWS="softmax delta_elu"] [SEEDS="1 2 3"] recipes/wikitext2/table.sh
#
#           SPEED=rounds ... trains nothing: times forward and backward of the rows in turns
#
# Each run resumes from its last checkpoint, and a finished one is only evaluated again. Prints one table row for each row: with
# several seeds perplexities are mean and standard deviation.
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

data=${DATA:?DATA must be the folder with train.txt, valid.txt and test.txt of WikiText-2}
out=${OUT:-outputs/wikitext2}
updates=${UPDATES:-1500}
seeds=${SEEDS:-1}
rows=${ROWS:-softmax sum_elu delta_elu delta_dpfp gated decay gated_delta}
bin=${BIN:-.venv/bin}
here=$PWD

declare -A options=(
    [softmax]="--mixer softmax"
    [sum_elu]="--update-rule sum --feature-map elu --feature-norm none --attention-norm"
    [delta_elu]="--update-rule delta --feature-map elu --feature-norm sum"
    [delta_dpfp]="--update-rule delta --feature-map dpfp --dpfp-nu 1 --feature-norm sum"
    [gated]="--update-rule gated --feature-map identity --feature-norm none"
    [decay]="--update-rule decay --feature-map identity --feature-norm none"
    [gated_delta]="--update-rule gated_delta --feature-map identity --feature-norm l2"
    [additive]="--mixer additive"
    [additive_all]="--mixer additive --window-sizes 0"
    [leap]="--mixer leap"
    [sru]="--mixer sru"
    [srupp]="--mixer srupp"
)
model=(--arch fast_weight_lm --decoder-layers 4 --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 8
    --decoder-normalize-before --adaptive-input --adaptive-input-cutoff 2000,10000 --adaptive-input-factor 2
    --adaptive-softmax-cutoff 2000,10000 --adaptive-softmax-factor 2 --tie-adaptive-weights --dropout 0.1
    --criterion adaptive_loss --ddp-backend legacy_ddp --tokens-per-sample 256)

mkdir -p "$out"
if ! prepared "$out/data" "DATA=$(absolute "$data")"; then
    rm -rf "$out/data.part"
    "$bin/fairseq-preprocess" --only-source --destdir "$out/data.part" --workers 2 \
        --trainpref "$data/train.txt" --validpref "$data/valid.txt" --testpref "$data/test.txt" >"$out/preprocess.log" 2>&1 ||
        { tail -n 3 "$out/preprocess.log" >&2; exit 1; }
    record "$out/data" "DATA=$(absolute "$data")"
    mv "$out/data.part" "$out/data"
fi

if [ -n "${SPEED:-}" ]; then
    named=()
    for row in $rows; do
        named+=("$row=${options[$row]}")
    done
    PYTHONPATH=$here exec "$bin/python" recipes/wikitext2/speed.py "$out/data" "$SPEED" "${named[@]}" -- --user-dir "$here/fw_fairseq" "${model[@]}"
fi

evaluate() { # CHECKPOINT ARGUMENTS...: perplexity on the test text
    local checkpoint=$1
    shift
    "$bin/fairseq-eval-lm" "$out/data" --user-dir "$here/fw_fairseq" --path "$checkpoint" --gen-subset test "$@" 2>&1 |
        sed -n 's/.*Perplexity: //p'
}

summary() { # NUMBERS...: the mean, and how far they spread
    printf '%s\n' "$@" | awk '{ sum += $1; squares += $1 * $1 }
        END { printf "%.2f", sum / NR; if (NR > 1) { d = (squares - sum * sum / NR) / (NR - 1); printf " ± %.2f", sqrt(d > 0 ? d : 0) } }'
}

echo "| row | test perplexity, context 0 | sliding, context 192 | training words/s | numbers kept of 256 tokens |"
echo "|---|---:|---:|---:|---:|"
for row in $rows; do
    plain=() sliding=()
    for seed in $seeds; do
        folder=$out/$row-$updates-$seed
        # shellcheck disable=SC2086
        "$bin/fairseq-train" "$out/data" --user-dir "$here/fw_fairseq" --task language_modeling --save-dir "$folder" \
            "${model[@]}" ${options[$row]} --max-tokens 1024 \
            --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 1.0 \
            --lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 150 --total-num-update "$updates" --max-update "$updates" \
            --no-epoch-checkpoints --log-format simple --log-interval 50 --seed "$seed" >>"$folder.log" 2>&1 ||
            { tail -n 3 "$folder.log" >&2; exit 1; }
        checkpoint=$folder/checkpoint_last.pt
        plain+=("$(evaluate "$checkpoint" --task language_modeling --tokens-per-sample 256 --max-tokens 1024)")
        sliding+=("$(evaluate "$checkpoint" --task sliding_language_modeling --tokens-per-sample 256 --context-window 192 --batch-size 16)")
        echo "$row, seed $seed: ${plain[-1]}, sliding ${sliding[-1]}" >&2
    done
    speed=$(sed -n 's/.*train_inner.* wps=\([0-9.]*\).*/\1/p' "$folder.log" | sort -n | awk '{v[NR]=$1} END {printf "%.0f", v[int((NR+1)/2)]}')
    kept=$(PYTHONPATH=$here "$bin/python" recipes/wikitext2/state.py "$checkpoint" "$out/data" 256 2>>"$folder.log")
    echo "| $row | $(summary "${plain[@]}") | $(summary "${sliding[@]}") | $speed | $kept |"
done
