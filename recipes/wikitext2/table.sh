#!/usr/bin/env bash
# Trains small language models on WikiText-2 under one budget and prints their table: softmax attention, update rules, other mixers.
#
# Paper:    none; the rows are the rules and mixers of all papers. Rows: softmax, sum_elu, delta_elu, delta_dpfp, gated, decay,
#           gated_delta (the default), additive, additive_all, leap, sru, srupp, retnet, gla, mamba2, hgrn2, rwkv6, rwkv7, kda, gdn2,
#           comba, gsa, lstm, delta_product; these and all other rules also with an ending: -conv with a short convolution, -norm with
#           an output norm, -gate with an output gate, -parts with all three, -published with the layer of the architecture NAME_lm;
#           and Terraformer's layers with softmax attention or gated_delta: sparse_ffn, sparse, sparse_gated_delta; with as many
#           parameters as dense ones, sparse_ffn_equal beside softmax, and sparse_equal beside softmax_full, the row softmax with a
#           full output layer
# Data:     DATA, a folder with train.txt, valid.txt and test.txt: WikiText-2 by words, <unk> kept (CC BY-SA); nothing is downloaded
# Hardware: one CPU core, 700 MB of memory
# Time:     6 to 30 minutes for a row of 1500 updates of 1024 tokens; one to two hours for softmax_full and sparse_equal
# Expected: the tables in docs/results/wikitext2.md
# Usage:    DATA=folder recipes/wikitext2/table.sh [ROW]... [OPTION of fairseq-train]...
#           DATA=folder UPDATES=500 recipes/wikitext2/table.sh softmax delta_elu
#           DATA=folder SEEDS="1 2 3" recipes/wikitext2/table.sh decay      mean and standard deviation of three runs
#           DATA=folder recipes/wikitext2/table.sh softmax sparse_ffn_equal softmax_full sparse_equal      dense and sparse layers
#
# Each run resumes from its last checkpoint; finished runs are only evaluated again. OUT/perplexity-UPDATES.txt collects ROW SEED, the
# perplexity at context 0 and the sliding one, for docs/results/figures/wikitext2.py.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
renamed SPEED "recipes/wikitext2/speed.sh measures speed"
source "$ROOT/recipes/wikitext2/rows.sh"
updates=${UPDATES:-1500}

evaluate() { # CHECKPOINT OPTION...: the perplexity of the test text
    logged "$OUT/eval.log" fairseq-eval-lm "$OUT/data" --user-dir "$ROOT/fw_fairseq" --path "$1" --gen-subset test "${machine[@]}" "${@:2}"
    perplexity "$OUT/eval.log"
}

train_row() { # ROW SEED FOLDER
    local own output=("${adaptive[@]}")
    own_options "$1"
    [[ ${own[*]} != *--criterion* ]] || output=()
    (train "$3" "$OUT/data" --task language_modeling "${model[@]}" "${output[@]}" "${own[@]}" --max-tokens 1024 \
        --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 1.0 \
        --lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 150 --total-num-update "$updates" --max-update "$updates" \
        --no-epoch-checkpoints --log-format simple --log-interval 50 --seed "$2" "${options[@]}") >"$3.log" ||
        { tail -n 3 "$3.log" >&2; exit 1; }
}

summary() { # NUMBER...: the mean, and the standard deviation of several
    printf '%s\n' "$@" | awk '{ sum += $1; squares += $1 * $1 }
        END { printf "%.2f", sum / NR; if (NR > 1) { d = (squares - sum * sum / NR) / (NR - 1); printf " ± %.2f", sqrt(d > 0 ? d : 0) } }'
}

median_speed() { # LOG of fairseq-train
    sed -n 's/.*train_inner.* wps=\([0-9.]*\).*/\1/p' "$1" | sort -n | awk '{v[NR]=$1} END {printf "%.0f", v[int((NR+1)/2)]}'
}

echo "| row | test perplexity, context 0 | sliding, context 192 | parameters | training words/s | numbers kept of 256 tokens |"
echo "|---|---:|---:|---:|---:|---:|"
for row in "${rows[@]}"; do
    plain=() sliding=()
    for seed in ${SEEDS:-1}; do
        folder=$OUT/$row-$updates-$seed
        train_row "$row" "$seed" "$folder"
        checkpoint=$folder/checkpoint_last.pt
        plain+=("$(evaluate "$checkpoint" --task language_modeling --tokens-per-sample 256 --max-tokens 1024)")
        sliding+=("$(evaluate "$checkpoint" --task sliding_language_modeling --tokens-per-sample 256 --context-window 192 --batch-size 16)")
        collect "$OUT/perplexity-$updates.txt" "$row $seed" "${plain[-1]} ${sliding[-1]}"
        echo "$row, seed $seed: ${plain[-1]}, sliding ${sliding[-1]}" >&2
    done
    kept=$("$PYTHON" "$ROOT/recipes/wikitext2/state.py" "$checkpoint" "$OUT/data" 256 2>>"$folder.log")
    parameters=$(sed -n 's/.*num. shared model params: \([0-9,]*\).*/\1/p' "$folder/train.log" | head -n 1)
    echo "| $row | $(summary "${plain[@]}") | $(summary "${sliding[@]}") | $parameters | $(median_speed "$folder/train.log") | $kept |"
done
