#!/usr/bin/env bash
# Fine-tunes one row on the text: 100,000 updates of 32 texts, as in appendix A. The length of 1024 tokens is this recipe's choice.
#
# Paper:    Mao 2022, tables 1 and 2; the head of convert.sh says which rows there are
# Data:     OUT of prepare.sh and OUT/ROW/start.pt of convert.sh
# Hardware: one GPU of 40 GB; GPUS workers share the 32 texts. A row needs 5.1 GB of disk: start.pt and three checkpoints of 1.5 GB; the
#           eleven rows of the paper need 56 GB
# Time:     13 hours on an A100 in the paper; not run at this size for want of the data and a GPU; recipes/README.md has estimates, and
#           CHECK=1 measures yours
# Expected: the paper's best perplexity of validation text: softmax 14.5; sum-4-phi 20.0, gated-4-phi 17.1, decay-4-phi 17.1,
#           delta-4-baseline 21.6, delta-4-norm (without attention norm) 20.1; gated-16-phi 16.8, gated-32-phi 16.4, decay-16-phi 16.1, decay-32-phi 14.6; local_attention 19.4.
#           docs/results/figures/tables.py mao1 OUT (and mao2) puts yours beside them
# Usage:    recipes/gpt2/finetune.sh ROW [OPTION of fairseq-train]...       resumes from the last checkpoint of the row
#           recipes/gpt2/finetune.sh decay-32-phi
#           GPUS=2 recipes/gpt2/finetune.sh softmax
#           GPUS=2 LAUNCH="torchrun --nproc-per-node 2" recipes/gpt2/finetune.sh decay-16-phi
#           GPUS=8 srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 4 recipes/gpt2/finetune.sh decay-16-phi --distributed-port 29500
#           CHECK=1 recipes/gpt2/finetune.sh softmax          20 updates: speed, memory, disk, hours
#           TOY=1 recipes/gpt2/finetune.sh decay-4-phi        a tiny model on the CPU, after the same row of convert.sh
#
# UPDATES, WARMUP and EVERY (updates between validations) shorten a run. The paper names neither optimizer nor schedule; this recipe takes
# Adam, 4000 updates of warm-up and cosine, as the paper's appendix B does. finetune.yaml beside this file does the same with Hydra.
# PRECISION is bf16, the default where every GPU has it, fp16, the default elsewhere, fp32 or tf32; the paper has mixed precision (fp16).
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/gpt2/rows.sh"
read_row "$@"
need_file "$OUT/$row/start.pt" "recipes/gpt2/convert.sh $row"

updates=${UPDATES:-${TOY:+6}} warmup=${WARMUP:-${TOY:+2}} every=${EVERY:-${TOY:+3}}
updates=${updates:-100000} warmup=${warmup:-4000} every=${every:-4000}
case $row in
    softmax | local_attention) model=(--mixer "$row") ;;
    *) model=(--update-rule "$rule" "${attention[@]}") ;;
esac

default_precision=fp16 trial_of=gpt2
share 32 --batch-size
train "$OUT/${RUN:-$row}" "$OUT/data" --task language_modeling --arch fast_weight_lm_gpt2_small "${shape[@]}" \
    --decoder-normalize-before --no-scale-embedding --activation-fn gelu_accurate --max-target-positions $tokens "${model[@]}" \
    --finetune-from-model "$OUT/$row/start.pt" --criterion cross_entropy --tokens-per-sample $tokens "${batch[@]}" \
    --optimizer adam --lr 6e-4 --lr-scheduler cosine --min-lr 2e-6 --warmup-updates "$warmup" --warmup-init-lr 1e-7 \
    --max-update "$updates" --clip-norm 1.0 --no-epoch-checkpoints --validate-interval-updates "$every" \
    --save-interval-updates "$every" --keep-interval-updates 1 --log-format json --log-interval "${LOG_INTERVAL:-100}" "${@:2}"
