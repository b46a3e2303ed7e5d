#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ranks that train in a device's memory, under a real daemon: state updated in place there, slots
# that are complete after the step, memory moved by an engine that an abort must end. No GPU is
# needed: the plug-in is the tests' own, or the one that BELAY_CUDA_PLUGIN names.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_PACE_MS=40
STEPS=30
TRAIN='precision: fp32'
export BELAY_CUDA_PLUGIN=${BELAY_CUDA_PLUGIN:-$CL_BIN/tests/trainer/libfake_device.so}

# begin RANKS: as it_begin, with a reference of the CPU, whose bits the tests' plug-in has; of
# another by itself.
begin() {
    it_job "$1"
    [ -n "${HAS_OWN_BITS:-}" ] || it_alone
    sed -i 's/^backend: cpu$/backend: cuda/' "$JOB_FILE"
    [ -z "${HAS_OWN_BITS:-}" ] || it_alone
    it_cluster node0
    cl_run "$JOB_FILE"
}

is_on_device() {
    grep -q '^belay-train: backend .*device' "$CL_DIR"/run/logs/rank-0000.log
}

# A rank dies, its replacement takes a device, the others keep theirs; all load the sealed step.
case_killed() {
    begin 3
    it_ready 10
    is_on_device || it_fail "rank 0 does not say that it is on a device"
    it_signal KILL 1
    it_wait 15 "recovery" it_recovered
    it_survivors 1
    it_end
    it_recoveries 1 1
    it_lost 1
    it_each_step
    it_verify
}

# on_gpusim: from here the CUDA back end itself, over the stand-ins of tests/gpusim.
on_gpusim() {
    export BELAY_CUDA_PLUGIN=${BELAY_CUDA_SIM:-$CL_BIN/tests/gpusim/belay_cuda_sim.so}
    [ -e "$BELAY_CUDA_PLUGIN" ] || {
        echo "skip: no C++ compiler when this was built, so no simulated GPU"
        exit 77
    }
    HAS_OWN_BITS=1
    TRAIN='precision: bf16'
}

# The CUDA back end in bf16: a rank is killed in it.
case_gpusim_killed() {
    on_gpusim
    case_killed
}

# The same of one that stands still, with stages.
case_gpusim_stopped() {
    on_gpusim
    case_stopped
}

# The others wait in the engine for a rank that stands still.
case_stopped() {
    LAYOUT='{tp: 1, pp: 2}'
    ALONE_RANKS=2
    begin 4
    it_ready 10
    it_signal STOP 1
    it_wait 15 "an event that names the hung rank" it_event RANK_HUNG '.fields.rank == 1'
    it_wait 15 "recovery from the stop" it_recovered
    it_survivors 1
    it_end
    it_lost 1
    it_verify
}

# Steps go on, with their seals, while no daemon is there.
case_daemon_killed() {
    begin 2
    it_ready 5
    cl_node_kill node0 KILL
    it_wait 20 "steps without a daemon" metrics_at 20
    it_node node0
    it_survivors
    it_end
    it_recoveries 0 0
    it_each_step 1
    it_verify
}

# Lines in metrics.jsonl: progress that needs no daemon.
metrics_at() {
    [ "$(wc -l 2>/dev/null <"$(cl_metrics)" || echo 0)" -ge "$1" ]
}

it_main "$@"
