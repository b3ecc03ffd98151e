#!/usr/bin/env bash
# Trains translation models on Multi30k until their validation loss no longer falls, and prints their BLEU.
#
# Paper:    none; a small relative of Schlag et al. 2021, table 1. Rows: those of recipes/wmt14/train.sh
# Data:     DATA, a folder with train, val and test_2016_flickr, each in .en and .de (29,000 image captions); nothing is downloaded
# Hardware: one CPU core, 1 GB of memory
# Time:     35 to 60 minutes for a row on an AMD EPYC, performer128 several times that; 5 to 8 on an H100 or H200, five to nine
#           rows at a time
# Expected: detokenised BLEU 38.6 (softmax), 37.2 (dpfp2), 35.8 (linear), 29.8 (performer128), 38.5 (dpfp2-decoder), 38.3 (linear-decoder),
#           37.8 (performer128-decoder), means of two seeds: docs/results/convergence.md
# Usage:    DATA=folder recipes/convergence/translation.sh [ROW]... [OPTION of fairseq-train]...
#           DATA=folder SEEDS="1 2" recipes/convergence/translation.sh softmax dpfp2-decoder
#           DATA=folder TEST="test_2016_flickr test_2017_flickr" recipes/convergence/translation.sh      a row for each test set
#           recipes/convergence/translation.sh --status     which rows are done, and how far the others are
#           TOY=1 DATA=folder recipes/convergence/translation.sh dpfp2      a tiny model
#
# A call resumes each row from its last checkpoint; finished rows are only printed again. No row is cut short. OUT/translated.txt collects
# the scores and OUT/translated_curves.txt the validations; docs/results/figures/convergence.py draws both.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/convergence/end.sh"
export SHAPE=iwslt_de_en
source "$ROOT/recipes/wmt14/rows.sh"
find_programs
OUT=$(output_folder convergence_translation)
seeds=${SEEDS:-1} dropout=${DROPOUT:-0.1} width=256 batch=2048 warm_up=200
[ "${1:-}" != --status ] || { show_status .; exit 0; }
split_rows "$@"
[ ${#rows[@]} -gt 0 ] || rows=(softmax dpfp2 linear performer128 dpfp2-decoder linear-decoder performer128-decoder)
for row in "${rows[@]}"; do row_model "$row"; done # says what is wrong with one before the first trains
[ -z "$TOY" ] || width=16 batch=512 warm_up=4
[ -n "${DATA:-}" ] || fail "DATA is missing; it must be the folder with train, val and test_2016_flickr, each in .en and .de"
export OUT CPU
VALID=${VALID:-val} TEST=${TEST:-test_2016_flickr} BPE=${BPE:-8000} LOWERCASE=1 "$ROOT/recipes/wmt14/prepare.sh"
fit=(--encoder-layers 3 --decoder-layers 3 --encoder-embed-dim "$width" --decoder-embed-dim "$width" --encoder-ffn-embed-dim $((2 * width))
    --decoder-ffn-embed-dim $((2 * width)) --encoder-attention-heads 4 --decoder-attention-heads 4 --encoder-normalize-before
    --decoder-normalize-before --share-all-embeddings --dropout "$dropout" --attention-dropout 0.0 --weight-decay 1e-4
    --criterion fast_weight_label_smoothed_cross_entropy --loss-chunk 256 --label-smoothing 0.1 --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0
    --max-tokens "$batch" --warmup-updates "$warm_up" --warmup-init-lr 0.0002)

echo "| row | seed | best validation perplexity | epochs | hours |"
echo "|---|---:|---:|---:|---:|"
for row in "${rows[@]}"; do
    row_model "$row"
    for seed in $seeds; do
        run=$OUT/runs/$row-$dropout-$seed
        SEED=$seed to_the_end "$run" "$OUT/bin" 0.002 "${model[@]}" "${fit[@]}" "${options[@]}"
        echo "| $row | $seed | $(cells "$run") |"
        collect_curve "$OUT/translated_curves.txt" "$row $dropout $seed" "$run"
    done
done
echo
echo "| run | detokenised BLEU | tokenised, compounds split | sentences/s |"
echo "|---|---:|---:|---:|"
for row in "${rows[@]}"; do
    for seed in $seeds; do
        run=$OUT/runs/$row-$dropout-$seed
        BEAM=5 LENPEN=1 RUN=${run##*/} kept "$run/table" "$ROOT/recipes/wmt14/eval.sh" "${run##*/}"
        scores=$(for file in "$run"/bleu-*.txt; do basename "$file" .txt | sed "s|^bleu-\(.*\)|\1 $(<"$file")|"; done)
        collect "$OUT/translated.txt" "$row $dropout $seed" "$scores"
    done
done
