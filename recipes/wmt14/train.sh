#!/usr/bin/env bash
# Trains one row of table 1: the big Transformer with softmax or linear attention, with the hyperparameters of appendix E.
#
# Paper:    Schlag et al. 2021, table 1. Rows: softmax, linear (elu), performerM (M random features: 32, 128, 256), dpfpNU (2, 4).
#           prescaledM is performerM with --favor-prescale, which the paper does not have. The ending -encoder, -decoder or -cross makes
#           only that attention linear, for example dpfp2-decoder
# Data:     OUT/bin of prepare.sh
# Hardware: 3 GPUs of 16 GB in the paper; GPUS workers share the 172,032 tokens of an update, and BATCH of them, 3584 without it, are
#           computed at once. A run needs 7.5 GB of disk: three checkpoints of 2.5 GB
# Time:     4 days on three V100 in the paper; not run at this size, nor on several GPUs; recipes/README.md has estimates, and CHECK=1
#           measures yours
# Expected: test BLEU in the paper: softmax 27.7, linear 26.8, performer32 24.4, performer128 25.3, performer256 27.7, dpfp2 26.9, dpfp4 27.1
# Usage:    recipes/wmt14/train.sh ROW [OPTION of fairseq-train]...      resumes from the last checkpoint of the row
#           GPUS=3 recipes/wmt14/train.sh dpfp2
#           GPUS=3 LAUNCH="torchrun --nproc-per-node 3" recipes/wmt14/train.sh dpfp2
#           GPUS=16 srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 recipes/wmt14/train.sh dpfp2 --distributed-port 29500
#           CHECK=1 recipes/wmt14/train.sh dpfp2    20 updates: speed, memory, disk, hours
#           TOY=1 recipes/wmt14/train.sh dpfp2      a tiny model on the CPU, after TOY=1 prepare.sh
#
# SHAPE names the architecture: wmt_en_de_big, or iwslt_de_en. PRECISION is bf16, the default where every GPU has it, fp16, the default
# elsewhere, fp32 or tf32. The paper does not name its own, nor which attentions are linear, nor the learning rate: this recipe makes all
# three linear and takes the rate of Ott et al. 2018 for batches accumulated over 16, 0.001. No row drops attention weights, as in their
# configuration. The model has 6+6 layers of width 1024, about 210 million parameters.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
renamed ATTENTIONS "name them in the row, for example dpfp2-decoder"
OUT=$(output_folder wmt14)
source "$ROOT/recipes/wmt14/rows.sh"
need_row "$kinds" "$@"
row=$1
shift
row_model "$row"
need_folder "$OUT/bin" recipes/wmt14/prepare.sh

default_precision=fp16 trial_of=wmt14
tokens=172032 BATCH=${BATCH:-3584}
if [ -n "$TOY" ]; then
    tokens=1024 BATCH=512
    model+=(--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 64
        --decoder-ffn-embed-dim 64 --encoder-attention-heads 4 --decoder-attention-heads 4 --max-update 20)
fi
share $tokens --max-tokens
train "$OUT/runs/${RUN:-$row}" "$OUT/bin" "${model[@]}" --share-all-embeddings --dropout 0.3 --attention-dropout 0.0 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 0.0 \
    --lr 0.001 --lr-scheduler inverse_sqrt --warmup-updates 4000 "${batch[@]}" --max-epoch 45 \
    --eval-bleu --eval-bleu-args '{"beam": 4, "lenpen": 0.6}' --eval-bleu-detok moses --eval-bleu-remove-bpe \
    --best-checkpoint-metric bleu --maximize-best-checkpoint-metric --no-epoch-checkpoints --log-format simple --log-interval 100 "$@"
