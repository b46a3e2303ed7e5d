# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154
# The checkpoint part of ./bench, which sources it: bench_ckpt measures and calls `result`. Each
# round has fio and Belay one after the other on the same file system; a value is the median of the
# rounds' ratios.

CK_SLOW=$((400 * 1000 * 1000)) # bytes a second of the slow target: less than the cores compress
CK_FIO_WAYS=("4m 8" "8m 16" "1m 32")
CK_CGROUP=

ck_dir=$dir/belay-bench-ckpt.$$ # on the file system that is measured
ck_answer=
ck_clean() {
    [ -z "${ck_bench_PID:-}" ] || kill "$ck_bench_PID" 2>/dev/null
    [ -z "${ck_train_pid:-}" ] || kill "$ck_train_pid" 2>/dev/null
    if [ -n "$CK_CGROUP" ]; then
        wait 2>/dev/null
        rmdir "$CK_CGROUP" 2>/dev/null
    fi
    rm -rf "$ck_dir"
}

# Trains a small GPT on the documents under belayd; `seed` is the root of its checkpoint.
ck_seed() {
    cl_start "$ck_dir/seed" seed0 || exit 3
    cat >"$CL_DIR/job.yaml" <<YAML
name: seed
run_dir: $CL_DIR/run
ranks: $ranks
lanes: 2
model: {layers: 4, dim: 256, hidden: 688, heads: 4, kv_heads: 4}
data: {files: [$work/text.txt]}
train: {global_batch: 2, micro_batch: 1, seq_len: 128, steps: 80, lr: 0.001, warmup: 20, seed: 7}
backend: cpu
threads: 1
roots: [{path: $CL_DIR/checkpoints, shared: true, every: 80, keep: 1}]
YAML
    cl_run "$CL_DIR/job.yaml"
    wait "$CL_RUN_PID"
    [ "$(cl_run_code)" = 0 ] || bl_die 3 "belay run left with $(cl_run_code): $(tail -n 1 "$CL_DIR/run.log")"
    cl_stop
    seed=$ck_dir/seed/checkpoints
}

# ck_start BYTES: bench-ckpt with a state of so many bytes, the root of its checkpoints beside it.
ck_start() {
    coproc ck_bench { exec setsid "$ck_program" --state "$seed" --root "$ck_dir/root" --bytes "$1"; }
    # Copies: bash forgets its own when the process ends.
    exec {ck_out}<&"${ck_bench[0]}" {ck_in}>&"${ck_bench[1]}"
    ck_pid=$ck_bench_PID
    ck_read
}
ck_stop() {
    echo quit >&"$ck_in"
    wait "$ck_pid"
    exec {ck_out}<&- {ck_in}>&-
    ck_bench_PID=
}
ck_read() {
    read -r ck_answer <&"$ck_out" || bl_die 3 "bench-ckpt ended early"
}
# ck COMMAND...: its answer is in ck_answer.
ck() {
    echo "$*" >&"$ck_in"
    ck_read
}
ck_field() {
    jq -r "$1" <<<"$ck_answer"
}

# ck_fio OP BLOCK DEPTH BYTES: bytes per second of one sequential pass over a file that is there.
ck_fio() {
    fio --name=bench --filename="$ck_dir/fio.dat" --size="$4" --rw="$1" --bs="$2" --iodepth="$3" \
        --ioengine=io_uring --direct=1 --fixedbufs --end_fsync=1 --output-format=json 2>"$work/fio.log" |
        jq -r '.jobs[0] | .read.bw_bytes + .write.bw_bytes'
}
# ck_fio_best OP: the best of CK_FIO_WAYS, as "BLOCK DEPTH".
ck_fio_best() {
    local way
    for way in "${CK_FIO_WAYS[@]}"; do
        # shellcheck disable=SC2086 # two words
        echo "$(ck_fio "$1" $way "$bytes") $way"
    done | sort -g | awk 'END { print $2, $3 }'
}

# ck_fio_huge OP: with huge pages under fio's buffers, which it has no option for, and 128 MiB of
# them; more than a program that has other work would spend.
ck_fio_huge() {
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 ck_fio "$1" 8m 16 "$bytes"
}
ck_mb() {
    awk '{ v = $1 / 1e6; printf "%.0f\n", v }'
}

