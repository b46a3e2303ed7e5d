# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154
# A row of the train part of ./bench: the time that a pipeline of two stages stands idle, over what
# 1F1B must. Both stages have the same work, but for a head of 256 bytes.

PI_MICROS=8 # a step's, so in theory 1/9 is idle
PI_STEPS=12

pi_job() {
    cat >"$1" <<YAML
name: bench-pipeline
run_dir: $work/pipeline.run
ranks: 2
lanes: 1
layout: {pp: 2}
model: {layers: 8, dim: 384, hidden: 1024, heads: 6, kv_heads: 6}
data: {files: [$work/text.txt]}
train: {global_batch: $PI_MICROS, micro_batch: 1, seq_len: 256, steps: $PI_STEPS, lr: 1e-4, seed: 7}
backend: cpu
YAML
}

bench_train_pipeline() {
    local idle round
    spare_begin
    pi_job "$work/pipeline.yaml"
    : >"$work/pipeline"
    for ((round = 1; round <= 3; round++)); do
        spare_note
        rm -f "$work/pipeline.jsonl"
        "$CL_BIN/belay-train" --job "$work/pipeline.yaml" --threads 1 \
            --metrics "$work/pipeline.jsonl" >"$work/pipeline.log" 2>&1 ||
            bl_die 3 "belay-train: $(tail -n 1 "$work/pipeline.log")"
        jq -r 'select(.step > 2) | .pipeline_idle' "$work/pipeline.jsonl" | median >>"$work/pipeline"
    done
    idle=$(sort -g "$work/pipeline" | head -n 1)
    result pp.bubble "$(awk -v i="$idle" -v m=$PI_MICROS 'BEGIN { print i * (m + 1) }')" ratio 1.15 lower \
        "$idle of the passes' time, the best of 3 runs' medians; (p - 1) / (m + p - 1) is 1/$((PI_MICROS + 1))"
}
