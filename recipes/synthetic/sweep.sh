#!/usr/bin/env bash
# Runs the points of one figure of the synthetic retrieval experiments, several at once, and collects their losses.
#
# Paper:    Schlag et al. 2021: capacity is figure 2 and, with 600 keys, figure 4; updates is figure 5 and, with 20 keys, figure 3
# Data:     drawn on the fly
# Hardware: 2 CPU cores; JOBS points run at once, as many as there are cores by default
# Time:     docs/results/retrieval.md has the time of each sweep
# Expected: the tables in docs/results/retrieval.md
# Usage:    recipes/synthetic/sweep.sh ROW...      prints RULE:MAP KEYS LOSS of each point, and keeps them in OUT/FIGURE.txt for
#           docs/results/figures/retrieval.py
#           recipes/synthetic/sweep.sh capacity                 all points of the figure
#           recipes/synthetic/sweep.sh updates-20 updates-40    all models with so many keys
#           JOBS=1 recipes/synthetic/sweep.sh capacity-60-softmax capacity-60-elu
#
# A row is one of point.sh, or its beginning. Finished points are not run again: stop and restart the sweep at will.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
renamed MODELS "rows are arguments, for example updates-20-delta-dpfp1"
renamed SIZES "rows are arguments, for example capacity-60"
OUT=$(output_folder synthetic)
need_row "capacity, updates, FIGURE-KEYS or a row of point.sh" "$@"
figure=${1%%-*}
case $figure in
    capacity)
        sizes="20 40 60 80 100 120 140 160 180 200"
        models=(softmax elu favor64 favor128 favor512 dpfp1 dpfp2 dpfp3) ;;
    updates)
        sizes="20 40 60 80 100 140 200"
        models=(sum-dpfp1 delta-dpfp1 fwm-tanh fwm-dpfp1 gated-dpfp1 gated_delta-dpfp1 decay-dpfp1 delta-elu delta-favor64
            delta-dpfp2 delta-favor128) ;;
    *) fail "ROW is $1; it must begin with capacity or updates" ;;
esac
no_toy "leave TOY out, and name rows with few keys, such as capacity-20"
results=$OUT/$figure.txt
mkdir -p "$OUT"
export OUT ROOT

point() { # ROW: RULE:MAP KEYS LOSS
    local loss keys=${1#*-} model
    model=${keys#*-} keys=${keys%%-*}
    loss=$(bash "$ROOT/recipes/synthetic/point.sh" "$1") || { echo "$1 failed" >&2; return 1; }
    echo "${model/-/:} $keys ${loss#best_eval_loss=}"
}
export -f point

for row in "$@"; do
    case $row in
        "$figure") for size in $sizes; do printf "$figure-$size-%s\n" "${models[@]}"; done ;;
        "$figure"-*-*) echo "$row" ;;
        "$figure"-*) printf "$row-%s\n" "${models[@]}" ;;
        *) fail "ROW is $row; all rows of one call must begin with $figure" ;;
    esac
done >"$results.points"
ended=0 total=$(wc -l <"$results.points")
xargs -P "${JOBS:-$(nproc)}" -L 1 bash -c 'point "$@"' point <"$results.points" |
    while read -r line; do
        echo "$line"
        echo "$((ended += 1)) of $total: $line" >&2
    done >"$results.part" || failed=yes
if [ ! -s "$results.part" ]; then
    rm "$results.part" "$results.points"
    fail "no point has a result"
fi
sort -k1,1 -k2,2n "$results.part"
touch "$results" # the points of earlier calls stay, unless they are among those of this one
awk '!seen[$1 " " $2]++' "$results.part" "$results" | sort -k1,1 -k2,2n >"$results.new"
mv "$results.new" "$results"
rm "$results.part" "$results.points"
[ -z "${failed:-}" ] || fail "not all points have a result"
