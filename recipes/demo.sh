#!/usr/bin/env bash
# A delta network beside fairseq's Transformer of the same size: trained, tested in three ways, continuing a prompt.
#   Data      Python's own language reference out of the interpreter, about 80,000 words and marks; nothing is downloaded
#   Hardware  2 CPU cores, or a GPU where torch sees one
#   Time      3 minutes on two free cores, install of cached packages included; twice that on busy ones
#   Expected  DEMO/table.md, curves.png, generation.png. Test perplexity about 102 with delta, 103 with the Transformer; 106 where delta
#             reads the text as one stream, its memory carried all along. Its state has one size at every length
#   recipes/demo.sh                        goes on where an earlier run stopped
#   DEMO=outputs/demo UPDATES=400 recipes/demo.sh
set -euo pipefail
cd "$(dirname "$0")/.."

DEMO=${DEMO:-demo}
UPDATES=${UPDATES:-150}
PROMPT=${PROMPT:-"if the object is"}
PYTHON=${PYTHON:-python3}

step() { printf '\n== %s\n' "$*"; }

wanted=$(cat setup.py pyproject.toml constraints.txt requirements/*.txt | sha256sum) # as tests/run.sh has it
have() { [ -f "$1" ] && [ "$(cat "$1")" = "$wanted" ]; }
if ! have .venv/installed && ! have .venv/installed-plots; then # the first is that of tests/run.sh, whose packages are more
    step "installing into .venv"
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null ||
        { echo "$PYTHON is not Python 3.11 or 3.12; set PYTHON to one that is" >&2; exit 2; }
    [ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plots]'
    echo "$wanted" >.venv/installed-plots
fi
export PATH="$PWD/.venv/bin:$PATH" PYTHONWARNINGS=ignore
mkdir -p "$DEMO"

if [ ! -f "$DEMO/data/test.idx" ]; then
    step "corpus"
    python recipes/demo/corpus.py "$DEMO/text"
    fairseq-preprocess --only-source --thresholdsrc 3 --destdir "$DEMO/data" \
        --trainpref "$DEMO/text/train.txt" --validpref "$DEMO/text/valid.txt" --testpref "$DEMO/text/test.txt" >"$DEMO/preprocess.log" 2>&1 ||
        { cat "$DEMO/preprocess.log" >&2; exit 1; }
fi

shape=(--decoder-layers 3 --decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128 --decoder-ffn-embed-dim 512
    --decoder-attention-heads 4 --decoder-normalize-before --share-decoder-input-output-embed --dropout 0.2)

train() { # NAME OPTION... ; fairseq goes on from checkpoint_last.pt by itself
    local name=$1 log="$DEMO/$1/train.log"
    shift
    [ "$(cat "$DEMO/$name/updates" 2>/dev/null)" = "$UPDATES" ] && return
    step "training $name, $UPDATES updates"
    mkdir -p "$DEMO/$name"
    fairseq-train "$DEMO/data" --user-dir fw_fairseq --task language_modeling --save-dir "$DEMO/$name" "${shape[@]}" "$@" \
        --tokens-per-sample 128 --batch-size 8 --max-update "$UPDATES" --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 \
        --clip-norm 1 --lr 2e-3 --lr-scheduler inverse_sqrt --warmup-updates 50 --validate-interval-updates 25 \
        --save-interval-updates 25 --keep-interval-updates 1 --no-epoch-checkpoints --seed 1 --num-workers 0 \
        --distributed-world-size 1 --log-format simple --log-interval 25 |
        tee -a "$log" | { grep --line-buffered -oE "(train_inner|valid) \| epoch.*num_updates[ =][0-9]+" || true; }
    echo "$UPDATES" >"$DEMO/$name/updates"
}

evaluate() { # NAME HOW OPTION...
    local name=$1 log="$DEMO/$1/$2.log"
    [ "$log" -nt "$DEMO/$name/updates" ] && grep -q Perplexity "$log" && return
    step "testing $name, $2"
    shift 2
    fairseq-eval-lm "$DEMO/data" --user-dir fw_fairseq --path "$DEMO/$name/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 128 --no-progress-bar "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
    grep -oE "(Evaluated|Loss).*" "$log"
}

continue_prompt() { # NAME
    local log="$DEMO/$1/sample.log"
    [ "$log" -nt "$DEMO/$1/updates" ] && return
    step "$1 goes on from: $PROMPT"
    echo "$PROMPT" | fairseq-interactive "$DEMO/data" --user-dir fw_fairseq --task language_modeling --path "$DEMO/$1/checkpoint_best.pt" \
        --sampling --sampling-topk 10 --unkpen 100 --beam 1 --min-len 20 --max-len-b 40 --seed 1 >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
    grep -P '^H-' "$log" | cut -f 3
}

train delta --arch fast_weight_lm --update-rule delta --no-token-positional-embeddings --task stateful_language_modeling
train transformer --arch transformer_lm
for model in delta transformer; do
    evaluate "$model" segments --task language_modeling --batch-size 8
    evaluate "$model" sliding --task language_modeling --batch-size 8 --context-window 96
done
evaluate delta streaming --task stateful_language_modeling --batch-size 1
continue_prompt delta
continue_prompt transformer

if [ ! -f "$DEMO/generation.json" ]; then
    step "generation at growing length"
    fw-bench model --layers 3 --heads 4 --vocabulary "$(($(wc -l <"$DEMO/data/dict.txt") + 4))" --tokens 128 512 --threads 1 \
        --contexts 256 1024 4096 --json "$DEMO/generation.json" --figure "$DEMO/generation.png"
fi

step "$DEMO/table.md, $DEMO/curves.png, $DEMO/generation.png"
python recipes/demo/report.py "$DEMO"
