#!/usr/bin/env bash
# One row of table 1 of Schlag et al. 2021: the "big" Transformer with softmax or linear attention, trained as appendix E says.
#
# Data:     OUT/bin of prepare.sh
# Hardware: 3 GPUs of 16 GB: batches of 3584 tokens a GPU, 16 accumulated, so 172,000 tokens an update. With N GPUs pass --update-freq
#           48/N. Memory: 6+6 layers, width 1024, about 210 million parameters
# Time:     published: 4 days on three V100. Not run at this size yet, nor on several GPUs
# Expect:   published test BLEU: softmax 27.7, linear 26.8, performer32 24.4, performer128 25.3, performer256 27.7, dpfp2 26.9, dpfp4 27.1
# usage:    [OUT=folder] recipes/wmt14/train.sh ROW [OPTION of fairseq-train]...      resumes from its last checkpoint
#           ROW: softmax, linear (elu), performerM (M random features: 32, 128, 256), dpfpNU (2, 4)
#           one machine:    recipes/wmt14/train.sh dpfp2                      fairseq takes every GPU it sees; or by torchrun:
#                           LAUNCH="torchrun --nproc-per-node 3 -m fairseq_cli.train" recipes/wmt14/train.sh dpfp2
#           Slurm, 2 nodes: srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 recipes/wmt14/train.sh dpfp2 --distributed-port 29500 --update-freq 3
#           CPU:            PRECISION= recipes/wmt14/train.sh dpfp2 --cpu
#
# The publication says neither which attentions were linear nor the learning rate: here all three, and that of Ott et al. 2018.
set -euo pipefail
cd "$(dirname "$0")/../.."

row=${1:?ROW must be softmax, linear, performerM or dpfpNU}
shift
out=${OUT:-outputs/wmt14}
save=${SAVE:-$out/runs/$row}
shape=${SHAPE:-wmt_en_de_big} # of the architecture; iwslt_de_en is the other one
attentions=${ATTENTIONS:-encoder,decoder,cross}
precision=${PRECISION---fp16}
bin=${BIN:-.venv/bin}
launch=${LAUNCH:-$bin/fairseq-train}

linear=(--arch "fast_weight_transformer_$shape" --linear-attention "$attentions" --update-rule sum --feature-norm none --attention-norm)
case $row in
    softmax) model=(--arch "transformer_$shape") ;;
    linear) model=("${linear[@]}" --feature-map elu) ;;
    performer[1-9]*) model=("${linear[@]}" --feature-map favor --favor-prescale --favor-features "${row#performer}") ;;
    dpfp[1-9]*) model=("${linear[@]}" --feature-map dpfp --dpfp-nu "${row#dpfp}") ;;
    *) echo "train.sh: ROW is $row; it must be softmax, linear, performerM or dpfpNU" >&2; exit 2 ;;
esac
[ -d "$out/bin" ] || { echo "train.sh: $out/bin is missing; run recipes/wmt14/prepare.sh with the same OUT first" >&2; exit 1; }

# shellcheck disable=SC2086
exec $launch "$out/bin" --user-dir "$PWD/fw_fairseq" --save-dir "$save" "${model[@]}" --share-all-embeddings --dropout 0.3 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 0.0 \
    --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --max-tokens 3584 --update-freq 16 --max-epoch 45 $precision \
    --eval-bleu --eval-bleu-args '{"beam": 4, "lenpen": 0.6}' --eval-bleu-detok moses --eval-bleu-remove-bpe \
    --best-checkpoint-metric bleu --maximize-best-checkpoint-metric --keep-last-epochs 1 --log-format simple --log-interval 100 --seed 1 "$@"
