#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The only daemon is killed and started again under a run: ranks do not notice, nothing is lost.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_PACE_MS=40
STEPS=60

# Lines in metrics.jsonl: progress that needs no daemon.
metrics_at() {
    [ "$(wc -l 2>/dev/null <"$(cl_metrics)" || echo 0)" -ge "$1" ]
}

daemon_killed() {
    STEPS=100
    it_begin 3 node0
    it_ready 10
    cl_node_kill node0 "$1"
    it_wait 20 "30 steps without a daemon" metrics_at 40
    it_node node0
    it_wait 15 "the daemon knows the run" it_step_is 40
    cl_events_since 0 | jq -es 'any(.name == "JOB_SUBMITTED")' >/dev/null ||
        it_fail "belay events has forgotten what was before the restart"
    it_survivors
    it_end
    it_recoveries 0 0
    it_each_step 1
    it_verify
    # Every line of the reporting rank came through its shim, once.
    local lines
    lines=$(cat "$CL_DIR"/run/logs/rank-0000.log* | grep -c '^step [0-9]*/100 loss')
    [ "$lines" = 100 ] || it_fail "the log of rank 0 has $lines lines of 100 steps"
}
case_killed() {
    daemon_killed KILL
}
case_restarted() {
    daemon_killed TERM
}

case_killed_three_times() {
    STEPS=120
    it_begin 2 node0
    it_ready 5
    local round
    for round in 1 2 3; do
        cl_node_kill node0 KILL
        it_wait 20 "steps without a daemon" metrics_at $((5 + 25 * round))
        it_node node0
        it_wait 15 "the daemon knows the run" it_step_is $((5 + 25 * round))
    done
    it_survivors
    it_end
    it_recoveries 0 0
    it_each_step 1
}

# A rank dies while nobody looks: the shim has kept how.
case_rank_dies_meanwhile() {
    STEPS=60
    it_begin 3 node0
    it_ready 10
    local victim
    victim=$(cl_rank_pid 1)
    cl_node_kill node0 KILL
    kill -SEGV "$victim"
    it_wait 5 "the end of rank 1" it_exit_kept "$victim"
    it_node node0
    it_wait 15 "recovery" it_recovered
    it_survivors 1
    [ "$(it_event_count RANK_EXITED '.fields.rank == 1 and .fields.signal_name == "SEGV"')" = 1 ] ||
        it_fail "the signal that ended rank 1 while the daemon was away is not told"
    it_end
    it_recoveries 1 1
    it_lost 1
    it_each_step
}
it_exit_kept() {
    ! kill -0 "$1" 2>/dev/null && compgen -G "$CL_DIR/node0/state/jobs/*/1.*.exit" >/dev/null
}

# All ranks end by themselves while the daemon is away: the end is told after.
case_run_ends_meanwhile() {
    STEPS=30
    it_begin 2 node0
    it_ready 10
    cl_node_kill node0 KILL
    it_wait 20 "all steps" metrics_at 30
    it_node node0
    it_end
    it_recoveries 0 0
    it_each_step 1
    it_verify
}

# While a checkpoint is written, its daemon and with it the engine go.
case_killed_in_save() {
    IT_FAIL=save-begun:delay_1500:1
    STEPS=60
    it_begin 2 node0
    it_wait 20 "a save under way" it_saving
    it_before
    cl_node_kill node0 KILL
    it_node node0
    it_end
    it_survivors
    it_recoveries 0 0
    it_verify
}
it_saving() {
    compgen -G "$CL_DIR/checkpoints/.step-*.tmp" >/dev/null
}

case_stopped_2_s() {
    STEPS=150
    it_begin 2 node0
    it_ready 10
    kill -STOP "${CL_PID[node0]}"
    sleep 2
    kill -CONT "${CL_PID[node0]}"
    it_end
    it_recoveries 0 0
    it_each_step 1
}

it_main "$@"