# --- saves and loads against the disk ---------------------------------------------------------

ck_disk() {
    local i w r best_w best_r huge_w huge_r
    ck_fio write 4m 8 "$bytes" >/dev/null # the file is laid out; so are ours once they are recycled
    best_w=$(ck_fio_best write)
    best_r=$(ck_fio_best read)
    for ((i = 0; i < 4; i++)); do ck save none; done
    for ((i = 1; i <= runs; i++)); do
        spare_note
        # shellcheck disable=SC2086
        w=$(ck_fio write $best_w "$bytes")
        huge_w=$(ck_fio_huge write)
        ck save none
        ck_field '"\(1000 * .bytes / .part_ms) \(1000 * .bytes / .ms) \(.cpu_ms / .bytes * 1e9) \(.ms - .part_ms)"' |
            awk -v w="$w" -v h="$huge_w" '{ print $1 / w, $2 / w, w, $1, $3, $4, $1 / h }' >>"$work/saves"
        # shellcheck disable=SC2086
        r=$(ck_fio read $best_r "$bytes")
        huge_r=$(ck_fio_huge read)
        ck load
        ck_field '"\(1000 * .bytes / .ms) \(.cpu_ms / .bytes * 1e9)"' |
            awk -v r="$r" -v h="$huge_r" '{ print $1 / r, r, $1, $2, $1 / h }' >>"$work/loads"
        bl_say "round $i: save $(tail -n 1 "$work/saves" | cut -d' ' -f1), load $(tail -n 1 "$work/loads" | cut -d' ' -f1)"
    done
    col() { awk -v c="$2" '{ print $c }' "$work/$1" | median; }
    result save.vs_disk "$(col saves 1)" ratio 0.95 higher \
        "$(col saves 4 | ck_mb) of fio's $(col saves 3 | ck_mb) MB/s (blocks, depth: $best_w); with the commit ($(col saves 6) ms) $(col saves 2); of fio on huge pages $(col saves 7); $(col saves 5) ms CPU a GB"
    result load.vs_disk "$(col loads 1)" ratio 0.90 higher \
        "$(col loads 3 | ck_mb) of fio's $(col loads 2 | ck_mb) MB/s (blocks, depth: $best_r); of fio on huge pages $(col loads 5); $(col loads 4) ms CPU a GB"
}

# --- the codec --------------------------------------------------------------------------------

ck_codec() {
    ck save zstd
    result save.ratio_fp32_training_state "$(ck_field '.raw_bytes / .bytes')" ratio 1.20 higher \
        "weights and both moments of a model after 80 steps; stored in $(ck_field .part_ms) ms"
    ck load
    local load_ms
    load_ms=$(ck_field .ms)
    ck encode $((512 << 20))
    result codec.encode_vs_zstd1 "$(ck_field '.zstd_encode_ms / .encode_ms')" ratio 1.7 higher \
        "$(ck_field '"ratio \(.bytes / .stored_bytes * 1000 | round / 1000), zstd -1 \(.bytes / .zstd_stored_bytes * 1000 | round / 1000); GB/s a thread: \(.bytes / .encode_ms / 1e4 | round / 100) and \(.bytes / .zstd_encode_ms / 1e4 | round / 100), back \(.bytes / .decode_ms / 1e4 | round / 100) and \(.bytes / .zstd_decode_ms / 1e4 | round / 100)"'); the whole back in $load_ms ms"
}

# ck_slow_start: a group of processes whose direct writes to the file system's disk are slowed down
# by the kernel. 1 where that cannot be had.
ck_slow_start() {
    local group=/sys/fs/cgroup/blkio/belay-bench.$$ device
    device=$(stat -c '%Hd:%Ld' "$ck_dir")
    mkdir "$group" 2>/dev/null || return 1
    CK_CGROUP=$group
    echo "$device $CK_SLOW" 2>/dev/null >"$group/blkio.throttle.write_bps_device"
}
ck_slow_enter() {
    echo "$1" >"$CK_CGROUP/cgroup.procs"
}

