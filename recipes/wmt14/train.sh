#!/usr/bin/env bash
# Trains one row of table 1: the big Transformer with softmax or linear attention, with the hyperparameters of appendix E.
#
# Paper:    Schlag et al. 2021, table 1. Rows: softmax, linear (elu), performerM (M random features: 32, 128, 256), dpfpNU (2, 4).
#           prescaledM is performerM with --favor-prescale, which the paper does not have. The ending -encoder, -decoder or -cross makes
#           only that attention linear, for example dpfp2-decoder
# Data:     OUT/bin of prepare.sh
# Hardware: 3 GPUs of 16 GB in the paper; GPUS workers share the 48 batches of 3584 tokens (172,000 tokens) of an update
# Time:     4 days on three V100 in the paper; not run at this size, nor on several GPUs; recipes/README.md has estimates
# Expected: test BLEU in the paper: softmax 27.7, linear 26.8, performer32 24.4, performer128 25.3, performer256 27.7, dpfp2 26.9, dpfp4 27.1
# Usage:    recipes/wmt14/train.sh ROW [OPTION of fairseq-train]...      resumes from the last checkpoint of the row
#           GPUS=3 recipes/wmt14/train.sh dpfp2
#           GPUS=3 LAUNCH="torchrun --nproc-per-node 3" recipes/wmt14/train.sh dpfp2
#           GPUS=16 srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 recipes/wmt14/train.sh dpfp2 --distributed-port 29500
#           CPU=1 recipes/wmt14/train.sh dpfp2
#
# SHAPE names the architecture: wmt_en_de_big, or iwslt_de_en. PRECISION is bf16, the default where every GPU has it, fp16, the default
# elsewhere, fp32 or tf32. The paper does not name its own, nor which attentions are linear, nor the learning rate: this recipe makes all
# three linear and takes the rate of Ott et al. 2018 for batches accumulated over 16, 0.001. No row drops attention weights, as in their
# configuration. The model has 6+6 layers of width 1024, about 210 million parameters.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
renamed ATTENTIONS "name them in the row, for example dpfp2-decoder"
no_toy "leave TOY out, and give the sizes of a small model, for example SHAPE=iwslt_de_en with --encoder-layers 2 --decoder-layers 2"
OUT=$(output_folder wmt14)
source "$ROOT/recipes/wmt14/rows.sh"
need_row "$kinds" "$@"
row=$1
shift
row_model "$row"
need_folder "$OUT/bin" recipes/wmt14/prepare.sh
choose_precision fp16 "$@"

batches=$(share 48)
train "$OUT/runs/${RUN:-$row}" "$OUT/bin" "${model[@]}" --share-all-embeddings --dropout 0.3 --attention-dropout 0.0 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 0.0 \
    --lr 0.001 --lr-scheduler inverse_sqrt --warmup-updates 4000 --max-tokens 3584 --update-freq "$batches" --max-epoch 45 \
    --eval-bleu --eval-bleu-args '{"beam": 4, "lenpen": 0.6}' --eval-bleu-detok moses --eval-bleu-remove-bpe \
    --best-checkpoint-metric bleu --maximize-best-checkpoint-metric --keep-last-epochs 1 --log-format simple --log-interval 100 "$@"
