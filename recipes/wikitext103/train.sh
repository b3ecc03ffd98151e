#!/usr/bin/env bash
# Schlag, Irie and Schmidhuber 2021, sec. 6.3: a row of tables 2 to 5, trained on WikiText-103 from scratch and tested.
#   Data      DATA with wiki.{train,valid,test}.tokens; recipes/baevski_auli/prepare.sh downloads it to outputs/baevski_auli/wikitext-103
#   Hardware  two GPUs of 16 GB in the paper, less than four days; not run here for want of the data and a GPU
#   Expected  test perplexity. Table 2, small / medium: transformer 34.1 / 29.6, linear 38.3 / 33.0, delta 35.5 / 31.5, performer 39.6 /
#             33.8, performer_delta 37.2 / 31.8. Table 3, medium: delta_norm 32.1, delta_nopos_norm 31.2, delta_nopos 31.1.
#             Table 4, medium: linear_carry above 260, delta_carry 29.4. Table 5, small: performer16 38.8, performer16_delta 37.0,
#             dpfp 38.8, dpfp_delta 35.0
#   ROW=delta SIZE=small DATA=... recipes/wikitext103/train.sh        goes on where it stopped
#   several GPUs: GPUS=2 LAUNCH="torchrun --nproc_per_node 2" ROW=delta DATA=... recipes/wikitext103/train.sh
#   nodes by Slurm: as in recipes/baevski_auli/finetune.sh.   TOY=1: a few sentences and a tiny model on a CPU
# The paper gives dropout, learning rate, warm-up, batch and epochs (appendix F). Cosine decay and clipping at 0.25 are this recipe's.
set -euo pipefail
cd "$(dirname "$0")/../.."

TOY=${TOY:-}
ROW=${ROW:-delta}
SIZE=${SIZE:-small}
OUT=${OUT:-outputs/wikitext103${TOY:+_toy}}
PYTHON=${PYTHON:-.venv/bin/python}
GPUS=${GPUS:-1}
case $SIZE in # tokens of a segment, segments of an update, updates in 120 or 70 epochs, Performer's m
    small) tokens=256 batch=96 updates=504000 m=8 ;;
    medium) tokens=384 batch=56 updates=336000 m=16 ;;
    *) echo "SIZE is $SIZE; it must be small or medium" >&2; exit 2 ;;
esac

linear="--update-rule sum --feature-map elu --feature-norm none --attention-norm"
delta="--update-rule delta --feature-map elu"
nopos=--no-token-positional-embeddings
favor_sum="--update-rule sum --feature-map favor --feature-norm none --attention-norm --favor-features"
favor_delta="--update-rule delta --feature-map favor --favor-features"
task=language_modeling
case $ROW in
    transformer) options="--mixer softmax" ;;
    linear) options=$linear ;;
    delta) options=$delta ;;
    performer) options="$favor_sum $m" ;;
    performer_delta) options="$favor_delta $m" ;;
    delta_norm) options="$delta --attention-norm" ;;
    delta_nopos) options="$delta $nopos" ;;
    delta_nopos_norm) options="$delta $nopos --attention-norm" ;;
    linear_carry) options="$linear $nopos" task=stateful_language_modeling ;;
    delta_carry) options="$delta $nopos" task=stateful_language_modeling ;;
    performer16) options="$favor_sum 16" ;;
    performer16_delta) options="$favor_delta 16" ;;
    dpfp) options="--update-rule sum --feature-map dpfp --dpfp-nu 1 --feature-norm none --attention-norm" ;;
    dpfp_delta) options="--update-rule delta --feature-map dpfp --dpfp-nu 1" ;;
    *) echo "ROW is $ROW; the rows are listed in the head of $0" >&2; exit 2 ;;
esac

machine=(--fp16) device=() shape=() warmup=2000
if [ -n "$TOY" ]; then
    tokens=16 batch=8 updates=${UPDATES:-6} warmup=2 machine=(--cpu --num-workers 0) device=(--cpu --num-workers 0)
    shape=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 4
        --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20)
    DATA=$OUT/text
    mkdir -p "$DATA"
    for split in train valid test; do
        for i in $(seq 1 80); do seq -s ' ' -f 'w%g' $((i * 7 % 40)) $((i * 7 % 40 + 8)); done >"$DATA/wiki.$split.tokens"
    done
fi
[ $((batch % GPUS)) = 0 ] || { echo "GPUS is $GPUS; it must divide $batch, the segments of an update" >&2; exit 2; }
if [ ! -f "$OUT/data/test.idx" ]; then
    data=${DATA:?set DATA to a folder with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens}
    "$PYTHON" -m fairseq_cli.preprocess --only-source --destdir "$OUT/data" --workers "${WORKERS:-1}" \
        --trainpref "$data/wiki.train.tokens" --validpref "$data/wiki.valid.tokens" --testpref "$data/wiki.test.tokens"
fi

folder=$OUT/$ROW-$SIZE
mkdir -p "$folder"
# shellcheck disable=SC2086
${LAUNCH:-$PYTHON} -m fairseq_cli.train "$OUT/data" --user-dir fw_fairseq --task $task --arch "fast_weight_lm_wiki103_$SIZE" \
    "${shape[@]}" "${machine[@]}" $options --save-dir "$folder" --criterion adaptive_loss --ddp-backend legacy_ddp \
    --tokens-per-sample $tokens --batch-size $((batch / GPUS)) --required-batch-size-multiple 1 --dropout 0.1 \
    --optimizer adam --lr 2.5e-4 --lr-scheduler cosine --warmup-updates $warmup --warmup-init-lr 1e-7 --max-update "$updates" \
    --clip-norm 0.25 --no-epoch-checkpoints --save-interval-updates 5000 --keep-interval-updates 1 \
    --log-format json --log-interval 100 --seed 1 "$@" 2>&1 | tee -a "$folder/train.log"

how=(--task sliding_language_modeling --context-window $((tokens - 1)) --batch-size 8) # windows of which the last position counts
[ "$task" = language_modeling ] || how=(--task "$task" --batch-size 1)                # or one stream, its memory carried
"$PYTHON" -m fairseq_cli.eval_lm "$OUT/data" --user-dir fw_fairseq --path "$folder/checkpoint_best.pt" --gen-subset test "${device[@]}" \
    --tokens-per-sample $tokens "${how[@]}" >"$folder/test.log" 2>&1 || { tail -n 20 "$folder/test.log" >&2; exit 1; }
echo "$ROW, $SIZE: test perplexity $(sed -n 's/.*Perplexity: //p' "$folder/test.log")"
