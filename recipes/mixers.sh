# shellcheck shell=bash
# Sourced after the lib by the recipes that compare mixers of language models: the options of each row, and those of
# converted models. An ending adds what published layers have around their recurrence to the row of a rule: -conv, -norm or -gate one
# part, -parts all three. With -published the layer is that of the architecture NAME_lm, in the same model.
# shellcheck disable=SC2034
converted_map() { # RULE WIDTH: sets map, the options of what conversion makes of queries and keys, WIDTH of them for each head
    case $1 in
        delta | gated_delta) map=(--feature-dim "$2" --feature-map relu --feature-norm sum) ;;
        *) map=(--feature-dim "$2" --feature-map identity --feature-norm none) ;;
    esac
}

sparse_parts="--ffn-sparsity 16 --qkv-sparsity 4 --ffn-sru 32"
declare -A row_options=(
    [softmax]="--mixer softmax"
    [sum_elu]="--update-rule sum --feature-map elu --feature-norm none --attention-norm"
    [delta]="--update-rule delta --feature-map identity --feature-norm l2"
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
    [lstm]="--mixer lstm"
    [retnet]="--update-rule retnet --feature-map identity --feature-norm none --scale-reads"
    [gla]="--update-rule gla --feature-map identity --feature-norm none --scale-reads"
    [mamba2]="--update-rule mamba2 --feature-map identity --feature-norm none"
    [hgrn2]="--update-rule hgrn2 --feature-map identity --feature-norm none"
    [rwkv6]="--update-rule rwkv6 --feature-map identity --feature-norm none"
    [rwkv7]="--update-rule rwkv7 --feature-map identity --feature-norm none"
    [kda]="--update-rule kda --feature-map identity --feature-norm l2"
    [gdn2]="--update-rule gdn2 --feature-map identity --feature-norm l2"
    [comba]="--update-rule comba --feature-map identity --feature-norm l2"
    [gsa]="--mixer gsa"
    [delta_product]="--update-rule delta_product --feature-map identity --feature-norm l2"
    [sparse_ffn]="--mixer softmax --ffn-sparsity 16"
    [sparse]="--mixer softmax $sparse_parts"
)
row_options[sparse_gated_delta]="$sparse_parts ${row_options[gated_delta]}"

published_layers="retnet gla mamba2 hgrn2 rwkv6 rwkv7 kda gdn2 comba gsa delta_net gated_delta delta_product gated_delta_product"
own_options() { # ROW: sets own, the options of a row; fails where there is no such row
    local name=$1 added=()
    case $1 in
        *-published)
            [[ " $published_layers " == *" ${1%-*} "* ]] || return 1
            own=(--arch "${1%-*}_lm" --ffn-form plain --norm-form layer --activation-fn relu
                --scale-embedding --token-positional-embeddings --no-layernorm-embedding)
            return 0
            ;;
        *-conv) added=(--short-conv 4) ;;
        *-norm) added=(--output-norm) ;;
        *-gate) added=(--output-gate) ;;
        *-parts) added=(--short-conv 4 --output-norm --output-gate) ;;
    esac
    [ ${#added[@]} = 0 ] || name=${1%-*}
    [ -n "${row_options[$name]:-}" ] || return 1
    read -ra own <<<"${row_options[$name]}"
    [ ${#added[@]} = 0 ] || [ "${own[0]}" = --update-rule ] || return 1
    own+=("${added[@]}")
}

row_names() { # all rows
    echo "$(printf '%s\n' "${!row_options[@]}" | sort | paste -sd ' '); rows of rules may end in -conv, -norm, -gate or -parts; $published_layers in -published"
}
