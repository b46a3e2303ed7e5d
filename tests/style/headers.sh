#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The one home of documentation is the header: each prototype there, or the group of prototypes
# that it opens, stands below a comment, but for the fixed verbs that say it all. Also reports functions over 70 lines (a report only).
set -euo pipefail
# shellcheck source=tests/style/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$style_root"
mapfile -t headers < <(style_files '*.h' | grep -v '^tests/')

while IFS= read -r line; do
    style_complain "$line"
done < <(awk '
FNR == 1 { covered = 0; inside = 0; depth = 0; comment = 0; statement = 0 }
# A comment covers what follows it without an empty line between.
comment { if (/\*\//) { comment = 0; covered = 1 } next }
/^[ \t]*\/\*/ { if (/\*\//) covered = 1; else comment = 1; next }
/^[ \t]*$/ { if (!depth) covered = 0; next }
/^[ \t]*#/ { next }
statement { if (/;[ \t]*(\/\*.*)?$/) statement = 0; next }
{
    open = gsub(/\{/, "{"); shut = gsub(/\}/, "}")
    if (depth || open) { depth += open - shut; next }
}
/^[A-Za-z_].*[ *][a-z][a-z0-9_]*\(/ && !/^(typedef|extern "C"|_Static_assert|static|KERN_INLINE)/ &&
!/_(close|free|copy|equal)\(/ {
    if (!covered && !/\/\*/) printf "%s:%d: prototype without a comment: %s\n", FILENAME, FNR, $0
    if (!/;[ \t]*(\/\*.*)?$/) statement = 1
}' "${headers[@]}")

mapfile -t sources < <(style_files '*.c' | grep -v '^tests/')
long=$(awk '
/^\{/ { start = FNR }
/^\}/ { if (start && FNR - start > 70) printf "%s:%d: %d lines\n", FILENAME, start, FNR - start; start = 0 }
' "${sources[@]}")
[ -z "$long" ] || printf 'functions over 70 lines (a report, not a complaint):\n%s\n' "$long"
style_end "${#headers[@]} headers"
