#!/usr/bin/env bash
# Evaluates finished rows of language.sh on the test text in segments, and prints how the perplexity changes with the words before a word.
#
# Paper:    none; the question is how much of a segment each model makes use of
# Data:     OUT of language.sh, where the rows are finished
# Hardware: one CPU core, 1 GB of memory
# Time:     17 seconds of a processor for a row on an AMD EPYC
# Expected: softmax 74.3, 56.5, 47.6, 42.1, 38.0, 36.8, 35.1, 34.6, 34.8 with SEEDS=2: docs/results/convergence.md
# Usage:    recipes/convergence/position.sh ROW...      rows of language.sh
#           recipes/convergence/position.sh softmax delta_dpfp sum_elu
#           DROPOUT=0.2 SEEDS="1 2" recipes/convergence/position.sh softmax
#           TOY=1 recipes/convergence/position.sh softmax      after TOY=1 language.sh softmax
#
# The segments are as long as those of the training and nothing is carried over between them. A column has the perplexity of all words
# from half of its place to its place: 1 is the first word of each segment, 2 the second, 4 the third and the fourth. OUT/position.txt
# collects the lines that docs/results/figures/convergence.py draws.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
source "$ROOT/recipes/convergence/end.sh"
find_programs
OUT=$(output_folder convergence)
source "$ROOT/recipes/convergence/model.sh"
split_rows "$@"
need_row "a row of language.sh, for example softmax" "${rows[@]}"
[ ${#options[@]} = 0 ] || fail "${options[0]} has no effect here; leave it out"
need_finished "${rows[@]}"

position_spans() { # RUN: END PERPLEXITY of each span
    segments_word_log "$1" &&
        "$PYTHON" "$ROOT/recipes/convergence/words.py" position "$1/words-segments.log" "$length"
}

print_spans position 1 '{ printf " %.2f |", $2 }' "${rows[@]}"
