#!/usr/bin/env bash
# All points of one figure of the synthetic retrieval experiments, several at once.
#
# Hardware: 2 CPU cores; see docs/results/retrieval.md for the time of each sweep.
# Expect:   the tables there.
# usage:    recipes/synthetic/sweep.sh capacity|updates
#           [MODELS="dpfp1 elu"] [SIZES="20 40"] [JOBS=2] [OUT=folder]
#
# Prints one line a point as it ends, then RULE-MAP KEYS LOSS of all of them. Finished points are not run again: stop and restart at will.
set -euo pipefail
cd "$(dirname "$0")/../.."

case ${1:-} in
    capacity)
        setting=1
        sizes=${SIZES:-$(seq 20 20 200)}
        models=${MODELS:-softmax elu favor64 favor128 favor512 dpfp1 dpfp2 dpfp3} ;;
    updates)
        setting=2
        sizes=${SIZES:-20 40 60 80 100 140 200}
        models=${MODELS:-sum:dpfp1 delta:dpfp1 fwm:tanh fwm:dpfp1 gated:dpfp1 gated_delta:dpfp1 decay:dpfp1 delta:elu delta:favor64} ;;
    *) echo "$0: the first argument is capacity or updates" >&2; exit 2 ;;
esac
export OUT=${OUT:-outputs/synthetic}
results=$OUT/$1.txt
mkdir -p "$OUT"

point() { # SETTING MODEL KEYS; a model is RULE:MAP or MAP, a map NAME or NAME and a number
    local rule=${2%:*} map=${2#*:} number loss
    [ "$rule" != "$2" ] || rule=sum
    number=${map##*[a-z]} map=${map%%[0-9]*}
    local options=(--setting "$1" --keys "$3" --rule "$rule" --feature-map "$map")
    [ "$map" != dpfp ] || options+=(--dpfp-nu "${number:-1}")
    [ "$map" != favor ] || options+=(--favor-features "${number:-64}")
    loss=$(bash recipes/synthetic/point.sh "${options[@]}") || { echo "$2 $3: failed" >&2; return 1; }
    echo "$2 $3 ${loss#best_eval_loss=}"
}
export -f point

for size in $sizes; do
    for model in $models; do echo "$setting $model $size"; done
done >"$results.points"
ended=0 total=$(wc -l <"$results.points")
xargs -P "${JOBS:-$(nproc)}" -L 1 bash -c 'point "$@"' point <"$results.points" |
    while read -r line; do
        echo "$line"
        echo "$((ended += 1)) of $total: $line" >&2
    done >"$results.part" || failed=yes
sort -k1,1 -k2,2n "$results.part" >"$results"
rm "$results.part" "$results.points"
cat "$results"
[ -z "${failed:-}" ] || { echo "$0: not all points have a result" >&2; exit 1; }
