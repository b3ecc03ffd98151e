# Sourced by the four scripts: what they share. TOY=1 puts a few sentences and a tiny GPT-2 through the same commands on a CPU,
# in a folder that ends in _toy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/prepared.sh

TOY=${TOY:-}
OUT=$(output_folder gpt2)
RULE=${RULE:-decay}          # sum, gated, delta, decay, gated_delta; softmax: GPT-2 itself; local_attention: a window of 32 tokens
M=${M:-16}                   # width of queries and keys per head: 4, 16 and 32 in the paper
VARIANT=${VARIANT:-phi}      # table 1: baseline, norm (without attention norm), phi (without feature map, too)
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

case $RULE:$VARIANT in
    softmax:* | local_attention:*) NAME=$RULE ;;
    delta:phi | gated_delta:phi) echo "RULE $RULE diverges without a feature map, in the paper too; VARIANT must be baseline or norm" >&2; exit 2 ;;
    decay:baseline | gated_delta:baseline) echo "RULE $RULE has no attention norm; VARIANT must be norm or phi" >&2; exit 2 ;;
    *:baseline | *:norm | *:phi) NAME=$RULE-$M-$VARIANT ;;
    *) echo "VARIANT is $VARIANT; it must be baseline, norm or phi" >&2; exit 2 ;;
esac
attention=() # the options that fw-convert and fairseq-train share
if [ "$NAME" != "$RULE" ]; then
    norm=none
    case $RULE in delta | gated_delta) norm=sum ;; esac
    attention=(--feature-dim "$M" --feature-norm "$norm" --feature-map relu)
    [ "$VARIANT" != phi ] || attention=(--feature-dim "$M" --feature-norm none --feature-map identity)
    [ "$VARIANT" != baseline ] || attention+=(--attention-norm)
fi

fairseq() { # TOOL ARGUMENT...
    local tool=$1
    shift
    ${LAUNCH:-$PYTHON} -m "fairseq_cli.$tool" "$@"
}

machine=() shape=() tokens=1024
if [ -n "$TOY" ]; then
    tokens=32 machine=(--cpu --num-workers 0)
    shape=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 128
        --decoder-attention-heads 4)
fi
