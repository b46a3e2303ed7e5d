# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the tests of real daemons and ranks have in common. A test file sources this, has a function
# case_NAME for each case and ends with `it_main "$@"`:
#
#     tests/integration/rank.sh            all its cases, one after another
#     tests/integration/rank.sh killed     that one
#
# A case runs in a process group of its own under a hard time-out, in a fresh folder below
# ${TMPDIR:-/tmp}; whatever happens, every process that carries its mark (IT_DIR in the
# environment) is killed at the end. Waiting is polling with a deadline, never a bare sleep.
# Exit: 0 passed, 1 failed (with the end of all logs), 77 skipped. IT_KEEP=1 keeps the folder.
set -uo pipefail
# shellcheck source=dist/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../dist/lib.sh"
# shellcheck source=dist/cluster.sh
. "$BL_ROOT/dist/cluster.sh"

IT_DIR=            # folder of the case
IT_WHO=            # "rank.sh killed"
IT_ALONE=          # digest of the trainer alone
IT_PIDS=           # live ranks before the fault, "rank pid" a line
IT_SEQ=0           # number of the newest event before the fault
IT_MS=0            # when that was looked at
IT_FAIL=           # failpoints of daemons and ranks started from now on
IT_PACE_MS=20      # each step takes at least so long; 0: as fast as it can
IT_EXTRA_NODE=()   # NAME=VALUE... for daemons started from now on

it_skip() {
    echo "skip: $*"
    exit 77
}

