#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What cannot work is refused: one clear line, exit 2 or 3, and nothing is left half started.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

# refused CODE PATTERN COMMAND...: the command leaves with that code and says so on stderr.
refused() {
    local want=$1 pattern=$2 rc=0
    shift 2
    timeout 15 "$@" >"$IT_DIR/stdout" 2>"$IT_DIR/out.log" </dev/null || rc=$?
    case " $want " in *" $rc "*) ;; *) it_fail "'$*' left with $rc, not $want" ;; esac
    grep -qE "$pattern" "$IT_DIR/out.log" || it_fail "'$*' does not say /$pattern/"
}
run_refused() {
    local want=$1 pattern=$2
    refused "$want" "$pattern" "$CL_BIN/belay" run "$JOB_FILE" --socket "$(cl_socket node0)"
    it_wait 10 "no rank and no shim" it_nothing_runs
    [ ! -e "$CL_DIR/checkpoints" ] || it_fail "a root was made"
}
start() {
    it_job 2
    it_cluster node0
}

case_unknown_key() {
    start
    echo "lnaes: 4" >>"$JOB_FILE"
    run_refused 2 "job.yaml:[0-9]+:[0-9]+: .*lnaes.*lanes"
}
case_wrong_value() {
    start
    sed -i 's/^lanes: 4/lanes: many/' "$JOB_FILE"
    run_refused 2 "job.yaml:[0-9]+:[0-9]+: .*lanes"
}
case_sums_that_do_not_fit() {
    start
    sed -i 's/global_batch: 4/global_batch: 6/' "$JOB_FILE"
    run_refused 2 "job.yaml:[0-9]+:[0-9]+: .*global_batch"
}
case_missing_text() {
    TEXT=$IT_DIR/nowhere.txt
    start
    run_refused "2 3" "nowhere.txt"
}
case_too_few_tokens() {
    TEXT=$IT_DIR/short.txt
    echo "too short" >"$IT_DIR/short.txt"
    start
    run_refused "2 3" "short.txt|token|sample"
}
case_missing_command() {
    COMMAND="[$IT_DIR/no-trainer]"
    start
    run_refused "2 3" "no-trainer"
}
case_run_dir_not_writable() {
    touch "$IT_DIR/file"
    RUN_DIR=$IT_DIR/file/run
    start
    run_refused "2 3" "file/run"
}
case_root_not_writable() {
    touch "$IT_DIR/file"
    ROOT=$IT_DIR/file/root
    start
    run_refused "2 3" "file/root"
}
case_no_daemon() {
    it_job 2
    refused 3 "no daemon answers" "$CL_BIN/belay" run "$JOB_FILE" --socket "$IT_DIR/none.sock"
    refused 3 "no daemon answers" "$CL_BIN/belay" status --socket "$IT_DIR/none.sock"
}
case_no_checkpoint_to_recover() {
    start
    mkdir "$IT_DIR/empty"
    refused "2 3" "empty" "$CL_BIN/belay" run --recover "$IT_DIR/empty" --socket "$(cl_socket node0)"
}

daemon_refused() {
    local want=$1 pattern=$2
    shift 2
    refused "$want" "$pattern" "$CL_BIN/belayd" --name other --state-dir "$IT_DIR/other" \
        --socket "$IT_DIR/other.sock" --bulk 127.0.0.1:0 "$@"
    [ "$(wc -l <"$IT_DIR/out.log")" -le 2 ] || it_fail "more than a line: $(cat "$IT_DIR/out.log")"
}
case_port_in_use() {
    start
    daemon_refused 3 "in use" --listen "127.0.0.1:${CL_PORT[node0]}"
}
case_socket_in_use() {
    start
    daemon_refused 3 "belayd.sock" --listen 127.0.0.1:0 --socket "$(cl_socket node0)"
    cl_status_raw node0 >/dev/null || it_fail "the first daemon lost its socket"
}
case_state_in_use() {
    start
    daemon_refused 3 "state" --listen 127.0.0.1:0 --state-dir "$CL_DIR/node0/state"
}
case_address_of_the_network() {
    daemon_refused 2 "loopback|127" --listen 0.0.0.0:0
    daemon_refused 2 "loopback|127" --listen 127.0.0.1:0 --head 192.0.2.1:7420
}
case_bad_daemon_option() {
    refused 2 "unknown|usage|option" "$CL_BIN/belayd" --nmae x
}

