# shellcheck shell=bash
# Sourced by the steps after the lib: reads ROW from the first argument and sets what the steps share.
# A row is RULE-M, abc-M or linformer-M; the folder of its run in OUT has the same name.
OUT=$(output_folder baevski_auli)

read_row() { # ROW: sets row, rule, width and attention, the options that fw-convert and fairseq-train share
    kinds="RULE-M, abc-M or linformer-M, for example decay-32"
    need_row "$kinds" "$@"
    row=$1
    IFS=- read -r rule width <<<"$row"
    [[ $rule =~ ^(sum|gated|delta|decay|gated_delta|abc|linformer)$ && $width =~ ^[1-9][0-9]*$ ]] || fail "ROW is $row; it must be $kinds"
    case $rule in
        delta | gated_delta) attention=(--feature-dim "$width" --feature-map relu --feature-norm sum) ;;
        *) attention=(--feature-dim "$width" --feature-map identity --feature-norm none) ;;
    esac
}

shape=() tokens=512 context=480
if [ -n "$TOY" ]; then
    tokens=32 context=24
    shape=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64
        --decoder-attention-heads 4 --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20
        --adaptive-input-factor 2 --adaptive-softmax-factor 2)
fi
