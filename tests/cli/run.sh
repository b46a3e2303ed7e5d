#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# belay as a person meets it. Each cases/NAME.sh is a script; what it prints and how it ends must be
# what cases/NAME.expect says:
#
#     --- stdout
#     ...
#     --- stderr
#     ...
#     --- exit N
#
# A case runs in a fresh folder with BELAY (the program) set; `try COMMAND...` in it prints the
# command, runs it and prints its exit code. The folder's path is shown as DIR.
#
#     tests/cli/run.sh [--update] [NAME...]      --update writes the .expect files anew
#
# Exit: 0 passed, 1 one differed, 77 nothing could be tried.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd -P)
export BELAY_SOURCE=${BELAY_SOURCE:-$(cd "$here/../.." && pwd -P)}
build=${BELAY_BUILD:-$BELAY_SOURCE/build}
export BELAY=$build/belay
update=0
if [ "${1:-}" = --update ]; then
    update=1
    shift
fi
for program in belay belay-train; do
    [ -x "$build/$program" ] || {
        echo "skip: $build/$program is not built"
        exit 77
    }
done
# What a case sees of its surroundings.
unset BELAY_SOCKET_PATH BELAY_SOCKET XDG_RUNTIME_DIR NO_COLOR
export LC_ALL=C TZ=UTC

# shellcheck disable=SC2317 # the cases call it
try() {
    local rc=0
    echo "\$ ${*//$BELAY/belay}"
    "$@" || rc=$?
    [ "$rc" = 0 ] || echo "exit $rc"
}
export -f try

# case_run NAME: its transcript on stdout.
case_run() {
    local dir rc=0
    dir=$(cd "$(mktemp -d "${TMPDIR:-/tmp}/belay-cli.XXXXXX")" && pwd -P)
    (cd "$dir" && mkdir work && cd work && timeout 60 bash "$here/cases/$1.sh" \
        >../stdout 2>../stderr </dev/null) || rc=$?
    {
        echo "--- stdout"
        cat "$dir/stdout"
        echo "--- stderr"
        cat "$dir/stderr"
        echo "--- exit $rc"
    } | sed "s,$dir/work,DIR,g"
    rm -rf "$dir"
}

names=("$@")
[ ${#names[@]} -gt 0 ] || mapfile -t names < <(cd "$here/cases" && printf '%s\n' *.sh | sed 's/\.sh$//')
failed=0
for name in "${names[@]}"; do
    if [ $update = 1 ]; then
        case_run "$name" >"$here/cases/$name.expect"
        echo "written  $name"
    elif diff -u "$here/cases/$name.expect" <(case_run "$name"); then
        echo "passed   $name"
    else
        echo "FAILED   $name"
        failed=1
    fi
done
exit $failed
