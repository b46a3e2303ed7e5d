# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Daemons on loopback and a job on them, for ./quickstart, ./bench and tests/soak. To be sourced
# after dist/lib.sh. One cluster at a time, below CL_DIR:
#
#     CL_DIR/NODE/state, belayd.sock, belayd.log     one folder a node; the first leads
#     CL_DIR/run.json, run.rc                        what `belay run` printed, and its exit code
#
# Everything that is started is stopped by cl_stop, by process id; sources call it on exit.

CL_BIN=${BELAY_BUILD:-$BL_ROOT/build}
CL_DIR=
CL_NODES=()
declare -A CL_PID=()  # node -> belayd
declare -A CL_PORT=() # node -> control port
CL_RUN_PID=

cl_now_ms() {
    local now=$EPOCHREALTIME
    echo $((${now%.*} * 1000 + 10#${now#*.} / 1000))
}

cl_port_free() {
    python3 -c 'import socket
s = socket.socket()
s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])'
}

cl_socket() {
    echo "$CL_DIR/$1/belayd.sock"
}

cl_head() {
    echo "${CL_NODES[0]}"
}

# cl_node_start NODE: starts its belayd and waits until it answers. Its state stays where it was.
cl_node_start() {
    local node=$1 dir="$CL_DIR/$1" head
    head=$(cl_head)
    # Without --head a daemon is the head.
    local whom=(--head "127.0.0.1:${CL_PORT[$head]:-}")
    [ "$node" != "$head" ] || whom=()
    mkdir -p "$dir/state"
    [ -n "${CL_PORT[$node]:-}" ] || CL_PORT[$node]=$(cl_port_free)
    "$CL_BIN/belayd" --name "$node" --state-dir "$dir/state" --socket "$dir/belayd.sock" \
        --listen "127.0.0.1:${CL_PORT[$node]}" --bulk 127.0.0.1:0 "${whom[@]}" --foreground \
        >>"$dir/belayd.log" 2>&1 </dev/null &
    CL_PID[$node]=$!
    local deadline=$((SECONDS + 15))
    until [ -S "$dir/belayd.sock" ] && cl_status_raw "$node" >/dev/null; do
        if ! kill -0 "${CL_PID[$node]}" 2>/dev/null || [ $SECONDS -gt $deadline ]; then
            bl_say "belayd of $node did not start; the end of $dir/belayd.log:"
            tail -n 5 "$dir/belayd.log" >&2
            return 1
        fi
        sleep 0.05
    done
}

# cl_node_kill NODE [SIGNAL]: ends the daemon, not its shims and ranks; waits until it is gone.
cl_node_kill() {
    local pid=${CL_PID[$1]:-}
    [ -n "$pid" ] || return 0
    kill "-${2:-TERM}" "$pid" 2>/dev/null
    # A stopped process does not act on a signal before it is continued.
    kill -CONT "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    CL_PID[$1]=
}

# cl_start DIR NODE...: fresh daemons, the first one leading.
cl_start() {
    local node
    CL_DIR=$1
    shift
    CL_NODES=("$@")
    CL_PORT=()
    for node in "$@"; do cl_node_start "$node" || return 1; done
}

# cl_orphans: process ids of shims and ranks that belong to this cluster (their command line or
# environment names its folder).
cl_orphans() {
    local dir pid
    for dir in /proc/[0-9]*; do
        pid=${dir#/proc/}
        [ -O "$dir" ] && [ "$pid" != $$ ] || continue
        case $(tr '\0' ' ' <"$dir/cmdline" 2>/dev/null) in
        *belay-shim*"$CL_DIR/"* | *belay-engine*"$CL_DIR/"*) echo "$pid" ;;
        *) grep -qsF "BELAY_SOCKET=$CL_DIR/" "$dir/environ" 2>/dev/null && echo "$pid" ;;
        esac
    done
}

# cl_stop: daemons, then whatever of the job is left. For clean-up: nothing is saved.
cl_stop() {
    local node pid
    [ -n "$CL_DIR" ] || return 0
    if [ -n "$CL_RUN_PID" ]; then
        kill "$CL_RUN_PID" 2>/dev/null
        wait "$CL_RUN_PID" 2>/dev/null
        CL_RUN_PID=
    fi
    for node in "${CL_NODES[@]}"; do cl_node_kill "$node" KILL; done
    for pid in $(cl_orphans); do kill -KILL "$pid" 2>/dev/null; done
    return 0
}

