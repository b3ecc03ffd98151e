#!/usr/bin/env bash
# Builds the source distribution and the wheel into dist/, as a release has them, and uses each wheel from a folder and an environment of
# its own: the Python lines of the README, and fairseq-train --user-dir fw_fairseq for 5 updates. Where fairseq has no wheel, the Python
# lines run without it, and then it is built.
#   tests/wheel.sh                          python3
#   tests/wheel.sh python3.11 python3.13    two interpreters
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
[ $# -gt 0 ] || set -- python3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf dist
"$1" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet --disable-pip-version-check build twine
"$work/build/bin/python" -m build --outdir dist >"$work/build.log" || { cat "$work/build.log" >&2; exit 1; }
"$work/build/bin/python" -m twine check --strict dist/*

words() { # COUNT: lines of words
    seq "$1" | awk '{ for (i = 0; i < 20; i++) printf "w%d ", ($1 * 7 + i * i) % 50; print "" }'
}

for name in "$@"; do
    bin=$work/$name/bin
    "$name" -m venv "$work/$name"
    requirements/cpu_torch.sh "$bin/python"
    "$bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
    mkdir "$work/use-$name"
    cd "$work/use-$name" # from where the checkout is not found
    awk '/^```python$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$root/README.md" >example.py
    "$bin/python" example.py
    echo "$name: $("$bin/python" -c 'import fw_fairseq; print("fw_fairseq", fw_fairseq.__version__, "runs")')"
    if ! "$bin/python" -c 'import fairseq' 2>/dev/null; then
        "$bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" setuptools
        "$root/requirements/fairseq.sh" "$bin/python"
    fi
    words 200 >train.txt
    words 20 >valid.txt
    PATH=$bin:$PATH
    fairseq-preprocess --only-source --trainpref train.txt --validpref valid.txt --destdir data >preprocess.log 2>&1 ||
        { tail -n 20 preprocess.log >&2; exit 1; }
    fairseq-train data --user-dir fw_fairseq --cpu --task stateful_language_modeling --arch fast_weight_lm --decoder-layers 2 \
        --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --update-rule gated_delta --tokens-per-sample 32 \
        --batch-size 4 --optimizer adam --lr 1e-3 --max-update 5 --num-workers 0 --save-dir run >train.log 2>&1 ||
        { tail -n 20 train.log >&2; exit 1; }
    fairseq-eval-lm data --user-dir fw_fairseq --cpu --path run/checkpoint_last.pt --task stateful_language_modeling --gen-subset valid \
        --tokens-per-sample 32 --batch-size 1 >eval.log 2>&1 || { tail -n 20 eval.log >&2; exit 1; }
    grep -o 'Perplexity: .*' eval.log
    cd "$root"
done
