#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The head is lost for good: a standby has a copy of its store and takes over by `belay promote`.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_PACE_MS=60
STEPS=150
NODES=2

on() {
    local node=$1
    shift
    "$CL_BIN/belay" "$@" --socket "$(cl_socket "$node")"
}

metrics_at() {
    [ "$(wc -l 2>/dev/null <"$(cl_metrics)" || echo 0)" -ge "$1" ]
}

replicated() {
    it_events node0 | jq -es 'any(.name == "NODE_CONNECTED")' >/dev/null &&
        [ "$(cl_status_raw node0 | jq -r '.store.replicated // false')" = true ]
}

# head_lost: a run under way with node1 as standby; then node0's daemon and its state are gone.
# Its ranks and shims live on: they are as much use as before.
head_lost() {
    it_job 4
    it_alone
    CL_NODES=(node0 node1)
    it_node node0 BELAYD_STANDBY=node1
    it_node node1
    it_wait 10 "the store is copied to the standby" replicated
    cl_run "$JOB_FILE"
    it_ready 10
    follow_events
    cl_node_kill node0 KILL
    rm -f "$CL_DIR"/node0/state/store.db*
    it_wait 20 "steps without a head" metrics_at 30
}

leads() {
    [ "$(cl_status_raw "$1" | jq -r .head)" = true ]
}

finished() {
    [ "$(it_status .verdict)" = "done" ]
}

# From here on node1 is asked.
promote() {
    on node1 promote >"$IT_DIR/out.log" 2>&1 || it_fail "belay promote leaves with $?"
    CL_NODES=(node1 node0)
    it_wait 10 "node1 leads" leads node1
}

follow_events() {
    on node1 events --follow --json >"$IT_DIR/followed" 2>/dev/null &
    it_wait 10 "the head's events at the standby" followed RUN_STARTED node0
}

# followed NAME NODE: has `belay events --follow` at node1 shown this event of this daemon?
followed() {
    jq -es --arg name "$1" --arg node "$2" 'any(.name == $name and .node == $node)' \
        "$IT_DIR/followed" >/dev/null 2>&1
}

judge() {
    it_wait 5 "the new head's events in those that are followed" followed RUN_STARTED node1
    it_wait 60 "the end of the run" finished
    [ "$(it_status .digest)" = "$IT_ALONE" ] || it_fail "ended in $(it_status .digest), alone in $IT_ALONE"
    it_each_step
    it_verify
}

# The old head's node comes back with its configuration of old: it becomes a member by itself.
case_promoted_and_old_head_back() {
    head_lost
    promote
    CL_NODES=(node0 node1)
    it_node node0 BELAYD_STANDBY=node1
    CL_NODES=(node1 node0)
    it_wait 20 "node0 is a member of node1" follows node0
    judge
    [ "$(it_event_count OLD_HEAD)" -ge 1 ] || it_fail "no event tells of the old head"
    [ "$(it_event_count GENERATION_RUNNING)" = 1 ] || it_fail "the ranks noticed"
}
follows() {
    it_events "$1" | jq -es 'any(.name == "HEAD_CONNECTED" and .fields.epoch == 2)' >/dev/null
}

# All processes of the head's node are gone too, and it never comes back.
case_promoted_without_the_node() {
    it_job 4
    it_alone
    CL_NODES=(node0 node1)
    it_node node0 BELAYD_STANDBY=node1
    it_node node1
    it_wait 10 "the store is copied to the standby" replicated
    cl_run "$JOB_FILE"
    it_wait 20 "a checkpoint" it_event SAVE_COMMITTED
    it_ready 15
    follow_events
    local pids
    mapfile -t pids < <(it_processes node0)
    kill -KILL "${pids[@]}" 2>/dev/null
    { wait "${CL_PID[node0]}"; } 2>/dev/null
    CL_PID[node0]=
    rm -rf "$CL_DIR/node0/state"
    promote
    judge
}

case_promote_refused_while_the_head_lives() {
    it_job 2
    CL_NODES=(node0 node1)
    it_node node0 BELAYD_STANDBY=node1
    it_node node1
    it_wait 10 "the store is copied to the standby" replicated
    local node rc
    for node in node0 node1; do
        rc=0
        on "$node" promote >"$IT_DIR/out.log" 2>&1 || rc=$?
        [ "$rc" = 3 ] || it_fail "belay promote on $node leaves with $rc beside a living head"
        grep -q "connected\|already" "$IT_DIR/out.log" || it_fail "the refusal of $node does not say why"
    done
    [ "$(cl_status_raw node0 | jq -r .head_epoch)" = 1 ] || it_fail "the epoch went up all the same"
}

case_promote_refused_without_a_copy() {
    it_job 2
    CL_NODES=(node0 node1)
    it_node node0
    it_node node1
    cl_node_kill node0 KILL
    local rc=0
    it_wait 10 "node1 knows that its head is away" away node1
    on node1 promote >"$IT_DIR/out.log" 2>&1 || rc=$?
    [ "$rc" = 3 ] || it_fail "belay promote leaves with $rc without a copy of the store"
    grep -q "no copy" "$IT_DIR/out.log" || it_fail "the refusal does not say why"
}
away() {
    [ "$(cl_status_raw "$1" | jq -r .head_connected)" = false ]
}

it_main "$@"
