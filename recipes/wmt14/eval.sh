#!/usr/bin/env bash
# Translates the test set and prints a table row: detokenised BLEU of sacrebleu, and tokenised BLEU with compounds split.
#
# Paper:    Schlag et al. 2021, table 1
# Data:     OUT of prepare.sh and train.sh: bin, raw/test.de, tok/test.de, runs/ROW
# Hardware: one GPU, or a CPU with CPU=1
# Time:     not measured for newstest2014; about a minute for 1000 short sentences and a small model on one CPU core
# Expected: the scores in the head of train.sh; detokenised BLEU is the one to compare with other work
# Usage:    recipes/wmt14/eval.sh ROW [OPTION of fairseq-generate]...
#           prints | row | detokenised BLEU | tokenised BLEU, compounds split | sentences/s |
#           CHECKPOINT=checkpoint_last.pt BEAM=5 LENPEN=1 recipes/wmt14/eval.sh dpfp2
#
# Published BLEU of WMT14 English-German mostly has compounds split: "mother-in-law" counts as three words, and the score is higher.
# Both scores are kept in the run's folder, where fw-plot tables schlag1 OUT finds the first.
# Text that prepare.sh put in lower case is compared in lower case.
source "$(dirname "$0")/../lib.sh"
find_programs
OUT=$(output_folder wmt14)
source=${SOURCE:-en}
target=${TARGET:-de}
need_row "a row that train.sh has trained" "$@"
row=$1 run=$OUT/runs/${RUN:-$1}
shift
checkpoint=$run/${CHECKPOINT:-checkpoint_best.pt}
need_file "$checkpoint" "recipes/wmt14/train.sh $row"

logged "$run/generate.log" fairseq-generate "$OUT/bin" --user-dir "$ROOT/fw_fairseq" --path "$checkpoint" --gen-subset test \
    --beam "${BEAM:-4}" --lenpen "${LENPEN:-0.6}" --remove-bpe --scoring sacrebleu --batch-size "${BATCH:-64}" "${machine[@]}" "$@"
tokens=$run/test.tok.$target text=$run/test.$target
sed -n 's/^H-//p' "$run/generate.log" | sort -n | cut -f 3 >"$tokens"
sacremoses -q -l "$target" detokenize -x <"$tokens" >"$text"
[ "$(wc -l <"$text")" = "$(wc -l <"$OUT/raw/test.$target")" ] || fail "$text and $OUT/raw/test.$target differ in their number of lines"

case_=()
grep -q '[[:upper:]]' "$OUT/tok/test.$target" || case_=(--lowercase)
compounds() { sed -E 's/ @-@ /-/g; s/([^ ])-([^ ])/\1 ##AT##-##AT## \2/g; s/([^ ])-([^ ])/\1 ##AT##-##AT## \2/g' "$1"; }
compounds "$OUT/tok/test.$target" >"$tokens.reference"
detokenised=$(sacrebleu "$OUT/raw/test.$target" -i "$text" -l "$source-$target" -b -w 2 "${case_[@]}")
split=$(compounds "$tokens" | sacrebleu "$tokens.reference" -b -w 2 --tokenize none --force)
echo "$detokenised $split" >"$run/bleu-test.txt"
echo "| $row | $detokenised | $split | $(sed -nE 's/.*Translated .* \(([0-9.]+) sentences\/s.*/\1/p' "$run/generate.log") |"
