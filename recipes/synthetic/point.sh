#!/usr/bin/env bash
# One point of the synthetic retrieval experiments of Schlag et al. 2021 (sec. 6.1, app. D).
#
# Data:     drawn on the fly.
# Hardware: one CPU core; half a minute for 20 keys, some minutes for 200.
# Expect:   setting 1, dpfp, nu 1: below 0.001 up to 100 keys, 0.17 at 200. Setting 2, 20 keys, delta with dpfp: below 0.001; sum: 0.1.
# usage:    recipes/synthetic/point.sh --setting 2 --keys 20 --rule delta --feature-map dpfp --dpfp-nu 1 [fairseq-train options]
#
# --feature-map softmax is softmax attention. Mini-batches of 32, Adam with its defaults (for fwm with tanh 128 and a tenth of the learning
# rate, as published), until the evaluation loss is below 0.001 or has made no progress for 1000 updates. The last line is
# best_eval_loss=X; a point that is finished (OUT, outputs/synthetic) only prints it.
set -euo pipefail
cd "$(dirname "$0")/../.."

setting=1 keys=20 rule=sum map=dpfp more=()
while [ $# -gt 0 ]; do
    case $1 in
        --setting) setting=$2 ;;
        --keys) keys=$2 ;;
        --rule) rule=$2 ;;
        --feature-map) map=$2 ;;
        *) more+=("$1"); shift; continue ;;
    esac
    shift 2
done

batch=32 rate=0.001
if [ "$map" = softmax ]; then
    model=(--mixer softmax)
else
    case $rule:$map in
        sum:elu | sum:relu | sum:dpfp | sum:favor | gated:elu | gated:relu | gated:dpfp | gated:favor)
            norm=(--feature-norm none --attention-norm) ;;
        fwm:tanh) norm=(--feature-norm none) batch=128 rate=0.0001 ;;
        fwm:*) norm=(--feature-norm none) ;;
        *:elu | *:relu | *:dpfp | *:favor) norm=(--feature-norm sum) ;;
        *) norm=(--feature-norm l2) ;;
    esac
    model=(--update-rule "$rule" --feature-map "$map" "${norm[@]}")
fi

out=${OUT:-outputs/synthetic}
bin=${BIN:-.venv/bin}
name=$(echo "setting$setting-$keys-$rule-$map ${more[*]:-}" | tr -s ' ' '_' | tr -dc 'A-Za-z0-9_.-')
log=$out/$name.log
mkdir -p "$out"
if ! grep -qs '^best_eval_loss=' "$log"; then
    OMP_NUM_THREADS=1 "$bin/fairseq-train" --user-dir fw_fairseq --task associative_retrieval --setting "$setting" --symbols "$keys" \
        --arch retrieval "${model[@]}" --criterion retrieval_mse --batch-size $batch --cpu --num-workers 0 --seed 1 \
        --optimizer adam --adam-betas '(0.9, 0.999)' --lr $rate --lr-scheduler until_solved --stop-min-lr 0 --patience 10 \
        --no-save --save-dir "$out" --log-format json --log-interval 1000000 "${more[@]}" >"$log.part" 2>&1 ||
        { tail -n 1 "$log.part" >&2; exit 1; }
    sed -n 's/.*"valid_loss": "\([^"]*\)".*/\1/p' "$log.part" | sort -g |
        awk '!number { best = $0 } !/nan/ { number = 1 } END { if (NR) print "best_eval_loss=" best }' >>"$log.part" # nan is sorted first
    mv "$log.part" "$log"
fi
tail -n 1 "$log"
