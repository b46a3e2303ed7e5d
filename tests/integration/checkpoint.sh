#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checkpoints of real runs: stopped and resumed in every shape, recovered from nothing but the
# root, written while processes die and disks are full.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_PACE_MS=20
STEPS=60

# resume RANKS...: stopped at 15, gone on with so many ranks.
resume() {
    it_begin 3 node0
    it_stop_at 15
    it_job "$1"
    cl_run "$JOB_FILE"
    it_end
    it_each_step
    it_verify
}
case_stop_and_resume() {
    resume 3
}
case_resume_on_one() {
    resume 1
}
case_resume_on_four() {
    resume 4
}

case_resume_with_fresh_daemons() {
    it_begin 4 node0
    it_stop_at 15
    cl_node_kill node0 TERM
    it_node node0
    it_job 2
    cl_run "$JOB_FILE"
    it_end
    it_each_step
    it_verify
}

# All ranks die and none can be started again: a stop saves what their memory holds, and ends.
case_stop_without_ranks() {
    cp "$CL_BIN/belay-train" "$IT_DIR/my-train"
    COMMAND="[$IT_DIR/my-train]"
    IT_COMMAND=my-train
    EVERY=50
    it_begin 2 node0
    it_ready 15
    mv "$IT_DIR/my-train" "$IT_DIR/away"
    pkill -KILL -f "^$IT_DIR/my-train" || it_fail "no rank was there to kill"
    it_wait 10 "a run that waits" waits
    it_belay stop >"$IT_DIR/out.log" 2>&1 || it_fail "belay stop leaves with $?"
    it_wait 10 "the end of belay run" it_run_ended
    [ "$(cl_run_code)" = 4 ] || it_fail "belay run left with $(cl_run_code) after a stop, not 4"
    [ "$(it_status .newest_disk.step)" -ge 15 ] || it_fail "the memory of the dead ranks was not saved"
    mv "$IT_DIR/away" "$IT_DIR/my-train"
    cl_run "$JOB_FILE"
    it_end
    it_each_step
    it_verify
}
waits() {
    [ "$(it_status .verdict)" = waiting ]
}

# The head's state is gone: the root has all that is needed.
case_recover_from_root() {
    it_begin 3 node0
    it_stop_at 15
    cl_node_kill node0 KILL
    rm -rf "$CL_DIR/node0" "$CL_DIR/run" "$JOB_FILE"
    it_node node0
    cl_run --recover "$CL_DIR/checkpoints"
    it_end
    it_verify
}

# The newest checkpoint, cut for tensor and pipeline parallel ranks and back again, is the same
# file as the trainer's own cut; a run goes on from the one that was cut for others, with the same
# bits. (Copies without a codec: what `auto` does depends on the disk's pace.)
case_recover_from_resharded() {
    it_begin 3 node0
    it_stop_at 15
    local tool="$CL_BIN/ckpt-tool" newest
    newest=$(ls -d "$CL_DIR"/checkpoints/step-*)
    newest=$(tail -n 1 <<<"$newest")
    "$tool" reshard "$newest" --out "$CL_DIR/plain" --codec none >"$IT_DIR/out.log" 2>&1 ||
        it_fail "ckpt-tool reshard --codec none leaves with $?"
    "$tool" reshard "$newest" --out "$CL_DIR/wide" --layout dp=3,tp=2,pp=2,zero=1,vocab=64 --parts 3 --codec zstd \
        >"$IT_DIR/out.log" 2>&1 || it_fail "ckpt-tool reshard leaves with $?"
    "$tool" reshard "$CL_DIR/wide" --out "$CL_DIR/back" --layout dp=3,zero=1 --parts 1 --codec none \
        >"$IT_DIR/out.log" 2>&1 || it_fail "ckpt-tool reshard, back, leaves with $?"
    cmp "$CL_DIR/plain/$(basename "$newest")/part-0000.safetensors" \
        "$CL_DIR/back/$(basename "$newest")/part-0000.safetensors" ||
        it_fail "there and back is another file than the trainer's"
    cl_node_kill node0 KILL
    rm -rf "$CL_DIR/node0" "$CL_DIR/run" "$CL_DIR/checkpoints" "$JOB_FILE"
    mv "$CL_DIR/wide" "$CL_DIR/checkpoints"
    it_node node0
    cl_run --recover "$CL_DIR/checkpoints"
    it_end
    it_verify
}

