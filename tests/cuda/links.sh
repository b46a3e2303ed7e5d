#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# No program needs CUDA's libraries or a driver to start: only the plug-in knows them.
set -euo pipefail
build=${BELAY_BUILD:?}
checked=0
bad=0
for program in belayd belay belay-shim belay-engine belay-train ckpt-tool libbelay.so; do
    [ -e "$build/$program" ] || {
        echo "$program is not in $build"
        bad=1
        continue
    }
    needed=$(readelf -d "$build/$program" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    checked=$((checked + 1))
    if grep -E '^lib(cuda|cudart|cublas|cublasLt|nccl|nvidia-ml)\b' <<<"$needed"; then
        echo "$program needs the above"
        bad=1
    fi
done
echo "$checked files, $bad bad"
exit "$bad"
