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

need_finished() { # ROW...: fails where one of language.sh is not finished for a seed
    local row seed run
    for row; do
        for seed in $seeds; do
            run=$OUT/runs/language/$row-$dropout-$seed
            is_finished "$run" || fail "$run is not finished; run recipes/convergence/language.sh $row with the same OUT, DROPOUT and SEEDS first"
        done
    done
}

word_log() { # RUN NAME OPTION...: RUN/words-NAME.log gets each word of the test text and its probability by the best checkpoint
    evaluate "$1" checkpoint_best.pt "words-$2" "${@:3}" --output-word-probs >/dev/null
}

segments_word_log() { # RUN: RUN/words-segments.log
    word_log "$1" segments "${segment_task[@]}" --max-tokens 4096
}

print_spans() { # NAME HEAD CELLS ROW...: a table of the lines that NAME_spans prints for each run, collected in OUT/NAME.txt
    local name=$1 head=$2 cells=$3 header='' row seed run found
    for row in "${@:4}"; do
        for seed in $seeds; do
            run=$OUT/runs/language/$row-$dropout-$seed
            found=$(kept "$run/$name.spans" "${name}_spans" "$run")
            rm -f "$run"/words-*.log # a line for each segment, with all words
            if [ -z "$header" ]; then
                header="| row | seed | $head |$(tail -n +2 <<<"$found" | awk '{ printf " %d |", $1 }')"
                echo "$header"
                sed 's/[^|]\+/---:/g; s/^|---:|/|---|/' <<<"$header"
            fi
            echo "| $row | $seed |$(awk "$cells" <<<"$found")"
            collect "$OUT/$name.txt" "$row $dropout $seed" "$found"
        done
    done
}
