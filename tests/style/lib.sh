# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the style tests share. They look at the source tree as it lies, committed or not.

style_root=${BELAY_SOURCE:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}
style_bad=0

# style_complain TEXT: counts and prints.
style_complain() {
    printf '%s\n' "$*"
    style_bad=$((style_bad + 1))
}

# style_files NAME-PATTERN...: our files, relative to the root, without build folders.
style_files() {
    local pattern arguments=()
    for pattern in "$@"; do
        [ ${#arguments[@]} = 0 ] || arguments+=(-o)
        arguments+=(-name "$pattern")
    done
    (cd "$style_root" && find . \( -path './build*' -o -path './.git' -o -path './.cache' \) -prune \
        -o -type f \( "${arguments[@]}" \) -print | sed 's,^\./,,' | sort)
}

# style_scripts: every bash script, with or without an ending.
style_scripts() {
    local file
    style_files '*.sh' '*.bash'
    for file in check quickstart bench .ci/run tests/soak; do
        [ ! -f "$style_root/$file" ] || echo "$file"
    done
}

# style_end CHECKED: the verdict.
style_end() {
    printf '%s, %d complaints\n' "$1" "$style_bad"
    [ "$style_bad" = 0 ]
}
