#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Each row of docs/failures.md names its test, and each test that it names exists. In the last
# column of a table that is headed "test" may stand, in backticks:
#
#     room/name              a test of the suite; test_... behind it: a function in its sources
#     file.sh case*...       integration/file, its cases
#     tests/path  ./script   a file or folder of the tree
#
# or "not yet", which is the truth about a row without one.
set -euo pipefail
# shellcheck source=tests/style/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$style_root"

build=${BELAY_BUILD:-build}
if [ ! -f "$build/meson-info/intro-tests.json" ] || ! command -v jq >/dev/null; then
    echo "skipped: needs a build folder and jq" >&2
    exit 77
fi
mapfile -t tests < <(jq -r '.[].name' "$build/meson-info/intro-tests.json")

# is_test PATTERN: some test has this name.
is_test() {
    local name
    for name in "${tests[@]}"; do
        # shellcheck disable=SC2053 # a pattern on purpose
        [[ $name == $1 ]] && return 0
    done
    return 1
}

# wrong_names TOKEN...: those of one pair of backticks that name nothing.
wrong_names() {
    local first=$1 name
    shift
    case $first in
    *.sh)
        if [[ $first == */* ]]; then
            [ -e "$first" ] || echo "$first"
            return
        fi
        is_test "integration/${first%.sh}*" || echo "$first"
        for name in "$@"; do
            is_test "integration/${first%.sh}/$name" || echo "$first $name"
        done
        ;;
    ./* | tests/*)
        [ -e "$first" ] || echo "$first"
        ;;
    *)
        is_test "$first" || echo "$first"
        for name in "$@"; do
            grep -rqw --include='*.c' -- "$name" tests || echo "$first $name"
        done
        ;;
    esac
}

# complaints DOCUMENT: one line for each row without a test, and each name without one behind it.
complaints() {
    local line number=0 in_table=0 cell token wrong
    local -a words
    while IFS= read -r line; do
        number=$((number + 1))
        [[ $line == '|'*'|' ]] || {
            in_table=0
            continue
        }
        cell=${line%|}
        cell=${cell##*|}
        [ "${cell// /}" = test ] && in_table=1 && continue
        if [ $in_table = 0 ] || [ "${cell//[- ]/}" = "" ]; then
            continue
        fi
        [[ $cell == *'`'*'`'* || $cell == *'not yet'* ]] || echo "$1:$number: names no test"
        # shellcheck disable=SC2016 # backticks of the document
        while read -r token; do
            read -ra words <<<"$token"
            while read -r wrong; do
                echo "$1:$number: there is no test $wrong"
            done < <(wrong_names "${words[@]}")
        done < <(grep -oE '`[^`]+`' <<<"$cell" | tr -d '`')
    done <"$1"
}

# The check itself is checked first: five things that are wrong, five complaints.
sample=$(mktemp)
trap 'rm -f "$sample"' EXIT
cat >"$sample" <<'TEXT'
| fault | what happens | test |
|---|---|---|
| a | b | `base/job`, `rank.sh killed two_*`, `tests/sim`, *not yet* on Sundays |
| a | b | `base/jobs` |
| a | b | `rank.sh killed kissed`, `./no_such_script` |
| a | b | somebody looked |
| a | b | `crash/save test_no_such_function` |

| fault | noticed after |
|---|---|
| a | `nothing` |
TEXT
found=$(complaints "$sample" | wc -l)
[ "$found" = 5 ] || style_complain "the check finds $found of 5 mistakes in a sample"

while IFS= read -r line; do
    style_complain "$line"
done < <(complaints docs/failures.md)
style_end "docs/failures.md against ${#tests[@]} tests"
