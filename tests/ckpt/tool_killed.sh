#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ckpt-tool killed (SIGKILL) instead of its 1st, 2nd, 3rd ... operation on the disk, and run again:
# reshard, repair and prune end as if nothing had happened, and what was good before is good at
# every moment between.
# usage: tool_killed.sh LAYOUT_ROOT
set -euo pipefail
make_root=$1
tool=$BELAY_BUILD/ckpt-tool
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
shape=1,32,48,4,2,61,0,0
"$make_root" "$work/a" 7 dp=2,zero=1 2 none $shape
if ! BELAY_FAIL=disk-op:exit_41:1 "$tool" reshard "$work/a" --out "$work/probe" >/dev/null 2>&1; then
    [ -e "$work/probe/latest" ] && exit 1
else
    echo "skip: a build without failpoints"
    exit 77
fi

complain() {
    echo "$*"
    failed=1
}

same_files() {
    # Names that begin so are passed over, and swept by the next save.
    diff -rq -x .trash -x verified -x latest -x '*.tmp' "$1" "$2"
}

# killed_at N COMMAND...: 0 when it was killed, 1 when it ended before
killed_at() {
    local n=$1 rc
    shift
    # The shell that waits tells of the kill; nobody wants to read it.
    rc=$( (BELAY_FAIL=disk-op:kill:$n "$@" >"$work/out" 2>&1 && echo 0 || echo $?) 2>/dev/null)
    [ "$rc" = 137 ] && return 0
    [ "$rc" = 0 ] || complain "$* with $n operations: exit $rc: $(cat "$work/out")"
    return 1
}

# Reshard: between kill and rerun the root has no checkpoint or the whole one.
"$tool" reshard "$work/a" --out "$work/expect" --layout tp=2 --parts 3 >/dev/null
for ((n = 1; n < 1000; n++)); do
    killed_at $n "$tool" reshard "$work/a" --out "$work/b" --layout tp=2 --parts 3 || break
    if [ -e "$work/b/step-000000000007.g1" ]; then
        "$tool" verify "$work/b" >/dev/null || complain "reshard, $n: what is there is not good"
    fi
    "$tool" reshard "$work/a" --out "$work/b" --layout tp=2 --parts 3 >"$work/out" 2>&1 ||
        complain "reshard, $n, again: exit $?: $(cat "$work/out")"
    same_files "$work/expect" "$work/b" || complain "reshard, $n, again: other files"
    [ -z "$(ls -A "$work"/b/.step* 2>/dev/null)" ] || complain "reshard, $n: an attempt is left"
    rm -rf "$work/b"
done
echo "reshard: killed at $((n - 1)) operations"
[ $n -gt 30 ] || complain "reshard: only $n operations"

# Reshard, killed over and over: it gets on, keeping what is done.
kills=0
rm -rf "$work/b"
while killed_at $((25 + kills)) "$tool" reshard "$work/a" --out "$work/b" --layout tp=2 --parts 3; do
    kills=$((kills + 1))
    [ $kills -lt 100 ] || break
done
same_files "$work/expect" "$work/b" || complain "reshard, $kills kills: other files"
echo "reshard: $kills kills of one"

# Repair: one bad chunk, one index gone, one part cut short.
damage() {
    rm -rf "$work/r"
    cp -r "$work/a" "$work/r"
    printf 'xxxx' | dd of="$work/r/step-000000000007.g1/part-n0.safetensors" bs=1 seek=20000 conv=notrunc status=none
    truncate -s 5000 "$work/r/step-000000000007.g1/part-n1.safetensors"
    rm "$work/r/step-000000000007.g1/part-n1.index"
}
for ((n = 1; n < 1000; n++)); do
    damage
    killed_at $n "$tool" repair "$work/r" --from "$work/a" --from "$work/expect" || break
    "$tool" repair "$work/r" --from "$work/a" --from "$work/expect" >"$work/out" 2>&1 ||
        complain "repair, $n, again: exit $?: $(cat "$work/out")"
    same_files "$work/a" "$work/r" || complain "repair, $n, again: other files"
    [ -z "$(ls -d "$work"/r/.repair* "$work"/r/step*/*.repair 2>/dev/null)" ] || complain "repair, $n: leftovers"
done
echo "repair: killed at $((n - 1)) operations"
[ $n -gt 8 ] || complain "repair: only $n operations"

# Prune: of five the two newest are good at every moment, and what is there is whole.
for step in 10 20 30 40 50; do
    "$make_root" "$work/many" $step dp=1 1 none $shape
done
for ((n = 1; n < 1000; n++)); do
    rm -rf "$work/p"
    cp -r "$work/many" "$work/p"
    killed_at $n "$tool" prune "$work/p" --keep 2 || break
    "$tool" verify "$work/p" >"$work/out" || complain "prune, $n: $(cat "$work/out")"
    for step in 50 40; do
        [ -d "$work/p/step-0000000000$step.g1" ] || complain "prune, $n: step $step is gone"
    done
    "$tool" prune "$work/p" --keep 2 >"$work/out" 2>&1 || complain "prune, $n, again: exit $?"
    [ "$(find "$work/p" -maxdepth 1 -name 'step*' | wc -l)" = 2 ] || complain "prune, $n, again: not two"
    [ -z "$(ls -A "$work/p/.trash")" ] || complain "prune, $n, again: .trash is not empty"
done
echo "prune: killed at $((n - 1)) operations"
[ $n -gt 5 ] || complain "prune: only $n operations"
exit $failed