ck_slow() {
    local limit by="the kernel's (blkio)" i
    if ck_slow_start; then
        limit=$(
            ck_slow_enter "$BASHPID"
            ck_fio write 4m 8 $((1 << 30))
        )
        ck_slow_enter "$ck_pid"
    else
        by="the queue's own" limit=$CK_SLOW
        ck rate "$CK_SLOW"
    fi
    for ((i = 0; i < 3; i++)); do
        ck save auto
        ck_field '"\(1000 * .raw_bytes / .part_ms) \(.raw_bytes / .bytes)"' |
            awk -v l="$limit" '{ print $1 / l, $2 }' >>"$work/slow"
    done
    if [ -n "$CK_CGROUP" ]; then
        echo "$ck_pid" >/sys/fs/cgroup/blkio/cgroup.procs
        rmdir "$CK_CGROUP" && CK_CGROUP=
    else
        ck rate 0
    fi
    result save.effective_vs_disk "$(col slow 1)" ratio 1.15 higher \
        "target of $(ck_mb <<<"$limit") MB/s, the limit is $by; written at a ratio of $(col slow 2)"
}

# --- what training feels ----------------------------------------------------------------------

# ck_steps FROM TO: median time of the steps between two lines of the metrics.
ck_steps() {
    sed -n "$(($1 + 2)),$2p" "$ck_dir/metrics.jsonl" | jq -r '1000 * 256 / .tokens_per_s' | median
}
ck_lines() {
    wc -l <"$ck_dir/metrics.jsonl"
}
ck_warm() {
    [ "$(ck_lines)" -gt 20 ]
}
# A window of steps with saves all the time (a codec) or without ("").
ck_window() {
    local from until=$((SECONDS + 3))
    from=$(ck_lines)
    while [ $SECONDS -lt $until ]; do
        if [ -n "$1" ]; then
            ck save "$1"
        else
            sleep 0.2
        fi
    done
    ck_steps "$from" "$(ck_lines)"
}

# ck_share NICE: the share of the processor that bench-ckpt's session has.
ck_share() {
    renice -n "$1" -p "$ck_pid" >/dev/null
    ! [ -e "/proc/$ck_pid/autogroup" ] || echo "$1" 2>/dev/null >"/proc/$ck_pid/autogroup"
}

ck_inflation() {
    local i before none auto
    cat >"$ck_dir/job.yaml" <<YAML
name: steps
run_dir: $ck_dir/run
ranks: 1
lanes: 2
model: {layers: 4, dim: 128, hidden: 344, heads: 4, kv_heads: 2}
data: {files: [$work/text.txt]}
train: {global_batch: 2, micro_batch: 1, seq_len: 128, steps: 1000000, lr: 0.001, warmup: 10, seed: 7}
backend: cpu
threads: 1
YAML
    : >"$ck_dir/metrics.jsonl"
    setsid "$CL_BIN/belay-train" --job "$ck_dir/job.yaml" --ranks 1 --metrics "$ck_dir/metrics.jsonl" \
        >"$ck_dir/train.log" 2>&1 </dev/null &
    ck_train_pid=$!
    wait_for 60 ck_warm
    # As belay-engine is: threads that are nice, and a session whose share is.
    ionice -c 2 -n 7 -p "$ck_pid"
    ck_share 10
    for ((i = 1; i <= runs && i <= 4; i++)); do
        before=$(ck_window "")
        none=$(ck_window none)
        auto=$(ck_window auto)
        awk -v b="$before" -v n="$none" -v a="$auto" 'BEGIN { print a / b, n / b, b }' >>"$work/inflation"
    done
    ck_share 0
    kill "$ck_train_pid"
    wait "$ck_train_pid" 2>/dev/null
    ck_train_pid=
    result save.step_inflation "$(col inflation 1)" ratio 1.05 lower \
        "saves one after the other, codec auto; with codec none $(col inflation 2); a step takes $(col inflation 3) ms; one rank, $(nproc) cores"
}

# --- other people's checkpoints ---------------------------------------------------------------

