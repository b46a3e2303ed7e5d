#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: ptxas.sh [--update]
# Reads what nvcc's build (kernels/cuda/compile.sh) kept of each kernel: none may spill registers or
# have a stack frame, and those of kernels.txt are printed with registers, shared memory, occupancy,
# bytes, FLOP and the time that these take at least on an H100 SXM. --update puts the table into
# docs/performance.md. Skips where the build has no CUDA.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source_root=${BELAY_SOURCE:-$(cd "$here/../.." && pwd)}
logs=${BELAY_BUILD:-$source_root/build}/kernels/cuda
doc=$source_root/docs/performance.md
update=0
[ "${1-}" != --update ] || update=1

shopt -s nullglob
files=("$logs"/*.ptxas)
[ ${#files[@]} -gt 0 ] || {
    echo "skip: no kernels were built by nvcc in $logs"
    exit 77
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A line for each kernel and architecture: arch|registers|static shared|stack and spills|name
awk -v quote="'" '
/Compiling entry function/ { gsub(quote, ""); name = $7; arch = $9 }
/bytes stack frame/ { spills = $1 + $5 + $9 }
/: Used [0-9]+ registers/ {
    shared = 0
    if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART, RLENGTH) + 0
    printf "%s|%d|%d|%d|%s\n", arch, $5, shared, spills, name
}' "${files[@]}" | c++filt |
    sed -e 's/(anonymous namespace):://g' -e 's/|void /|/' -e 's/(.*//' | sort -u >"$work/kernels"
[ -s "$work/kernels" ] || { echo "no kernel in ${#files[@]} logs"; exit 1; }

bad=0
while IFS='|' read -r arch registers shared spills name; do
    [ "$spills" = 0 ] || {
        echo "$name, $arch: $spills bytes of stack and spills ($registers registers, $shared shared)"
        bad=1
    }
done <"$work/kernels"

# The card: NVIDIA H100 Tensor Core GPU datasheet, SXM: dense rates in GFLOP/s, bytes in GB/s. What
# an SM has: CUDA C++ Programming Guide, compute capability 9.0.
tensor=989400 fp32=66900 memory=3350
sm_registers=65536 sm_warps=64 sm_blocks=32 sm_shared=233472 block_shared=1024

# occupancy REGISTERS THREADS SHARED: blocks of an SM; registers go to warps in pieces of 256.
occupancy() {
    local warps=$(($2 / 32)) blocks=$sm_blocks limit
    for limit in $((sm_warps / warps)) $((sm_registers / (($1 * 32 + 255) / 256 * 256) / warps)) \
        $((sm_shared / ($3 + block_shared))); do
        [ "$limit" -ge "$blocks" ] || blocks=$limit
    done
    echo "$blocks"
}

# Of GPT-2 124M, batch 32, sequence 1024: read by the expressions of kernels.txt.
# shellcheck disable=SC2034
B=32 T=1024 C=768 H=12 D=64 V=50257 L=12 P=124439808
# shellcheck disable=SC2034
N=$((B * T)) F=$((4 * C)) R=$((B * T / 64))

# field ARCH COLUMN: of the kernel `name`, empty when there is none.
field() {
    awk -F'|' -v arch="$1" -v name="$name" -v column="$2" \
        '$1 == arch && $5 == name { print $column; exit }' "$work/kernels"
}

{
    echo "| kernel | registers sm_80, sm_90 | shared | warps of an SM | MB | GFLOP | at least, us | by | a step |"
    echo "|---|---|---|---|---|---|---|---|---|"
} >"$work/table"
total=0 listed=0
while IFS='|' read -r name threads dynamic bytes flop unit launches; do
    case $name in '#'* | '') continue ;; esac
    old=$(field sm_80 2) new=$(field sm_90 2) static=$(field sm_90 3)
    [ -n "$old" ] && [ -n "$new" ] || {
        echo "kernels.txt names $name, which nvcc did not compile"
        bad=1
        continue
    }
    bytes=$((bytes)) flop=$((flop)) shared=$((static + dynamic)) launches=$((launches))
    peak=$fp32
    [ "$unit" = fp32 ] || peak=$tensor
    by_memory=$((bytes / memory)) by_unit=$((flop / peak)) # ns
    ns=$by_memory by=memory
    [ "$by_unit" -le "$by_memory" ] || ns=$by_unit by=$unit
    warps=$(($(occupancy "$new" "$threads" "$shared") * threads / 32))
    total=$((total + ns * launches)) listed=$((listed + 1))
    # shellcheck disable=SC2016
    printf '| `%s` | %d, %d | %d | %d of %d | %d.%d | %d.%d | %d.%d | %s | %d |\n' \
        "$(sed -e 's/__nv_bfloat16/bf16/g' -e 's/ >/>/g' <<<"$name")" "$old" "$new" "$shared" \
        "$warps" "$sm_warps" $((bytes / 1000000)) $((bytes / 100000 % 10)) \
        $((flop / 1000000000)) $((flop / 100000000 % 10)) $((ns / 1000)) $((ns / 100 % 10)) "$by" \
        "$launches" >>"$work/table"
done <"$here/kernels.txt"
cat "$work/table"
echo "all launches of a step: at least $((total / 1000)) us; $(grep -c . "$work/kernels") kernels compiled"
[ "$listed" -gt 0 ] || bad=1

if [ "$update" = 1 ]; then
    awk -v table="$work/table" '
    /^<!-- kernels: end/ { inside = 0 }
    !inside { print }
    /^<!-- kernels: begin/ { inside = 1; while ((getline row < table) > 0) print row }
    ' "$doc" >"$work/doc"
    cat "$work/doc" >"$doc"
fi
[ "$bad" = 0 ] || exit 1
