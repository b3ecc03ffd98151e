# shellcheck shell=bash
# Sourced after end.sh and OUT: the sizes, the training and the evaluation that language models of this folder share.
dropout=${DROPOUT:-0.1} seeds=${SEEDS:-1} words=4000 length=256 batch=2048 width=128 context=192 warm_up=200
[ -z "$TOY" ] || words=300 length=32 batch=256 width=16 context=16 warm_up=4
model=(--decoder-layers 4 --decoder-embed-dim "$width" --decoder-input-dim "$width" --decoder-output-dim "$width"
    --decoder-ffn-embed-dim $((4 * width)) --decoder-attention-heads 4 --decoder-normalize-before --share-decoder-input-output-embed
    --dropout "$dropout")
fit=(--max-tokens "$batch" --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 1.0 --warmup-updates "$warm_up")
# softmax has fairseq's model and its cross_entropy. The loss of the others is the same, computed in less time.
criterion=(--criterion fast_weight_cross_entropy --loss-chunk 256)
segment_task=(--task language_modeling --tokens-per-sample "$length")

evaluate() { # RUN CHECKPOINT NAME OPTION...: the perplexity of the test text
    logged "$1/$3.log" fairseq-eval-lm "$OUT/words" --user-dir "$ROOT/fw_fairseq" --path "$1/$2" --gen-subset test "${machine[@]}" "${@:4}"
    perplexity "$1/$3.log"
}

segments() { # RUN: in segments without context, by the best checkpoint
    kept "$1/segments" evaluate "$1" checkpoint_best.pt segments "${segment_task[@]}" --max-tokens 4096
}
