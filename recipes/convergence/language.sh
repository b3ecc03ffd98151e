#!/usr/bin/env bash
# Trains language models on WikiText-2 until their validation loss no longer falls, evaluates them in three ways and prints their table.
#
# Paper:    none; the rows are the rules and mixers of all papers: softmax, sum_elu, delta_elu, delta_dpfp, gated, decay, gated_delta,
#           additive, additive_all, leap, sru, srupp, and the other rows of wikitext2/table.sh. The ending -nopos leaves positions out;
#           the ending -stream does so too, and trains on streams whose state is carried over from segment to segment
# Data:     DATA, a folder with train.txt, valid.txt and test.txt: WikiText-2 by words, <unk> kept (CC BY-SA); nothing is downloaded
# Hardware: one CPU core, 1 GB of memory
# Time:     half an hour to 80 minutes for a row on an Intel Xeon or AMD EPYC with AVX-512; 1.5 hours for sru and additive without, beside
#           other work
# Expected: test perplexity in segments 34.7 (softmax), 31.2 (gated_delta), 32.6 (delta_dpfp), 32.4 (gated), 32.7 (decay), 33.0 (sru),
#           33.6 (srupp), 34.2 (additive), 34.9 (leap), 36.6 (sum_elu), 32.0 (delta_elu and delta_elu-nopos), means of two seeds:
#           docs/results/convergence.md
# Usage:    DATA=folder recipes/convergence/language.sh [ROW]... [OPTION of fairseq-train]...
#           DATA=folder SEEDS="1 2" recipes/convergence/language.sh softmax delta_dpfp
#           DATA=folder DROPOUT=0.2 recipes/convergence/language.sh softmax      another dropout, in a folder of its own
#           recipes/convergence/language.sh --status        which rows are done, and how far the others are
#           TOY=1 recipes/convergence/language.sh softmax delta_elu-stream      tiny models on a small text
#
# The vocabulary has the 4,000 most frequent words, 84% of the text; the others become <unk>, as WikiText-2 has its rarest words. So the
# layers, not the tables of words, have most of the parameters and of the work. A call resumes each row from its last checkpoint;
# finished rows are only printed again. No row is cut short: a row without an end is not in the table. OUT/language.txt collects the test
# perplexities and OUT/language_curves.txt the validations; docs/results/figures/convergence.py draws both.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/convergence/end.sh"
source "$ROOT/recipes/mixers.sh"
find_programs
OUT=$(output_folder convergence)
source "$ROOT/recipes/convergence/model.sh"
[ "${1:-}" != --status ] || { show_status language; exit 0; }
split_rows "$@"
[ ${#rows[@]} -gt 0 ] || rows=(softmax sum_elu delta_elu delta_dpfp gated decay gated_delta sru leap additive srupp)
without_ending() { # ROW: without -nopos or -stream
    local name=${1%-nopos}
    echo "${name%-stream}"
}

for row in "${rows[@]}"; do
    if ! own_options "$(without_ending "$row")" || [ "$row" = softmax-stream ]; then
        fail "ROW is $row; it must be one of $(row_names), or that with -nopos or -stream, which softmax does not have"
    fi
done
if [ -n "$TOY" ]; then
    DATA=$OUT/corpus
    [ -d "$DATA" ] || language_reference "$OUT/reference"
    mkdir -p "$DATA"
    for split in train valid test; do head -n 60 "$OUT/reference/$split.txt" >"$DATA/$split.txt"; done
fi
need_data
made_with=("TOY=$TOY" "DATA=$(absolute "$DATA")")
if ! prepared "$OUT/words" "${made_with[@]}"; then
    need_texts
    binarise "$OUT/words" "${made_with[@]}" -- --only-source --nwordssrc "$words" \
        --trainpref "$DATA/train.txt" --validpref "$DATA/valid.txt" --testpref "$DATA/test.txt"
fi

row_task() { # ROW: sets task and own, the options of the row
    local name
    name=$(without_ending "$1")
    own_options "$name"
    own=(--arch fast_weight_lm "${criterion[@]}" "${own[@]}")
    [ "$name" != softmax ] || own=(--arch transformer_lm) # fairseq's own, which conversion.sh begins with
    task=("${segment_task[@]}")
    case $1 in
        *-nopos) own+=(--no-token-positional-embeddings) ;;
        *-stream)
            own+=(--no-token-positional-embeddings)
            task=(--task stateful_language_modeling --tokens-per-sample "$length" --batch-size $((batch / length))) ;;
    esac
}

echo "| row | seed | best validation | test, segments | test, sliding | test, one stream | epochs | hours |"
echo "|---|---:|---:|---:|---:|---:|---:|---:|"
for row in "${rows[@]}"; do
    row_task "$row"
    for seed in $seeds; do
        run=$OUT/runs/language/$row-$dropout-$seed
        SEED=$seed to_the_end "$run" "$OUT/words" 0.003 "${task[@]}" "${own[@]}" "${model[@]}" "${fit[@]}" --warmup-init-lr 0.0003 "${options[@]}"
        sliding=$(kept "$run/sliding" evaluate "$run" checkpoint_best.pt sliding --task sliding_language_modeling \
            --tokens-per-sample "$length" --context-window "$context" --batch-size 16)
        stream=
        [[ $row != *-nopos && $row != *-stream ]] || [[ $row == softmax-* ]] || stream=$(kept "$run/stream" evaluate "$run" checkpoint_best.pt stream \
            --task stateful_language_modeling --tokens-per-sample "$length" --batch-size 1)
        tested=$(segments "$run")
        echo "| $row | $seed | $(cells "$run" "$tested" "$sliding" "$stream") |"
        collect "$OUT/language.txt" "$row $dropout $seed" "$tested $sliding ${stream:--}"
        collect_curve "$OUT/language_curves.txt" "$row $dropout $seed" "$run"
    done
done
