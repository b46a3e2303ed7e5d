#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every command against a real daemon and a tiny job: exit codes, JSON, Ctrl-C, a restart of the
# daemon while belay run watches.
# Exit: 0 passed, 1 failed, 77 skipped.
set -uo pipefail
# shellcheck source=dist/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../dist/lib.sh"
# shellcheck source=dist/cluster.sh
. "$BL_ROOT/dist/cluster.sh"

for program in belayd belay belay-shim belay-engine belay-train; do
    [ -x "$CL_BIN/$program" ] || {
        echo "skip: $CL_BIN/$program is not built"
        exit 77
    }
done
work=$(mktemp -d "${TMPDIR:-/tmp}/belay-live.XXXXXX") || exit 3
trap 'cl_stop; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

fail() {
    echo "FAILED: $*"
    tail -n 20 "$work"/out "$CL_DIR"/run.log "$CL_DIR"/*/belayd.log 2>/dev/null
    exit 1
}

# b CODE COMMAND...: belay with the socket; stdout and stderr to $work/out and err.
b() {
    local want=$1 rc=0
    shift
    timeout 60 "$CL_BIN/belay" "$@" --socket "$socket" >"$work/out" 2>"$work/err" </dev/null || rc=$?
    [ $rc = "$want" ] || fail "belay $*: exit $rc, not $want: $(cat "$work/err")"
}
# has PATTERN: the output has it.
has() {
    grep -Eq -- "$1" "$work/out" "$work/err" || fail "no '$1' in what was printed"
}
# json FILTER: true of the output.
json() {
    jq -es "$1" <"$work/out" >/dev/null || fail "not so: $1: $(cat "$work/out")"
}
# until_true SECONDS TEXT COMMAND...
until_true() {
    local deadline=$((SECONDS + $1)) text=$2
    shift 2
    until "$@"; do
        [ $SECONDS -lt $deadline ] || fail "not in time: $text"
        sleep 0.05
    done
}
run_ended() {
    [ -n "$(cl_run_code)" ]
}
stepped() {
    cl_status_raw node0 | jq -e --argjson past "$1" '.step > $past' >/dev/null
}

# job NAME STEPS PACE: a step takes at least PACE ms.
job() {
    cat >"$work/$1.yaml" <<YAML
name: $1
run_dir: $work/$1
ranks: 2
lanes: 2
model: {layers: 1, dim: 32, hidden: 64, heads: 2, kv_heads: 1}
data: {files: [$BL_ROOT/LICENSE]}
train: {global_batch: 2, micro_batch: 1, seq_len: 32, steps: $2, lr: 0.003, warmup: 2, seed: 7}
backend: cpu
threads: 1
roots: [{path: $work/$1.checkpoints, shared: true, every: 10, keep: 2}]
YAML
}

cl_start "$work/cluster" node0 || fail "belayd does not start"
socket=$(cl_socket node0)

echo "idle"
b 0 status
has '^idle'
b 0 status --json
json '.[0] | .schema == 1 and .verdict == "idle"'
b 0 status --prometheus
has '^belay_verdict.job="",verdict="idle". 1$'
b 3 save
b 3 stop
b 0 doctor --json
json '.[0] | .schema == 1 and .findings == 0 and any(.checks[]; .name == "daemon" and .state == "ok")'

echo "a run to its end"
job short 30
want=$("$CL_BIN/belay-train" --job "$work/short.yaml" --digest 2>/dev/null | cl_alone_digest)
b 0 run "$work/short.yaml" --json
json '.[-1] | .schema == 1 and .verdict == "done" and .exit_code == 0 and .step == 30
    and .name == "short" and .checkpoint.step == 30 and (.run | length) == 16'
[ "$(jq -r .digest "$work/out")" = "$want" ] || fail "digest $(jq -r .digest "$work/out"), alone $want"
b 0 status
has '^done: step 30/30, memory .*, disk 30 \(.* ago\), 1 of 1 nodes up$'
b 0 events --json
json 'length > 5 and all(.seq > 0 and .ms > 0 and (.code | startswith("BLY-")) and (.name | length) > 0)'
json 'map(.seq) | . == (sort | unique)'
json 'any(.name == "FINISHED")'
last=$(jq -s 'last.seq' "$work/out")
b 0 events --since "$last"
[ ! -s "$work/out" ] || fail "events after the last one"
b 3 run "$work/short.yaml"
has 'finished'

echo "detached, saved, watched, stopped"
job long 1000000
b 0 run "$work/long.yaml" --detach
has '^run [0-9a-f]{16} of long started$'
until_true 60 "a step" stepped 0
b 0 status
has '^healthy: step [0-9]+/1000000, '
b 0 save
has '^committed: step [0-9]+$'
b 0 status --prometheus
has '^belay_root_checkpoint.job="long",root="[^"]*",checkpoint="(committed|verified)". 1$'
"$BELAY_BUILD/tests/cli/test_prometheus" "$work/out" >"$work/err" || fail "no metrics: $(cat "$work/err")"
has '^[0-9]{2,} series$'
b 0 save --json
json '.[0] | .schema == 1 and .committed > 0'
b 3 run "$work/long.yaml"
has 'runs already'
b 0 stop --json
json '.[0] | .schema == 1 and .step > 0'
stopped=$(jq .step "$work/out")
b 0 status
has "^stopped: step $stopped/"

echo "resumed, Ctrl-C, a restart of the daemon"
"$CL_BIN/belay" run "$work/long.yaml" --socket "$socket" >"$work/watch" 2>&1 </dev/null &
watcher=$!
until_true 60 "a step after the resume" stepped "$stopped"
grep -q "resumed at step $stopped" "$work/watch" || fail "no word of the resume: $(cat "$work/watch")"
kill -INT $watcher
rc=0
wait $watcher || rc=$?
[ $rc = 130 ] || fail "belay run left with $rc, not 130, when it was interrupted"
grep -q 'the run goes on' "$work/watch" || fail "no word of the run going on"
b 0 status
has '^healthy'
b 0 stop
stopped=$(cl_status_raw node0 | jq .step)
cl_run "$work/long.yaml"
until_true 60 "the resume" grep -q "resumed at step $stopped" "$CL_DIR/run.log"
until_true 60 "a step" stepped "$stopped"
before=$(cl_status_raw node0 | jq .step)
cl_node_kill node0 KILL
until_true 60 "belay run notices" grep -q 'daemon is away' "$CL_DIR/run.log"
cl_node_start node0 || fail "belayd does not start again"
until_true 60 "a step after the restart" stepped "$before"
until_true 60 "belay run is back" grep -q 'daemon is back' "$CL_DIR/run.log"
[ "$(grep -c 'daemon is away' "$CL_DIR/run.log")" = 1 ] || fail "it says more than once that the daemon is away"
b 0 stop
until_true 60 "belay run ends" run_ended
[ "$(cl_run_code)" = 4 ] || fail "belay run left with $(cl_run_code), not 4"
jq -es 'last | .verdict == "stopped" and .exit_code == 4' <"$CL_DIR/run.json" >/dev/null ||
    fail "its last line: $(cat "$CL_DIR/run.json")"

echo "recovered from its root alone, moved, by daemons that know nothing"
job lost 200
cl_stop
# Slow enough to be stopped before its end.
BELAY_FAIL=before-vote:delay_20:0 cl_start "$work/cluster1" node0 || fail "belayd does not start"
socket=$(cl_socket node0)
"$CL_BIN/belay-train" --job "$work/lost.yaml" --digest >"$work/alone" 2>/dev/null
cl_run "$work/lost.yaml"
until_true 60 "a step" stepped 12
b 0 stop
until_true 60 "belay run ends" run_ended
cl_stop
rm -rf "$work/lost"
mv "$work/lost.checkpoints" "$work/moved"
sed 's/^ranks: 2/ranks: 1/' "$work/lost.yaml" >"$work/lost1.yaml"
sed 's/seed: 7/seed: 8/' "$work/lost.yaml" >"$work/other.yaml"
cl_start "$work/cluster2" node0 || fail "belayd does not start"
socket=$(cl_socket node0)
b 2 run --recover "$work/moved" "$work/other.yaml"
has 'train.seed'
b 0 run --recover "$work/moved" "$work/lost1.yaml" --json
json '.[-1] | .verdict == "done" and .step == 200 and (.checkpoint.root | endswith("/moved"))'
[ "$(jq -r .digest "$work/out")" = "$(cl_alone_digest <"$work/alone")" ] ||
    fail "digest $(jq -r .digest "$work/out"), alone $(cl_alone_digest <"$work/alone")"

echo "on a terminal"
if command -v script >/dev/null; then
    job shown 60
    timeout 60 script -qec "$CL_BIN/belay run $work/shown.yaml --socket $socket" /dev/null \
        >"$work/out" 2>&1 </dev/null || fail "belay run on a terminal: exit $?"
    grep -q "$(printf '\r\033')\[Kstep [0-9]*/60" "$work/out" || fail "no live line on a terminal"
fi
echo "passed"
