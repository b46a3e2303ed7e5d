# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154
# The reduce part of ./bench, which sources it: the ordered all-reduce of the communicator over
# OpenMPI's all-reduce of as many bytes between as many processes, in the same minutes.

reduce_bytes=$((64 << 20))
reduce_turns=10

reduce_ours() { "$CL_BIN/tests/bench/bench-reduce" "$1" $reduce_bytes $reduce_turns | cut -d' ' -f1 | median; }
reduce_mpi() {
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        mpirun --oversubscribe -n "$1" "$work/reduce_mpi" $reduce_bytes $reduce_turns 2>>"$work/mpi.log" | median
}

# reduce_row RANKS GOAL: turns of ours and theirs alternate; the median of the ratios counts.
reduce_row() {
    local i ours theirs
    : >"$work/reduce"
    for ((i = 1; i <= runs; i++)); do
        spare_note
        ours=$(reduce_ours "$1")
        theirs=$(reduce_mpi "$1")
        [ -n "$ours" ] || bl_die 3 "bench-reduce failed"
        [ -n "$theirs" ] || bl_die 3 "mpirun: $(tail -n 1 "$work/mpi.log")"
        awk -v o="$ours" -v t="$theirs" 'BEGIN { print o, t, t / o }' >>"$work/reduce"
    done
    result "reduce.ordered_vs_mpi.$1" "$(awk '{ print $3 }' "$work/reduce" | median)" times "$2" higher \
        "all-reduce of 64 MiB, $1 ranks, median of $runs: ordered $(awk '{ print $1 }' "$work/reduce" | median) ms, OpenMPI $(awk '{ print $2 }' "$work/reduce" | median) ms"
}

bench_reduce() {
    if ! command -v mpirun >/dev/null || ! command -v mpicc >/dev/null; then
        bl_say "reduce: no mpirun and mpicc (Debian: openmpi-bin libopenmpi-dev), left out"
        return
    fi
    mpicc -O2 -o "$work/reduce_mpi" "$BL_ROOT/tests/bench/reduce_mpi.c" || bl_die 3 "mpicc failed"
    reduce_row 2 4
    reduce_row 4 2
}
