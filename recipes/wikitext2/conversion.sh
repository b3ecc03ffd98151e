#!/usr/bin/env bash
# WikiText-2: one softmax Transformer, its attention replaced by each update rule, fine-tuned under one budget.
#
# Data:     DATA=folder with train.txt, valid.txt, test.txt: WikiText-2, word level, <unk> kept (CC BY-SA). Not downloaded here.
# Hardware: one CPU core, 1 GB; on a busy one half an hour for the start, 2 to 4 minutes for each row
# Expect:   the table in docs/results/conversion.md.
# usage:    DATA=folder [OUT=folder] [START_UPDATES=1600] [UPDATES=60] [ROWS="softmax decay-16"] recipes/wikitext2/conversion.sh
#           TOY=1 recipes/wikitext2/conversion.sh         a tiny model on the text of recipes/demo; OUT then ends in _toy
#
# Rows are softmax, the same fine-tune of the model as it is, and RULE-M: M is the width of queries and keys per head. RULE-M-distilled
# learns from the Transformer in the same number of updates: half of them match its layers, training what is new alone, half its words.
# What is finished is kept: run it again to go on, or with other ROWS. Perplexity on the first TEST_LINES lines of the test text,
# without context.
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

out=$(output_folder wikitext2_conversion)
start_updates=${START_UPDATES:-1600} updates=${UPDATES:-60} lines=${TEST_LINES:-600} machine=()
rules=(decay gated delta sum gated_delta)
rows=${ROWS:-softmax ${rules[*]/%/-16} decay-16-distilled ${rules[*]/%/-32} ${rules[*]/%/-4}}
bin=${BIN:-.venv/bin}
user_dir=$PWD/fw_fairseq
batch=(--tokens-per-sample 256 --max-tokens 1024)
model=(--decoder-layers 4 --decoder-embed-dim 256 --decoder-input-dim 256 --decoder-output-dim 256 --decoder-ffn-embed-dim 1024
    --decoder-attention-heads 8 --decoder-normalize-before --adaptive-input --adaptive-input-cutoff 2000,10000
    --adaptive-input-factor 2 --adaptive-softmax-cutoff 2000,10000 --adaptive-softmax-factor 2 --tie-adaptive-weights)
if [ -n "${TOY:-}" ]; then
    DATA=$out/corpus start_updates=8 updates=8 lines=60 machine=(--cpu) batch=(--tokens-per-sample 32 --max-tokens 128)
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64
        --adaptive-input-cutoff 500,1000 --adaptive-softmax-cutoff 500,1000)
    [ -d "$DATA" ] || "$bin/python" recipes/demo/corpus.py "$DATA"
fi
data=${DATA:?DATA must be the folder with train.txt, valid.txt and test.txt of WikiText-2}

run() { # LOG COMMAND...: the end of the log where the command fails
    local log=$1
    shift
    "$@" >>"$log" 2>&1 || { tail -n 3 "$log" >&2; exit 1; }
}

train() { # FOLDER UPDATES LR WARM-UP SCHEDULE ARGUMENTS...
    local folder=$1 count=$2
    [ ! -f "$folder/finished.pt" ] || return 0
    run "$folder.log" "$bin/fairseq-train" "$out/data" --user-dir "$user_dir" --task language_modeling --save-dir "$folder" "${model[@]}" \
        --dropout 0.1 --ddp-backend legacy_ddp "${batch[@]}" --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 \
        --clip-norm 1.0 --lr "$3" --warmup-updates "$4" --lr-scheduler "$5" --max-update "$count" --disable-validation \
        --no-epoch-checkpoints --save-interval-updates 200 --keep-interval-updates 1 --num-workers 0 --log-format json --log-interval 25 \
        --seed 1 "${machine[@]}" "${@:6}"
    mv "$folder/checkpoint_last.pt" "$folder/finished.pt"
    rm -f "$folder"/checkpoint*
}

perplexity() { # CHECKPOINT: kept in a file beside it
    [ -f "$1.perplexity" ] || {
        "$bin/fairseq-eval-lm" "$out/data" --user-dir "$user_dir" --path "$1" --gen-subset test --task language_modeling \
            "${batch[@]}" "${machine[@]}" --num-workers 0 2>&1 | sed -n 's/.*Perplexity: //p' >"$1.part"
        mv "$1.part" "$1.perplexity"
    }
    cat "$1.perplexity"
}

made_with=("TOY=${TOY:-}" "DATA=$(absolute "$data")" "TEST_LINES=$lines")
mkdir -p "$out/text"
if ! prepared "$out/data" "${made_with[@]}"; then
    head -n "$lines" "$data/test.txt" >"$out/text/test.txt"
    run "$out/preprocess.log" "$bin/fairseq-preprocess" --only-source --destdir "$out/data.part" --workers 1 \
        --trainpref "$data/train.txt" --validpref "$data/valid.txt" --testpref "$out/text/test.txt"
    record "$out/data" "${made_with[@]}"
    mv "$out/data.part" "$out/data"
fi
start=$out/start-$start_updates
train "$start" "$start_updates" 0.002 150 polynomial_decay --total-num-update "$start_updates" --arch transformer_lm --criterion adaptive_loss
echo "The Transformer after $start_updates updates: $(perplexity "$start/finished.pt")"
echo
echo "| row | converted | after $updates updates | of the softmax row's performance |"
echo "|---|---:|---:|---:|"
for row in $rows; do
    folder=$start-$row-$updates
    IFS=- read -r rule width distilled <<<"$row"
    case $rule in
        softmax) options=() trained=(--mixer softmax) ;;
        delta | gated_delta) options=(--feature-dim "$width" --feature-map relu --feature-norm sum) ;;
        *) options=(--feature-dim "$width" --feature-map identity --feature-norm none) ;;
    esac
    [ "$rule" = softmax ] || trained=(--update-rule "$rule" "${options[@]}")
    if [ ! -f "$folder/converted.pt" ]; then
        mkdir -p "$folder"
        run "$folder.log" "$bin/python" -m fw_fairseq.tools.convert "$start/finished.pt" "$folder/converted.pt" --rule "$rule" "${options[@]}"
    fi
    tune=(10 cosine --min-lr 2e-6 --warmup-init-lr 1e-7 --arch fast_weight_lm "${trained[@]}")
    begin=$folder/converted.pt count=$updates criterion=(--criterion adaptive_loss)
    if [ -n "$distilled" ]; then
        count=$((updates / 2)) criterion=(--criterion t2r_distillation --teacher "$start/finished.pt")
        train "$folder/warm" $count 0.001 "${tune[@]}" "${criterion[@]}" --finetune-from-model "$begin" --match-updates $count --train-only new
        begin=$folder/warm/finished.pt
    fi
    train "$folder" $count 0.0003 "${tune[@]}" "${criterion[@]}" --finetune-from-model "$begin"
    converted=$(perplexity "$folder/converted.pt") tuned=$(perplexity "$folder/finished.pt")
    softmax=$(cat "$start-softmax-$updates/finished.pt.perplexity" 2>/dev/null || true)
    echo "| $row | $converted | $tuned | ${softmax:+$(awk "BEGIN {printf \"%.1f%%\", 100 * $softmax / $tuned}")} |"
done
