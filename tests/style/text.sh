#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every source says its licence, leaves nothing open, is of a readable length, and the
# documentation's links lead somewhere.
set -euo pipefail
# shellcheck source=tests/style/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$style_root"

# Longest sources that are still read in one sitting; a table of data may be longer.
lines_max=800
is_table() {
    case $1 in
    *_table.c | *_options.c | *.pb-c.* | tests/*/golden/*) return 0 ;;
    *) return 1 ;;
    esac
}

mapfile -t sources < <(style_files '*.c' '*.h' '*.cu' '*.cuh' '*.proto' meson.build)
mapfile -t scripts < <(style_scripts)
for file in "${sources[@]}" "${scripts[@]}"; do
    head -n 2 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' ||
        style_complain "$file: no SPDX line at the top"
done
# The words are spelt in two halves so that this file does not find itself.
while IFS= read -r hit; do
    style_complain "$hit: left open"
done < <(grep -nE '\b(TO''DO|FIX''ME|XX''X|HA''CK)\b' "${sources[@]}" "${scripts[@]}" | cut -c1-120)
for file in "${sources[@]}"; do
    count=$(wc -l <"$file")
    if [ "$count" -gt $lines_max ] && ! is_table "$file"; then
        style_complain "$file: $count lines, more than $lines_max: a room that wants a wall"
    fi
done

# Relative links of the documents: [text](path#anchor).
mapfile -t documents < <(style_files '*.md')
for file in "${documents[@]}"; do
    while read -r link; do
        case $link in
        '' | http:* | https:* | mailto:* | '#'*) continue ;;
        esac
        [ -e "$(dirname "$file")/${link%%#*}" ] || style_complain "$file: link to $link leads nowhere"
    done < <(grep -oE '\]\([^) ]+\)' "$file" | sed 's/^](//; s/)$//')
done
style_end "${#sources[@]} sources, ${#scripts[@]} scripts, ${#documents[@]} documents"
