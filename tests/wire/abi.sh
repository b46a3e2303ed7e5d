#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# belay.h and libbelay.so as others use them: the header stands alone in C99, C11 and C++, and the
# library shows exactly the functions that the header declares.
set -euo pipefail
library=${1:?abi.sh LIBRARY}
header="$BELAY_SOURCE/wire/belay.h"
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

printf '#include "%s"\nint main(void) { return belay_is_supervised(); }\n' "$header" >"$dir/use.c"
cp "$dir/use.c" "$dir/use.cc"
for standard in c99 c11; do
    ${CC:-cc} -std=$standard -pedantic -Wall -Wextra -Werror -fsyntax-only "$dir/use.c"
done
if command -v c++ >/dev/null; then
    c++ -std=c++11 -pedantic -Wall -Wextra -Werror -fsyntax-only "$dir/use.cc"
fi
${CC:-cc} "$dir/use.c" -o "$dir/use" "$library" -Wl,-rpath,"$(dirname "$library")"
env -u BELAY_SOCKET LD_LIBRARY_PATH="$(dirname "$library")" "$dir/use"

grep -o 'belay_[a-z_]*(' "$header" | tr -d '(' | sort -u >"$dir/declared"
nm -D --defined-only "$library" | awk '$2 == "T" {print $3}' | sort >"$dir/shown"
diff -u "$dir/declared" "$dir/shown"
