# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154
# The step part of ./bench, which sources it: what supervision costs, and how fast a rank is back.

# job_write DIR STEPS
job_write() {
    cat >"$1/job.yaml" <<YAML
name: bench
run_dir: $1/run
ranks: $ranks
lanes: 4
model: {layers: 4, dim: 128, hidden: 344, heads: 4, kv_heads: 2}
data: {files: [$work/text.txt]}
train: {global_batch: 4, micro_batch: 1, seq_len: 128, steps: $2, lr: 0.003, warmup: 10, seed: 7}
backend: cpu
threads: 1
roots: [{path: $1/checkpoints, shared: true, every: 0, keep: 1}]
YAML
}

# step_ms FILE: median time of a step, from the tokens per second of a metrics file; the first
# steps warm caches up and are left out.
step_ms() {
    jq -r 'select(.step > 5) | 1000 * 4 * 128 / .tokens_per_s' "$1" | median
}

# pair N: one run alone and one under Belay; a line "alone with ratio" goes to the file of pairs.
pair() {
    local dir="$work/pair$1" alone with
    mkdir -p "$dir/alone"
    job_write "$dir/alone" "$steps"
    spare_note
    "$CL_BIN/belay-train" --job "$dir/alone/job.yaml" --ranks "$ranks" \
        --metrics "$dir/alone/metrics.jsonl" >"$dir/alone/log" 2>&1 ||
        bl_die 3 "belay-train: $(tail -n 1 "$dir/alone/log")"
    spare_note
    cl_start "$dir/with" node0 || exit 3
    job_write "$CL_DIR" "$steps"
    cl_run "$CL_DIR/job.yaml"
    wait "$CL_RUN_PID" # asking again and again would take from what is measured
    [ "$(cl_run_code)" = 0 ] || bl_die 3 "belay run left with $(cl_run_code): $(tail -n 1 "$CL_DIR/run.log")"
    with=$(step_ms "$(cl_metrics)")
    cl_stop
    alone=$(step_ms "$dir/alone/metrics.jsonl")
    awk -v a="$alone" -v w="$with" 'BEGIN { print a, w, w / a }' >>"$work/pairs"
    bl_say "pair $1: $(tail -n 1 "$work/pairs" | awk '{ printf "alone %.1f ms, with Belay %.1f ms, ratio %.3f", $1, $2, $3 }')"
}

recovered_since() {
    cl_events_since "$1" | jq -es 'any(.name == "RECOVERED")' >/dev/null
}
stepped() {
    local text
    text=$(cl_status_raw "$(cl_head)") && [ "$(cl_status_fields <<<"$text" | cut -f1)" -gt "$1" ]
}

# recoveries N: kills a rank N times in one long run; a line of ms for each.
recoveries() {
    local i seq begun back step=5
    spare_note
    cl_start "$work/recover" node0 || exit 3
    job_write "$CL_DIR" 100000
    cl_run "$CL_DIR/job.yaml"
    for ((i = 1; i <= $1; i++)); do
        wait_for 60 stepped $step
        seq=$(cl_events_newest)
        begun=$(cl_now_ms)
        kill -KILL "$(cl_rank_pid $((i % ranks)))"
        wait_for 60 recovered_since "$seq"
        back=$(cl_events_since "$seq" | jq -rs '[.[] | select(.name == "RECOVERED") | .ms] | first')
        echo $((back - begun)) >>"$work/recovered"
        step=$(($(cl_status_raw node0 | cl_status_fields | cut -f1) + 5))
    done
    cl_stop
}

bench_step() {
    local i step_alone overhead recovered_ms
    for ((i = 1; i <= runs; i++)); do pair $i; done
    recoveries "$runs"
    step_alone=$(awk '{ print $1 }' "$work/pairs" | median)
    overhead=$(awk '{ print $3 }' "$work/pairs" | median)
    recovered_ms=$(median <"$work/recovered")
    result step.snapshot_overhead "$overhead" ratio 1.05 lower \
        "median of $runs pairs, $ranks ranks, measured $overhead; step alone $step_alone ms"
    result recover.rank_ms "$recovered_ms" ms "$(awk -v s="$step_alone" 'BEGIN { print 1000 + s }')" lower \
        "median of $runs kills, measured $recovered_ms; a step takes $step_alone ms"
}
