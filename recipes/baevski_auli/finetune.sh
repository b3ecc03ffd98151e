#!/usr/bin/env bash
# Fine-tunes one row on WikiText-103: 100,000 updates of 26 segments, as in appendix B. Their length of 512 tokens is this recipe's choice.
#
# Paper:    Mao 2022, table 3. Rows: those of convert.sh, and the paper's comparators abc-M and linformer-M (M slots), which start from
#           nothing and need no convert.sh
# Data:     OUT of prepare.sh and OUT/ROW/start.pt of convert.sh
# Hardware: one GPU of 40 GB; GPUS workers share the 26 segments, or the nearest number that they can share. A row needs 9.7 GB of disk:
#           start.pt with 1 GB and three checkpoints of 2.9 GB
# Time:     35 hours on an A40 in the paper; not run at this size for want of the data and a GPU; recipes/README.md has estimates, and
#           CHECK=1 measures yours
# Expected: the paper's test perplexity at context 0 and 480: decay-32 22.1 and 20.7, decay-64 21.9 and 20.5, abc-32 21.9 and 20.5,
#           linformer-64 27.2 and 30.7; the pretrained model has 20.5 and 19.0. docs/results/figures/tables.py mao3 OUT puts yours beside them
# Usage:    recipes/baevski_auli/finetune.sh ROW [OPTION of fairseq-train]...       resumes from the last checkpoint of the row
#           recipes/baevski_auli/finetune.sh decay-32
#           GPUS=2 recipes/baevski_auli/finetune.sh decay-64
#           GPUS=2 LAUNCH="torchrun --nproc-per-node 2" recipes/baevski_auli/finetune.sh decay-32
#           GPUS=2 srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 1 recipes/baevski_auli/finetune.sh decay-32 --distributed-port 29500
#           CHECK=1 recipes/baevski_auli/finetune.sh decay-32      20 updates: speed, memory, disk, hours
#           BATCH=13 recipes/baevski_auli/finetune.sh decay-32     half of the batch at once, twice for each update
#           TOY=1 recipes/baevski_auli/finetune.sh decay-4    a tiny model on the CPU, after the same row of convert.sh
#
# UPDATES and WARMUP shorten a run. Adam, 4000 updates of warm-up to 1e-4, cosine to 2e-6, clipping at 0.1. finetune.yaml beside this file
# does the same with Hydra. PRECISION is bf16, the default where every GPU has it, fp16, the default elsewhere, fp32 or tf32; the paper does
# not name its own.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
source "$ROOT/recipes/baevski_auli/rows.sh"
read_row "$@"
need_folder "$OUT/data" recipes/baevski_auli/prepare.sh

updates=${UPDATES:-${TOY:+6}} warmup=${WARMUP:-${TOY:+2}}
updates=${updates:-100000} warmup=${warmup:-4000}
case $rule in
    abc | linformer) model=(--mixer "$rule" --slots "$width") ;;
    *)
        need_file "$OUT/$row/start.pt" "recipes/baevski_auli/convert.sh $row"
        model=(--update-rule "$rule" "${attention[@]}" --finetune-from-model "$OUT/$row/start.pt")
        ;;
esac

default_precision=fp16 trial_of=baevski_auli
share 26 --batch-size
train "$OUT/${RUN:-$row}" "$OUT/data" --task language_modeling --arch fast_weight_lm_baevski_auli "${shape[@]}" "${model[@]}" \
    --criterion adaptive_loss --ddp-backend legacy_ddp --tokens-per-sample $tokens "${batch[@]}" \
    --required-batch-size-multiple 1 --optimizer adam --lr 1e-4 --lr-scheduler cosine --min-lr 2e-6 --warmup-updates "$warmup" \
    --warmup-init-lr 1e-7 --max-update "$updates" --clip-norm 0.1 --no-epoch-checkpoints --save-interval-updates 2000 \
    --keep-interval-updates 1 --log-format json --log-interval "${LOG_INTERVAL:-100}" "${@:2}"
