# Sourced by the four scripts: what they share. TOY=1 puts a few sentences and a tiny model through the same commands on a CPU,
# in a folder that ends in _toy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/prepared.sh

TOY=${TOY:-}
OUT=$(output_folder baevski_auli)
RULE=${RULE:-decay}                 # of fw-convert --rule, or abc or linformer, which are not converted
M=${M:-${TOY:+4}}                   # width of queries and keys per head; 32 and 64 in the paper's table 3
M=${M:-32}
MAP=${MAP:-identity} NORM=${NORM:-none} # relu and sum for RULE=delta
PYTHON=${PYTHON:-.venv/bin/python}
NAME=$RULE-$M
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

fairseq() { # TOOL ARGUMENT...
    local tool=$1
    shift
    ${LAUNCH:-$PYTHON} -m "fairseq_cli.$tool" "$@"
}

machine=() shape=() tokens=512 context=480
if [ -n "$TOY" ]; then
    tokens=32 context=24
    machine=(--cpu --num-workers 0)
    shape=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64
        --decoder-attention-heads 4 --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20
        --adaptive-input-factor 2 --adaptive-softmax-factor 2)
fi
