#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The one home of documentation is the header: each prototype there, or the group of prototypes
# that it belongs to, has a comment, but for the fixed verbs that say it all. Also reports functions
# over 70 lines (a report only).
set -euo pipefail
# shellcheck source=tests/style/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$style_root"
mapfile -t headers < <(style_files '*.h' | grep -v '^tests/')

while IFS= read -r line; do
    style_complain "$line"
done < <(awk '
# Lines without an empty one between them are a group; a group needs a comment.
function group_end(    i) {
    for (i = 1; i <= bare && !covered; i++) print pending[i]
    bare = covered = 0
}
FNR == 1 { group_end(); depth = comment = statement = 0 }
comment { if (/\*\//) comment = 0; next }
/^[ \t]*$/ { if (!depth) group_end(); next }
/\/\*/ { if (!depth) covered = 1; if (/^[ \t]*\/\*/) { if (!/\*\//) comment = 1; next } }
/^[ \t]*#/ { next }
statement { if (/;[ \t]*(\/\*.*)?$/) statement = 0; next }
{
    open = gsub(/\{/, "{"); shut = gsub(/\}/, "}")
    if (depth || open) { depth += open - shut; next }
}
/^[A-Za-z_].*[ *][a-z][a-z0-9_]*\(/ && !/^(typedef|extern "C"|_Static_assert|static|KERN_INLINE)/ &&
!/_(close|free|copy|equal)\(/ {
    pending[++bare] = FILENAME ":" FNR ": prototype without a comment: " $0
}
/^[A-Za-z_].*\(/ && !/;[ \t]*(\/\*.*)?$/ { statement = 1 }
END { group_end() }
' "${headers[@]}")

mapfile -t sources < <(style_files '*.c' | grep -v '^tests/')
long=$(awk '
/^\{/ { start = FNR }
/^\}/ { if (start && FNR - start > 70) printf "%s:%d: %d lines\n", FILENAME, start, FNR - start; start = 0 }
' "${sources[@]}")
[ -z "$long" ] || printf 'functions over 70 lines (a report, not a complaint):\n%s\n' "$long"
style_end "${#headers[@]} headers"
