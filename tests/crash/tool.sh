#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ckpt-tool's verbs that write, killed before every single operation that they do to a disk, and
# with EIO at each. Whatever happened, the source is as it was, nothing under a committed name is
# broken, and the same command, given again, comes to the same end as if nothing had been.
#
#     tool.sh CASE [STRIDE]        each STRIDE-th operation, 1 by default
set -euo pipefail
tool=$BELAY_BUILD/ckpt-tool
make_root=$BELAY_BUILD/tests/crash/make_root
case=$1
stride=${2:-1}
operations_max=600
dir=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")/belay-tool-XXXXXX")
trap 'rm -rf "$dir"' EXIT
src=$dir/src
out=$dir/out
steps=3
where="" # what is being tried, for messages

die() {
    printf '%s: %s\n' "$where" "$*" >&2
    exit 1
}

sum_of() { # of all files below a directory, names and contents
    (cd "$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum)
}

states_of() { # step, state and state digest of each checkpoint in a root
    "$tool" ls --json "$1" | jq -r '.roots[0].checkpoints[] | "\(.step) \(.state) \(.state_digest)"'
}

# Everything with a committed name in root $1 is good, and verifies with every byte.
check_root() {
    local text
    [ -e "$1/BELAY" ] || return 0
    text=$(states_of "$1")
    ! grep -qE ' (broken|foreign) ' <<<"$text" || die "$1 has $text"
    if grep -q ' good ' <<<"$text"; then
        text=$("$tool" verify "$1" 2>&1) || die "verify: $text"
    fi
}

# No attempts, no manifests half written are left. (What is left of BELAY and latest goes with a
# run's next sweep, of a mark of verified with the next mark.)
check_tidy() {
    local left
    left=$(find "$1" -mindepth 1 -name '*.tmp' -not -path '*/.trash/*' -not -name '.BELAY.*' \
        -not -name '.latest.*' -not -name verified.tmp | head -3)
    [ -z "$left" ] || die "left over: $left"
}

prepare_reshard() { rm -rf "$out"; }
run_reshard() { "$tool" reshard "$src" --out "$out" --parts 3 --codec "$to"; }
finish_reshard() {
    [ "$(states_of "$out")" = "$(states_of "$src" | head -1)" ] || die "another state: $(states_of "$out")"
    check_tidy "$out"
}

# Another layout of the step is there, and is replaced.
prepare_reshard_force() {
    rm -rf "$out"
    cp -a "$dir/replaced" "$out"
}
run_reshard_force() { "$tool" reshard "$src" --out "$out" --parts 3 --codec "$to" --force; }
finish_reshard_force() {
    finish_reshard
    [ "$("$tool" ls --json "$out" | jq '.roots[0].checkpoints[0].parts')" = 3 ] || die "not replaced"
}

prepare_prune() {
    rm -rf "$out"
    cp -a "$src" "$out"
}
run_prune() { "$tool" prune "$out" --keep 2; }
finish_prune() {
    [ "$(states_of "$out")" = "$(states_of "$src" | head -2)" ] || die "kept: $(states_of "$out")"
    check_tidy "$out"
}

# One copy is whole, the other lacks a part and has a bit flipped.
prepare_repair() {
    rm -rf "$out"
    cp -a "$src" "$out"
    rm "$out"/step-000000000003.g1/part-0000."$suffix"
    printf '\377\377\377' |
        dd of="$out"/step-000000000002.g1/part-0001."$suffix" bs=1 seek=5000 conv=notrunc status=none
}
run_repair() { "$tool" repair "$out" --from "$src"; }
finish_repair() {
    [ "$(states_of "$out")" = "$(states_of "$src")" ] || die "repaired: $(states_of "$out")"
    check_root "$out"
    check_tidy "$out"
}

# Of the roots that are written: between a repair's beginning and end what was broken may be broken.
check_between() {
    [ "$verb" = repair ] || check_root "$out"
    # One of the two is there at any moment: it may be only under its attempt's name yet.
    [ "$verb" != reshard_force ] || states_of "$out" | grep -qE ' (good|committing) ' ||
        die "neither the old nor the new one is there: $(ls -a "$out")"
}

# try ACTION WANTED: operation after operation, until the command comes through.
try() {
    local at rc count=0
    for ((at = 1; at < operations_max; at += stride)); do
        where="$case, $1 at operation $at"
        "prepare_$verb"
        rc=0
        rm -rf "$dir/hit"
        mkdir "$dir/hit" # the failpoint leaves a file there when it acts
        (BELAY_FAIL=disk-op:$1:$at BELAY_FAIL_ONCE_DIR=$dir/hit "run_$verb") >"$dir/log" 2>&1 ||
            rc=$?
        [ -e "$dir/hit/disk-op" ] || break
        if [ $rc != 0 ] || [ "$1" = kill ]; then # a help may fail without harm
            # A repair goes on with the next file, and says what it could not repair.
            [ $rc = "$2" ] || [ "$verb $1 $rc" = "repair error 1" ] || die "exit $rc: $(cat "$dir/log")"
            [ "$1" = kill ] || grep -q ' /' "$dir/log" || die "no path in: $(cat "$dir/log")"
        fi
        check_between
        "run_$verb" >"$dir/log" 2>&1 || die "again: exit $?: $(cat "$dir/log")"
        "finish_$verb"
        [ "$(sum_of "$src")" = "$truth" ] || die "the source changed"
        count=$((count + 1))
    done
    "finish_$verb"
    printf '%s %s: up to operation %d, %d tried\n' "$case" "$1" "$at" "$count"
    [ "$count" -gt 3 ] && [ "$at" -lt "$operations_max" ] || die "nothing was enumerated"
}

verb=${case%_zstd}
from=none
to=none
suffix=safetensors
[ "$verb" = "$case" ] || {
    from=zstd
    suffix=safetensors.zst
    to=none
}
[ "${verb%_force}" != reshard ] || [ "$from" = zstd ] || to=zstd
"$tool" "${verb%_force}" --help >/dev/null 2>&1 || {
    echo "skipped: $verb is not built into this version" >&2
    exit 77
}
command -v jq >/dev/null || {
    echo "skipped: needs jq" >&2
    exit 77
}
"$make_root" "$src" $steps "$from"
[ "$verb" != reshard_force ] || "$tool" reshard "$src" --out "$dir/replaced" --parts 2 >"$dir/log" 2>&1
truth=$(sum_of "$src")
try kill 137
try error 3
