#!/usr/bin/env bash
# WMT14 English-German, or your own parallel text: normalised, tokenised, joint BPE, binarised for fairseq.
#
# Data:     downloaded: Europarl v7, Common Crawl and News Commentary v9 (1.7 GB), checked by SHA-256; newstest2013 and newstest2014
#           (full) through sacrebleu, which has their checksums. DATA=folder takes train, valid and test with .en and .de from there
# Hardware: any CPU, 16 GB, 15 GB of disk for WMT14; WORKERS processes
# Time:     hours for WMT14, one minute for 29,000 sentences (Multi30k)
# Expect:   OUT/bin for fairseq; OUT/raw/test.de and OUT/tok/test.de, which eval.sh scores against
# usage:    [DATA=folder] [OUT=folder] recipes/wmt14/prepare.sh       every finished file stays: run it again to go on
#           DATA=multi30k VALID=val TEST=test_2016_flickr BPE=8000 LOWERCASE=1 OUT=outputs/multi30k recipes/wmt14/prepare.sh
#
# Needs the extra `translation` (sacremoses, subword-nmt).
set -euo pipefail
cd "$(dirname "$0")/../.."
source recipes/prepared.sh

out=${OUT:-outputs/wmt14}
source=${SOURCE:-en}
target=${TARGET:-de}
data=${DATA:-}
train=${TRAIN:-train} valid=${VALID:-valid} test=${TEST:-test} # names of the files in DATA
merges=${BPE:-32000}
lowercase=${LOWERCASE:-0}
longest=${LONGEST:-250} # words of a training sentence
workers=${WORKERS:-$(nproc)}
bin=${BIN:-.venv/bin}

fail() { echo "prepare.sh: $*" >&2; exit 1; }

make() { # FILE COMMAND...: its output, unless the file is there; a file that is there is whole
    local file=$1
    shift
    if [ ! -f "$file" ]; then
        mkdir -p "$(dirname "$file")"
        echo "$file" >&2
        "$@" >"$file.part"
        mv "$file.part" "$file"
    fi
}

download() { # URL SHA256
    local file=$out/download/${1##*/}
    make "$file" curl --fail --silent --show-error --location "$1"
    echo "$2  $file" | sha256sum --check --quiet || { rm "$file"; fail "$1 is not the file it was; delete $out/download and run again"; }
}

corpus() { # LANGUAGE: the training text of WMT14
    local archive
    for archive in training-parallel-europarl-v7 training-parallel-commoncrawl training-parallel-nc-v9; do
        tar -xzOf "$out/download/$archive.tgz" --wildcards "*.de-en.$1"
    done
}

published() { # SET LANGUAGE: newstest, its first language the source
    local side=src
    [ "$2" = "$target" ] && side=ref
    "$bin/sacrebleu" --test-set "$1" --language-pair "$source-$target" --echo "$side"
}

words() { # LANGUAGE FILE: as the Moses scripts, hyphens split
    "$bin/sacremoses" -q -j "$workers" -l "$1" normalize -c tokenize -x -a <"$2" | if [ "$lowercase" = 1 ]; then sed 's/.*/\L&/'; else cat; fi
}

pairs() { # SIDE: the training sentences that are not empty, not too long, and not 1.5 times as long as the other language's
    paste -d '\t' "$out/tok/train.$source" "$out/tok/train.$target" |
        awk -F '\t' -v most="$longest" -v side="$1" \
            '{m = split($1, a, " "); n = split($2, b, " ")} m && n && m <= most && n <= most && m <= 1.5 * n && n <= 1.5 * m {print $side}'
}

options=("SOURCE=$source" "TARGET=$target" "DATA=$(absolute "$data")" "TRAIN=$train" "VALID=$valid" "TEST=$test")
options+=("BPE=$merges" "LOWERCASE=$lowercase" "LONGEST=$longest")
prepared "$out/raw" "${options[@]}" || true # what was made of it stays, file by file
if [ -z "$data" ]; then
    [ "$source-$target" = en-de ] || fail "only en-de is downloaded; for $source-$target set DATA to a folder with its text"
    download https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz 0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7
    download https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5
    download https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485
fi
if [ -n "$data" ]; then
    for file in "$data"/{"$train","$valid","$test"}.{"$source","$target"}; do
        [ -f "$file" ] || fail "$file is missing; DATA must have {$train,$valid,$test}.{$source,$target} (TRAIN, VALID and TEST rename them)"
    done
fi
mkdir -p "$out"
[ -d "$out/raw" ] || record "$out/raw" "${options[@]}"
for language in "$source" "$target"; do
    if [ -n "$data" ]; then
        for split in train valid test; do
            make "$out/raw/$split.$language" cat "$data/${!split}.$language"
        done
    else
        make "$out/raw/train.$language" corpus "$language"
        make "$out/raw/valid.$language" published wmt13 "$language"
        make "$out/raw/test.$language" published wmt14/full "$language"
    fi
done
for split in train valid test; do
    [ "$(wc -l <"$out/raw/$split.$source")" = "$(wc -l <"$out/raw/$split.$target")" ] ||
        fail "$out/raw/$split.$source and $split.$target differ in their number of lines; they must be translations line by line"
    for language in "$source" "$target"; do
        make "$out/tok/$split.$language" words "$language" "$out/raw/$split.$language"
    done
done
make "$out/pairs/train.$source" pairs 1
make "$out/pairs/train.$target" pairs 2
[ -s "$out/pairs/train.$source" ] || fail "no training pair of $out/tok is left after filtering by length"
make "$out/codes" "$bin/subword-nmt" learn-bpe -s "$merges" < <(cat "$out/pairs/train.$source" "$out/pairs/train.$target")
for split in train valid test; do
    folder=tok
    [ "$split" = train ] && folder=pairs
    for language in "$source" "$target"; do
        make "$out/bpe/$split.$language" "$bin/subword-nmt" apply-bpe -c "$out/codes" <"$out/$folder/$split.$language"
    done
done
if [ ! -d "$out/bin" ]; then
    echo "$out/bin" >&2
    rm -rf "$out/bin.part"
    "$bin/fairseq-preprocess" --source-lang "$source" --target-lang "$target" --joined-dictionary --workers "$workers" \
        --trainpref "$out/bpe/train" --validpref "$out/bpe/valid" --testpref "$out/bpe/test" --destdir "$out/bin.part" >"$out/preprocess.log" 2>&1 ||
        { tail -n 3 "$out/preprocess.log" >&2; exit 1; }
    mv "$out/bin.part" "$out/bin"
else
    echo "$out/bin is there" >&2
fi
