#!/usr/bin/env bash
# Translates the test set and prints a table row: detokenised BLEU of sacrebleu, and tokenised BLEU with compounds split.
#
# Data:     OUT of prepare.sh and train.sh: bin, raw/test.de, tok/test.de, runs/ROW
# Hardware: a GPU, or a CPU with --cpu
# Time:     not measured for newstest2014; about a minute for 1000 short sentences and a small model on one CPU core
# Expect:   the scores in train.sh; of the two, detokenised BLEU is the one to compare
# usage:    [OUT=folder] recipes/wmt14/eval.sh [ROW] [OPTION of fairseq-generate]...
#           no ROW: that of the newest best checkpoint. CHECKPOINT=checkpoint_last.pt takes another one of its folder
#
# Published BLEU of WMT14 English-German mostly has compounds split: "mother-in-law" counts as three words, so it is higher.
# Text that prepare.sh put in lower case is compared in lower case.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${OUT:-outputs/wmt14}
source=${SOURCE:-en}
target=${TARGET:-de}
name=${CHECKPOINT:-checkpoint_best.pt}
beam=${BEAM:-4}
penalty=${LENPEN:-0.6}
bin=${BIN:-.venv/bin}

fail() { echo "eval.sh: $*" >&2; exit 1; }

row=
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    row=$1
    shift
fi
if [ -z "$row" ]; then
    newest=$({ find "$out/runs" -mindepth 2 -maxdepth 2 -name "$name" -printf '%T@ %p\n' 2>/dev/null || true; } | sort -n | tail -n 1 | cut -d ' ' -f 2-)
    [ -n "$newest" ] || fail "no $name below $out/runs; train with recipes/wmt14/train.sh first"
    row=$(basename "$(dirname "$newest")")
fi
checkpoint=$out/runs/$row/$name
[ -f "$checkpoint" ] || fail "$checkpoint is missing; train with recipes/wmt14/train.sh $row first"

log=$out/runs/$row/generate.log
"$bin/fairseq-generate" "$out/bin" --user-dir "$PWD/fw_fairseq" --path "$checkpoint" --gen-subset test --beam "$beam" --lenpen "$penalty" \
    --remove-bpe --scoring sacrebleu --batch-size "${BATCH:-64}" "$@" >"$log" 2>&1 || { tail -n 1 "$log" >&2; exit 1; }
tokens=$out/runs/$row/test.tok.$target text=$out/runs/$row/test.$target
sed -n 's/^H-//p' "$log" | sort -n | cut -f 3 >"$tokens"
"$bin/sacremoses" -q -l "$target" detokenize -x <"$tokens" >"$text"
[ "$(wc -l <"$text")" = "$(wc -l <"$out/raw/test.$target")" ] || fail "$text and $out/raw/test.$target differ in their number of lines"

case_=()
grep -q '[[:upper:]]' "$out/tok/test.$target" || case_=(--lowercase)
compounds() { sed -E 's/ @-@ /-/g; s/([^ ])-([^ ])/\1 ##AT##-##AT## \2/g; s/([^ ])-([^ ])/\1 ##AT##-##AT## \2/g' "$1"; }
compounds "$out/tok/test.$target" >"$tokens.reference"
detokenised=$("$bin/sacrebleu" "$out/raw/test.$target" -i "$text" -l "$source-$target" -b -w 2 "${case_[@]}")
split=$(compounds "$tokens" | "$bin/sacrebleu" "$tokens.reference" -b -w 2 --tokenize none --force)
echo "| $row | $detokenised | $split | $(sed -nE 's/.*Translated .* \(([0-9.]+) sentences\/s.*/\1/p' "$log") |"
