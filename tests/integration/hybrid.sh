#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs of dp x tp x pp ranks that lose some: replaced, dissolved, cut to fewer stages, grown back.
# Every run ends in the digest of the trainer alone with the same tp and nothing else.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_PACE_MS=40
IT_SECONDS=${IT_SECONDS:-220}
STEPS=80
MODEL='{layers: 4, dim: 32, hidden: 64, heads: 4, kv_heads: 2, vocab: 256}'
TRAIN=
QUICK_DEADLINES='{beat: 100ms, lease: 1s, step_floor: 2500ms, init_floor: 4s, load: 10s, save: 30s,
            join: 4s, restart: 3s, grace: 3s}'

# hybrid_job DP TP PP [OPTIONS]: the job, and the digest that it must end in.
hybrid_job() {
    local alone
    LAYOUT="{tp: $2, pp: $3${4:+, $4}}"
    it_job $(($1 * $2 * $3))
    alone=$CL_DIR/alone.yaml
    sed -e "s/^ranks: .*/ranks: $2/" -e "s/^layout: .*/layout: {tp: $2, zero: 0}/" "$JOB_FILE" >"$alone"
    IT_ALONE=$("$CL_BIN/belay-train" --job "$alone" --digest 2>"$IT_DIR/out.log" | cl_alone_digest)
    if [ -z "$IT_ALONE" ]; then
        ! grep -qi 'not built' "$IT_DIR/out.log" || it_skip "the trainer: $(tail -n 1 "$IT_DIR/out.log")"
        it_fail "the trainer alone prints no digest"
    fi
    rm -rf "$CL_DIR/run"
}

# hybrid_begin DP TP PP OPTIONS NODE...
hybrid_begin() {
    hybrid_job "$1" "$2" "$3" "$4"
    shift 4
    it_cluster "$@"
    cl_run "$JOB_FILE"
}

# hybrid_nodes PER_NODE NODE...: daemons with room for so many ranks each.
hybrid_nodes() {
    local room=$1 node
    shift
    CL_NODES=("$@")
    for node in "$@"; do it_node "$node" "BELAYD_RANKS_MAX=$room"; done
}

hybrid_layout_is() {
    it_run_ended && it_fail "the run ended as $(it_status '.layout | tostring')"
    [ "$(it_status '.layout | "\(.dp) \(.tp) \(.pp)"')" = "$1 $2 $3" ]
}

# hybrid_layout DP TP PP: waits until the run has it.
hybrid_layout() {
    it_wait 60 "a layout of dp $1, tp $2, pp $3" hybrid_layout_is "$@"
}

# Exactly these ranks were killed by Belay: no victim.
hybrid_killed_only() {
    local got
    got=$(it_events "${CL_NODES[@]}" |
        jq -rs '[.[] | select(.name == "RANK_KILLED" and .fields.rank != null) | .fields.rank] | unique | join(" ")')
    [ "$got" = "$*" ] || it_fail "ranks that were killed: '$got', not '$*'"
}

hybrid_node_dies() {
    local pids
    it_wait 30 "a checkpoint" it_event SAVE_COMMITTED
    it_before
    mapfile -t pids < <(it_processes "$1")
    kill -KILL "${pids[@]}" 2>/dev/null
    { wait "${CL_PID[$1]}"; } 2>/dev/null
    CL_PID[$1]=
}

hybrid_end() {
    it_end "${1:-60}"
    it_each_step
    it_verify
}

# --- a rank is lost and comes back -------------------------------------------------------------

killed() {
    hybrid_begin "$1" "$2" "$3" "${5:-}" node0
    it_ready 10
    it_signal KILL "$4"
    it_wait 20 "recovery" it_recovered
    it_survivors "$4"
    hybrid_end
    it_recoveries 1 1
    it_lost 1
    [ "$(it_event_count RESHAPED)" = 0 ] || it_fail "the layout changed though the rank came back"
}

case_killed() {
    STEPS=40
    killed 2 1 2 1
}
case_killed_tp() {
    killed 2 2 1 2
}
case_zero_2() {
    TRAIN='recompute: full'
    killed 2 2 1 3 'zero: 2'
}
case_zero_3() {
    killed 2 1 2 2 'zero: 3'
}

# window NAME RANK HIT: killed in the window, once.
window() {
    IT_FAIL="$1@$2:kill:$3"
    hybrid_begin 2 1 2 '' node0
    hybrid_end
    [ -e "$IT_DIR/once/$1@$2" ] || it_fail "no rank came to $1 $3 times"
    it_recoveries 1 1
    it_lost 1
}
# All have voted, one stage has applied, the other has not.
case_voted_unapplied() {
    window voted-unapplied 1 12
}
case_mid_forward() {
    window mid-forward 3 30
}

# --- hangs: the one that stands still is found, not those that wait for it ----------------------

