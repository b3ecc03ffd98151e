# Sourced by recipes: the folder of their output, and the record of the options that prepared data were made with.

output_folder() { # NAME: OUT or outputs/NAME. With TOY=1 it ends in _toy, without it never does: toy data are never taken for real data
    local out=${OUT:-outputs/$1}
    while [ "$out" != "${out%/}" ] && [ "$out" != / ]; do out=${out%/}; done
    if [ -n "${TOY:-}" ]; then
        out=${out%_toy}_toy
    elif [ "$out" != "${out%_toy}" ]; then
        echo "${0##*/}: OUT is $out; only the folders of TOY=1 end in _toy" >&2
        return 2
    fi
    echo "$out"
}

prepared() { # FOLDER NAME=VALUE...: whether FOLDER is there, made with these options; ends the script where it was made with others
    local folder=$1 found
    shift
    [ -d "$folder" ] || return 1
    found=$(paste -sd ' ' "$folder.options" 2>/dev/null || echo "unknown options")
    [ "$found" = "$*" ] || { echo "${0##*/}: $folder was made with $found, not with $*; set OUT to another folder, or remove all of ${folder%/*}" >&2; exit 1; }
    echo "$folder is there and was made with these options" >&2
}

record() { # FOLDER NAME=VALUE...: before FOLDER gets its name, so that it is never there without its options
    printf '%s\n' "${@:2}" >"$1.options"
}

absolute() { # PATH: the same file by one name; nothing where PATH is empty
    [ -z "$1" ] || realpath -m "$1"
}
