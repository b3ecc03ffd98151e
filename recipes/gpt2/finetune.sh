#!/usr/bin/env bash
# Mao 2022, appendix A: 100,000 updates of 32 texts of 1024 tokens, learning rate 6e-4, clip 1.0, validation every 4000 updates.
#   Data      what convert.sh left in OUT
#   Hardware  one GPU with 40 GB; several by LAUNCH below, GPUS of them share the 32 texts (1, 2, 4, 8, 16 or 32)
#   Time      13 hours on an A100 in the paper; not run here for want of the data and a GPU
#   Expected  the paper's perplexity on The Pile's validation text: GPT-2 14.5; m = 4, phi: sum 20.0, gated 17.1, decay 17.1, delta
#             with norm 20.1; gated 16.8 and 16.4, decay 16.1 and 14.6 for m = 16 and 32; local_attention 19.4.
#             fw-plot tables mao1 OUT (and mao2) puts yours beside them
#   RULE=decay M=32 recipes/gpt2/finetune.sh           goes on where it stopped
#   RULE=softmax recipes/gpt2/finetune.sh              GPT-2 itself, tuned to the text: where the paper's models start and what they aim at
#   GPUS=2 LAUNCH="torchrun --nproc_per_node 2" recipes/gpt2/finetune.sh
#   two nodes by Slurm, one task each:
#   GPUS=2 srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 1 bash -c 'LAUNCH="torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend
#       c10d --rdzv_endpoint $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500" recipes/gpt2/finetune.sh'
# The paper names neither optimizer nor schedule: Adam, 4000 updates of warm-up and cosine, as in its appendix B. With Hydra, for sweeps:
# finetune.yaml beside this file.
source "$(dirname "$0")/settings.sh"

GPUS=${GPUS:-1}
[ $((32 % GPUS)) = 0 ] || { echo "GPUS is $GPUS; it must divide 32, the texts of an update" >&2; exit 2; }
UPDATES=${UPDATES:-${TOY:+6}} WARMUP=${WARMUP:-${TOY:+2}} EVERY=${EVERY:-${TOY:+3}}
UPDATES=${UPDATES:-100000} WARMUP=${WARMUP:-4000} EVERY=${EVERY:-4000}
[ -n "$TOY" ] || machine=(--fp16)
case $RULE in
    softmax | local_attention) model=(--mixer "$RULE") ;;
    *) model=(--update-rule "$RULE" "${attention[@]}") ;;
esac

fairseq train "$OUT/data" --user-dir fw_fairseq --task language_modeling --arch fast_weight_lm_gpt2_small "${shape[@]}" "${machine[@]}" \
    --decoder-normalize-before --no-scale-embedding --activation-fn gelu_accurate --max-target-positions $tokens "${model[@]}" \
    --finetune-from-model "$OUT/$NAME/start.pt" --save-dir "$OUT/$NAME" --criterion cross_entropy --tokens-per-sample $tokens \
    --batch-size $((32 / GPUS)) --optimizer adam --lr 6e-4 --lr-scheduler cosine --min-lr 2e-6 --warmup-updates "$WARMUP" \
    --warmup-init-lr 1e-7 --max-update "$UPDATES" --clip-norm 1.0 --no-epoch-checkpoints --validate-interval-updates "$EVERY" \
    --save-interval-updates "$EVERY" --keep-interval-updates 1 --log-format json --log-interval "${LOG_INTERVAL:-100}" --seed 1 "$@" 2>&1 |
    tee -a "$OUT/$NAME/train.log"
