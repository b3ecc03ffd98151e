#!/usr/bin/env bash
# Makes WMT14 English-German, or your own parallel text, ready for train.sh: normalised, tokenised, cut by one BPE for both languages.
#
# Paper:    Schlag et al. 2021, table 1
# Data:     downloads Europarl v7, Common Crawl and News Commentary v9 (1.7 GB, checked by SHA-256), and newstest2013 and newstest2014
#           (full) through sacrebleu, which has their checksums; or takes train, valid and test of DATA, each in .en and .de
# Hardware: any CPU, 2 GB of memory, 15 GB of disk for WMT14; needs the extra translation (sacremoses, subword-nmt)
# Time:     about 70 minutes of processor time for WMT14, of which 10 to 25, for learn-bpe, are on one core; one minute for the 29,000
#           sentences of Multi30k
# Expected: OUT/bin for fairseq; OUT/raw/test.de and OUT/tok/test.de, which eval.sh scores against
# Usage:    recipes/wmt14/prepare.sh                        a second call continues where the first one stopped, file by file
#           DATA=folder OUT=folder recipes/wmt14/prepare.sh
#           TOY=1 recipes/wmt14/prepare.sh                  a small text and the same words backwards, to try all steps on a CPU
#           DATA=multi30k VALID=val TEST=test_2016_flickr BPE=8000 LOWERCASE=1 OUT=outputs/multi30k recipes/wmt14/prepare.sh
#
# TRAIN, VALID and TEST are the names of the files in DATA, SOURCE and TARGET their languages. TEST may name several test sets, such as
# "test2016 test2017", or without DATA those of sacrebleu, such as "wmt14/full wmt17"; eval.sh scores each. BPE is the number of merges; LONGEST is
# the number of words above which a training sentence is left out.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
OUT=$(output_folder wmt14)
source=${SOURCE:-en}
target=${TARGET:-de}
data=${DATA:-}
train=${TRAIN:-train} valid=${VALID:-valid} tests=${TEST:-test}
read -ra names <<<"$tests"
splits=(train valid) testprefs=
for i in "${!names[@]}"; do # fairseq calls several test sets test, test1, test2 and so on
    split=test${i/#0/}
    declare "$split=${names[i]}"
    splits+=("$split")
    testprefs+=${testprefs:+,}$OUT/bpe/$split
done
merges=${BPE:-32000}
if [ -n "$TOY" ]; then
    data=${DATA:-$OUT/text} merges=${BPE:-300}
fi
lowercase=${LOWERCASE:-0}
longest=${LONGEST:-250}

make() { # FILE COMMAND...: writes the command's output to FILE unless FILE is there; a file that is there is whole
    local file=$1
    shift
    if [ ! -f "$file" ]; then
        mkdir -p "$(dirname "$file")"
        echo "$file" >&2
        each_minute lines_of "$file" $SECONDS
        "$@" >"$file.part"
        no_more
        mv "$file.part" "$file"
    fi
}

lines_of() { # FILE SECONDS: how much of it is there, of which the work has begun so many seconds after this shell
    local whole
    whole=$(wc -l <"$OUT/raw/train.$source") # all that takes long is made of the training text
    echo "$1: $(wc -l <"$1.part") lines of at most $whole after $(((SECONDS - $2) / 60)) minutes"
}

toy() { # makes DATA: lines of the language reference, and the same words backwards for a translation
    local split
    language_reference "$data/words"
    for split in train valid test; do
        awk -v most="$([ $split = train ] && echo 800 || echo 20)" 'NF > 2 && NF < 30 && n++ < most' "$data/words/$split.txt" >"$data/$split.$source"
        awk '{ for (i = NF; i; i--) printf "%s%s", $i, (i == 1 ? "\n" : " ") }' "$data/$split.$source" >"$data/$split.$target"
    done
}

learn() { # learn-bpe, whose bar of progress is for a terminal
    if [ -t 2 ]; then subword-nmt learn-bpe -s "$merges"; else subword-nmt learn-bpe -s "$merges" 2>/dev/null; fi
}

apply() { # FILE: its words in pieces; several processes need files in place of streams
    subword-nmt apply-bpe -c "$OUT/codes" --num-workers "$WORKERS" -i "$1" -o "$OUT/bpe/.pieces" >&2
    cat "$OUT/bpe/.pieces"
    rm "$OUT/bpe/.pieces"
}

corpus() { # LANGUAGE: the training text of WMT14
    local archive
    for archive in training-parallel-europarl-v7 training-parallel-commoncrawl training-parallel-nc-v9; do
        tar -xzOf "$OUT/download/$archive.tgz" --wildcards "*.de-en.$1"
    done
}

published() { # SET LANGUAGE: newstest in that language
    local side=src
    [ "$2" = "$target" ] && side=ref
    sacrebleu --test-set "$1" --language-pair "$source-$target" --echo "$side"
}

words() { # LANGUAGE FILE: tokens as the Moses scripts make them, hyphens split
    sacremoses -q -j "$WORKERS" -l "$1" normalize -c tokenize -x -a <"$2" | if [ "$lowercase" = 1 ]; then sed 's/.*/\L&/'; else cat; fi
}

pairs() { # SIDE: the training sentences that are not empty, not too long, and not 1.5 times as long as the other language's
    paste -d '\t' "$OUT/tok/train.$source" "$OUT/tok/train.$target" |
        awk -F '\t' -v most="$longest" -v side="$1" \
            '{m = split($1, a, " "); n = split($2, b, " ")} m && n && m <= most && n <= most && m <= 1.5 * n && n <= 1.5 * m {print $side}'
}

archive() { # URL SHA256
    download "$1" "$OUT/download/${1##*/}" "$2"
}

for program in sacremoses sacrebleu subword-nmt; do
    command -v $program >/dev/null || fail "$program is missing; install the extra translation of this project"
done
made_with=("SOURCE=$source" "TARGET=$target" "DATA=$(absolute "$data")" "TRAIN=$train" "VALID=$valid" "TEST=$tests")
made_with+=("BPE=$merges" "LOWERCASE=$lowercase" "LONGEST=$longest")
[ -z "$TOY" ] || [ -n "${DATA:-}" ] || [ -d "$data" ] || toy
prepared "$OUT/raw" "${made_with[@]}" || true # finished files stay, also where OUT/bin is not there yet
if [ -z "$data" ]; then
    [ "$source-$target" = en-de ] || fail "only en-de is downloaded; for $source-$target set DATA to a folder with its text"
    archive https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz 0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7
    archive https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5
    archive https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485
else
    for split in "${splits[@]}"; do
        for file in "$data/${!split}".{"$source","$target"}; do
            [ -f "$file" ] || fail "$file is missing; DATA must have {$train,$valid,${tests// /,}}.{$source,$target} (TRAIN, VALID and TEST rename them)"
        done
    done
fi
if [ ! -d "$OUT/raw" ]; then
    say "preparing the text, processes: $WORKERS"
    record "$OUT/raw" "${made_with[@]}"
fi
for language in "$source" "$target"; do
    if [ -n "$data" ]; then
        for split in "${splits[@]}"; do
            make "$OUT/raw/$split.$language" cat "$data/${!split}.$language"
        done
    else
        make "$OUT/raw/train.$language" corpus "$language"
        make "$OUT/raw/valid.$language" published wmt13 "$language"
        for split in "${splits[@]:2}"; do
            name=${!split}
            make "$OUT/raw/$split.$language" published "${name/#test/wmt14/full}" "$language"
        done
    fi
done
for split in "${splits[@]}"; do
    [ "$(wc -l <"$OUT/raw/$split.$source")" = "$(wc -l <"$OUT/raw/$split.$target")" ] ||
        fail "$OUT/raw/$split.$source and $split.$target differ in their number of lines; they must be translations line by line"
    for language in "$source" "$target"; do
        make "$OUT/tok/$split.$language" words "$language" "$OUT/raw/$split.$language"
    done
done
make "$OUT/pairs/train.$source" pairs 1
make "$OUT/pairs/train.$target" pairs 2
[ -s "$OUT/pairs/train.$source" ] || fail "no training pair of $OUT/tok is left after filtering by length"
make "$OUT/codes" learn < <(cat "$OUT/pairs/train.$source" "$OUT/pairs/train.$target")
for split in "${splits[@]}"; do
    folder=tok
    [ "$split" = train ] && folder=pairs
    for language in "$source" "$target"; do
        make "$OUT/bpe/$split.$language" apply "$OUT/$folder/$split.$language"
    done
done
if [ -d "$OUT/bin" ]; then
    echo "$OUT/bin is there" >&2
else
    echo "$OUT/bin" >&2
    binarise "$OUT/bin" "${made_with[@]}" -- --source-lang "$source" --target-lang "$target" --joined-dictionary \
        --trainpref "$OUT/bpe/train" --validpref "$OUT/bpe/valid" --testpref "$testprefs"
fi
