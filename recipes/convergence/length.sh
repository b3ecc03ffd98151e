#!/usr/bin/env bash
# Evaluates finished rows of language.sh on the test text as one stream, and prints how the perplexity changes with the words read so far.
#
# Paper:    none; the question is which memories are still right far beyond the length of training
# Data:     OUT of language.sh, where the rows are finished
# Hardware: one CPU core, 1 GB of memory
# Time:     half a minute for a row on an AMD EPYC
# Expected: the perplexity of delta_elu-stream is 8% to 38% below that of its segments up to 245,569 words, that of decay-stream 2% to 9%,
#           that of gated_delta-stream 4% to 12%; that of delta_elu-nopos rises above it after 1,024, to 27 and 34 times at
#           the end (seeds 1 and 2): docs/results/convergence.md
# Usage:    recipes/convergence/length.sh ROW...      rows of language.sh that end in -stream or -nopos
#           recipes/convergence/length.sh delta_elu-stream decay-stream
#           DROPOUT=0.2 SEEDS="1 2" recipes/convergence/length.sh gated_delta-stream
#           TOY=1 recipes/convergence/length.sh delta_elu-stream      after TOY=1 language.sh delta_elu-stream
#
# Words differ in how hard they are to predict. Each cell is therefore the perplexity in the stream divided by that of the same words in
# segments as long as those of the training, which begin with an empty memory: below 1 the memory helps, far above 1 the model has
# diverged. A column's words are those from half of its length to its length. OUT/length.txt collects the lines that docs/results/figures/convergence.py draws.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/convergence/end.sh"
find_programs
OUT=$(output_folder convergence)
source "$ROOT/recipes/convergence/model.sh"
split_rows "$@"
kinds="a row of language.sh that ends in -stream or -nopos, for example delta_elu-stream"
need_row "$kinds" "${rows[@]}"
[ ${#options[@]} = 0 ] || fail "${options[0]} has no effect here; leave it out"
for row in "${rows[@]}"; do
    [[ $row =~ ^[a-z0-9_-]+-(stream|nopos)$ && $row != softmax-* ]] || fail "ROW is $row; it must be $kinds"
done
need_finished "${rows[@]}"

length_spans() { # RUN: END STREAM SEGMENTS of each span
    word_log "$1" stream --task stateful_language_modeling --tokens-per-sample "$length" --batch-size 1 &&
        segments_word_log "$1" &&
        "$PYTHON" "$ROOT/recipes/convergence/words.py" length "$1/words-stream.log" "$1/words-segments.log" "$length"
}

print_spans length "perplexity to $length words" '{ printf NR == 1 ? " %.2f |" : " %.3f |", NR == 1 ? $2 : $2 / $3 }' "${rows[@]}"
