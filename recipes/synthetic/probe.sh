#!/usr/bin/env bash
# Trains small models on the tasks mqar and state_tracking, prints how many of their answers are right and collects that for
# docs/results/figures/probes.py.
#
# Paper:    Arora et al. 2023 (recall of many pairs); Grazzi et al. 2024 and Siems et al. 2025 (products of many elements of a group)
# Data:     drawn on the fly
# Hardware: one CPU core
# Time:     docs/results/probes.md has the time of each task
# Expected: the tables in docs/results/probes.md
# Usage:    recipes/synthetic/probe.sh TASK-MODEL... [OPTION of fairseq-train]...    prints MODEL SIZE PERCENT of each probe
#           recipes/synthetic/probe.sh recall-delta recall-sum_elu
#           recipes/synthetic/probe.sh recall-delta-w64 recall-delta-w256
#           recipes/synthetic/probe.sh parity-kda parity-kda-negative
#           recipes/synthetic/probe.sh s3-delta_product-negative s3-delta_product-3-negative
#           UPDATES=3000 recipes/synthetic/probe.sh modular-delta_product-negative
#           SIZES="64 128" recipes/synthetic/probe.sh recall-gated_delta
#           TOY=1 recipes/synthetic/probe.sh parity-delta-negative
#
# TASK is recall (mqar: SIZE pairs, 16, 32 and 64, a training for each), or parity, modular (addition modulo 5), s3 or s5 (permutations of
# three or five things), which are trained on up to 64 elements and asked for SIZE elements, 64, 128, 256 and 512. MODEL is a rule of
# recipes/mixers.sh. After it, a number is that of --product-steps, -wN sets the width, and -negative adds --negative-eigenvalues. Models for
# recall have 2 layers of width 128, 2 heads and a short convolution over queries, keys and values, which brings a value to its key; those for
# parity have 1 layer of width 64 with 2 heads, those for modular and s3 have 8 heads, and those for s5 are twice as wide with 4.
# Training sequences of modular, s3 and s5 have 2 to 64 elements, a length for each batch, and the learning rate falls to 0. UPDATES is 1000
# for recall, 500 for parity and 1500 for the others where it is not given. Finished probes are only printed again, and
# refused with other options.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/mixers.sh"
OUT=$(output_folder synthetic)
split_rows "$@"
kinds="TASK-MODEL, for example recall-delta; TASK is recall, parity, modular, s3 or s5"
need_row "$kinds" "${rows[@]}"
every=100 sizes_of_recall="16 32 64" length=64 lengths="64 128 256 512" symbols=256 asked=256
[ -z "$TOY" ] || every=2 sizes_of_recall="4 8" length=8 lengths="8 16" symbols=32 asked=4
sizes_of_recall=${SIZES:-$sizes_of_recall} lengths=${SIZES:-$lengths}

