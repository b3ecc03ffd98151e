# shellcheck shell=bash
# The common part of all recipes, sourced before anything else. recipes/README.md describes the calling convention and the variables.
# Recipes stay in the caller's folder: DATA and OUT are relative to it, and files of this repository are named by $ROOT.
set -euo pipefail
export LC_ALL=C.UTF-8 # in the locale C, wc counts bytes as characters, and sed cuts letters in two

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then # the comment at the head of the recipe
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit 0
fi

say() {
    echo "${0##*/}: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

switched() { # VARIABLE: sets it to 1 or to nothing
    case ${!1:-} in
        1) ;;
        0 | '') printf -v "$1" '' ;;
        *) fail "$1 is ${!1}; it must be 1, or 0 as without it" ;;
    esac
}

of_form() { # VARIABLE PATTERN ALLOWED: fails where it has another form
    [[ ${!1:-} =~ ^($2)?$ ]] || fail "$1 is ${!1}; it must be $3"
}

switched TOY
CPU=${CPU:-$TOY}
switched CPU
for variable in BATCH EVERY GPUS JOBS SAVE_EVERY START_UPDATES TEST_LINES TEST_WORDS TOKENS UPDATES WORKERS; do
    of_form $variable '0*[1-9][0-9]*' "a whole number of at least 1"
done
for variable in CHECK WARMUP; do of_form $variable '[0-9]+' "a whole number"; done
case ${CHECK:-0} in
    0) CHECK= ;;
    1) CHECK=20 ;;
esac
of_form SEEDS ' *[0-9]+( +[0-9]+)* *' 'one or more whole numbers, for example "1 2"'
of_form PRECISION 'bf16|fp16|fp32|tf32' "bf16, fp16, fp32 or tf32"
of_form DROPOUT '0|0?\.[0-9]+' "a number from 0 to below 1, for example 0.1"
GPUS=${GPUS:-1}
WORKERS=${WORKERS:-$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)} # nproc alone prints OMP_NUM_THREADS where that is set
default_precision= # where a GPU has no bf16; without one, PRECISION alone changes the precision
SEED=1
machine=() # options of every fairseq command
if [ -n "$CPU" ]; then
    machine=(--cpu --num-workers 0)
    # Otherwise glibc returns the tensors of each step to the system, which clears every page before the next step gets it.
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-4294967296}
    export MALLOC_TOP_PAD_=${MALLOC_TOP_PAD_:-67108864}
    # Fewer and larger pages, where the system gives them to programs that ask.
    export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
fi

find_programs() { # puts BIN, or .venv/bin where there is no BIN, first on the PATH, and sets PYTHON
    if [ -n "${BIN:-}" ]; then
        [ -d "$BIN" ] || fail "BIN is $BIN, which is not a folder"
        BIN=$(cd -- "$BIN" && pwd)
    elif [ -x "$ROOT/.venv/bin/fairseq-train" ]; then
        BIN=$ROOT/.venv/bin
    fi
    [ -z "${BIN:-}" ] || export PATH=$BIN:$PATH
    command -v fairseq-train >/dev/null ||
        fail "fairseq-train is not in ${BIN:-$ROOT/.venv/bin} or on the PATH; run recipes/demo.sh once, or set BIN to the folder that has it"
    PYTHON=$(command -v python || command -v python3) || fail "python is not in ${BIN:-$ROOT/.venv/bin} or on the PATH"
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # fairseq's use of Hydra has many
}

output_folder() { # NAME: OUT or outputs/NAME. It ends in _toy with TOY=1 only, so that toy data are never taken for real data
    local out=${OUT:-outputs/$1}
    while [ "$out" != "${out%/}" ] && [ "$out" != / ]; do out=${out%/}; done
    if [ -n "$TOY" ]; then
        out=${out%_toy}_toy
    elif [ "$out" != "${out%_toy}" ]; then
        fail "OUT is $out; only the folders of TOY=1 end in _toy"
    fi
    [ ! -e "$out" ] || [ -d "$out" ] || fail "OUT is $out, which is not a folder"
    echo "$out"
}

