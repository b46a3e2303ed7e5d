#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ranks that end or stop in every way there is.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_PACE_MS=40
STEPS=80

# Rank 1 of three gets a signal at step 10.
signalled() {
    it_begin 3 node0
    it_ready 10
    it_signal "$1" 1
    it_wait 15 "recovery after SIG$1" it_recovered
    it_survivors 1
    it_end
    it_recoveries 1 1
    it_lost 1
    it_each_step
    it_verify
}

case_killed() {
    signalled KILL
    [ "$(it_event_count RANK_EXITED '.fields.rank == 1 and .fields.signal_name == "KILL"')" = 1 ] ||
        it_fail "no event names rank 1 and its signal"
}

case_crashed() {
    signalled SEGV
    [ "$(it_event_count RANK_EXITED '.fields.rank == 1 and .fields.signal_name == "SEGV"')" = 1 ] ||
        it_fail "no event names rank 1 and its signal"
}

case_terminated() {
    signalled TERM
}

case_exits_with_0_early() {
    IT_FAIL=before-vote@1:exit_0:12
    it_begin 3 node0
    it_end
    it_recoveries 1 1
    it_lost 1
    [ "$(it_event_count RANK_EXITED '.fields.rank == 1')" = 1 ] || it_fail "no event names rank 1"
}

case_asks_to_be_started_again() {
    IT_FAIL=before-vote@1:exit_75:12
    it_begin 3 node0
    it_end
    it_recoveries 1 1
    it_lost 1
}

stacks_saved() {
    local file
    file=$(it_events node0 | jq -rs '[.[] | select(.name == "STACKS_SAVED") | .fields.path] | first // empty')
    [ -n "$file" ] && [ -s "$file" ]
}

# Stopped in the middle of a step: the one that stands still is found, not those that wait for it.
case_stopped() {
    it_begin 3 node0
    it_ready 10
    it_signal STOP 1
    it_wait 15 "an event that names the hung rank" it_event RANK_HUNG '.fields.rank == 1'
    it_wait 15 "recovery from the stop" it_recovered
    it_survivors 1
    if command -v eu-stack >/dev/null; then
        stacks_saved || it_fail "no stacks of the hung rank were saved"
    fi
    it_end
    it_recoveries 1 1
    it_lost 1
}

case_spins() {
    IT_FAIL=before-vote@2:delay_20000:12
    it_begin 3 node0
    it_wait 30 "an event that names the hung rank" it_event RANK_HUNG '.fields.rank == 2'
    [ "$(it_event_count HANG_UNKNOWN)" = 0 ] || it_fail "it was not seen that the others wait in the vote"
    it_end
    it_recoveries 1 1
    it_lost 1
}

# Two seconds are no hang. The only sleep that is meant: it is the fault.
case_pauses_2_s() {
    it_begin 3 node0
    it_ready 10
    it_signal STOP 1
    sleep 2
    kill -CONT "$IT_PID"
    it_end
    it_recoveries 0 0
    it_each_step 1
}

case_two_together() {
    it_begin 4 node0
    it_ready 10
    it_signal KILL 1 3
    it_wait 15 "recovery" it_recovered
    it_survivors 1 3
    it_end
    it_recoveries 1 2
    it_lost 1
    it_each_step
}

case_all_together() {
    it_begin 3 node0
    it_ready 15
    # shellcheck disable=SC2046 # a list of numbers
    kill -KILL $(cl_rank_pids)
    it_wait 15 "recovery" it_recovered
    it_end
    it_recoveries 1 3
    it_lost 1
}

# One after the other, each as soon as the run is back; kills from outside never end a run.
case_again_and_again() {
    local round
    STEPS=200
    it_begin 2 node0
    for round in 1 2 3 4 5; do
        it_ready $((round * 20))
        it_signal KILL 1
        it_wait 15 "recovery $round" it_recovered
    done
    it_end
    it_recoveries 5 5
    it_lost 1
    it_each_step
}

no_progress() {
    it_begin 2 node0
    it_wait 40 "the end of the run" it_run_ended
    [ "$(cl_run_code)" = 93 ] || it_fail "belay run left with $(cl_run_code), not 93"
    it_recoveries 2 2
    [ "$(it_event_count NO_PROGRESS '.fields.text | test("rank 1")')" = 1 ] ||
        it_fail "the event does not name rank 1"
    # Not through a pipe: grep -q leaves early, and cat would fail.
    grep -q "rank 1" "$CL_DIR/run.log" "$CL_DIR/run.json" ||
        it_fail "belay run does not name the first cause"
    it_wait 5 "no rank and no shim left" it_nothing_runs
}
case_crashes_at_the_same_step() {
    IT_ONCE=0
    IT_FAIL=before-vote@1:segv:1
    no_progress
}
case_leaves_at_the_same_step() {
    IT_ONCE=0
    IT_FAIL=before-vote@1:exit_5:1
    no_progress
}

case_shim_killed() {
    it_begin 2 node0
    it_ready 10
    local rank shim
    rank=$(cl_rank_pid 1)
    shim=$(ps -o ppid= -p "$rank" | tr -d ' ')
    [ "$(cat "/proc/$shim/comm")" = belay-shim ] || it_fail "the parent of rank 1 is no shim"
    kill -KILL "$shim"
    it_wait 5 "rank 1 goes with its shim" it_gone "$rank"
    it_wait 15 "recovery" it_recovered
    it_survivors 1
    it_end
    it_recoveries 1 1
    it_lost 1
}
it_gone() {
    ! kill -0 "$1" 2>/dev/null
}

it_main "$@"
