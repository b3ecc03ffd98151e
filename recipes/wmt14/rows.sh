# shellcheck shell=bash
# Sourced after the lib: the options of the model of each row.
shape=${SHAPE:-wmt_en_de_big}
# shellcheck disable=SC2034
kinds="softmax, linear, performerM, prescaledM or dpfpNU"

row_model() { # ROW: sets model
    local name=${1%%-*} attentions=encoder,decoder,cross linear
    case $1 in
        *-encoder | *-decoder | *-cross) attentions=${1#*-} ;;
        *-*) fail "ROW is $1; after the - must be encoder, decoder or cross" ;;
    esac
    linear=(--arch "fast_weight_transformer_$shape" --linear-attention "$attentions" --update-rule sum --feature-norm none --attention-norm)
    case $name in
        softmax) model=(--arch "transformer_$shape") ;;
        linear) model=("${linear[@]}" --feature-map elu) ;;
        performer[1-9]*) model=("${linear[@]}" --feature-map favor --favor-features "${name#performer}") ;;
        prescaled[1-9]*) model=("${linear[@]}" --feature-map favor --favor-prescale --favor-features "${name#prescaled}") ;;
        dpfp[1-9]*) model=("${linear[@]}" --feature-map dpfp --dpfp-nu "${name#dpfp}") ;;
        *) fail "ROW is $1; it must be $kinds" ;;
    esac
}