absolute() { # PATH: the same file by one name; nothing where PATH is empty
    [ -z "$1" ] || realpath -m "$1"
}

need_folder() { # FOLDER RECIPE: fails if FOLDER, which RECIPE makes, is not there
    [ -d "$1" ] || fail "$1 is missing; run $2 with the same OUT and TOY first"
}

need_data() { # fails where DATA is not given
    [ -n "${DATA:-}" ] || fail "DATA is missing; it must be the folder with train.txt, valid.txt and test.txt"
}

need_texts() { # sets texts, the options of fairseq-preprocess for DATA, which has train.txt or the name in WikiText-103, and so on
    local split file
    texts=()
    for split in train valid test; do
        file=$DATA/wiki.$split.tokens
        [ -f "$file" ] || file=$DATA/$split.txt
        [ -f "$file" ] || fail "$file is missing; DATA must be the folder with train.txt, valid.txt and test.txt"
        texts+=("--${split}pref" "$file")
    done
}

need_file() { # FILE RECIPE: fails if FILE, which RECIPE makes, is not there
    [ -f "$1" ] || fail "$1 is missing; run $2 with the same OUT and TOY first"
}

# ---- arguments

need_row() { # ROWS ARGUMENT...: fails where the first argument is not a row; ROWS says which there are
    if [ $# = 1 ] || [ "${2#-}" != "$2" ]; then fail "ROW is missing; it must be $1"; fi
}

find_checkpoint() { # NAME ROWS ROW...: sets OUT, and row, run and checkpoint of a row that recipes/NAME/train.sh has trained
    OUT=$(output_folder "$1")
    need_row "${@:2}"
    row=$3 run=$OUT/runs/${RUN:-$3}
    checkpoint=$run/${CHECKPOINT:-checkpoint_best.pt}
    need_file "$checkpoint" "recipes/$1/train.sh $row"
}

split_rows() { # ARGUMENT...: sets rows to the arguments before the first option, and options to the others
    rows=()
    while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do
        rows+=("$1")
        shift
    done
    options=("$@")
}

given() { # OPTION DEFAULT ARGUMENT...: the value of an option among the arguments, or the default
    local option=$1 value=$2
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in
            "$option") value=${2:-} ;;
            "$option="*) value=${1#*=} ;;
        esac
        shift
    done
    echo "$value"
}

renamed() { # VARIABLE SENTENCE: fails where a variable is set that recipes no longer read
    [ -z "${!1+set}" ] || fail "$1 is set, which this recipe does not read; $2"
}

no_toy() { # SENTENCE: fails with TOY=1, in a recipe that has no toy size; SENTENCE says what to do
    [ -z "$TOY" ] || fail "TOY is set, and this recipe has no toy size; $1"
}

# ---- data

download() { # URL FILE SHA256: resumes and checks a download; without SHA256 the sum of the first download holds
    local url=$1 file=$2 wanted=${3:-} found
    if [ ! -f "$file" ]; then
        mkdir -p "$(dirname "$file")"
        curl --fail --location --proto-redir =https --retry 5 --continue-at - --output "$file.part" "$url"
        mv "$file.part" "$file"
    fi
    found=$(sha256sum "$file" | cut -d ' ' -f 1)
    [ -n "$wanted" ] || wanted=$(cat "$file.sha256" 2>/dev/null || echo "$found")
    [ "$found" = "$wanted" ] || { echo "$file has SHA-256 $found instead of $wanted; remove it and start again" >&2; exit 1; }
    echo "$found" >"$file.sha256"
}

prepared() { # FOLDER NAME=VALUE...: whether FOLDER is there, made with these options; ends the script where it was made with others
    local folder=$1 found
    shift
    [ -d "$folder" ] || return 1
    found=$(paste -sd ' ' "$folder.options" 2>/dev/null || echo "unknown options")
    [ "$found" = "$*" ] || fail "$folder was made with $found, not with $*; set OUT to another folder, or remove all of ${folder%/*}"
    echo "$folder is there and was made with these options" >&2
}

