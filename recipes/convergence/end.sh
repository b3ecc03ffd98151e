# shellcheck shell=bash
# Sourced after the lib by the recipes of this folder: training until the validation loss no longer falls, and what has been done so far.

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several runs side by side do not wait for each other's threads

# The learning rate falls to 0.3 of itself after each epoch that lowers the validation loss by less than 0.5%, and the run ends the third
# time. At one rate a loss goes on falling by a little for many epochs. Rate and end are read from the checkpoint, so that a run which was
# stopped and resumed is the run that was never stopped. Epochs only bound a run that would never end: it counts as unfinished.
until_the_end=(--lr-scheduler reduce_lr_on_plateau --lr-shrink 0.3 --lr-patience 0 --lr-threshold 0.005 --max-epoch 200
    --no-epoch-checkpoints --log-format json --log-interval 50)
[ -z "$TOY" ] || until_the_end+=(--lr-threshold 0.2)
ENDED='stopping training because current learning rate'

is_finished() { # FOLDER
    [ -f "$1/train.log" ] && grep -q "$ENDED" "$1/train.log"
}

to_the_end() { # FOLDER DATA LR OPTION...: trains until the loss no longer falls, or goes on with it; a finished run is left alone
    local folder=$1 lr=$3
    ! is_finished "$folder" || return 0
    (train "$folder" "$2" --lr "$lr" --stop-min-lr "$(awk "BEGIN { print 0.03 * $lr }")" "${until_the_end[@]}" "${@:4}") >/dev/null ||
        { [ ! -f "$folder/train.log" ] || tail -n 3 "$folder/train.log" >&2; exit 1; }
    is_finished "$folder" || fail "$folder did not end by its learning rate; $folder/train.log says why"
}

kept() { # FILE COMMAND...: the output of a command, from FILE where it has been written before
    if [ ! -s "$1" ]; then # in $(...) a command that fails does not end the recipe by itself
        "${@:2}" >"$1.part" || fail "$1 is not made, because its command failed"
        [ -s "$1.part" ] || fail "$1 is not made, because its command printed nothing"
        mv "$1.part" "$1"
    fi
    cat "$1"
}

collect_curve() { # FILE NAME RUN: EPOCH UPDATES LOSS PERPLEXITY of each validation of a run, each behind NAME, into FILE
    local value='": "\{0,1\}\([^",}]*\)' # a number, which JSON logs of fairseq write with or without quotes
    collect "$1" "$2" "$(sed -n "s/.*\"epoch$value.*\"valid_loss$value.*\"valid_ppl$value.*\"valid_num_updates$value.*/\1 \4 \2 \3/p" "$3/train.log")"
}

cells() { # RUN CELL...: cells of a table: best validation perplexity, CELL..., epochs, hours
    "$PYTHON" "$ROOT/recipes/status.py" --cells "$@"
}

show_status() { # FOLDER: a line for each run in this folder of OUT/runs
    "$PYTHON" "$ROOT/recipes/status.py" "$OUT/runs/$1"
}