# The same after a crash of everything, with another number of ranks.
case_recover_after_a_crash() {
    it_begin 3 node0
    it_wait 20 "a checkpoint" it_event SAVE_COMMITTED
    it_wait 20 "step 15" it_step_is 15
    local pids
    mapfile -t pids < <(it_processes)
    kill -KILL "${pids[@]}"
    { wait; } 2>/dev/null
    rm -rf "$CL_DIR/node0" "$CL_DIR/run"
    it_job 2
    it_node node0
    cl_run --recover "$CL_DIR/checkpoints" "$JOB_FILE"
    it_end
    it_verify
}

# The newest checkpoint is damaged: the one before it is used, and somebody is told which.
# damaged NAME COMMAND...: the command is given the part's file.
damaged() {
    it_begin 2 node0
    it_stop_at 25
    local newest part
    newest=$(find "$CL_DIR/checkpoints" -maxdepth 1 -name 'step-*' | sort | tail -n 1)
    part=$(find "$newest" -name '*.safetensors*' | head -n 1)
    "$@" "$part"
    "$CL_BIN/ckpt-tool" verify "$CL_DIR/checkpoints" >"$IT_DIR/out.log" 2>&1 &&
        it_fail "ckpt-tool finds nothing wrong in a damaged checkpoint"
    grep -qF "$(basename "$newest")/$(basename "$part")" "$IT_DIR/out.log" || it_fail "ckpt-tool does not name the file"
    cl_node_kill node0 KILL
    rm -rf "$CL_DIR/node0" "$CL_DIR/run"
    it_node node0
    cl_run --recover "$CL_DIR/checkpoints"
    it_end 40
    grep -qF "$(basename "$newest")" "$CL_DIR/node0/belayd.log" || it_fail "nobody names the damaged checkpoint"
}
case_recover_past_a_truncated_one() {
    damaged truncate -s -100
    [ "$(it_event_count CHECKPOINT_PASSED_OVER '.fields.reason | test("/part-")')" -ge 1 ] ||
        it_fail "no event says which file made an older one be used"
}
flip() {
    python3 - "$1" <<'PYTHON'
import sys
with open(sys.argv[1], "r+b") as part:
    middle = part.seek(0, 2) // 2
    part.seek(middle)
    byte = part.read(1)[0]
    part.seek(middle)
    part.write(bytes([byte ^ 16]))
PYTHON
}
case_recover_past_a_flipped_bit() {
    damaged flip
    it_event CHECKPOINT_BAD || it_fail "no event names the damaged checkpoint"
    [ "$(it_event_count CHECKPOINT_BAD 'tostring | test("/part-[^ ]*: chunk [0-9]+ .*tensor [^ ]+\\)")')" -ge 1 ] ||
        it_fail "no event names its file, chunk and tensor"
}