ck_peers() {
    local i line ours_save ours_load part
    ck save none
    part=$(echo "$ck_dir"/root/step-*/part-0000.safetensors)
    part=${part##* } # the newest
    # bash warns of the other coprocess.
    { coproc ck_peer { exec "$torch" "$BL_ROOT/tests/bench/peers.py" "$part" "$ck_dir/peer" 2>"$work/peer.log"; }; } 2>/dev/null
    exec {peer_out}<&"${ck_peer[0]}" {peer_in}>&"${ck_peer[1]}"
    read -r line <&"$peer_out" || bl_die 3 "peers.py: $(tail -n 1 "$work/peer.log")"
    bl_say "torch $(jq -r .torch <<<"$line")"
    for ((i = 0; i < 3; i++)); do
        ck save none
        ours_save=$(ck_field .ms)
        ck load
        ours_load=$(ck_field .ms)
        echo >&"$peer_in"
        read -r line <&"$peer_out" || bl_die 3 "peers.py: $(tail -n 1 "$work/peer.log")"
        jq -r --argjson s "$ours_save" --argjson l "$ours_load" '[.dcp_save_ms / $s,
            .dcp_async_save_ms / $s, .safetensors_save_ms / $s, .dcp_load_ms / $l,
            .safetensors_load_ms / $l] | @tsv' <<<"$line" >>"$work/peers"
    done
    echo quit >&"$peer_in"
    exec {peer_out}<&- {peer_in}>&-
    wait "$ck_peer_PID" 2>/dev/null
    i=0
    for line in dcp_save dcp_async_save safetensors_save dcp_load safetensors_load; do
        i=$((i + 1))
        result "peer.$line" "$(col peers $i)" ratio 1 higher "its time over ours, codec none, durable; caches dropped before loads"
    done
}

# --- tools ------------------------------------------------------------------------------------

# ck_tool ARGUMENT...: ckpt-tool under a clock; the answer is in ck_answer.
ck_tool() {
    ck_answer=$("$ck_program" --run "$CL_BIN/ckpt-tool" "$@" 2>"$work/tool.log") || bl_die 3 "ckpt-tool $1"
    [ "$(ck_field .code)" = 0 ] || bl_die 3 "ckpt-tool $*: $(tail -n 1 "$work/tool.log")"
}

ck_tools() {
    local from copy_ms big=$((4 << 30))
    rm -rf "$ck_dir/root" "$ck_dir/fio.dat"
    ck_start $big
    ck save none
    ck_stop
    from=$(echo "$ck_dir"/root/step-*)
    ck_tool verify "$from"
    result verify.peak_mib "$(ck_field '.peak_kib / 1024')" MiB 256 lower \
        "of a checkpoint of 4 GiB, in $(ck_field .ms) ms"
    if ! "$CL_BIN/ckpt-tool" reshard --help >/dev/null 2>&1; then
        result reshard.vs_copy null ratio 1.5 lower "not built"
        result reshard.peak_mib null MiB 256 lower "not built"
        return
    fi
    copy_ms=$(cl_now_ms)
    cp -r "$from" "$ck_dir/copy" && sync "$ck_dir"/copy/*
    copy_ms=$(($(cl_now_ms) - copy_ms))
    rm -rf "$ck_dir/copy"
    ck_tool reshard "$from" --parts 4 --no-verify --out "$ck_dir/resharded"
    result reshard.vs_copy "$(ck_field ".ms / $copy_ms")" ratio 1.5 lower \
        "4 GiB from one part to four; cp and sync $copy_ms ms, reshard $(ck_field .ms) ms"
    result reshard.peak_mib "$(ck_field '.peak_kib / 1024')" MiB 256 lower "the same"
}

# --- everything -------------------------------------------------------------------------------

bench_ckpt() {
    ck_program=$CL_BIN/tests/bench/bench-ckpt
    mkdir -p "$ck_dir" || exit 3
    [ -n "$seed" ] || ck_seed
    ck_start "$bytes"
    bl_say "state: $(ck_field '"\(.bytes) bytes in \(.tensors) tensors"')"
    ck_disk
    ck_codec
    ck_slow
    ck_inflation
    [ -z "$torch" ] || ck_peers
    ck_stop
    ck_tools
    rm -rf "$ck_dir"
}
