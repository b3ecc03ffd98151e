#!/usr/bin/env bash
# Mao 2022, appendix B: 100,000 updates of 26 segments of 512 tokens, Adam, 4000 updates of warm-up to 1e-4, cosine to 2e-6, clip 0.1.
#   Data      what convert.sh left in OUT
#   Hardware  one GPU with 40 GB; several by LAUNCH below, GPUS of them share the 26 segments (1, 2, 13 or 26)
#   Time      35 hours on an A40 in the paper; not run here for want of the data and a GPU
#   Expected  the paper's test perplexity, context 0 and 480: m = 32 22.1 and 20.7, m = 64 21.9 and 20.5; its start, with softmax
#             attention, 20.5 and 19.0
#   recipes/baevski_auli/finetune.sh                   goes on where it stopped
#   M=64 recipes/baevski_auli/finetune.sh
#   RULE=abc recipes/baevski_auli/finetune.sh          abc and linformer, the paper's comparators with M slots, start from nothing: no
#                                                      convert.sh (published 21.9 and 20.5; linformer with M=64 27.2 and 30.7)
#   GPUS=2 LAUNCH="torchrun --nproc_per_node 2" recipes/baevski_auli/finetune.sh
#   two nodes by Slurm, one task each:
#   GPUS=2 srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 1 bash -c 'LAUNCH="torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend
#       c10d --rdzv_endpoint $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500" recipes/baevski_auli/finetune.sh'
# fw-plot tables mao3 OUT puts what eval.sh measured beside the paper's table. With Hydra, for sweeps: finetune.yaml beside this file.
source "$(dirname "$0")/settings.sh"

GPUS=${GPUS:-1}
[ $((26 % GPUS)) = 0 ] || { echo "GPUS is $GPUS; it must divide 26, the segments of an update" >&2; exit 2; }
UPDATES=${UPDATES:-${TOY:+6}} WARMUP=${WARMUP:-${TOY:+2}}
UPDATES=${UPDATES:-100000} WARMUP=${WARMUP:-4000}
[ -n "$TOY" ] || machine=(--fp16)
case $RULE in
    abc | linformer) model=(--mixer "$RULE" --slots "$M") ;;
    *) model=(--update-rule "$RULE" --feature-dim "$M" --feature-map "$MAP" --feature-norm "$NORM" --finetune-from-model "$OUT/$NAME/start.pt") ;;
esac
mkdir -p "$OUT/$NAME"

fairseq train "$OUT/data" --user-dir fw_fairseq --task language_modeling --arch fast_weight_lm_baevski_auli "${shape[@]}" "${machine[@]}" \
    "${model[@]}" --save-dir "$OUT/$NAME" --criterion adaptive_loss --ddp-backend legacy_ddp --tokens-per-sample $tokens --batch-size $((26 / GPUS)) \
    --required-batch-size-multiple 1 --optimizer adam --lr 1e-4 --lr-scheduler cosine --min-lr 2e-6 --warmup-updates "$WARMUP" --warmup-init-lr 1e-7 \
    --max-update "$UPDATES" --clip-norm 0.1 --no-epoch-checkpoints --save-interval-updates 2000 --keep-interval-updates 1 \
    --log-format json --log-interval "${LOG_INTERVAL:-100}" --seed 1 "$@" 2>&1 | tee -a "$OUT/$NAME/train.log"
