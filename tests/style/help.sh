#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Each program's --help: on stdout, exit 0, at most 80 columns. A wrong argument: exit 2 and one
# line on stderr that names it, not the whole help.
set -euo pipefail
# shellcheck source=tests/style/lib.sh
. "$(dirname "$0")/lib.sh"
checked=0

# help_check NAME COMMAND...
help_check() {
    local name=$1 out rc=0 wide
    shift
    out=$(timeout 20 "$@" --help 2>/dev/null </dev/null) || rc=$?
    checked=$((checked + 1))
    [ $rc = 0 ] || style_complain "$name --help: exit $rc"
    [ -n "$out" ] || style_complain "$name --help: nothing on stdout"
    wide=$(awk 'length($0) > 80 { print; exit }' <<<"$out")
    [ -z "$wide" ] || style_complain "$name --help: wider than 80 columns: $wide"
}

# refusal_check NAME COMMAND...
refusal_check() {
    local name=$1 err rc=0
    shift
    err=$(timeout 20 "$@" --no-such-option 2>&1 >/dev/null </dev/null) || rc=$?
    [ $rc = 2 ] || style_complain "$name --no-such-option: exit $rc, not 2"
    [ "$(wc -l <<<"$err")" -le 2 ] || style_complain "$name --no-such-option: more than a line or two"
    [[ $err == *no-such-option* ]] || style_complain "$name --no-such-option: does not name it: $err"
}

for script in check quickstart bench .ci/run tests/soak; do
    if [ -x "$style_root/$script" ]; then
        help_check "$script" "$style_root/$script"
        refusal_check "$script" "$style_root/$script"
    fi
done
for program in belayd belay belay-train belay-engine belay-shim ckpt-tool; do
    path=${BELAY_BUILD:-$style_root/build}/$program
    if [ -x "$path" ]; then
        help_check "$program" "$path"
        refusal_check "$program" "$path"
    fi
done
for verb in run status events stop save; do
    path=${BELAY_BUILD:-$style_root/build}/belay
    [ ! -x "$path" ] || help_check "belay $verb" "$path" "$verb"
done
style_end "$checked help texts"
