#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The form of the C code: clang-format 14 would change nothing.
set -euo pipefail
# shellcheck source=tests/style/lib.sh
. "$(dirname "$0")/lib.sh"
tool=
for candidate in clang-format-14 clang-format; do
    if "$candidate" --version 2>/dev/null | grep -q 'version 14\.'; then
        tool=$candidate
        break
    fi
done
[ -n "$tool" ] || {
    echo "skip: clang-format 14 is not installed (other versions format differently)"
    exit 77
}
mapfile -t files < <(style_files '*.c' '*.h')
cd "$style_root"
out=$("$tool" --dry-run "${files[@]}" 2>&1) || true
while read -r file; do
    style_complain "$file: not formatted (clang-format -i $file)"
done < <(sed -n 's/^\([^:]*\):[0-9]*:[0-9]*: warning: .*/\1/p' <<<"$out" | sort -u)
style_end "${#files[@]} files formatted by $tool"
