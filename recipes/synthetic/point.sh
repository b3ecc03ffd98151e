#!/usr/bin/env bash
# Trains one model of the synthetic retrieval experiments until it is solved or makes no progress, and prints its best evaluation loss.
#
# Paper:    Schlag et al. 2021, section 6.1 and appendix D, figures 2 to 5. Rows: FIGURE-KEYS-RULE-MAP. FIGURE is capacity (setting 1, each
#           key once) or updates (setting 2, keys are written again); without RULE the rule is sum. A map is softmax (softmax attention),
#           elu, relu, tanh, dpfpNU or favorM, with M random features
# Data:     drawn on the fly
# Hardware: one CPU core
# Time:     half a minute for 20 keys, some minutes for 200
# Expected: capacity-N-dpfp1 below 0.001 up to N = 100, 0.17 at 200; updates-20-delta-dpfp1 below 0.001; updates-20-sum-dpfp1 0.1
# Usage:    recipes/synthetic/point.sh ROW [OPTION of fairseq-train]...     prints best_eval_loss=X; a finished point only prints
#           recipes/synthetic/point.sh updates-20-delta-dpfp1
#           recipes/synthetic/point.sh capacity-60-softmax --lr 0.0003
#
# Batches of 32 and Adam with its defaults (for fwm with tanh 128 and a tenth of the learning rate, as in the paper), until the evaluation
# loss is below 0.001 or has made no progress for 1000 updates.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
no_toy "leave TOY out, and name a row with few keys, such as capacity-20-dpfp1"
OUT=$(output_folder synthetic)
kinds="FIGURE-KEYS-RULE-MAP, for example updates-20-delta-dpfp1"
need_row "$kinds" "$@"
row=$1
shift
[[ $row =~ ^(capacity|updates)-([1-9][0-9]*)-(([a-z_]+)-)?([a-z]+)([0-9]*)$ ]] || fail "ROW is $row; it must be $kinds"
setting=1 keys=${BASH_REMATCH[2]} rule=${BASH_REMATCH[4]:-sum} map=${BASH_REMATCH[5]} number=${BASH_REMATCH[6]}
[ "${BASH_REMATCH[1]}" = capacity ] || setting=2

batch=32 rate=0.001 more=()
case $map in
    dpfp) more=(--dpfp-nu "${number:-1}") ;;
    favor) more=(--favor-features "${number:-64}") ;;
esac
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
more+=("$@")

# docs/results/figures/retrieval.py reads the model from this name
name=$(echo "setting$setting-$keys-$rule-$map ${more[*]:-}" | tr -s ' ' '_' | tr -dc 'A-Za-z0-9_.-')
log=$OUT/$name.log
if ! grep -qs '^best_eval_loss=' "$log"; then
    OMP_NUM_THREADS=1 logged "$log.part" fairseq-train --user-dir "$ROOT/fw_fairseq" --task associative_retrieval --setting "$setting" \
        --symbols "$keys" --arch retrieval "${model[@]}" --criterion retrieval_mse --batch-size $batch --cpu --num-workers 0 --seed "$SEED" \
        --optimizer adam --adam-betas '(0.9, 0.999)' --lr $rate --lr-scheduler until_solved --stop-min-lr 0 --patience 10 \
        --no-save --save-dir "$OUT" --log-format json --log-interval 1000000 "${more[@]}"
    best=$(sed -n 's/.*"valid_loss": "\([^"]*\)".*/\1/p' "$log.part" | sort -g |
        awk '!number { best = $0 } !/nan/ { number = 1 } END { if (NR) print "best_eval_loss=" best }') # nan is sorted first
    [ -z "$best" ] || echo "$best" >>"$log.part"
    mv "$log.part" "$log"
fi
tail -n 1 "$log"