hangs() {
    it_wait 40 "an event that names the hung rank" it_event RANK_HUNG ".fields.rank == $1"
    it_wait 20 "recovery" it_recovered
    hybrid_killed_only "$1"
    hybrid_end
    it_recoveries 1 1
    it_lost 1
}
case_stopped() {
    hybrid_begin 1 1 3 '' node0
    it_ready 10
    it_signal STOP 1
    hangs 1
}
# Its control thread lives on: only who waits for whom tells.
case_hangs_mid_forward() {
    IT_FAIL="mid-forward@2:delay_20000:40"
    hybrid_begin 1 1 4 '' node0
    hangs 2
}
case_hangs_in_group() {
    IT_FAIL="mid-backward@5:delay_20000:40"
    hybrid_begin 2 2 2 '' node0
    hangs 5
}

# --- nodes are lost -----------------------------------------------------------------------------

# dissolved OPTIONS: dp 2 x pp 2 on two nodes; the second one goes for good.
dissolved() {
    DEADLINES=$QUICK_DEADLINES
    STEPS=${STEPS_MORE:-120}
    NODES=2
    hybrid_job 2 1 2 "$1"
    hybrid_nodes 2 node0 node1
    cl_run "$JOB_FILE"
    hybrid_layout 2 1 2
    hybrid_node_dies node1
    hybrid_layout 1 1 2
    it_wait 10 "an event that says from which layout to which" \
        it_event RESHAPED '(.fields.text | test("dp 2 x tp 1 x pp 2 -> dp 1 x tp 1 x pp 2"))'
}
case_dissolved_and_regrown() {
    STEPS_MORE=250
    dissolved ''
    it_node node1 BELAYD_RANKS_MAX=2
    hybrid_layout 2 1 2
    hybrid_end
}
# Without ZeRO each replica holds all: the other one's loss costs no step.
case_dissolved_without_loss() {
    dissolved 'zero: 0'
    hybrid_end
    it_lost 1
    [ "$(it_event_count STEPS_LOST)" = 0 ] || it_lost 1
}

# recut: pp 3 on three nodes; one goes.
recut() {
    DEADLINES=$QUICK_DEADLINES
    STEPS=${STEPS_MORE:-120}
    NODES=3
    hybrid_job 1 1 3 "${1:-}"
    hybrid_nodes 1 node0 node1 node2
    cl_run "$JOB_FILE"
    hybrid_layout 1 1 3
    hybrid_node_dies node1
}
case_recut() {
    recut
    hybrid_layout 1 1 2
    it_wait 10 "an event that says from which layout to which" \
        it_event RESHAPED '(.fields.text | test("pp 3 -> dp 1 x tp 1 x pp 2"))'
    hybrid_end
    local said
    said=$("$CL_BIN/ckpt-tool" ls --json "$CL_DIR/checkpoints" |
        jq -r '[.. | objects | select(.layout? and .step?)] | max_by(.step) | .layout | "\(.dp) \(.tp) \(.pp)"')
    [ "$said" = "1 1 2" ] || it_fail "the newest checkpoint says that it is of dp, tp, pp $said"
}
case_recut_and_regrown() {
    STEPS_MORE=250
    recut
    hybrid_layout 1 1 2
    it_node node1 BELAYD_RANKS_MAX=1
    hybrid_layout 1 1 3
    hybrid_end
}
# Fewer ranks than the job wants to go on with: it waits, says for how many, and goes on.
waits_for_ranks() {
    it_status .waits_for | grep -F 'room for 1 more ranks: 2 are here, one replica takes 3 at least' >/dev/null
}
case_below_the_least() {
    recut 'pp_min: 3'
    it_wait 40 "a wait with numbers" waits_for_ranks
    it_node node1 BELAYD_RANKS_MAX=1
    hybrid_layout 1 1 3
    hybrid_end
}

# --- at random ----------------------------------------------------------------------------------

# at_random DP TP PP ROUNDS [OPTIONS]: ranks killed and stopped, one or two at a time.
at_random() {
    local round rank seed=${BELAY_TEST_SEED:-$RANDOM} world=$(($1 * $2 * $3)) signal
    echo "BELAY_TEST_SEED=$seed"
    RANDOM=$seed
    STEPS=$((60 * $4))
    hybrid_begin "$1" "$2" "$3" "${5:-}" node0
    for ((round = 1; round <= $4; round++)); do
        it_ready $((round * 40))
        rank=$((RANDOM % world))
        signal=KILL
        [ $((RANDOM % 3)) -gt 0 ] || signal=STOP
        echo "round $round: SIG$signal to rank $rank"
        if [ $((RANDOM % 3)) = 0 ]; then
            it_signal "$signal" "$rank" $(((rank + 1 + RANDOM % (world - 1)) % world))
        else
            it_signal "$signal" "$rank"
        fi
        it_wait 30 "recovery $round" it_recovered
    done
    hybrid_end 120
    it_lost 1
}
case_at_random() {
    at_random 2 1 2 5
}
case_at_random_whole() {
    at_random 2 2 2 4
}

it_main "$@"
