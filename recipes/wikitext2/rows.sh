# shellcheck shell=bash
# Sourced by table.sh and speed.sh after the lib: the data and the common options of the models.
source "$ROOT/recipes/mixers.sh"
model=(--arch fast_weight_lm --decoder-layers 4 --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 8
    --decoder-normalize-before --dropout 0.1 --ddp-backend legacy_ddp --tokens-per-sample 256)
adaptive=(--adaptive-input --adaptive-input-cutoff 2000,10000 --adaptive-input-factor 2 --adaptive-softmax-cutoff 2000,10000
    --adaptive-softmax-factor 2 --tie-adaptive-weights --criterion adaptive_loss)
# Sparse parts beside the dense model with as many parameters, whose feed-forward layers are as wide as that takes. A sparse output
# goes with neither an adaptive nor a tied one.
row_options[sparse_ffn_equal]="--mixer softmax --ffn-sparsity 16 --decoder-ffn-embed-dim 448"
row_options[softmax_full]="--mixer softmax --criterion cross_entropy"
row_options[sparse_equal]="${row_options[softmax_full]} --ffn-sparsity 16 --ffn-controller-dim 28 --decoder-ffn-embed-dim 3392"
row_options[sparse_equal]+=" --qkv-sparsity 16 --ffn-sru 32 --output-sparsity 4"

renamed ROWS "rows are arguments"
no_toy "leave TOY out, and set UPDATES=10 for a short table.sh or ROUNDS=1 for a short speed.sh"
need_data
OUT=$(output_folder wikitext2)
split_rows "$@"
[ ${#rows[@]} -gt 0 ] || rows=(softmax sum_elu delta_elu delta_dpfp gated decay gated_delta)
for row in "${rows[@]}"; do
    own_options "$row" || fail "ROW is $row; it must be one of $(row_names)"
done
if ! prepared "$OUT/data" "DATA=$(absolute "$DATA")"; then
    need_texts
    binarise "$OUT/data" "DATA=$(absolute "$DATA")" -- --only-source \
        --trainpref "$DATA/train.txt" --validpref "$DATA/valid.txt" --testpref "$DATA/test.txt"
fi