# two_roots COMMAND...: everything dies when two roots have two steps in common; the command
# damages the newest of these, NEWEST; the run is recovered.
two_roots() {
    ROOTS="[{path: $CL_DIR/checkpoints, shared: true, every: 10, keep: 3}, {path: $CL_DIR/second, shared: true, every: 10, keep: 3}]"
    it_begin 2 node0
    it_wait 40 "two steps in both roots" in_both 2
    local pids step
    mapfile -t pids < <(it_processes)
    kill -KILL "${pids[@]}"
    { wait; } 2>/dev/null
    NEWEST=$(common | tail -n 1)
    for step in "$CL_DIR"/checkpoints/step-* "$CL_DIR"/second/step-*; do
        [[ $(basename "$step") > $NEWEST ]] && rm -r "$step"
    done
    "$@"
    rm -rf "$CL_DIR/node0" "$CL_DIR/run"
    it_node node0
    cl_run --recover "$CL_DIR/checkpoints" "$JOB_FILE"
    it_end 60
}
flip_newest() {
    local root
    for root in "$@"; do
        flip "$(find "$CL_DIR/$root/$NEWEST" -name '*.safetensors*' | head -n 1)"
    done
}
went_on_from_newest() {
    [ "$(it_event_count GENERATION_PLANNED ".text == \"$NEWEST\"")" -ge 1 ]
}

# One of them has a flipped bit: the other one gives what is damaged, nothing is lost.
case_recover_heals_from_another_root() {
    two_roots flip_newest checkpoints
    it_event CHECKPOINT_HEALED || it_fail "no event tells that a checkpoint was healed"
    [ "$(it_event_count CHECKPOINT_HEALED '.fields.reason | test("/part-[^ ]*: chunk [0-9]+ .*tensor .*second/")')" -ge 1 ] ||
        it_fail "it does not say what came from where"
    [ "$(it_event_count CHECKPOINT_BAD)" = 0 ] || it_fail "a checkpoint was given up that could be healed"
    went_on_from_newest || it_fail "an older one was used"
}

# The same bit in both: an older step is used, and each is named.
case_recover_past_a_step_bad_in_both_roots() {
    two_roots flip_newest checkpoints second
    it_event CHECKPOINT_BAD || it_fail "no event names the damaged checkpoint"
    [ "$(it_event_count CHECKPOINT_HEALED)" = 0 ] || it_fail "something was healed from nothing"
}
# Steps that both roots have, oldest first.
common() {
    comm -12 <(cd "$CL_DIR/checkpoints" 2>/dev/null && compgen -G 'step-*' | sort) \
        <(cd "$CL_DIR/second" 2>/dev/null && compgen -G 'step-*' | sort)
}
in_both() {
    [ "$(common | wc -l)" -ge "$1" ]
}

saving() {
    compgen -G "$CL_DIR/checkpoints/.step-*.tmp" >/dev/null
}

# A rank dies while its step is written: the save goes on.
case_rank_killed_in_save() {
    IT_FAIL=save-begun:delay_1000:1
    it_begin 3 node0
    it_wait 20 "a save under way" saving
    it_before
    it_signal KILL 1
    it_wait 15 "recovery" it_recovered
    it_wait 15 "the save of step 10" it_event SAVE_COMMITTED '.fields.step == 10'
    it_survivors 1
    it_end
    it_lost 1
    it_verify
}

case_engine_killed_in_save() {
    IT_FAIL=save-begun:delay_1000:1
    it_begin 3 node0
    it_wait 20 "a save under way" saving
    it_before
    kill -KILL "$(cl_helper_pids belay-engine | head -n 1)"
    it_wait 15 "an event of it" it_event ENGINE_LOST
    it_end
    it_survivors
    it_recoveries 0 0
    it_verify
}

case_save_on_request() {
    EVERY=1000
    it_begin 2 node0
    it_wait 20 "step 10" it_step_is 10
    it_belay save >"$IT_DIR/out.log" 2>&1 || it_fail "belay save leaves with $?"
    compgen -G "$CL_DIR/checkpoints/step-*" >/dev/null || it_fail "belay save came back without a checkpoint"
    it_end
    it_verify
}

case_keeps_the_newest() {
    KEEP=2
    it_begin 2 node0
    it_end
    it_wait 5 "two checkpoints are left" two_left
    it_verify
}
two_left() {
    [ "$(find "$CL_DIR/checkpoints" -maxdepth 1 -name 'step-*' | wc -l)" = 2 ]
}

