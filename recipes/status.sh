#!/usr/bin/env bash
# Says how runs are doing: update of all, perplexity, best validation, words/s, hours left, the age of the last line, size on the disk.
#
# Paper:    none
# Data:     the folders of runs, which train.sh and finetune.sh write
# Hardware: any
# Time:     a moment
# Expected: a line for each run: running, stopped by a signal, interrupted, or finished
# Usage:    recipes/status.sh [FOLDER]...                      without FOLDER: OUT, or else outputs
#           recipes/status.sh outputs/wikitext103
#           watch -n 60 recipes/status.sh
source "$(dirname "$(realpath "$0")")/lib.sh" || exit 1
find_programs
if [ $# = 0 ]; then
    set -- outputs
    [ -z "${OUT:-}" ] || set -- "$(output_folder .)"
fi
"$PYTHON" "$ROOT/recipes/status.py" "$@"