# it_fail TEXT: the reason, then the end of every log.
it_fail() {
    trap - TERM
    echo "FAILED $IT_WHO: $*"
    local file
    [ ${#CL_NODES[@]} = 0 ] || cl_status_raw "$(cl_head)" | jq -c . 2>/dev/null | cut -c1-3000
    for file in "$IT_DIR"/out.log "$CL_DIR"/run.log "$CL_DIR"/*/belayd.log "$CL_DIR"/run/logs/*.log; do
        [ -s "$file" ] || continue
        echo "--- $file"
        tail -n "${IT_TAIL:-25}" "$file" | cut -c1-300
    done
    exit 1
}

# shellcheck disable=SC2120 # the tests give it a node
# it_processes [NODE]: ids of the case's programs (those of one node: daemon, shims, ranks, engine).
it_processes() {
    local pid mark="IT_DIR=$IT_DIR"
    [ $# = 0 ] || mark="IT_NODE=$CL_DIR/$1"
    for pid in $(pgrep "^belay|^${IT_COMMAND:-belay-train}$"); do
        grep -qzxF "$mark" "/proc/$pid/environ" 2>/dev/null && echo "$pid"
    done
    return 0
}

# Ranks and shims that live.
it_processes_of_ranks() {
    local pid
    for pid in $(pgrep "^belay-shim$|^${IT_COMMAND:-belay-train}$"); do
        grep -qzxF "IT_DIR=$IT_DIR" "/proc/$pid/environ" 2>/dev/null && echo "$pid"
    done
    return 0
}

it_nothing_runs() {
    [ -z "$(it_processes_of_ranks)" ]
}

it_clean_up() {
    local rc=$? pid
    trap - EXIT TERM INT
    [ -z "$CL_DIR" ] || cl_stop 2>/dev/null
    # Twice: a daemon may have started something in between.
    for _ in 1 2; do
        # shellcheck disable=SC2119
        for pid in $(it_processes); do kill -KILL "$pid" 2>/dev/null; done
    done
    if [ -n "${IT_MOUNTED:-}" ]; then
        fsfreeze -u "$IT_MOUNTED" 2>/dev/null # else whoever writes there never ends
        umount -l "$IT_MOUNTED" 2>/dev/null
    fi
    if [ "${IT_KEEP:-0}" = 1 ]; then echo "kept: $IT_DIR"; else rm -rf "$IT_DIR"; fi
    exit $rc
}

it_main() {
    local name rc=0 one
    if [ $# = 0 ]; then
        for name in $(compgen -A function | sed -n 's/^case_//p'); do
            one=0
            bash "$0" "$name" || one=$?
            case $one in
            0) echo "passed  $name" ;;
            77) echo "skipped $name" ;;
            *)
                echo "FAILED  $name ($one)"
                rc=1
                ;;
            esac
        done
        exit $rc
    fi
    declare -F "case_$1" >/dev/null || bl_die 2 "no case '$1' here"
    if [ -z "${IT_INNER:-}" ]; then
        IT_INNER=1 exec timeout -k 10 "${IT_SECONDS:-100}" bash "$0" "$1"
    fi
    unset IT_INNER
    IT_WHO="$(basename "$0") $1"
    for name in belayd belay belay-shim belay-engine belay-train; do
        [ -x "$CL_BIN/$name" ] || it_skip "$CL_BIN/$name is not built"
    done
    IT_DIR=$(mktemp -d "${TMPDIR:-/tmp}/belay-it.XXXXXX") || exit 3
    export IT_DIR
    unset BELAY_FAIL BELAY_FAIL_ONCE_DIR BELAY_SOCKET_PATH
    CL_DIR=$IT_DIR/cluster
    JOB=it-${1//_/-}-$$
    mkdir "$CL_DIR" "$IT_DIR/once"
    trap it_clean_up EXIT
    trap 'it_fail "not done in ${IT_SECONDS:-100} s"' TERM
    trap 'exit 130' INT
    "case_$1"
    exit 0
}

# --- waiting ----------------------------------------------------------------------------------

# it_wait SECONDS TEXT COMMAND...: polls until the command succeeds.
it_wait() {
    local deadline=$((SECONDS + $1)) text=$2
    shift 2
    until "$@"; do
        [ $SECONDS -lt $deadline ] || it_fail "not in time: $text"
        sleep 0.03
    done
}

it_run_ended() {
    [ -n "$(cl_run_code)" ]
}

# it_status FILTER: of the run's status, or null.
it_status() {
    cl_status_raw "$(cl_head)" | jq -r "$CL_JQ_RUN \$r | $1"
}

it_step() {
    local text
    text=$(cl_status_raw "$(cl_head)") && cl_status_fields <<<"$text" | cut -f1
}

it_step_is() {
    local step
    it_run_ended && it_fail "the run ended early, exit $(cl_run_code): $(tail -n 1 "$CL_DIR/run.log")"
    step=$(it_step) && [ -n "$step" ] && [ "$step" -ge "$1" ]
}

# it_events NODE...: all that these daemons told, from their files: a restart does not matter.
it_events() {
    local node
    for node in "$@"; do
        cat "$CL_DIR/$node/state/events.jsonl.1" "$CL_DIR/$node/state/events.jsonl" 2>/dev/null
    done
    return 0
}

it_events_newest() {
    it_events "$(cl_head)" | jq -rs 'last.seq // 0'
}

# Has the head told this event since IT_SEQ? it_event NAME [JQ CONDITION]
it_event() {
    it_events "$(cl_head)" | jq -es --arg name "$1" --argjson seq "$IT_SEQ" \
        "any(.seq > \$seq and .name == \$name and (${2:-true}))" >/dev/null
}

# it_event_count NAME [JQ CONDITION]: over the whole run, all daemons.
it_event_count() {
    it_events "${CL_NODES[@]}" |
        jq -rs --arg name "$1" "[.[] | select(.name == \$name and (${2:-true}))] | length"
}

# --- daemons and the job ----------------------------------------------------------------------

# it_node NODE [NAME=VALUE...]: starts its daemon, with these in the environment of all that it
# starts.
it_node() {
    local node=$1 fail=$IT_FAIL
    shift
    [ "$IT_PACE_MS" = 0 ] || fail+="${fail:+,}before-vote:delay_$IT_PACE_MS:0"
    local -x IT_NODE="$CL_DIR/$node" BELAY_FAIL=$fail BELAY_FAIL_ONCE_DIR=$IT_DIR/once
    # shellcheck disable=SC2163 # NAME=VALUE
    [ $# = 0 ] || local -x "$@"
    [ "${#IT_EXTRA_NODE[@]}" = 0 ] || local -x "${IT_EXTRA_NODE[@]}"
    [ "${IT_ONCE:-1}" = 1 ] || unset BELAY_FAIL_ONCE_DIR
    cl_node_start "$node" || it_fail "belayd of $node did not start"
}

# it_cluster NODE...: daemons, the first one leading.
it_cluster() {
    local node
    CL_NODES=("$@")
    for node in "$@"; do it_node "$node"; done
}

# it_job RANKS: writes job.yaml. STEPS, EVERY, KEEP, NODES, ROOT, RUN_DIR, ROOTS, COMMAND, LANES,
# LAYOUT, MODEL, TRAIN and DEADLINES may say otherwise than the defaults here.
it_job() {
    [ -s "$IT_DIR/text.txt" ] || cat "$BL_ROOT/LICENSE" "$BL_ROOT/LICENSE" >"$IT_DIR/text.txt"
    JOB_FILE=$CL_DIR/job.yaml
    cat >"$JOB_FILE" <<YAML
name: $JOB
run_dir: ${RUN_DIR:-$CL_DIR/run}
ranks: $1
lanes: ${LANES:-4}
${LAYOUT:+layout: $LAYOUT}
placement: {nodes: ${NODES:-1}}
model: ${MODEL:-{layers: 2, dim: 32, hidden: 64, heads: 2, kv_heads: 1, vocab: 256\}}
data: {files: [${TEXT:-$IT_DIR/text.txt}]}
train: {global_batch: 4, micro_batch: 1, seq_len: 32, steps: ${STEPS:-40}, lr: 0.003, warmup: 5,
        seed: 11${TRAIN:+, $TRAIN}}
backend: cpu
threads: 1
roots: ${ROOTS:-[{path: ${ROOT:-$CL_DIR/checkpoints}, shared: true, every: ${EVERY:-10}, keep: ${KEEP:-3}\}]}
deadlines: ${DEADLINES:-{beat: 100ms, lease: 2s, step_floor: 2500ms, init_floor: 10s, load: 10s, save: 30s,
            join: 12s, restart: 6s, grace: 3s\}}
${COMMAND:+command: $COMMAND}
YAML
}

# it_alone: the digest that every run of this job must end in, into IT_ALONE. ALONE_RANKS: of the
# trainer alone, when the job's layout takes more than one.
it_alone() {
    IT_ALONE=$("$CL_BIN/belay-train" --job "$JOB_FILE" --ranks "${ALONE_RANKS:-1}" --digest 2>"$IT_DIR/out.log" | cl_alone_digest)
    [ -n "$IT_ALONE" ] || it_fail "the trainer alone prints no digest"
    rm -rf "$CL_DIR/run"
}

# it_begin RANKS NODE...: reference, daemons, and the run under way.
it_begin() {
    local ranks=$1
    shift
    it_job "$ranks"
    it_alone
    it_cluster "$@"
    cl_run "$JOB_FILE"
}

# Belay's commands, to the head.
it_belay() {
    "$CL_BIN/belay" "$@" --socket "$(cl_socket "$(cl_head)")"
}

# it_stop_at STEP: stops the run after it and waits for `belay run` to say so.
it_stop_at() {
    it_wait 20 "step $1" it_step_is "$1"
    it_belay stop >"$IT_DIR/out.log" 2>&1 || it_fail "belay stop leaves with $?"
    it_wait 10 "the end of belay run" it_run_ended
    [ "$(cl_run_code)" = 4 ] || it_fail "belay run left with $(cl_run_code) after a stop, not 4"
    it_wait 5 "no rank and no shim left" it_nothing_runs
    it_verify
}

# it_ready STEP: waits for that step, then notes what there is before a fault.
it_ready() {
    it_wait 20 "step $1" it_step_is "$1"
    it_before
}

it_rank_pids() {
    cl_status_raw "$(cl_head)" | jq -r "$CL_JQ_RUN"' $r.ranks[]?
        | select(.state != "exited" and .pid > 0 and .rank != null) | "\(.rank) \(.pid)"' | sort -n
}

it_before() {
    IT_SEQ=$(it_events_newest)
    IT_PIDS=$(it_rank_pids)
    IT_MS=$(cl_now_ms)
}

# it_signal SIGNAL RANK...: to their processes, all at once; they must be there.
it_signal() {
    local signal=$1 rank pids=()
    shift
    for rank in "$@"; do
        it_wait 10 "a process of rank $rank" it_has_pid "$rank"
        pids+=("$IT_PID")
    done
    kill "-$signal" "${pids[@]}" || it_fail "rank $* was gone before SIG$signal"
}
it_has_pid() {
    IT_PID=$(cl_rank_pid "$1")
    [ -n "$IT_PID" ]
}

# --- judging ----------------------------------------------------------------------------------

# it_end: waits for the end and compares it with the trainer alone.
it_end() {
    it_wait "${1:-30}" "the end of the run" it_run_ended
    local code got
    code=$(cl_run_code)
    [ "$code" = 0 ] || it_fail "belay run left with $code, not 0: $(tail -n 1 "$CL_DIR/run.log")"
    got=$(cl_run_digest)
    [ "$got" = "$IT_ALONE" ] || it_fail "ended in ${got:-no digest}, the trainer alone in $IT_ALONE"
    it_report
}

# For whoever reads the log: how soon the fault was noticed, the next step, what was lost.
it_report() {
    [ "$IT_MS" -gt 0 ] || return 0
    it_events "${CL_NODES[@]}" | jq -rs --argjson ms "$IT_MS" '
        ([.[] | select(.name == "FINISHED") | .ms] | first // 1e18) as $over
        | [.[] | select(.ms >= $ms and .ms < $over)] as $since
        | ([$since[] | select(.name | IN("PROC_SUSPECTED", "RANK_EXITED", "RANK_FAILED", "RANK_HUNG",
            "NODE_AWAY", "HEAD_AWAY", "ENGINE_LOST", "SHIM_LOST")) | .ms] | min) as $seen
        | ([$since[] | select(.name == "RECOVERED")] | first) as $back
        | if $seen then "noticed after \($seen - $ms) ms" else "nothing to notice" end,
          if $back then "next step after \($back.ms - $ms) ms, \($back.fields.count // 0) steps lost" else empty end'
}

it_recovered() {
    it_run_ended || it_event RECOVERED
}

# it_survivors RANK...: all that were there before are there still, but for these ranks.
it_survivors() {
    local rank pid
    while read -r rank pid; do
        case " $* " in *" $rank "*) continue ;; esac
        kill -0 "$pid" 2>/dev/null || it_run_ended || it_fail "rank $rank (process $pid) did not survive"
        [ "$(it_event_count PROC_STARTED ".fields.rank == $rank")" -le 1 ] ||
            it_fail "rank $rank was started more than once"
    done <<<"$IT_PIDS"
}

# it_lost STEPS: at most so many steps were done again in any recovery.
it_lost() {
    local lost
    lost=$(it_events "${CL_NODES[@]}" | jq -rs '[.[] | select(.name == "RECOVERED") | .fields.count // 0] | max // 0')
    [ "$lost" -le "$1" ] || it_fail "$lost steps were lost, not $1 at most"
}

# it_recoveries LO HI: so many recoveries from the first generation on.
it_recoveries() {
    local count
    count=$(it_event_count GENERATION_RUNNING)
    [ "$count" -ge $(($1 + 1)) ] && [ "$count" -le $(($2 + 1)) ] ||
        it_fail "$((count - 1)) recoveries, not $1 to $2"
}

# it_each_step: the metrics have a line for every step; EXACT=1: exactly one.
it_each_step() {
    local wrong
    wrong=$(jq -s --argjson steps "${STEPS:-40}" --argjson exact "${1:-0}" '
        (map(.step) | group_by(.) | map({key: (.[0] | tostring), value: length}) | from_entries) as $n
        | [range(1; $steps + 1) | tostring | select(($n[.] // 0) < 1 or ($exact == 1 and $n[.] != 1))]
        | join(" ")' "$(cl_metrics)")
    [ "$wrong" = '""' ] || it_fail "metrics.jsonl: missing or repeated steps: $wrong"
}

# it_verify: every committed checkpoint is sound. Older ones may be going away meanwhile.
it_verify() {
    [ -x "$CL_BIN/ckpt-tool" ] || return 0
    compgen -G "${ROOT:-$CL_DIR/checkpoints}/step-*" >/dev/null || it_fail "no checkpoint is there"
    it_wait 10 "ckpt-tool verify is content" it_verify_once
}
it_verify_once() {
    "$CL_BIN/ckpt-tool" verify "${ROOT:-$CL_DIR/checkpoints}" >"$IT_DIR/out.log" 2>&1
}
