#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Nothing is disturbed: the run ends in the digest of the trainer alone, whatever the number of
# ranks and daemons.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_PACE_MS=0

whole() {
    it_begin "$@"
    it_end
    it_recoveries 0 0
    it_each_step 1
    it_verify
    [ "$(it_status .verdict)" = "done" ] || it_fail "status says $(it_status .verdict) at the end"
    "$CL_BIN/belay" status --socket "$(cl_socket "$(cl_head)")" >"$IT_DIR/out.log" 2>&1 ||
        it_fail "belay status leaves with $? after a run that went well"
    it_wait 5 "no rank and no shim left" it_nothing_runs
}

case_one_rank() {
    whole 1 node0
}

case_two_ranks() {
    whole 2 node0
}

case_four_ranks() {
    whole 4 node0
}

case_two_daemons() {
    NODES=2
    whole 4 node0 node1
}

it_main "$@"
