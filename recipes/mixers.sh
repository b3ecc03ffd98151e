# shellcheck shell=bash
# Sourced after the lib by the recipes that compare mixers of language models: the options of each row.
# shellcheck disable=SC2034
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