record() { # FOLDER NAME=VALUE...: before FOLDER gets its name, so that it is never there without its options
    mkdir -p "$(dirname "$1")"
    printf '%s\n' "${@:2}" >"$1.options"
}

each_minute() { # COMMAND...: prints its output once a minute, until no_more
    {
        [ -z "${binarising:-}" ] || exec {binarising}>&-
        while sleep 60 <&- >/dev/null 2>&1 && kill -0 $$; do "$@"; done # a sleep that is left over holds no file
    } >&2 2>/dev/null &
    watcher=$!
}

no_more() {
    [ -z "${watcher:-}" ] || kill "$watcher" 2>/dev/null || true
    watcher=
}
trap no_more EXIT

binarised() { # FOLDER SECONDS FILE...: how far fairseq-preprocess is, which has begun so many seconds after this shell
    local width=4 done_ taken=$((SECONDS - $2))
    [ "$(cat "$1"/dict*.txt 2>/dev/null | wc -l)" -gt 65500 ] || width=2
    done_=$(($(cat "$1"/*.bin* 2>/dev/null | wc -c) / width))
    : "${all_words:=$(cat "${@:3}" | LC_ALL=C wc -lw | awk '{ print $1 + $2 }')}" # a line ends in a symbol
    if [ "$done_" = 0 ]; then
        echo "counting $all_words words, for $((taken / 60)) minutes"
    else
        echo "$done_ of $all_words words after $((taken / 60)) minutes"
    fi
}

binarise() { # FOLDER NAME=VALUE... -- OPTION of fairseq-preprocess...: makes FOLDER and records its options; log beside it
    local folder=$1 made_with=() option parts part file files=() log
    log=$(dirname "$folder")/preprocess.log
    shift
    while [ "$1" != -- ]; do
        made_with+=("$1")
        shift
    done
    for option in "${@:2}"; do # files by their names or, of two languages, by how their names begin
        IFS=, read -ra parts <<<"$option"
        for part in "${parts[@]}"; do
            if [ -f "$part" ]; then
                files+=("$part")
            else
                for file in "$part".*; do [ ! -f "$file" ] || files+=("$file"); done
            fi
        done
    done
    mkdir -p "$(dirname "$folder")"
    exec {binarising}>"$folder.lock" # another row's recipe may be making the same folder
    flock "$binarising"
    [ ! -d "$folder" ] || { exec {binarising}>&-; return 0; }
    rm -rf "$folder.part"
    say "binarising into $folder, processes: $WORKERS; the log is $log"
    each_minute binarised "$folder.part" $SECONDS "${files[@]}"
    logged "$log" fairseq-preprocess --user-dir "$ROOT/fw_fairseq" --destdir "$folder.part" --workers "$WORKERS" "${@:2}"
    no_more
    record "$folder" "${made_with[@]}"
    mv "$folder.part" "$folder"
    exec {binarising}>&-
}

own_text() { # NAME VOCABULARY: sets OUT, and texts, vocabulary and made_with for OUT/bin; ends the script where that is there
    OUT=$(output_folder "$1")
    vocabulary=${VOCABULARY:-$2}
    if [ -n "$TOY" ]; then
        vocabulary=500 DATA=$OUT/text
    fi
    need_data
    made_with=("TOY=$TOY" "DATA=$(absolute "$DATA")" "VOCABULARY=$vocabulary")
    if prepared "$OUT/bin" "${made_with[@]}"; then
        exit 0
    fi
    [ -z "$TOY" ] || language_reference "$DATA"
    need_texts
}

language_reference() { # FOLDER: train.txt, valid.txt and test.txt of the demo
    "$PYTHON" "$ROOT/recipes/demo/corpus.py" "$1"
}

# ---- commands

logged() { # LOG COMMAND...: the output goes to LOG, and lines that say how far it is also to the terminal; where the command fails, the
    # last lines are shown and the recipe ends
    local status=0
    mkdir -p "$(dirname "$1")"
    ("${@:2}") 2>&1 | tee "$1" | { grep --line-buffered -oE 'evaluated [0-9,]+ of .*|[0-9]+ / [0-9]+ wps.*' >&2 || true; } || status=$?
    [ $status != 0 ] || return 0
    tail -n 3 "$1" | cut -c -1000 >&2
    explain $status "$1"
    exit 1
}

explain() { # STATUS LOG: what to do about a command that was killed, or had too little memory
    if [ "$1" -gt 128 ]; then
        say "signal $(($1 - 128)) ended the command; the same command continues, and $2 is its log"
        [ "$1" != 137 ] || say "the system sends signal 9 where memory runs out: set BATCH to half of what is computed at once, or take fewer WORKERS"
    elif tail -n 30 "$2" | grep -qiE 'out of memory|OutOfMemory'; then
        say "memory ran out: set BATCH to half of what a GPU computes at once; the batch of an update stays"
    fi
}

convert_row() { # NAME SOURCE OPTION of fw-convert...: recipes/NAME makes OUT/ROW/start.pt of SOURCE, and convert.txt
    mkdir -p "$OUT/$row"
    say "converting $2, which takes half a minute at full size"
    "$PYTHON" -m fw_fairseq.tools.convert "$2" "$OUT/$row/start.pt" --rule "$rule" "${@:3}" |
        grep --line-buffered -v '^to train it' | tee "$OUT/$row/convert.txt"
    say "next: recipes/$1/finetune.sh $row"
}

measure_text() { # LOG DATA SPLIT OPTION of fairseq-eval-lm...: evaluates a split, or its first TEST_WORDS words; sets log to the whole log
    local data=$2
    log=$1
    if [ -n "${TEST_WORDS:-}" ]; then
        log=$(dirname "$log")/first-$TEST_WORDS-$(basename "$log")
        data=${log%.log}
        "$PYTHON" "$ROOT/recipes/cut.py" "$2" "$3" "$TEST_WORDS" "$data"
    fi
    [ ! -t 2 ] || say "evaluating the $3 text of $data; the log is $log.part, and then $log"
    logged "$log.part" fairseq-eval-lm "$data" --user-dir "$ROOT/fw_fairseq" --gen-subset "$3" "${machine[@]}" "${@:4}"
    mv "$log.part" "$log"
    [ "$data" = "$2" ] || rm -r "$data"
}

share() { # BATCH OPTION: sets batch, the options of fairseq-train for a GPU's part of the batch, of which it computes BATCH at once
    local part=$((($1 + GPUS / 2) / GPUS)) times
    [ $part -gt 0 ] || part=1
    times=$(((part + ${BATCH:-$part} - 1) / ${BATCH:-$part}))
    part=$(((part + times / 2) / times))
    batch=("$2" "$part" --update-freq "$times")
    [ $((part * times * GPUS)) = "$1" ] ||
        say "an update has $((part * times * GPUS)) in its batch, and $1 in the paper: $GPUS GPUs take $part each, $times times"
}

choose_precision() { # OPTION...: adds PRECISION to machine, or else bf16 where every GPU has it, or else default_precision; fp32 on CPUs.
    # Says where GPUs are idle
    local option precision=${PRECISION:-} found there
    [ -z "$CPU" ] || return 0
    found=$("$PYTHON" -c 'import sys, torch
gpus = [torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())]
print("bf16" if gpus and min(gpus) >= (8, 0) else sys.argv[1], len(gpus))' "$default_precision")
    there=${found#* }
    [ "$there" -le "$GPUS" ] || [ -n "${LAUNCH:-}" ] || say "$GPUS of $there GPUs is used; GPUS=$there uses all"
    for option; do
        case $option in --fp16 | --bf16 | --amp | --memory-efficient-fp16 | --memory-efficient-bf16) return 0 ;; esac
    done
    [ -n "$precision$default_precision" ] || return 0
    [ -n "$precision" ] || precision=${found% *}
    case $precision in
        bf16 | fp16) machine+=("--$precision") ;;
        tf32) export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 FW_FAIRSEQ_FP32=tf32 ;; # PyTorch reads the one, the CUDA kernels the other
    esac
}

launcher() { # sets launch to the command that starts "-m fairseq_cli.train": LAUNCH, its words split as in a shell, or python
    launch=("$PYTHON")
    if [ -n "${LAUNCH:-}" ]; then
        mapfile -t launch < <(xargs printf '%s\n' <<<"${LAUNCH% -m fairseq_cli.train}")
        [ ${#launch[@]} -gt 0 ] || fail "LAUNCH is $LAUNCH; its quotes must be in pairs"
    fi
}

train() { # FOLDER DATA OPTION...: trains in FOLDER, which also gets train.log; resumes from the last checkpoint that is there
    local folder=$1 launch status=0 trial=()
    launcher
    choose_precision "${@:3}"
    if [ -n "$CHECK" ]; then begin_trial "${@:3}"; fi
    mkdir -p "$folder"
    say "training in $folder; the log is $folder/train.log, and recipes/status.sh $folder says how far it is"
    "${launch[@]}" -m fairseq_cli.train "$2" --user-dir "$ROOT/fw_fairseq" --save-dir "$folder" --seed "$SEED" \
        --distributed-world-size "$GPUS" "${machine[@]}" --save-interval-updates "${SAVE_EVERY:-5000}" --keep-interval-updates 1 \
        "${@:3}" "${trial[@]}" 2>&1 | tee -a "$folder/train.log" || status=$?
    [ $status = 0 ] || { explain $status "$folder/train.log"; return $status; }
    [ -z "$CHECK" ] || end_trial "${@:3}"
}

begin_trial() { # OPTION...: sets folder, trial and launch for a training of CHECK updates, which train() calls this for
    [ -n "${trial_of:-}" ] || fail "CHECK is set, and this recipe has no trial; leave CHECK out"
    folder+=.check
    rm -rf "$folder"
    trial=(--max-update "$CHECK" --max-valid-steps 0 --save-interval-updates 0 --log-format json --log-interval $(((CHECK + 3) / 4)))
    launch=("$PYTHON" "$ROOT/recipes/peak.py" "$folder/memory" "${launch[@]}")
}

end_trial() { # OPTION...: evaluates what the trial has trained, and prints what it measured
    CHECK='' BATCH='' RUN=${folder##*/} CHECKPOINT=checkpoint_last.pt TEST_WORDS=1000 TEST_LINES=10 "$ROOT/recipes/$trial_of/eval.sh" "$row"
    "$PYTHON" "$ROOT/recipes/status.py" --check "$folder" "$(given --max-update 0 "$@")" "$(given --max-epoch 0 "$@")"
    rm -f "$folder"/*.pt
}

collect() { # FILE NAME TEXT: puts the lines of TEXT, each behind NAME, into FILE, which docs/results/figures reads, in place of earlier ones of NAME
    { grep -v "^$2 " "$1" 2>/dev/null || true; awk -v name="$2" '{ print name, $0 }' <<<"$3"; } >"$1.part"
    mv "$1.part" "$1"
}

perplexity() { # LOG of fairseq-eval-lm
    sed -n 's/.*Perplexity: //p' "$1"
}

performance() { # FILE PERPLEXITY: what share of the performance of the model whose perplexity is in FILE is left; nothing without FILE
    [ ! -f "$1" ] || awk "BEGIN { printf \"%.1f%%\", 100 * $(cat "$1") / $2 }"
}

bits() { # LOG of fairseq-eval-lm: bits per token
    sed -n 's/.*Loss (base 2): \([0-9.]*\).*/\1/p' "$1"
}
