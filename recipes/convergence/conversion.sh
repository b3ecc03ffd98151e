#!/usr/bin/env bash
# Converts the softmax Transformer of language.sh to each rule, fine-tunes it until its validation loss no longer falls and prints what
# is left, beside models that were trained from scratch for as long.
#
# Paper:    a small relative of Mao 2022, tables 1 and 2. Rows: softmax (the same fine-tuning of the unchanged model), and RULE-M, a rule
#           (sum, delta, gated, decay, gated_delta) and the width of queries and keys per head. The ending -distilled learns from the
#           Transformer first: UPDATES updates match its layers while only the new parts train. The ending -scratch is the same model
#           without the Transformer's parameters
# Data:     OUT of language.sh, where the row softmax is finished; -scratch only needs the vocabulary of any of its rows
# Hardware: one CPU core, 1 GB of memory
# Time:     25 to 50 minutes for a row, an hour for -scratch, on an Intel Xeon or AMD EPYC with AVX-512
# Expected: test perplexity 32.2 (decay-16, mean of two seeds): docs/results/convergence.md
# Usage:    recipes/convergence/conversion.sh [ROW]... [OPTION of fairseq-train]...
#           recipes/convergence/conversion.sh softmax decay-16 decay-16-distilled decay-16-scratch
#           DROPOUT=0.2 SEEDS=2 recipes/convergence/conversion.sh      of that Transformer
#           recipes/convergence/conversion.sh --status      which rows are done, and how far the others are
#           TOY=1 recipes/convergence/conversion.sh decay-4 after TOY=1 language.sh softmax
#
# A call resumes each row from its last checkpoint; finished rows are only printed again. No row is cut short. The last share is left empty
# until the row softmax is finished. docs/results/figures/wikitext2.py draws the table of one seed. OUT/conversion_curves.txt collects the
# validations, which docs/results/figures/convergence.py draws.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/convergence/end.sh"
source "$ROOT/recipes/mixers.sh"
find_programs
OUT=$(output_folder convergence)
source "$ROOT/recipes/convergence/model.sh"
kinds="softmax, RULE-M, RULE-M-distilled or RULE-M-scratch, with the rule sum, delta, gated, decay or gated_delta"
[ "${1:-}" != --status ] || { show_status conversion; exit 0; }
split_rows "$@"
[ ${#rows[@]} -gt 0 ] || rows=(softmax {decay,gated,delta,sum}-{16,32,4} {decay,gated,delta,sum}-16-{distilled,scratch})
for row in "${rows[@]}"; do
    [[ $row =~ ^(softmax|(sum|delta|gated|decay|gated_delta)-[1-9][0-9]*(-distilled|-scratch)?)$ ]] || fail "ROW is $row; it must be $kinds"
done
for row in "${rows[@]}"; do
    [[ $row = *-scratch ]] || { need_finished softmax; break; }
done
[ -d "$OUT/words" ] || fail "$OUT/words is not there; run recipes/convergence/language.sh with the same OUT first"
match=${UPDATES:-1000}
[ -z "$TOY" ] || match=8

convert_row() { # sets begin to the converted Transformer, and converted to its perplexity
    begin=$run/converted.pt
    [ -f "$begin" ] ||
        logged "$begin.log" "$PYTHON" -m fw_fairseq.tools.convert "$start/checkpoint_best.pt" "$begin" --rule "$rule" "${map[@]}"
    converted=$(kept "$run/converted" evaluate "$run" converted.pt converted "${segment_task[@]}" --max-tokens 4096)
}

match_row() { # sets begin to the converted Transformer after it has learnt the layers of the Transformer
    local matched=$run/matched
    [ -f "$matched.done" ] || {
        SEED=$seed logged "$matched.log" train "$matched" "$OUT/words" "${common[@]}" --criterion t2r_distillation \
            --teacher "$start/checkpoint_best.pt" --match-updates "$match" --train-only new --max-update "$match" --lr 0.001 \
            --lr-scheduler polynomial_decay --total-num-update "$match" --disable-validation \
            --no-epoch-checkpoints --finetune-from-model "$begin"
        touch "$matched.done"
    }
    begin=$matched/checkpoint_last.pt
}

echo "| row | seed | before fine-tuning, test | best validation | test | of the softmax row's performance | epochs | hours |"
echo "|---|---:|---:|---:|---:|---:|---:|---:|"
for seed in $seeds; do
    start=$OUT/runs/language/softmax-$dropout-$seed
    for row in "${rows[@]}"; do
        IFS=- read -r rule features way <<<"$row"
        run=$OUT/runs/conversion/$row-$dropout-$seed
        mkdir -p "$run"
        common=("${segment_task[@]}" "${model[@]}" "${fit[@]}")
        loss=("${criterion[@]}") converted='' rate=0.001 first_rate=0.0001
        if [ "$rule" = softmax ]; then # fairseq's own, as in language.sh
            common+=(--arch transformer_lm)
            loss=() converted=$(segments "$start") begin=$start/checkpoint_best.pt
        else
            converted_map "$rule" "$features"
            common+=(--arch fast_weight_lm --update-rule "$rule" "${map[@]}")
            case $way in
                scratch) rate=0.003 first_rate=0.0003 begin= ;;
                distilled) convert_row; match_row ;;
                *) convert_row ;;
            esac
        fi
        SEED=$seed to_the_end "$run" "$OUT/words" "$rate" --warmup-init-lr "$first_rate" "${common[@]}" "${loss[@]}" \
            ${begin:+--finetune-from-model "$begin"} "${options[@]}"
        tuned=$(segments "$run")
        share=$(performance "$OUT/runs/conversion/softmax-$dropout-$seed/segments" "$tuned")
        collect_curve "$OUT/conversion_curves.txt" "$row $dropout $seed" "$run"
        echo "| $row | $seed | $converted | $(cells "$run" "$tuned" "$share") |"
    done
done
