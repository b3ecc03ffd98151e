# shellcheck shell=bash
# Sourced by the steps after the lib: reads ROW from the first argument and sets what the steps share.
# A row is RULE-M-VARIANT, softmax or local_attention; the folder of its run in OUT has the same name.
OUT=$(output_folder gpt2)

read_row() { # ROW: sets row, rule and attention, the options that fw-convert and fairseq-train share
    local width variant norm=none
    kinds="softmax, local_attention or RULE-M-VARIANT, for example decay-16-phi"
    need_row "$kinds" "$@"
    row=$1 attention=()
    IFS=- read -r rule width variant <<<"$row"
    case $row in
        softmax | local_attention) return ;;
        delta-*-phi | gated_delta-*-phi) fail "ROW is $row; $rule diverges without a feature map, in the paper too; VARIANT must be baseline or norm" ;;
        decay-*-baseline | gated_delta-*-baseline) fail "ROW is $row; $rule has no attention norm; VARIANT must be norm or phi" ;;
    esac
    [[ $rule =~ ^(sum|gated|delta|decay|gated_delta)$ && $width =~ ^[1-9][0-9]*$ && $variant =~ ^(baseline|norm|phi)$ ]] ||
        fail "ROW is $row; it must be $kinds"
    case $rule in delta | gated_delta) norm=sum ;; esac
    attention=(--feature-dim "$width" --feature-norm "$norm" --feature-map relu)
    [ "$variant" != phi ] || attention=(--feature-dim "$width" --feature-norm none --feature-map identity)
    [ "$variant" != baseline ] || attention+=(--attention-norm)
    [ "$rule-$variant" != delta-baseline ] || attention+=(--attention-norm-of read)
}

shape=() tokens=1024
if [ -n "$TOY" ]; then
    tokens=32
    shape=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 128
        --decoder-attention-heads 4)
fi
