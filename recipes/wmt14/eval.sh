#!/usr/bin/env bash
# Translates the test set and prints a table row: detokenised BLEU of sacrebleu, and tokenised BLEU with compounds split.
#
# Paper:    Schlag et al. 2021, table 1
# Data:     OUT of prepare.sh and train.sh: bin, raw/test.de, tok/test.de, runs/ROW; a row for each test set that prepare.sh got
# Hardware: one GPU, or a CPU with CPU=1
# Time:     about a minute for 1000 short sentences and a small model on one CPU core
# Expected: the scores in the head of train.sh; detokenised BLEU is the one to compare with other work
# Usage:    recipes/wmt14/eval.sh ROW [OPTION of fairseq-generate]...
#           prints | row | detokenised BLEU | tokenised BLEU, compounds split | sentences/s |
#           TEST_LINES=100 recipes/wmt14/eval.sh dpfp2      the first sentences alone
#           CHECKPOINT=checkpoint_last.pt BEAM=5 LENPEN=1 recipes/wmt14/eval.sh dpfp2
#
# Published BLEU of WMT14 English-German mostly has compounds split: "mother-in-law" counts as three words, and the score is higher.
# Both scores are kept in the run's folder, where docs/results/figures/tables.py schlag1 OUT finds the first.
# Text that prepare.sh put in lower case is compared in lower case.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
OUT=$(output_folder wmt14)
source=${SOURCE:-en}
target=${TARGET:-de}
need_row "a row that train.sh has trained" "$@"
row=$1 run=$OUT/runs/${RUN:-$1}
shift
checkpoint=$run/${CHECKPOINT:-checkpoint_best.pt}
need_file "$checkpoint" "recipes/wmt14/train.sh $row"

shorter=()
[ -z "$TOY" ] || shorter=(--max-len-a 0 --max-len-b 12) # of a model that has not learnt to end

compounds() { sed -E 's/ @-@ /-/g; s/([^ ])-([^ ])/\1 ##AT##-##AT## \2/g; s/([^ ])-([^ ])/\1 ##AT##-##AT## \2/g' "$1"; }

score() { # SUBSET OPTION...: translates one test set and prints its row
    local set=$1 data=$OUT/bin log=$run/generate.log tokens=$run/$1.tok.$target text=$run/$1.$target case_=() label=$row folder detokenised split
    [ "$set" = test ] || log=$run/generate-$set.log label="$row $set"
    if [ -n "${TEST_LINES:-}" ]; then
        data=$run/first-$TEST_LINES log=${log%.log}-first-$TEST_LINES.log
        "$PYTHON" "$ROOT/recipes/cut.py" "$OUT/bin" "$set" "$TEST_LINES" "$data"
    fi
    [ ! -t 2 ] || say "translating $set; the log is $log"
    logged "$log" fairseq-generate "$data" --user-dir "$ROOT/fw_fairseq" --path "$checkpoint" --gen-subset "$set" \
        --beam "${BEAM:-4}" --lenpen "${LENPEN:-0.6}" --remove-bpe --scoring sacrebleu --batch-size "${BATCH:-64}" --log-format simple --log-interval 20 \
        "${machine[@]}" "${shorter[@]}" "${@:2}"
    [ "$data" = "$OUT/bin" ] || rm -r "$data"
    sed -n 's/^H-//p' "$log" | sort -n | cut -f 3 >"$tokens"
    sacremoses -q -l "$target" detokenize -x <"$tokens" >"$text"
    for folder in raw tok; do # as long as what was translated
        head -n "${TEST_LINES:--0}" "$OUT/$folder/$set.$target" >"$text.$folder"
    done
    [ "$(wc -l <"$text")" = "$(wc -l <"$text.raw")" ] || fail "$text and $OUT/raw/$set.$target differ in their number of lines"
    grep -q '[[:upper:]]' "$text.tok" || case_=(--lowercase)
    compounds "$text.tok" >"$tokens.reference"
    detokenised=$(sacrebleu "$text.raw" -i "$text" -l "$source-$target" -b -w 2 "${case_[@]}")
    split=$(compounds "$tokens" | sacrebleu "$tokens.reference" -b -w 2 --tokenize none --force)
    [ -n "${TEST_LINES:-}" ] || echo "$detokenised $split" >"$run/bleu-$set.txt" # the tables read whole test sets
    echo "| $label | $detokenised | $split | $(sed -nE 's/.*Translated .* \(([0-9.]+) sentences\/s.*/\1/p' "$log") |"
}

for reference in "$OUT"/tok/test*."$target"; do
    set=${reference##*/}
    score "${set%."$target"}" "$@"
done