read_row() { # ROW: sets kind, model and own, the options of the model
    kind=${1%%-*} model=${1#*-} steps='' of_width=''
    [[ $1 =~ ^(recall|parity|modular|s3|s5)-. ]] || fail "ROW is $1; it must be $kinds"
    local rule=${model%-negative}
    [[ ! $rule =~ ^(.+)-w([1-9][0-9]*)$ ]] || rule=${BASH_REMATCH[1]} of_width=${BASH_REMATCH[2]}
    [[ ! $rule =~ ^delta_product-[0-9]+$ ]] || steps=${rule##*-} rule=delta_product
    if ! own_options "$rule" || [ "${own[0]}" != --update-rule ]; then
        fail "ROW is $1; MODEL must be a rule of recipes/mixers.sh: $(row_names)"
    fi
    [ -z "$steps" ] || own+=(--product-steps "$steps")
    [[ $model != *-negative ]] || own+=(--negative-eigenvalues)
}

same_options() { # FOLDER: records the options of a probe; fails where it was made with others
    local chosen=(${UPDATES:+"UPDATES=$UPDATES"} "${options[@]}") made
    mkdir -p "$1"
    if [ ! -f "$1/checkpoint_last.pt" ]; then # nothing has been made yet
        echo "${chosen[*]}" >"$1/options"
    fi
    made=$(cat "$1/options" 2>/dev/null || echo "unknown options")
    [ "$made" = "${chosen[*]}" ] || fail "$1 was made with ${made:-no options}, not with ${chosen[*]:-no options}; set OUT to another folder"
}

train_probe() { # FOLDER UPDATES LAYERS WIDTH HEADS OPTION...: resumes from the last checkpoint; a finished training is left alone
    local updates=${UPDATES:-$2} layers=$3 width=$4 heads=$5 rate=(inverse_sqrt)
    [ -z "$TOY" ] || updates=4 width=16
    width=${of_width:-$width}
    [[ $kind == recall || $kind == parity ]] || rate=(polynomial_decay --total-num-update "$updates")
    ! grep -qs "done training" "$1/train.log" || return 0
    echo "training ${1##*/}; its progress is in $1/train.log" >&2
    OMP_NUM_THREADS=1 logged "$1/train.log" fairseq-train --user-dir "$ROOT/fw_fairseq" --save-dir "$1" --seed "$SEED" --cpu --num-workers 0 \
        --arch fast_weight_lm --decoder-layers "$layers" --decoder-embed-dim "$width" --decoder-input-dim "$width" \
        --decoder-output-dim "$width" --decoder-ffn-embed-dim $((2 * width)) --decoder-attention-heads "$heads" --decoder-normalize-before \
        --no-token-positional-embeddings --share-decoder-input-output-embed "${own[@]}" --dropout 0 \
        --criterion label_smoothed_cross_entropy --label-smoothing 0 --report-accuracy --optimizer adam --clip-norm 1.0 --lr 0.003 \
        --lr-scheduler "${rate[@]}" --warmup-updates 100 --updates-per-epoch $every --max-update "$updates" --no-epoch-checkpoints \
        --log-format json --log-interval 50 "${@:6}" "${options[@]}"
}

percent() { # FOLDER SIZE OPTION...: the share of right answers in a validation
    logged "$1/$2.log" fairseq-validate --user-dir "$ROOT/fw_fairseq" --path "$1/checkpoint_last.pt" --valid-subset test \
        --cpu --num-workers 0 --batch-size $asked --evaluation-sequences $asked --log-format json "${@:3}"
    sed -n 's/.*"test_accuracy": "\([^"]*\)".*/\1/p' "$1/$2.log"
}

for row in "${rows[@]}"; do read_row "$row"; done # all are refused before the first is trained
for row in "${rows[@]}"; do
    read_row "$row"
    results=$OUT/$kind.txt
    for size in $([ "$kind" = recall ] && echo "$sizes_of_recall" || echo "$lengths"); do
        folder=$OUT/probes/$row
        [ "$kind" != recall ] || folder+=-$size
        same_options "$folder"
        if ! grep -qs "^$model $size " "$results"; then
            if [ "$kind" = recall ]; then
                task=(--task mqar --pairs "$size" --symbols "$symbols" --batch-size 32)
                ask=(--task mqar)
                train_probe "$folder" 1000 2 128 2 "${task[@]}" --short-conv 4
            else
                task=(--task state_tracking --group "$kind" --length "$length" --batch-size 64)
                ask=(--task state_tracking --evaluation-length "$size")
                shape=(500 1 64 2)
                [ "$kind" = parity ] || shape=(1500 1 64 8) task+=(--shortest-length 2)
                [ "$kind" != s5 ] || shape=(1500 1 128 4)
                train_probe "$folder" "${shape[@]}" "${task[@]}" --evaluation-length $length
            fi
            found=$(percent "$folder" "$size" "${ask[@]}")
            [ -n "$found" ] || fail "$folder/$size.log has no accuracy"
            echo "$model $size $found" >>"$results"
        fi
        grep "^$model $size " "$results"
    done
done
