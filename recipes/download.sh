# Sourced by recipes that download.

download() { # URL FILE SHA256 ; an empty SHA256: that of the first download
    local url=$1 file=$2 wanted=$3 found
    if [ ! -f "$file" ]; then
        curl --fail --location --retry 5 --continue-at - --output "$file.part" "$url"
        mv "$file.part" "$file"
    fi
    found=$(sha256sum "$file" | cut -d ' ' -f 1)
    [ -n "$wanted" ] || wanted=$(cat "$file.sha256" 2>/dev/null || echo "$found")
    [ "$found" = "$wanted" ] || { echo "$file has SHA-256 $found instead of $wanted; remove it and start again" >&2; exit 1; }
    echo "$found" >"$file.sha256"
}
