#!/usr/bin/env bash
# Trains one softmax Transformer on WikiText-2, replaces its attention by each update rule, fine-tunes all under one budget and prints the
# table.
#
# Paper:    a small relative of Mao 2022, tables 1 and 2. Rows: softmax (the same fine-tuning of the unchanged model), and RULE-M, a rule
#           and the width of queries and keys per head. RULE-M-distilled learns from the Transformer in as many updates: half of them
#           match its layers while only the new parts train, half match its words
# Data:     DATA, a folder with train.txt, valid.txt and test.txt: WikiText-2 by words, <unk> kept (CC BY-SA); nothing is downloaded
# Hardware: one CPU core, 1 GB of memory
# Time:     on a busy core half an hour for the start, 2 to 4 minutes for each row
# Expected: the table in docs/results/conversion.md
# Usage:    DATA=folder recipes/wikitext2/conversion.sh [ROW]... [OPTION of fairseq-train]...
#           DATA=folder UPDATES=60 START_UPDATES=1600 recipes/wikitext2/conversion.sh softmax decay-16
#           TOY=1 recipes/wikitext2/conversion.sh           a tiny model on a small text
#
# Finished runs are kept: call it again to continue, or with other rows. The perplexity is that of the first TEST_LINES lines of the
# test text, without context.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/mixers.sh"
find_programs
renamed ROWS "rows are arguments"
OUT=$(output_folder wikitext2_conversion)
start_updates=${START_UPDATES:-1600} updates=${UPDATES:-60} lines=${TEST_LINES:-600}
rules=(decay gated delta sum gated_delta)
split_rows "$@"
[ ${#rows[@]} -gt 0 ] || rows=(softmax "${rules[@]/%/-16}" decay-16-distilled "${rules[@]/%/-32}" "${rules[@]/%/-4}")
known="decay|gated|delta|sum|gated_delta|fwm|retnet|gla|mamba2|hgrn2|rwkv6|rwkv7" # rules that converted_map has maps for
for row in "${rows[@]}"; do
    [[ $row =~ ^(softmax|($known)-[1-9][0-9]*(-distilled)?)$ ]] ||
        fail "ROW is $row; it must be softmax, RULE-M or RULE-M-distilled, with a rule of: ${known//|/ }"
done
batch=(--tokens-per-sample 256 --max-tokens 1024 --num-workers 0)
model=(--decoder-layers 4 --decoder-embed-dim 256 --decoder-input-dim 256 --decoder-output-dim 256 --decoder-ffn-embed-dim 1024
    --decoder-attention-heads 8 --decoder-normalize-before --adaptive-input --adaptive-input-cutoff 2000,10000
    --adaptive-input-factor 2 --adaptive-softmax-cutoff 2000,10000 --adaptive-softmax-factor 2 --tie-adaptive-weights)
if [ -n "$TOY" ]; then
    DATA=$OUT/corpus start_updates=8 updates=8 lines=60 batch=(--tokens-per-sample 32 --max-tokens 128 --num-workers 0)
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64
        --adaptive-input-cutoff 500,1000 --adaptive-softmax-cutoff 500,1000)
    [ -d "$DATA" ] || language_reference "$DATA"
fi
need_data

fit() { # FOLDER UPDATES LR WARM-UP SCHEDULE OPTION...: trains, and keeps FOLDER/finished.pt alone
    local folder=$1 count=$2
    [ ! -f "$folder/finished.pt" ] || return 0
    (train "$folder" "$OUT/data" --task language_modeling "${model[@]}" \
        --dropout 0.1 --ddp-backend legacy_ddp "${batch[@]}" --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 \
        --clip-norm 1.0 --lr "$3" --warmup-updates "$4" --lr-scheduler "$5" --max-update "$count" --disable-validation \
        --no-epoch-checkpoints --save-interval-updates 200 --keep-interval-updates 1 --log-format json --log-interval 25 \
        "${@:6}" "${options[@]}") >"$folder.log" || { tail -n 3 "$folder.log" >&2; exit 1; }
    mv "$folder/checkpoint_last.pt" "$folder/finished.pt"
    rm -f "$folder"/checkpoint*
}

measure() { # CHECKPOINT: its perplexity, kept in a file beside it
    [ -f "$1.perplexity" ] || {
        logged "$1.log" fairseq-eval-lm "$OUT/data" --user-dir "$ROOT/fw_fairseq" --path "$1" --gen-subset test --task language_modeling \
            "${batch[@]}" "${machine[@]}"
        perplexity "$1.log" >"$1.part"
        [ -s "$1.part" ] || fail "$1.log has no perplexity"
        mv "$1.part" "$1.perplexity"
    }
    cat "$1.perplexity"
}

made_with=("TOY=$TOY" "DATA=$(absolute "$DATA")" "TEST_LINES=$lines")
if ! prepared "$OUT/data" "${made_with[@]}"; then
    need_texts
    mkdir -p "$OUT/text"
    head -n "$lines" "$DATA/test.txt" >"$OUT/text/test.txt"
    binarise "$OUT/data" "${made_with[@]}" -- --only-source \
        --trainpref "$DATA/train.txt" --validpref "$DATA/valid.txt" --testpref "$OUT/text/test.txt"
fi
start=$OUT/start-$start_updates
fit "$start" "$start_updates" 0.002 150 polynomial_decay --total-num-update "$start_updates" --arch transformer_lm --criterion adaptive_loss
transformer=$(measure "$start/finished.pt")
echo "The Transformer after $start_updates updates: $transformer"
echo
echo "| row | converted | after $updates updates | of the softmax row's performance |"
echo "|---|---:|---:|---:|"
for row in "${rows[@]}"; do
    folder=$start-$row-$updates
    IFS=- read -r rule width distilled <<<"$row"
    map=() trained=(--mixer softmax)
    if [ "$rule" != softmax ]; then
        converted_map "$rule" "$width"
        trained=(--update-rule "$rule" "${map[@]}")
    fi
    if [ ! -f "$folder/converted.pt" ]; then
        mkdir -p "$folder"
        logged "$folder.log" "$PYTHON" -m fw_fairseq.tools.convert "$start/finished.pt" "$folder/converted.pt" --rule "$rule" "${map[@]}"
    fi
    tune=(10 cosine --min-lr 2e-6 --warmup-init-lr 1e-7 --arch fast_weight_lm "${trained[@]}")
    begin=$folder/converted.pt count=$updates criterion=(--criterion adaptive_loss)
    if [ -n "$distilled" ]; then
        count=$((updates / 2)) criterion=(--criterion t2r_distillation --teacher "$start/finished.pt")
        fit "$folder/warm" "$count" 0.001 "${tune[@]}" "${criterion[@]}" --finetune-from-model "$begin" --match-updates "$count" --train-only new
        begin=$folder/warm/finished.pt
    fi
    fit "$folder" "$count" 0.0003 "${tune[@]}" "${criterion[@]}" --finetune-from-model "$begin"
    converted=$(measure "$folder/converted.pt")
    tuned=$(measure "$folder/finished.pt")
    echo "| $row | $converted | $tuned | $(performance "$start-softmax-$updates/finished.pt.perplexity" "$tuned") |"
done
