#!/usr/bin/env bash
# Fine-tunes the converted Transformer as Mao 2022, appendix B.
#
# Data:     OUT/bin of prepare.sh, OUT/RULE-M.pt of convert.sh
# Hardware: published on one A40 (48 GB): batches of 26 segments of 512. With N GPUs BATCH is that of one
# Time:     published: 35 hours. Not run at this size yet
# Expect:   test perplexity at context 0 and 480, published: decay M=32 22.1 and 20.7, M=64 21.9 and 20.5; the Transformer 20.5 and 19.0
# usage:    [OUT=folder] [RULE=decay] [BATCH=26] recipes/baevski_auli/finetune.sh M [OPTION of fairseq-train]...
#           resumes from its last checkpoint
#           one machine:    LAUNCH="torchrun --nproc-per-node 2 -m fairseq_cli.train" BATCH=13 recipes/baevski_auli/finetune.sh 32
#           Slurm, 2 nodes: srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 1 env BATCH=13 recipes/baevski_auli/finetune.sh 32
#                           --distributed-port 29500
#           toy:            TOY=1 recipes/baevski_auli/finetune.sh 4          after TOY=1 prepare.sh and convert.sh 4
set -euo pipefail
cd "$(dirname "$0")/../.."

m=${1:?M, the features of a head, is missing: 32 or 64}
shift
out=${OUT:-outputs/baevski_auli}
rule=${RULE:-decay}
bin=${BIN:-.venv/bin}
launch=${LAUNCH:-$bin/fairseq-train}
precision=${PRECISION---fp16}
source=$out/$rule-$m.pt
[ -f "$source" ] || { echo "finetune.sh: $source is missing; run recipes/baevski_auli/convert.sh $m first" >&2; exit 1; }

length=512 batch=${BATCH:-26} updates=100000 warmup=4000
model=(--arch fast_weight_lm_baevski_auli)
if [ -n "${TOY:-}" ]; then
    length=32 batch=8 updates=20 warmup=5 precision="--cpu --num-workers 0"
    model=(--arch fast_weight_lm --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32
        --decoder-ffn-embed-dim 64 --decoder-attention-heads 4 --decoder-normalize-before --adaptive-input --tie-adaptive-weights
        --adaptive-input-cutoff 500,1000 --adaptive-softmax-cutoff 500,1000)
fi
norm=none
case $rule in *delta) norm=l2 ;; esac

# shellcheck disable=SC2086
exec $launch "$out/bin" --user-dir "$PWD/fw_fairseq" --task language_modeling --save-dir "${SAVE:-$out/runs/$rule-$m}" "${model[@]}" \
    --update-rule "$rule" --feature-map identity --feature-norm $norm --feature-dim "$m" --finetune-from-model "$source" \
    --criterion adaptive_loss --ddp-backend legacy_ddp --tokens-per-sample $length --batch-size "$batch" --max-update $updates \
    --optimizer adam --lr 1e-04 --lr-scheduler cosine --warmup-updates $warmup --warmup-init-lr 1e-07 --min-lr 2e-06 --clip-norm 0.1 \
    --keep-last-epochs 1 --log-format json --log-interval 100 --seed 1 $precision "$@"
