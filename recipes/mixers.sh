# shellcheck shell=bash
# Sourced after the lib by the recipes that compare mixers of language models: the options of each row, and those of
# converted models.
# shellcheck disable=SC2034
converted_map() { # RULE WIDTH: sets map, the options of what conversion makes of queries and keys, WIDTH of them for each head
    case $1 in
        delta | gated_delta) map=(--feature-dim "$2" --feature-map relu --feature-norm sum) ;;
        *) map=(--feature-dim "$2" --feature-map identity --feature-norm none) ;;
    esac
}

declare -A row_options=(
    [softmax]="--mixer softmax"
    [sum_elu]="--update-rule sum --feature-map elu --feature-norm none --attention-norm"
    [delta_elu]="--update-rule delta --feature-map elu --feature-norm sum"
    [delta_dpfp]="--update-rule delta --feature-map dpfp --dpfp-nu 1 --feature-norm sum"
    [gated]="--update-rule gated --feature-map identity --feature-norm none"
    [decay]="--update-rule decay --feature-map identity --feature-norm none"
    [gated_delta]="--update-rule gated_delta --feature-map identity --feature-norm l2"
    [additive]="--mixer additive"
    [additive_all]="--mixer additive --window-sizes 0"
    [leap]="--mixer leap"
    [sru]="--mixer sru"
    [srupp]="--mixer srupp"
)