# --- the job ----------------------------------------------------------------------------------

# cl_run JOB [ARGUMENT...]: `belay run` in the background.
cl_run() {
    rm -f "$CL_DIR/run.rc"
    (
        rc=0
        "$CL_BIN/belay" run "$@" --socket "$(cl_socket "$(cl_head)")" --json \
            >"$CL_DIR/run.json" 2>"$CL_DIR/run.log" </dev/null || rc=$?
        echo $rc >"$CL_DIR/run.rc.new"
        mv "$CL_DIR/run.rc.new" "$CL_DIR/run.rc"
    ) &
    CL_RUN_PID=$!
}

# cl_run_code: exit code of `belay run`, empty while it runs.
cl_run_code() {
    cat "$CL_DIR/run.rc" 2>/dev/null
}

cl_status_raw() {
    timeout 5 "$CL_BIN/belay" status --json --socket "$(cl_socket "$1")" 2>/dev/null
    # 1 is "needs attention": an answer all the same.
    [ $? -le 1 ]
}

# --- what the programs print ------------------------------------------------------------------

# The run in an answer of `belay status --json`: the newest one, or the newest that ended.
# shellcheck disable=SC2016 # the dollar is for jq
CL_JQ_RUN='((.runs // [])[-1] // (.ended // [])[-1] // .) as $r |'

# cl_status_fields: status on stdin; step, loss, tokens/s, live ranks, saved step, last event,
# separated by tabs, none of them empty.
cl_status_fields() {
    jq -r "$CL_JQ_RUN"' [
        ($r.step // 0),
        (if $r.loss then ($r.loss * 1000 | round / 1000) else "-" end),
        (if $r.tokens_per_s then ($r.tokens_per_s | round) else "-" end),
        ([$r.ranks[]? | select(.state != "exited" and .state != "starting")] | length),
        ($r.disk_step // $r.newest_disk.step // "-"),
        (.last_event // "-" | if type == "object" then .name + " " + (.text // "") else . end
         | if . == "" then "-" else . end)
    ] | @tsv'
}

# cl_rank_pids: process ids of the live ranks, one a line, sorted.
cl_rank_pids() {
    cl_status_raw "$(cl_head)" |
        jq -r "$CL_JQ_RUN"' $r.ranks[]? | select(.state != "exited" and .pid > 0) | .pid' | sort -n
}

# cl_rank_pid RANK
cl_rank_pid() {
    cl_status_raw "$(cl_head)" | jq -r --argjson rank "$1" "$CL_JQ_RUN"' $r.ranks[]?
        | select(.rank == $rank and .state != "exited" and .pid > 0) | .pid' | head -n 1
}

# cl_helper_pids NAME: children of the cluster's daemons by that program name (shims that an older
# daemon started have another parent: those are found by their folder).
cl_helper_pids() {
    local pid
    for pid in $(pgrep -x "$1"); do
        if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF "$CL_DIR/" ||
            printf '%s\n' "${CL_PID[@]}" | grep -qx "$(ps -o ppid= -p "$pid" | tr -d ' ')"; then
            echo "$pid"
        fi
    done
}

# cl_events_since SEQ: the head's events after that number, one JSON object a line.
cl_events_since() {
    timeout 5 "$CL_BIN/belay" events --since "$1" --json --socket "$(cl_socket "$(cl_head)")" 2>/dev/null |
        jq -c --argjson since "$1" '(if type == "object" and has("events") then .events[] else . end)
            | select(.seq > $since)'
}

# cl_events_of NODE: all that this node's daemon noted itself (a member's answer is the head's).
cl_events_of() {
    cat "$CL_DIR/$1/state/events.jsonl"
}

# cl_events_newest: the newest number.
cl_events_newest() {
    cl_events_since 0 | jq -rs 'last.seq // 0'
}

# cl_run_digest: of the final state, when `belay run` has ended.
cl_run_digest() {
    jq -rs 'last | .digest // empty' "$CL_DIR/run.json"
}

# cl_alone_digest: out of what `belay-train --digest` prints.
cl_alone_digest() {
    sed -n 's/^digest //p' | tail -n 1
}

# cl_metrics: the file with an object for each step.
cl_metrics() {
    echo "$CL_DIR/run/metrics.jsonl"
}
