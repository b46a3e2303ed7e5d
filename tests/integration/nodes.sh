#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two daemons, and one of them, or all that it has, goes.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_PACE_MS=60
STEPS=100

NODES=2

metrics_at() {
    [ "$(wc -l 2>/dev/null <"$(cl_metrics)" || echo 0)" -ge "$1" ]
}

# daemon_of NODE SIGNAL: goes, and is back after 30 steps.
daemon_of() {
    it_begin 4 node0 node1
    it_ready 10
    cl_node_kill "$1" "$2"
    it_wait 20 "30 steps without it" metrics_at 40
    it_node "$1"
    it_wait 15 "the head knows the run" it_step_is 41
    it_survivors
    it_end
    it_recoveries 0 0
    it_each_step 1
    it_verify
}
case_member_killed() {
    daemon_of node1 KILL
}
case_member_restarted() {
    daemon_of node1 TERM
}
case_head_killed() {
    daemon_of node0 KILL
}
case_head_restarted() {
    daemon_of node0 TERM
}

case_rank_killed_on_member() {
    it_begin 4 node0 node1
    it_ready 10
    local rank
    rank=$(it_status '[.ranks[] | select(.node == "node1")][0].rank')
    it_signal KILL "$rank"
    it_wait 15 "recovery" it_recovered
    it_survivors "$rank"
    it_end
    it_recoveries 1 1
    it_lost 1
    it_verify
}

# node_dies NODE: daemon, engine, shims and ranks of it at one blow, after a checkpoint.
node_dies() {
    it_wait 20 "a checkpoint" it_event SAVE_COMMITTED
    it_ready 15
    local pids
    mapfile -t pids < <(it_processes "$1")
    [ ${#pids[@]} -ge 6 ] || it_fail "only ${#pids[@]} processes on $1"
    kill -KILL "${pids[@]}" 2>/dev/null
    { wait "${CL_PID[$1]}"; } 2>/dev/null
    CL_PID[$1]=
}

case_member_dies_and_is_back() {
    it_begin 4 node0 node1
    node_dies node1
    it_node node1
    it_wait 30 "recovery" it_recovered
    it_end
    [ "$(it_event_count STEPS_LOST)" -ge 1 ] || it_fail "no event says that steps were lost"
    [ "$(it_event_count RANK_EXITED '.fields.node == "node1"')" -ge 2 ] || it_fail "no event names the lost ranks"
    it_each_step
    it_verify
}

# Fewer ranks from then on.
case_member_dies_for_good() {
    it_begin 4 node0 node1
    node_dies node1
    it_wait 40 "recovery" it_recovered
    [ "$(it_event_count NODE_LOST)" -ge 1 ] || it_fail "no event says that the node is lost"
    [ "$(it_event_count STEPS_LOST)" -ge 1 ] || it_fail "no event says that steps were lost"
    it_end
    it_each_step
    it_verify
}
case_head_dies_and_is_back() {
    it_begin 4 node0 node1
    node_dies node0
    it_node node0
    it_wait 40 "recovery" it_recovered
    it_end
    [ "$(it_event_count STEPS_LOST)" -ge 1 ] || it_fail "no event says that steps were lost"
    it_each_step
    it_verify
}

# Everything everywhere, power off: from the newest checkpoint.
case_all_die() {
    it_begin 4 node0 node1
    it_wait 20 "a checkpoint" it_event SAVE_COMMITTED
    it_ready 15
    local pids
    # shellcheck disable=SC2119
    mapfile -t pids < <(it_processes)
    kill -KILL "${pids[@]}" 2>/dev/null
    { wait; } 2>/dev/null
    CL_PID=([node0]='' [node1]='')
    it_node node0
    it_node node1
    it_wait 40 "the end" it_finished
    [ "$(it_status .digest)" = "$IT_ALONE" ] || it_fail "ended in $(it_status .digest)"
    it_each_step
    it_verify
}
it_finished() {
    [ "$(it_status .verdict)" = "done" ]
}

# A node that comes late is taken in.
case_member_comes_late() {
    STEPS=150
    NODES=1
    DEADLINES="{beat: 100ms, lease: 1s, step_floor: 2500ms, init_floor: 4s, save: 30s, join: 4s, restart: 3s,
                grace: 2s}"
    it_job 4
    it_alone
    CL_NODES=(node0 node1)
    it_node node0 BELAYD_RANKS_MAX=2
    cl_run "$JOB_FILE"
    it_wait 30 "the run on two ranks" it_step_is 5
    [ "$(it_status .world)" = 2 ] || it_fail "world is $(it_status .world), not 2"
    it_before
    it_node node1
    it_wait 30 "four ranks" it_world_is 4
    it_end
    it_each_step
    it_verify
}
it_world_is() {
    it_run_ended && it_fail "the run ended with $(it_status .world) ranks"
    [ "$(it_status .world)" = "$1" ]
}

it_main "$@"
