#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A process is killed in exactly the window that matters, by a named failpoint: every one of a
# rank, of a save in the engine, and around every write of the head's store.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

acted() {
    [ -e "$IT_DIR/once/$1" ]
}

# rank NAME HIT [LOST]: rank 1 is killed at the HIT-th time that it comes there, once.
rank() {
    IT_FAIL="$1@1:kill:$2"
    it_begin 3 node0
    it_end
    acted "$1@1" || it_fail "no rank came to $1 $2 times"
    it_recoveries 1 1
    it_lost "${3:-1}"
    it_stayed 0 2
    it_each_step
    it_verify
}

# The others of a run that is over were started once each.
it_stayed() {
    local one
    for one in "$@"; do
        [ "$(it_event_count PROC_STARTED ".fields.rank == $one")" = 1 ] ||
            it_fail "rank $one did not keep its process"
    done
}

case_mid_forward() {
    rank mid-forward 30
}
case_mid_backward() {
    rank mid-backward 30
}
case_before_vote() {
    rank before-vote 13
}
case_voted_unapplied() {
    rank voted-unapplied 12
}
case_mid_apply() {
    rank mid-apply 40
}
case_mid_gather() {
    rank mid-gather 14
}
case_sealed_unsent() {
    rank sealed-unsent 12
}
# The end of the last step is the end of the run: it has to be done once more, or its slot is used.
case_last_step() {
    STEPS=12
    rank voted-unapplied 12
}
case_first_step() {
    rank before-vote 1
}

# in_recovery NAME RANK HIT: rank 0 is killed in a step; in the recovery RANK is killed at NAME.
in_recovery() {
    IT_FAIL="mid-apply@0:kill:25,$1@$2:kill:$3"
    it_begin 3 node0
    it_end
    acted mid-apply@0 && acted "$1@$2" || it_fail "only these came to their end: $(ls "$IT_DIR/once")"
    it_recoveries 1 2
    it_lost 1
    it_stayed 2
    it_each_step
    it_verify
}
# The replacement dies in its first load, while it copies, before it says ready.
case_replacement_mid_copy() {
    in_recovery mid-copy 0 1
}
# A survivor dies in its second generation (the first one loads nothing).
case_survivor_mid_load() {
    in_recovery mid-load 1 1
}
case_survivor_before_ready() {
    in_recovery before-ready 1 2
}

# engine NAME: the engine is killed there while it saves step 10.
engine() {
    IT_FAIL="$1:kill:1"
    it_begin 2 node0
    it_end
    acted "$1" || it_fail "no engine came to $1"
    it_recoveries 0 0
    [ "$(it_event_count ENGINE_LOST)" -ge 1 ] || it_fail "no event tells of the lost engine"
    it_verify
    [ "$(find "$CL_DIR/checkpoints" -maxdepth 1 -name '.step-*.tmp' | wc -l)" = 0 ] ||
        it_fail "leftovers of the attempt stand in the root: $(ls -A "$CL_DIR/checkpoints")"
}
case_save_begun() {
    engine save-begun
}
case_save_written() {
    engine save-written
}
case_commit_begin() {
    engine commit-begin
}
case_commit_manifest() {
    engine commit-manifest
}
case_commit_renamed() {
    engine commit-renamed
}

# store HITS...: the head dies at the n-th write of its store, before and after it, and is started
# again. In each run a rank dies too, so that the writes of a recovery and of saves are among them.
head_dead() {
    ! kill -0 "${CL_PID[node0]}" 2>/dev/null
}
head_dead_or_end() {
    head_dead || it_run_ended
}
store_one() {
    local point=$1 hit=$2
    rm -rf "$CL_DIR" "$IT_DIR/once"
    mkdir "$CL_DIR" "$IT_DIR/once"
    IT_FAIL="mid-apply@1:kill:25,$point:kill:$hit"
    it_job 2
    it_cluster node0
    cl_run "$JOB_FILE"
    it_wait 20 "$point $hit, or the end" head_dead_or_end
    if head_dead || { [ "$(cl_run_code)" != 0 ] && it_wait 5 "the head's end" head_dead; }; then
        acted "$point" || it_fail "the head died before $point $hit"
        { wait "${CL_PID[node0]}"; } 2>/dev/null
        it_node node0
    fi
    it_wait 30 "the end of the run after $point $hit" it_over_or_again
    local got
    got=$(it_status '.digest // empty')
    [ "$got" = "$IT_ALONE" ] || it_fail "after $point $hit: ended in ${got:-nothing}, alone in $IT_ALONE"
    it_verify
    acted "$point" || it_said_done=1
    cl_stop
}
# The run is over, whoever may have been told. A `belay run` whose submission was cut off may be
# given again: then it is taken up, or is running already.
it_over_or_again() {
    [ "$(it_status .verdict)" = "done" ] && return 0
    if it_run_ended && [ "$(cl_run_code)" != 0 ] && [ "$(it_status '.name // empty')" = "" ]; then
        cl_run "$JOB_FILE"
    fi
    return 1
}
store() {
    local point=$1 hit
    shift
    it_job 2
    it_alone
    it_said_done=
    for hit in "$@"; do
        store_one "$point" "$hit"
        # The run had fewer writes than that.
        [ -z "$it_said_done" ] || break
    done
}
case_store_write_submit() {
    store store-write 1 2 3
}
case_store_write_start() {
    store store-write 4 5 6
}
case_store_write_later() {
    store store-write 7 8 9 10
}
case_store_write_last() {
    store store-write 11 12 13 14
}
case_store_written_submit() {
    store store-written 1 2 3
}
case_store_written_start() {
    store store-written 4 5 6
}
case_store_written_later() {
    store store-written 7 8 9 10
}
case_store_written_last() {
    store store-written 11 12 13 14
}

it_main "$@"
