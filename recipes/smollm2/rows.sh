# shellcheck shell=bash
# Sourced by the steps after the lib: reads ROW from the first argument and sets what the steps share. A row is softmax or
# RULE[-half|-quarter][-window]; the folder of its run in OUT has the same name.
OUT=$(output_folder smollm2)
no_toy "leave TOY out"

read_row() { # ROW: sets row, rule and conversion, the options of fw-convert
    local known="softmax or RULE[-half|-quarter][-window], for example gated_delta-half-window"
    need_row "$known" "$@"
    row=$1 conversion=()
    [[ $row =~ ^(softmax|(sum|gated|decay|delta|gated_delta|kda)(-half|-quarter)?(-window)?)$ ]] || fail "ROW is $row; it must be $known"
    rule=${row%%-*}
    [ "$rule" = softmax ] || conversion+=(--feature-map relu --feature-norm l2)
    case $row in *-half*) conversion+=(--mixer-pattern "softmax,fast_weight") ;; *-quarter*) conversion+=(--mixer-pattern "softmax,fast_weight*3") ;; esac
    case $row in *-window) conversion+=(--memory-window 64) ;; esac
}
