#!/usr/bin/env bash
# Makes your own text ready for train.sh: a dictionary of its most frequent words, and the binary files of fairseq.
#
# Paper:    Jaszczur et al. 2021 (Sparse is Enough in Scaling Transformers), which trains on C4
# Data:     DATA, a folder with train.txt, valid.txt and test.txt; nothing is downloaded
# Hardware: any CPU
# Time:     a minute for WikiText-2
# Expected: OUT/bin with a dictionary of 32,000 entries, or of all words where there are fewer
# Usage:    DATA=folder recipes/terraformer/prepare.sh     a second call continues where the first one stopped
#           DATA=folder OUT=folder VOCABULARY=16000 recipes/terraformer/prepare.sh
#           TOY=1 recipes/terraformer/prepare.sh           a small text, to try all steps on a CPU in a minute
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
own_text terraformer 32000
binarise "$OUT/bin" "${made_with[@]}" -- --only-source --nwordssrc "$vocabulary" "${texts[@]}"
