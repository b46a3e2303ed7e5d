#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs of tensor parallel ranks: their checkpoints hold boxes of tensors, and are checkpoints like
# any other. The model's one kv head is shared by both ranks.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

STEPS=40
LAYOUT='{tp: 2}'
ALONE_RANKS=2

# tool EXPECT ARGUMENT...: ckpt-tool leaves with that code.
tool() {
    local want=$1 got=0
    shift
    "$CL_BIN/ckpt-tool" "$@" >"$IT_DIR/out.log" 2>&1 || got=$?
    [ "$got" = "$want" ] || it_fail "ckpt-tool $* leaves with $got, not $want"
}

# say MODEL [OPTION...]: its text.
say() {
    "$CL_BIN/belay-train" sample --temperature 0 --model "$@" 2>"$IT_DIR/out.log" ||
        it_fail "belay-train sample of $1 leaves with $?"
}

newest() {
    local all
    all=$(ls -d "$CL_DIR"/checkpoints/step-*)
    tail -n 1 <<<"$all"
}

# Two replicas of two slices, stopped; one goes on, with the same bits. In between: what the tools
# make of the checkpoint.
case_stop_and_resume_on_one_replica() {
    it_begin 4 node0
    it_stop_at 15
    local at tp
    at=$(newest)
    tp=$("$CL_BIN/ckpt-tool" show "$at" --json | jq .layout.tp)
    [ "$tp" = 2 ] || it_fail "the checkpoint says that tp is $tp"
    tool 0 verify "$at"
    tool 0 reshard "$at" --out "$CL_DIR/whole" --layout dp=1 --codec none
    tool 0 diff "$at" "$CL_DIR/whole"
    tool 0 reshard "$CL_DIR/whole" --out "$CL_DIR/wide" --layout tp=2,pp=2
    tool 0 diff "$at" "$CL_DIR/wide"
    tool 0 export "$at" --to hf --out "$CL_DIR/hf" --context 32
    tool 0 import --from hf "$CL_DIR/hf" --out "$CL_DIR/again"
    say "$at" >"$IT_DIR/ours"
    say "$CL_DIR/again" >"$IT_DIR/theirs"
    cmp "$IT_DIR/ours" "$IT_DIR/theirs" || it_fail "the exported weights say something else"
    LAYOUT='{tp: 1}'
    it_job 2
    if it_belay run "$JOB_FILE" >"$IT_DIR/out.log" 2>&1; then
        it_fail "a run of two slices went on as one"
    fi
    grep -q 'layout.tp' "$IT_DIR/out.log" || it_fail "another tp is not refused by name"
    LAYOUT='{tp: 2}'
    it_job 2
    cl_run "$JOB_FILE"
    it_end
    it_each_step
    it_verify
}

# Stream and norms cut by rows; a rank dies, and its slice comes back from memory.
case_sequence_parallel_rank_killed() {
    LAYOUT='{tp: 2, sequence: true}'
    it_begin 4 node0
    it_ready 12
    it_signal KILL 2
    it_end
    it_lost 1
    it_verify
}

# The trained stories260K, trained no further by two ranks with a rate of 0 and saved by them, says
# its known text.
case_saved_in_slices_it_tells_its_story() {
    local data=${BELAY_TEST_DATA:-}
    [ -s "$data/stories260K.bin" ] || it_skip "BELAY_TEST_DATA has no stories260K.bin"
    tool 0 import --from llama2c "$data/stories260K.bin" --out "$CL_DIR/story"
    MODEL='{layers: 5, dim: 64, hidden: 172, heads: 8, kv_heads: 4, vocab: 512, tied: true}'
    TRAIN="weight_decay: 0, lr_min: 0, init: $CL_DIR/story"
    STEPS=2
    it_job 2
    sed -i 's/lr: 0.003, warmup: 5/lr: 0, warmup: 0/' "$JOB_FILE"
    it_alone
    it_cluster node0
    cl_run "$JOB_FILE"
    it_end
    it_verify
    say "$(newest)" --tokenizer "$data/tok512.bin" --steps 200 >"$IT_DIR/story"
    cmp "$IT_DIR/story" "$data/stories260K.greedy200.txt" || it_fail "it says something else"
}

it_main "$@"