# A disk that holds no save: training goes on, the last save fails, so does belay run.
case_disk_full() {
    [ "$(id -u)" = 0 ] || it_skip "needs root to mount a small file system"
    mkdir "$IT_DIR/small"
    mount -t tmpfs -o size=300k tmpfs "$IT_DIR/small" 2>/dev/null || it_skip "no tmpfs can be mounted"
    IT_MOUNTED=$IT_DIR/small
    ROOT=$IT_DIR/small/root
    it_begin 2 node0
    it_wait 30 "the end of the run" it_run_ended
    [ "$(cl_run_code)" = 3 ] || it_fail "belay run left with $(cl_run_code), not 3"
    it_recoveries 0 0
    it_each_step 1
    [ "$(it_event_count PART_FAILED '.fields.reason | test("small/root")')" -ge 1 ] ||
        it_fail "no event names the path that is full"
    [ "$(it_event_count LAST_SAVE_FAILED)" = 1 ] || it_fail "no event says that the last save failed"
    it_wait 5 "no rank and no shim left" it_nothing_runs
}

# The disk is full for a while: the next save stands.
case_disk_full_for_a_while() {
    [ "$(id -u)" = 0 ] || it_skip "needs root to mount a small file system"
    mkdir "$IT_DIR/small"
    mount -t tmpfs -o size=4m tmpfs "$IT_DIR/small" 2>/dev/null || it_skip "no tmpfs can be mounted"
    IT_MOUNTED=$IT_DIR/small
    ROOT=$IT_DIR/small/root
    KEEP=2
    dd if=/dev/zero of="$IT_DIR/small/ballast" bs=64k count=62 2>/dev/null
    it_begin 2 node0
    it_wait 20 "a save that fails" it_event SAVE_FAILED
    rm "$IT_DIR/small/ballast"
    it_wait 20 "one that stands" it_event SAVE_COMMITTED
    it_end
    it_recoveries 0 0
    it_verify
}

# The directory holds another run: refused by name, and nothing there is touched.
case_root_of_another_run() {
    it_begin 2 node0
    it_end
    local before first=$JOB
    before=$(find "$CL_DIR/checkpoints" -type f -exec sha256sum {} + | sort)
    JOB=$JOB-two
    RUN_DIR=$CL_DIR/run2
    it_job 2
    cl_run "$JOB_FILE"
    it_wait 10 "the refusal" it_run_ended
    case $(cl_run_code) in 2 | 3) ;; *) it_fail "belay run left with $(cl_run_code)" ;; esac
    grep -q "holds run" "$CL_DIR/run.log" || it_fail "the refusal does not say whose the root is"
    [ "$before" = "$(find "$CL_DIR/checkpoints" -type f -exec sha256sum {} + | sort)" ] ||
        it_fail "the other run's checkpoints of $first were touched"
    it_nothing_runs || it_fail "something was started"
}

# Another model under the same run_dir: never a silent start from nothing.
case_run_dir_of_another_run() {
    it_begin 2 node0
    it_stop_at 15
    sed -i 's/dim: 32, hidden: 64/dim: 64, hidden: 64/' "$JOB_FILE"
    cl_run "$JOB_FILE"
    it_wait 10 "the refusal" it_run_ended
    case $(cl_run_code) in 2 | 3) ;; *) it_fail "belay run left with $(cl_run_code)" ;; esac
    grep -q "model.dim differs" "$CL_DIR/run.log" || it_fail "the refusal does not say what differs"
    it_nothing_runs || it_fail "something was started"
}

# A run that has finished is not trained again by mistake.
case_finished_run_again() {
    it_begin 2 node0
    it_end
    cl_run "$JOB_FILE"
    it_wait 10 "the refusal" it_run_ended
    case $(cl_run_code) in 2 | 3) ;; *) it_fail "belay run left with $(cl_run_code)" ;; esac
    grep -q "finished" "$CL_DIR/run.log" || it_fail "the refusal does not say that the run is over"
    it_nothing_runs || it_fail "something was started"
}

it_main "$@"
