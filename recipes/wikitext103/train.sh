#!/usr/bin/env bash
# One row of tables 2 to 5 of Schlag et al. 2021: language models on WikiText-103 from scratch.
#
# Data:     OUT/bin of prepare.sh
# Hardware: published on two V100 in up to four days. With N GPUs a batch is split over them: BATCH is that of one
# Time:     not run at this size yet
# Expect:   published test perplexity (sliding window; eval.sh): see ROW
# usage:    [OUT=folder] [BATCH=n] recipes/wikitext103/train.sh SIZE ROW [OPTION of fairseq-train]...      resumes from its last checkpoint
#           SIZE: small (width 128, segments of 256, 40M parameters) or medium (256, 384, 90M)
#           ROW, with the published perplexity of small and medium:
#             transformer 34.1 29.6   linear 38.3 33.0   delta 35.5 31.5   performer 39.6 33.8   performer_delta 37.2 31.8
#             medium: delta_norm 32.1   delta_nopos_norm 31.2   delta_nopos 31.1
#             carry-over, medium: delta_stream 29.4   linear_stream (breaks: above 260)
#               transformer_xl_stream, evaluated by XL_MEMORY=n: 15 65.5   127 30.1   255 27.4   767 25.5
#             local_attention, abc, linformer: comparators that are not in these tables
#             small, larger features: performer16 38.8   performer16_delta 37.0   dpfp1 38.8   dpfp1_delta 35.0
#           SIZE base, ROW srupp or srupp5: SRU++ base of Lei 2021, memories carried along; the schedule is this file's, not the
#             publication's. Published for srupp: 148M parameters, 18.3 with 2560 tokens of attention (SRUPP_MEMORY=2560 eval.sh)
#           one machine:    LAUNCH="torchrun --nproc-per-node 2 -m fairseq_cli.train" BATCH=48 recipes/wikitext103/train.sh small delta
#           Slurm, 2 nodes: srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 4 env BATCH=12 recipes/wikitext103/train.sh small delta
#                           --distributed-port 29500
#           toy:            TOY=1 recipes/wikitext103/train.sh small delta         a tiny model on the CPU, after TOY=1 prepare.sh
#
# Batches of 96 (small) and 56 segments for about 120 and 70 epochs. The publication names the first learning rate and the warm-up, not
# the schedule: cosine, here.
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

size=${1:?SIZE must be small, medium or base} row=${2:?ROW is missing; the head of this file lists them}
shift 2
out=$(output_folder wikitext103)
save=${SAVE:-$out/runs/$size-$row}
bin=${BIN:-.venv/bin}
launch=${LAUNCH:-$bin/fairseq-train}
[ -d "$out/bin" ] || { echo "train.sh: $out/bin is missing; run recipes/wikitext103/prepare.sh with the same OUT and TOY first" >&2; exit 1; }

case $size in
    small) length=256 batch=${BATCH:-96} updates=500000 features=8 ;;
    medium) length=384 batch=${BATCH:-56} updates=335000 features=16 ;;
    base) length=512 batch=${BATCH:-16} updates=400000 features= arch=srupp_lm_wiki103_base ;;
    *) echo "train.sh: SIZE is $size; it must be small, medium or base" >&2; exit 2 ;;
esac
case $size,$row in
    base,srupp | base,srupp5) ;;
    base,* | *,srupp | *,srupp5) echo "train.sh: SIZE $size has no ROW $row; base goes with srupp and srupp5, and they with base" >&2; exit 2 ;;
esac
linear=(--update-rule sum --feature-norm none --attention-norm)
delta=(--update-rule delta --feature-norm sum)
case $row in
    transformer) model=(--mixer softmax) ;;
    linear | linear_stream) model=("${linear[@]}" --feature-map elu) ;;
    delta | delta_stream) model=("${delta[@]}" --feature-map elu) ;;
    delta_norm | delta_nopos_norm) model=("${delta[@]}" --feature-map elu --attention-norm) ;;
    delta_nopos) model=("${delta[@]}" --feature-map elu) ;;
    performer) model=("${linear[@]}" --feature-map favor --favor-features "$features") ;;
    performer_delta) model=("${delta[@]}" --feature-map favor --favor-features "$features") ;;
    performer16) model=("${linear[@]}" --feature-map favor --favor-features 16) ;;
    performer16_delta) model=("${delta[@]}" --feature-map favor --favor-features 16) ;;
    dpfp1) model=("${linear[@]}" --feature-map dpfp --dpfp-nu 1) ;;
    dpfp1_delta) model=("${delta[@]}" --feature-map dpfp --dpfp-nu 1) ;;
    srupp) model=(--srupp-dropout 0.1) ;;
    srupp5) model=(--mixer-pattern "sru*4,srupp" --sru-projection 768 --srupp-dropout 0.1) ;;
    transformer_xl_stream) model=(--mixer transformer_xl --xl-memory $length) ;;
    local_attention | abc | linformer) model=(--mixer "$row") ;;
    *) echo "train.sh: ROW is $row; the head of this file lists what there is" >&2; exit 2 ;;
esac
task=language_modeling
case $row in *_stream | srupp*) task=stateful_language_modeling ;; esac
case $row in *_stream | *_nopos*) model+=(--no-token-positional-embeddings) ;; esac
if [ -n "${TOY:-}" ]; then
    length=32 batch=8 updates=20
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32)
    [ "$size" = base ] || model+=(--decoder-ffn-embed-dim 64)
    model+=(--adaptive-input-cutoff 500,1000 --adaptive-softmax-cutoff 500,1000 --cpu --num-workers 0 --warmup-updates 5)
fi

mkdir -p "$save"
# shellcheck disable=SC2086
$launch "$out/bin" --user-dir "$PWD/fw_fairseq" --task $task --save-dir "$save" --arch "${arch:-fast_weight_lm_wiki103_$size}" \
    --decoder-normalize-before --tokens-per-sample $length --batch-size "$batch" --required-batch-size-multiple 1 --criterion fast_weight_cross_entropy \
    --ddp-backend legacy_ddp --optimizer adam --lr 0.00025 --lr-scheduler cosine --warmup-updates 2000 --max-update $updates \
    --clip-norm 0.25 --keep-last-epochs 1 --log-format json --log-interval 100 --seed 1 "${model[@]}" "$@" 2>&1 | tee -a "$save/train.log"
