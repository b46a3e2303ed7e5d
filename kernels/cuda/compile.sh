#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: compile.sh LOG NVCC ARGUMENT...
# Runs NVCC with ptxas -v and keeps in LOG what that says of each kernel's registers, shared memory
# and spills: tests/gpusim/ptxas.sh reads it. What else is said, and all of it on failure, goes to
# stderr.
set -euo pipefail
log=$1
shift
code=0
"$@" -Xptxas -v >"$log" 2>&1 || code=$?
if [ "$code" != 0 ]; then
    cat "$log" >&2
    rm -f "$log"
    exit "$code"
fi
grep -v -e '^ptxas info' -e 'bytes stack frame' -e '^$' "$log" >&2 || true