# The trainer was rebuilt while the run went on: a replacement made of it is refused by name.
case_rebuilt_binary() {
    cp "$CL_BIN/belay-train" "$IT_DIR/my-train"
    COMMAND="[$IT_DIR/my-train]"
    IT_COMMAND=my-train
    IT_PACE_MS=60
    STEPS=100
    it_job 2
    it_cluster node0
    cl_run "$JOB_FILE"
    it_ready 10
    cp "$IT_DIR/my-train" "$IT_DIR/rebuilt"
    echo >>"$IT_DIR/rebuilt"
    mv "$IT_DIR/rebuilt" "$IT_DIR/my-train"
    it_signal KILL 1
    it_wait 20 "an event that names the binary" it_event BINARY_CHANGED '.fields.path | test("my-train")'
    grep -q "rebuilt\|my-train" <<<"$(cl_status_raw node0)" || it_fail "status does not say what is wrong"
}

# A node with other kernels gives other bits: its ranks are refused, the run goes on without them.
case_other_arithmetic() {
    local type=Prescott
    it_job 2
    [ "$("$CL_BIN/belay-train" --job "$JOB_FILE" --ranks 1 --digest 2>/dev/null | cl_alone_digest)" != \
        "$(OPENBLAS_CORETYPE=$type "$CL_BIN/belay-train" --job "$JOB_FILE" --ranks 1 --digest 2>/dev/null |
            cl_alone_digest)" ] || it_skip "OPENBLAS_CORETYPE=$type gives the same bits here"
    rm -rf "$CL_DIR/run"
    IT_PACE_MS=40
    STEPS=150
    DEADLINES="{beat: 100ms, lease: 1s, step_floor: 2500ms, init_floor: 4s, save: 30s, join: 4s, restart: 3s,
                grace: 2s}"
    it_job 4
    it_alone
    CL_NODES=(node0 node1)
    it_node node0 BELAYD_RANKS_MAX=2
    cl_run "$JOB_FILE"
    it_wait 30 "the run on two ranks" it_step_is 5
    it_before
    it_node node1 OPENBLAS_CORETYPE="$type"
    it_wait 30 "a refusal that says why" it_event RANK_REFUSED '.fields.node == "node1" and
        (.fields.text | test("probe|function"))'
    it_end 60
    it_survivors
    [ "$(it_status .world)" = 2 ] || it_fail "the run went on with $(it_status .world) ranks"
}

# Resumed where the one node gives other bits: said in a line, with the way out; nothing hangs.
case_resume_with_other_arithmetic() {
    local type=Prescott
    DEADLINES="{beat: 100ms, lease: 1s, step_floor: 2500ms, init_floor: 4s, save: 30s, join: 4s, restart: 3s,
                grace: 2s}"
    it_begin 2 node0
    it_wait 20 "step 5" it_step_is 5
    "$CL_BIN/belay" stop --socket "$(cl_socket node0)" >"$IT_DIR/out.log" 2>&1 || it_fail "belay stop leaves with $?"
    it_wait 10 "the end of belay run" it_run_ended
    cl_node_kill node0
    it_node node0 OPENBLAS_CORETYPE="$type"
    cl_run "$JOB_FILE"
    it_wait 20 "the end of belay run" it_run_ended
    [ "$(cl_run_code)" = 3 ] || it_fail "belay run left with $(cl_run_code), not 3"
    grep -q "node0: .*differs.*unset OPENBLAS_CORETYPE" "$CL_DIR/run.log" || it_fail "it does not say why"
    cl_node_kill node0
    it_node node0
    cl_run "$JOB_FILE"
    it_end
}

it_main "$@"
