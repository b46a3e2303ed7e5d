#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two roots, as a local disk and a shared directory would be: each at its own pace, one that hangs,
# one that is destroyed.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_PACE_MS=20
STEPS=60

# two_roots EVERY_LOCAL EVERY_SHARED [DEADLINE]: into ROOTS; with a deadline for what hangs.
two_roots() {
    LOCAL=$CL_DIR/local
    SHARED=${SHARED:-$CL_DIR/shared}
    ROOTS="[{path: $LOCAL, shared: true, every: $1, keep: 2}, {path: $SHARED, shared: true, every: $2, keep: 2}]"
    DEADLINES="{beat: 100ms, lease: 2s, step_floor: 2500ms, init_floor: 10s, load: 10s, save: 30s,
            join: 12s, restart: 6s, grace: 3s, root: ${3:-60s}}"
}

root_is() { # root_is PATH FILTER: something about that root, in status
    [ "$(it_status ".roots[]? | select(.path == \"$1\") | $2")" = true ]
}

verify_both() {
    ROOT=$LOCAL it_verify
    ROOT=$SHARED it_verify
}

# engine_of ROOT [NODE]: the engine of that root, of that node's daemon (the head's): the newest that
# said it started.
engine_of() {
    it_events "${2:-$(cl_head)}" | jq -rs --arg root "$1" \
        '[.[] | select(.name == "ENGINE_STARTED" and .fields.root == $root)] | last.fields.pid'
}

newest_of() {
    find "$1" -maxdepth 1 -name 'step-*' | sort | tail -n 1
}

stop_at() {
    it_wait 20 "step $1" it_step_is "$1"
    it_belay stop >"$IT_DIR/out.log" 2>&1 || it_fail "belay stop leaves with $?"
    it_wait 10 "the end of belay run" it_run_ended
    [ "$(cl_run_code)" = 4 ] || it_fail "belay run left with $(cl_run_code) after a stop, not 4"
    it_wait 5 "no rank and no shim left" it_nothing_runs
}

# Each root at its own pace, both with the last step, verified.
case_two_paces() {
    two_roots 5 20
    it_begin 2 node0
    it_wait 20 "a save to the local root" it_event SAVE_COMMITTED ".fields.text // \"\" | test(\"$LOCAL\")"
    it_wait 20 "step 40" it_step_is 40
    it_wait 10 "more saves to the local root" root_is "$LOCAL" ".committed > ([.committed, 3] | min) - 1 and .every == 5"
    root_is "$SHARED" ".every == 20 and .committed <= 3" || it_fail "the shared root does not keep its pace"
    it_end
    it_recoveries 0 0
    it_each_step 1
    [ "$(it_event_count SAVE_FAILED)" = 0 ] || it_fail "a save failed"
    [ "$(it_event_count SAVE_VERIFIED)" -ge 2 ] || it_fail "no checkpoint was read back"
    [ "$(basename "$(newest_of "$LOCAL")")" = "$(basename "$(newest_of "$SHARED")")" ] ||
        it_fail "the last step is not on both roots"
    verify_both
}

# The engine of one root is stopped for good: that root is stuck, the other one and training go on.
case_root_hangs() {
    two_roots 5 10 4s
    STEPS=800
    it_begin 2 node0
    it_wait 20 "a save to both roots" both_saved
    local pid skipped
    pid=$(engine_of "$SHARED")
    kill -STOP "$pid" || it_fail "no engine of the shared root"
    it_before
    it_wait 15 "the root is called stuck" it_event ROOT_STUCK ".fields.text // \"\" | test(\"$SHARED\")"
    it_event ENGINE_STUCK ".fields.root == \"$SHARED\"" || it_fail "the daemon does not tell of the engine"
    kill -0 "$pid" 2>/dev/null && it_wait 2 "the hung engine is gone" gone "$pid"
    it_event SAVE_COMMITTED ".fields.text // \"\" | test(\"$LOCAL\")" ||
        it_wait 10 "a save to the local root meanwhile" it_event SAVE_COMMITTED ".fields.text // \"\" | test(\"$LOCAL\")"
    it_wait 15 "the root answers again" it_event ROOT_BACK
    IT_SEQ=$(it_events_newest)
    it_wait 15 "a save to it" it_event SAVE_COMMITTED ".fields.text // \"\" | test(\"$SHARED\")"
    it_recoveries 0 0
    it_end 60
    it_survivors
    it_each_step 1
    verify_both
}
both_saved() {
    root_is "$LOCAL" ".committed > 0" && root_is "$SHARED" ".committed > 0"
}
gone() {
    ! kill -0 "$1" 2>/dev/null
}

# A real hang: the file system is frozen, and whoever writes there waits in the kernel, where no
# signal reaches. The other root and training go on; when it thaws the root is used again.
case_root_frozen() {
    [ "$(id -u)" = 0 ] || it_skip "needs root to mount and freeze a file system"
    command -v fsfreeze mkfs.ext4 >"$IT_DIR/out.log" || it_skip "no fsfreeze or mkfs.ext4"
    truncate -s 64m "$IT_DIR/image" && mkfs.ext4 -q "$IT_DIR/image" && mkdir "$IT_DIR/mount"
    mount -o loop "$IT_DIR/image" "$IT_DIR/mount" 2>/dev/null || it_skip "no loop device can be mounted"
    IT_MOUNTED=$IT_DIR/mount
    SHARED=$IT_DIR/mount/shared
    two_roots 5 10 4s
    STEPS=800
    it_begin 2 node0
    it_wait 20 "a save to both roots" both_saved
    fsfreeze -f "$IT_DIR/mount" || it_skip "the file system cannot be frozen"
    it_before
    it_wait 20 "the root is called stuck" it_event ROOT_STUCK ".fields.text // \"\" | test(\"$SHARED\")"
    IT_SEQ=$(it_events_newest)
    it_wait 10 "a save to the local root meanwhile" it_event SAVE_COMMITTED ".fields.text // \"\" | test(\"$LOCAL\")"
    fsfreeze -u "$IT_DIR/mount"
    it_wait 30 "the root answers again" it_event ROOT_BACK
    IT_SEQ=$(it_events_newest)
    it_wait 15 "a save to it" it_event SAVE_COMMITTED ".fields.text // \"\" | test(\"$SHARED\")"
    it_recoveries 0 0
    it_end 60
    it_survivors
    it_each_step 1
    verify_both
}

# While the root hangs status says so, needs a person, and the end does not wait for it.
case_root_hangs_at_the_end() {
    two_roots 10 10 4s
    STEPS=500
    it_begin 2 node0
    it_wait 20 "a save to both roots" both_saved
    hang_for_ever "$SHARED" &
    local helper=$!
    it_wait 15 "status names the root" root_is "$SHARED" '.state == "stuck"'
    it_wait 15 "status says what to do" status_needs "root stuck: $SHARED"
    it_wait 15 "belay status shows it" status_shows "^root .*$SHARED, stuck"
    it_end 40
    kill "$helper" 2>/dev/null
    ROOT=$LOCAL it_verify
}
status_needs() {
    it_status '.needs | join(" ")' | grep -q "$1"
}
status_shows() {
    it_belay status >"$IT_DIR/out.log" 2>&1 # leaves with 1: somebody is needed
    grep -q "$1" "$IT_DIR/out.log"
}
# hang_for_ever ROOT [NODE]: every engine of that root is stopped as soon as it is there.
hang_for_ever() {
    local pid last=
    while :; do
        pid=$(engine_of "$1" "${2:-}")
        [ "$pid" = "$last" ] || [ "$pid" = null ] || kill -STOP "$pid" 2>/dev/null
        last=$pid
        sleep 0.02
    done
}

# member_loads: all of the member dies, and is back with the local root hanging on it alone, so that
# its ranks cannot load from there.
member_loads() {
    local pids last
    it_before
    mapfile -t pids < <(it_processes node1)
    last=$(engine_of "$LOCAL" node1)
    kill -KILL "${pids[@]}" 2>/dev/null
    { wait "${CL_PID[node1]}"; } 2>/dev/null
    CL_PID[node1]=
    hang_for_ever "$LOCAL" node1 "$last" &
    local helper=$!
    IT_FAIL=disk-read:delay_150:0 it_node node1 # so slow that it is stopped before it has answered
    it_wait 60 "recovery" it_recovered
    kill "$helper" 2>/dev/null
    [ "$(it_event_count ENGINE_STUCK ".fields.root == \"$LOCAL\"")" -ge 1 ] || it_fail "no engine hung on the member"
    [ "$(it_event_count LOAD_ELSEWHERE ".fields.root == \"$SHARED\"")" -ge 1 ] ||
        it_fail "nothing was loaded from the other root"
}

# Both roots have the newest step: loaded from the other one, by the first plan.
case_root_hangs_on_the_member() {
    two_roots 100 100 2s
    NODES=2
    STEPS=300
    it_begin 4 node0 node1
    it_wait 30 "a save to both roots" both_saved
    member_loads
    it_recoveries 1 1
    it_end 60
}

# Only the root that hangs there has the newest step: an older one is used, of which the other root
# has a copy.
case_root_hangs_on_the_member_with_the_newest() {
    two_roots 20 50 2s
    NODES=2
    STEPS=300
    it_begin 4 node0 node1
    it_wait 30 "a newer step in the local root" local_is_ahead
    member_loads
    it_end 60
}
local_is_ahead() {
    [ "$(it_status '[.roots[] | .step // 0] | .[0] > .[1] and .[1] > 0')" = true ]
}

# An engine that ends before it says hello: told of once, and started less and less often.
case_engine_ends_at_once() {
    two_roots 5 20
    IT_FAIL=engine-begin:error:0
    it_job 2
    it_cluster node0
    local from
    it_belay run "$JOB_FILE" >"$IT_DIR/out.log" 2>&1 && it_fail "belay run began without an engine"
    grep -q "the checkpoint engine failed" "$IT_DIR/out.log" || it_fail "not refused for that reason"
    it_wait 10 "a first engine" died 1
    from=$(date +%s%3N)
    it_wait 10 "a fourth engine" died 4
    # 200, 400 and 800 ms between them; a little less, as the first was seen late.
    [ $(($(date +%s%3N) - from)) -ge 1000 ] || it_fail "started again and again"
    [ "$(it_event_count ENGINE_LOST)" = 1 ] || it_fail "told of more than once"
}
died() {
    [ "$(grep -c "^belay-engine: Input/output error" "$CL_DIR/node0/belayd.log")" -ge "$1" ]
}

# destroyed WHICH: stopped, one root is destroyed, everything is started anew from the other.
destroyed() {
    stop_at 30
    cl_node_kill node0 KILL
    rm -rf "$1" "$CL_DIR/node0" "$CL_DIR/run"
    it_node node0
    cl_run --recover "$2"
    it_end
    verify_both
}
case_local_root_destroyed() {
    two_roots 5 20
    STEPS=150
    it_begin 3 node0
    destroyed "$LOCAL" "$SHARED"
}
case_shared_root_destroyed() {
    two_roots 5 20
    STEPS=150
    it_begin 3 node0
    destroyed "$SHARED" "$LOCAL"
}

# All is killed while both roots are written to, and the local one is gone: the shared one has it.
case_killed_and_local_root_destroyed() {
    two_roots 5 10
    IT_FAIL=save-written:delay_200:0
    it_begin 3 node0
    it_wait 20 "a save to both roots" both_saved
    it_signal KILL 1
    it_wait 15 "recovery" it_recovered
    local pids
    mapfile -t pids < <(it_processes)
    kill -KILL "${pids[@]}"
    { wait; } 2>/dev/null
    rm -rf "$LOCAL" "$CL_DIR/node0" "$CL_DIR/run"
    IT_FAIL=
    it_job 2
    it_node node0
    cl_run --recover "$SHARED" "$JOB_FILE"
    it_end
    verify_both
}

# The newest checkpoint of the nearer root is damaged after it was committed: the other root's is
# loaded, not an older one.
case_damaged_on_one_root() {
    two_roots 10 10
    STEPS=150
    it_begin 2 node0
    stop_at 25
    cl_node_kill node0 KILL
    local part
    part=$(find "$(newest_of "$LOCAL")" -name 'part-*.safetensors*' | head -n 1)
    truncate -s -100 "$part"
    local step
    step=$(basename "$(newest_of "$SHARED")" | sed 's/step-0*//; s/\.g.*//')
    rm -rf "$CL_DIR/node0"
    it_node node0
    cl_run --recover "$SHARED"
    it_end 40
    jq -es --argjson step "$step" '[.[] | select(.step > $step)] | length > 0' "$(cl_metrics)" >/dev/null ||
        it_fail "nothing was trained after step $step"
    it_each_step 1
}

# every: auto begins at 100 steps and follows what is measured.
case_interval_auto() {
    two_roots auto 50
    STEPS=700
    IT_PACE_MS=5
    it_begin 2 node0
    it_wait 40 "an interval is chosen" it_event SAVE_INTERVAL ".fields.text // \"\" | test(\"$LOCAL\")"
    root_is "$LOCAL" '.auto and .every != 100' || it_fail "status does not show the interval"
    it_end 60
    it_recoveries 0 0
    it_each_step 1
    verify_both
}

it_main "$@"
