#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The layering check must fail on each kind of wrong include, and name it.
set -euo pipefail
source_root=${BELAY_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# try WANT FILE LINE: a tree with this one line in this one file.
try() {
    local want=$1 file=$2 line=$3 rc=0 out
    rm -rf "$work/tree"
    mkdir -p "$work/tree/docs" "$work/tree/$(dirname "$file")"
    cp "$source_root/docs/architecture.md" "$work/tree/docs/"
    printf '%s\n' "$line" >"$work/tree/$file"
    out=$("$source_root/tests/style/layers.sh" "$work/tree" 2>&1) || rc=$?
    if [ "$want" = good ] && [ $rc != 0 ]; then
        echo "$file: '$line' was refused: $out"
        exit 1
    fi
    if [ "$want" = bad ] && { [ $rc = 0 ] || [[ $out != *"$file:1:"* ]]; }; then
        echo "$file: '$line' was not named: $out"
        exit 1
    fi
}

try good wire/a.c '#include "base/error.h"'
try good daemon/core/a.c '#include "wire/msg.h"'
try good daemon/a.c '#include <uv.h>'
try bad base/a.c '#include "wire/msg.h"'
try bad ckpt/a.c '#include "wire/msg.h"'
try bad kernels/cpu/a.c '#include "trainer/model.h"'
try bad trainer/a.c '#include "daemon/core/core.h"'
try bad tools/a.c '#include "trainer/model.h"'
try bad daemon/core/a.c '#include "daemon/daemon.h"'
try bad daemon/core/a.c '#include <pthread.h>'
try bad wire/a.c '  #  include <uv.h>'
try bad trainer/a.c '#include <liburing.h>'
try bad base/a.c '#include "nowhere/a.h"'
echo "each wrong include was named"
