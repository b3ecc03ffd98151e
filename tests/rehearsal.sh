#!/usr/bin/env bash
# The recipes of the papers at their own sizes, on drawn text: each prepares, converts, and makes a trial; then a training is told to stop
# within a validation, and resumes. For the days before a release: an hour of processor time on two cores, 12 GB of memory and 20 GB of disk.
#   tests/rehearsal.sh FOLDER          FOLDER keeps texts and logs; finished steps of an earlier call stay
#   tests/rehearsal.sh FOLDER 0.01     with a hundredth of the text, to try this script
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?name a folder for texts and logs}") scale=${2:-1}
export CPU=1 OMP_NUM_THREADS=1 PYTHONPATH=tests BIN=$PWD/.venv/bin
mkdir -p "$folder"

did() { # NAME COMMAND...: once; its output in FOLDER/NAME.log, its minutes and its last line on the terminal
    local log=$folder/$1.log begin=$SECONDS
    [ ! -f "$folder/$1.done" ] || return 0
    "${@:2}" >"$log" 2>&1 & # in the background, where a function ends at its first failure
    wait $! || { tail -n 20 "$log" >&2; echo "$1 failed; its log is $log" >&2; exit 1; }
    touch "$folder/$1.done"
    printf '%-28s %4d s   %s\n' "$1" $((SECONDS - begin)) "$(grep -vE '^ *$|INFO' "$log" | tail -n 1 | cut -c -150)"
}

expect() { # LOG TEXT: fails where the log does not have it
    grep -qE "$2" "$folder/$1.log" || { echo "$folder/$1.log lacks: $2" >&2; exit 1; }
}

refused() { # SENTENCE COMMAND...: at once, with this sentence
    local said begin=$SECONDS
    said=$("${@:2}" 2>&1) && { echo "not refused: ${*:2}" >&2; exit 1; }
    [[ $said == *"$1"* && $((SECONDS - begin)) -lt 20 ]] || { echo "refused in another way: $said" >&2; exit 1; }
}

stop_within_a_validation() { # ends with code 75 and a checkpoint within 30 seconds, and resumes
    local run=$OUT/runs/stopped log=$OUT/runs/stopped/train.log begin status=0
    local step=(recipes/wikitext103/train.sh small-delta --batch-size 2 --max-update 3 --save-interval-updates 2 --log-interval 1)
    export RUN=stopped
    rm -rf "$run"
    "${step[@]}" &
    until [ -f "$log" ] && grep -q 'begin validation on' "$log"; do sleep 1; done
    sleep 1
    pkill -TERM -f "save-dir $run "
    begin=$SECONDS
    wait $! || status=$?
    [ $status = 75 ] && [ -f "$run/checkpoint_last.pt" ] && [ $((SECONDS - begin)) -le 30 ] ||
        { echo "exit code $status after $((SECONDS - begin)) seconds" >&2; exit 1; }
    grep -q 'SIGTERM received' "$log" && grep -q 'SIGTERM stopped the run after update 2, with a checkpoint' "$log"
    "${step[@]}" --disable-validation
    grep -q 'num_updates: 3 >= max_update: 3' "$log"
}

real() { "$BIN/python" -m support.real_size "$1" "$folder" "$scale"; }

export OUT=$folder/wikitext103
did text real text
DATA=$folder/text did wikitext103-prepare recipes/wikitext103/prepare.sh
expect wikitext103-prepare "processes: $(getconf _NPROCESSORS_ONLN);"
CHECK=2 did wikitext103-delta recipes/wikitext103/train.sh small-delta --batch-size 8
CHECK=2 did wikitext103-stream recipes/wikitext103/train.sh medium-delta_stream --batch-size 4
CHECK=2 did wikitext103-srupp recipes/wikitext103/train.sh base-srupp --batch-size 1
did wikitext103-stopped stop_within_a_validation
did status recipes/status.sh

export OUT=$folder/baevski_auli CHECKPOINT=$folder/published/model.pt
did checkpoint real checkpoint
refused "DICT is /nowhere, which is not a file" env DICT=/nowhere DATA="$folder/text" recipes/baevski_auli/prepare.sh
DATA=$folder/text did baevski_auli-prepare recipes/baevski_auli/prepare.sh
did baevski_auli-convert recipes/baevski_auli/convert.sh decay-32
CHECK=2 did baevski_auli-finetune recipes/baevski_auli/finetune.sh decay-32 --batch-size 1 --update-freq 1
refused "exclude each other" recipes/baevski_auli/finetune.sh decay-32 --bf16 --fp16

export OUT=$folder/gpt2-run
did gpt2 real gpt2
DATA=$folder/documents MODEL=$folder/gpt2 did gpt2-prepare recipes/gpt2/prepare.sh
did gpt2-convert recipes/gpt2/convert.sh decay-32-phi
CHECK=2 did gpt2-finetune recipes/gpt2/finetune.sh decay-32-phi --batch-size 1 --update-freq 1

export OUT=$folder/wmt14
did pairs real pairs
DATA=$folder/pairs did wmt14-prepare recipes/wmt14/prepare.sh
CHECK=2 did wmt14-train recipes/wmt14/train.sh dpfp2 --max-tokens 512 --update-freq 1
