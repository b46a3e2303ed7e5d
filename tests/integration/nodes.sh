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

# Each node writes into a root of its own; together they have the checkpoint.
own_roots_begin() {
    ROOTS="[{path: \"$CL_DIR/own-{node}\", every: 10, keep: 3}${1:-}]"
    it_begin 4 node0 node1
}
own_parts() {
    local node
    for node in node0 node1; do
        compgen -G "$CL_DIR/own-$node/step-*/part-$node.*" >/dev/null || it_fail "no part on $node"
        [ "$(cat "$CL_DIR/own-$node"/step-*/part-*.safetensors* 2>/dev/null | wc -c)" -gt 0 ] ||
            it_fail "$node has an empty part"
    done
    ! compgen -G "$CL_DIR/own-node0/step-*/part-node1.*" >/dev/null || it_fail "node0 has node1's part"
}
all_killed() {
    local pids
    # shellcheck disable=SC2119
    mapfile -t pids < <(it_processes)
    kill -KILL "${pids[@]}" 2>/dev/null
    { wait; } 2>/dev/null
    CL_PID=([node0]='' [node1]='')
}
case_own_roots_all_die() {
    STEPS=50
    own_roots_begin
    it_wait 20 "a verified checkpoint" it_event SAVE_VERIFIED
    own_parts
    it_ready 25
    all_killed
    it_node node0
    it_node node1
    it_wait 40 "the end" it_finished
    [ "$(it_status .digest)" = "$IT_ALONE" ] || it_fail "ended in $(it_status .digest)"
    [ "$(it_event_count GENERATION_PLANNED '.fields.generation > 1 and .fields.step >= 10')" -ge 1 ] ||
        it_fail "the run did not go on from its own roots"
    it_each_step
    own_tool 'node node0 has this root for itself' ls "$CL_DIR/own-node0"
    own_tool '1 of 2 parts is here; node node1 has others' ls "$CL_DIR/own-node0"
    own_tool 'good as far as it is here: 1 of 2 parts' verify "$CL_DIR/own-node1"
    own_tool 'good \(2 parts' verify "$CL_DIR/own-node0/" "$CL_DIR/own-node1"
    own_tool ' +(good|verified) ' ls "$CL_DIR/own-node1,$CL_DIR/own-node0"
    own_tool '' reshard "$CL_DIR/own-node0,$CL_DIR/own-node1" --out "$CL_DIR/whole" --parts 1
    own_tool 'the same state as' verify "$CL_DIR/own-node0" "$CL_DIR/own-node1" --step 50 \
        --against "$CL_DIR/whole"
    own_tool '' export "$CL_DIR/own-node0,$CL_DIR/own-node1" --to hf --out "$CL_DIR/hf"
}
# own_tool PATTERN ARGUMENTS...: ckpt-tool ends well and says that.
own_tool() {
    local pattern=$1 out
    shift
    out=$("$CL_BIN/ckpt-tool" "$@" 2>&1) || it_fail "ckpt-tool $*: $out"
    grep -Eq -- "$pattern" <<<"$out" || it_fail "ckpt-tool $*: no '$pattern' in: $out"
}

# A node's disk is lost: the checkpoints that it had a part of are not whole any more; another root
# is used, and that is said.
case_own_root_lost() {
    own_roots_begin ", {path: $CL_DIR/far, shared: true, every: 20}"
    it_wait 20 "a checkpoint on both roots" it_event SAVE_COMMITTED '.fields.text | test("far")'
    it_ready 35
    it_wait 20 "a newer one on the nodes" own_newest_is 30
    all_killed
    rm -rf "$CL_DIR/own-node1"
    it_node node0
    it_node node1
    it_wait 40 "the end" it_finished
    [ "$(it_status .digest)" = "$IT_ALONE" ] || it_fail "ended in $(it_status .digest)"
    [ "$(it_event_count CHECKPOINT_INCOMPLETE)" -ge 1 ] || it_fail "no event says that it is not whole"
    it_each_step
}
own_newest_is() {
    compgen -G "$CL_DIR/own-node1/step-*$1.g*" >/dev/null
}

# ZeRO 0: both nodes hold all of the state, and each writes about half of it.
case_replicas_share_a_save() {
    STEPS=30
    LAYOUT="{zero: 0}"
    IT_EXTRA_NODE=(BELAYD_RANKS_MAX=1)
    it_begin 2 node0 node1
    it_end
    local sizes dir
    for dir in "$CL_DIR"/checkpoints/step-*; do
        mapfile -t sizes < <(stat -c %s "$dir"/part-*.safetensors*)
        [ ${#sizes[@]} = 2 ] || it_fail "$dir has ${#sizes[@]} parts"
        [ "${sizes[0]}" -lt $((2 * sizes[1])) ] && [ "${sizes[1]}" -lt $((2 * sizes[0])) ] ||
            it_fail "$dir: parts of ${sizes[*]} bytes"
    done
    it_verify
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
