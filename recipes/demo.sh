#!/usr/bin/env bash
# Trains a fast-weight model and fairseq's Transformer of the same size on a small text, tests both in three ways and lets them continue a
# prompt. The fast-weight model reads the test text better as one stream than in segments, and each generated token costs it the same.
#
# Paper:    none; the rule is gated_delta (Yang et al. 2024)
# Data:     Python's own language reference, about 80,000 words and marks, which the interpreter contains; nothing is downloaded
# Hardware: 2 CPU cores, or a GPU where torch sees one
# Time:     about 3 minutes on two free cores: the trainings run side by side and take 85 and 66 seconds of processor time
# Expected: OUT/table.md and OUT/demo.png. Test perplexity of the fast-weight model 60.9 in segments of 128 tokens, 60.3 in a sliding
#           window and 60.3 as one stream; of the Transformer 77.5 and 79.2. The state of the fast-weight model has one size at every length
# Usage:    recipes/demo.sh                 makes .venv, unless an environment is active that has fairseq, torch and matplotlib;
#                                           a second call continues where the first one stopped; with more UPDATES it trains on
#           OUT=folder UPDATES=600 PROMPT="if the class has" recipes/demo.sh
#           PYTHON=python3.13 recipes/demo.sh       takes another interpreter for a new .venv
asked_python=${PYTHON:-}
source "$(dirname "$(realpath "$0")")/lib.sh" || exit 1
no_toy "leave TOY out, and set UPDATES=50 for a short demo"
[ $# = 0 ] || fail "$1 has no effect here; leave it out"

OUT=${OUT:-${DEMO:-outputs/demo}}
UPDATES=${UPDATES:-300}
PROMPT=${PROMPT:-"if the object is"}

ready() { # whether an environment is active, other than .venv, that has what the demo needs
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    [ -n "$active" ] && [ "$active" != "$ROOT/.venv" ] && [ -x "$active/bin/fairseq-train" ] &&
        "$active/bin/python" -c 'import fairseq, hydra, matplotlib, sacrebleu, torch' 2>/dev/null
}

step() { printf '\n== %s\n' "$*"; }

shape=(--decoder-layers 3 --decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128 --decoder-ffn-embed-dim 512
    --decoder-attention-heads 4 --decoder-normalize-before --share-decoder-input-output-embed --dropout 0.2)

check_updates() { # fails where a model of OUT has had more updates, by the checkpoints that its log names
    local name had
    for name in gated_delta transformer; do
        [ -f "$OUT/$name/train.log" ] || continue
        had=$(sed -nE 's/.*Saved checkpoint .* @ ([0-9]+) updates.*/\1/p' "$OUT/$name/train.log" | tail -n 1)
        [ "${had:-0}" -le "$UPDATES" ] ||
            fail "OUT is $OUT, where $name has had $had updates; UPDATES is $UPDATES and must be at least $had, or OUT another folder"
    done
}

fit() { # NAME OPTION...: trains until UPDATES
    local folder=$OUT/$1
    [ "$(cat "$folder/updates" 2>/dev/null)" != "$UPDATES" ] || return 0
    step "training $1, $UPDATES updates"
    train "$folder" "$OUT/data" "${shape[@]}" "${@:2}" --num-workers 0 \
        --tokens-per-sample 128 --batch-size 8 --max-update "$UPDATES" --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 \
        --clip-norm 1 --lr 2e-3 --lr-scheduler inverse_sqrt --warmup-updates 50 --validate-interval-updates 50 \
        --save-interval-updates 50 --keep-interval-updates 1 --no-epoch-checkpoints --log-format simple --log-interval 25 |
        { grep --line-buffered -oE "(train_inner|valid) \| epoch.*num_updates[ =][0-9]+" || true; } | sed -u "s/^/$1 | /" || {
        tail -n 3 "$folder/train.log" >&2
        return 1
    }
    echo "$UPDATES" >"$folder/updates"
}

evaluate() { # NAME HOW OPTION...
    local log=$OUT/$1/$2.log
    if [ "$log" -nt "$OUT/$1/updates" ] && grep -q Perplexity "$log"; then return; fi
    step "testing $1, $2"
    logged "$log" fairseq-eval-lm "$OUT/data" --user-dir "$ROOT/fw_fairseq" --path "$OUT/$1/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 128 --no-progress-bar "${machine[@]}" "${@:3}"
    grep -oE "(Evaluated|Loss).*" "$log"
}

continue_prompt() { # NAME
    local folder=$OUT/$1 log=$OUT/$1/sample.log
    if [ "$log" -nt "$folder/updates" ] && grep -q '^H-' "$log" && [ "$(cat "$folder/prompt" 2>/dev/null)" = "$PROMPT" ]; then return; fi
    step "$1 continues: $PROMPT"
    rm -f "$folder/prompt"
    logged "$log" fairseq-interactive "$OUT/data" --user-dir "$ROOT/fw_fairseq" --task language_modeling "${machine[@]}" \
        --path "$folder/checkpoint_best.pt" --sampling --sampling-topk 10 --unkpen 100 --beam 1 --min-len 20 --max-len-b 40 --seed 1 <<<"$PROMPT"
    printf "%s\n" "$PROMPT" >"$folder/prompt"
    grep -P '^H-' "$log" | cut -f 3
}

check_updates
ready || PYTHON=$asked_python "$ROOT/requirements/install.sh" plots
BIN=$ROOT/.venv/bin
! ready || BIN=${VIRTUAL_ENV:-$CONDA_PREFIX}/bin
find_programs
if [ ! -d "$OUT/data" ]; then
    step "corpus"
    language_reference "$OUT/text"
    binarise "$OUT/data" -- --only-source --thresholdsrc 3 \
        --trainpref "$OUT/text/train.txt" --validpref "$OUT/text/valid.txt" --testpref "$OUT/text/test.txt"
fi

# Side by side: each has half of the cores, which tensors this small use better than one model could use all
(
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + 1) / 2))}
    fit gated_delta --arch fast_weight_lm --update-rule gated_delta --feature-map identity --feature-norm l2 \
        --no-token-positional-embeddings --task stateful_language_modeling &
    first=$!
    fit transformer --arch transformer_lm --task language_modeling || failed=yes
    wait "$first" && [ -z "${failed:-}" ]
)
for model in gated_delta transformer; do
    evaluate "$model" segments --task language_modeling --batch-size 8
    evaluate "$model" sliding --task language_modeling --batch-size 8 --context-window 96
done
evaluate gated_delta stream --task stateful_language_modeling --batch-size 1
continue_prompt gated_delta
continue_prompt transformer

if [ ! -f "$OUT/generation.json" ]; then
    step "generation at growing length"
    "$PYTHON" -m fw_fairseq.tools.bench model --mixers gated_delta --layers 3 --heads 4 --vocabulary "$(($(wc -l <"$OUT/data/dict.txt") + 4))" --tokens 128 512 \
        --threads 1 --contexts 256 1024 4096 --json "$OUT/generation.json.part"
    mv "$OUT/generation.json.part" "$OUT/generation.json"
fi

step "$OUT/table.md, $OUT/demo.png"
"$PYTHON" "$ROOT/recipes/demo/report.py" "$OUT"
