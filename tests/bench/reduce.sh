# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154
# The reduce part of ./bench, which sources it: memory of a rank over what the dry run says; the
# ordered all-reduce of the communicator over
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

# memory_row: peak memory of the largest rank over the dry run's sum, the worst of ZeRO 0 to 3.
memory_row() {
    local worst kept=$spare_min
    "$CL_BIN/tests/trainer/test_trainer_dryrun" >"$work/memory" 2>&1 || bl_die 3 "$(tail -n 3 "$work/memory")"
    worst=$(sed -n 's/.* dp 2 ZeRO .* ratio //p' "$work/memory" | sort -g | tail -n 1)
    # shellcheck disable=SC2034
    spare_min=100 # bytes do not depend on what else runs
    result zero.memory "${worst:-null}" ratio 1.05 lower \
        "peak of a rank over the dry run's sum, the worst of: $(sed -n 's/.*dp 2 \(ZeRO .\): .* ratio \(.*\)/\1 \2/p' "$work/memory" | paste -sd' ')"
    spare_min=$kept
}

bench_reduce() {
    memory_row
    if ! command -v mpirun >/dev/null || ! command -v mpicc >/dev/null; then
        bl_say "reduce: no mpirun and mpicc (Debian: openmpi-bin libopenmpi-dev), left out"
        return
    fi
    mpicc -O2 -D_GNU_SOURCE -o "$work/reduce_mpi" "$BL_ROOT/tests/bench/reduce_mpi.c" || bl_die 3 "mpicc failed"
    reduce_row 2 4
    reduce_row 4 2
}
