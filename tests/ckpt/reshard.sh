#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The matrix of layouts through ckpt-tool itself: models with uneven sizes, padded vocabularies, few
# kv heads, fused and tied tensors, written in one layout, resharded to another and back again, give
# the very files that were there before; damage is repaired from copies that are cut another way;
# verification is content with a checkpoint that is retired under its eyes.
# usage: reshard.sh LAYOUT_ROOT
set -euo pipefail
make_root=$1
tool=$BELAY_BUILD/ckpt-tool
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

complain() {
    echo "$*"
    failed=1
}

digest_of() {
    "$tool" show "$1" --json | grep -o '"state_digest":"[0-9a-f]*"'
}

# same_files A B: every part, index and manifest of two roots, byte for byte
same_files() {
    diff -rq -x .trash -x verified "$1" "$2"
}

# there_and_back NAME SHAPE LAYOUT PARTS CODEC LAYOUT2 PARTS2 CODEC2
there_and_back() {
    local name=$1 shape=$2 layout=$3 parts=$4 codec=$5 layout2=$6 parts2=$7 codec2=$8
    local a=$work/$name.a b=$work/$name.b c=$work/$name.c d=$work/$name.d

    "$make_root" "$a" 7 "$layout" "$parts" "$codec" "$shape"
    "$tool" reshard "$a" --out "$b" --layout "$layout2" --parts "$parts2" --codec "$codec2" >/dev/null ||
        complain "$name: there: exit $?"
    [ "$(digest_of "$a")" = "$(digest_of "$b")" ] || complain "$name: there: another state digest"
    "$tool" reshard "$b" --out "$c" --like "$a" >/dev/null || complain "$name: back: exit $?"
    same_files "$a" "$c" || complain "$name: back like the original: other files"
    "$tool" reshard "$b" --out "$d" --layout "$layout" --parts "$parts" --codec "$codec" >/dev/null ||
        complain "$name: back by layout: exit $?"
    for part in "$a"/step*/part-*; do # the tool has names of its own for parts
        cmp "$part" "$d/$(basename "$(dirname "$part")")/$(basename "$part" | sed 's/part-n/part-000/')" ||
            complain "$name: back by layout: other files"
    done
    rm -rf "$a" "$b" "$c" "$d"
}

#                 layers,dim,hidden,heads,kv,vocab,tied,fused
there_and_back uneven 3,24,33,3,3,50,0,0 dp=2,zero=1 2 none dp=3,tp=2,zero=1 3 none
there_and_back padded 2,32,48,4,4,101,0,0 dp=1 1 none tp=4,vocab=64 2 zstd
there_and_back gqa 2,64,96,8,2,77,0,0 tp=8,zero=1 3 zstd dp=3,pp=2,zero=1 2 none
there_and_back fused 2,64,100,4,2,200,0,1 dp=2,tp=2,zero=2 2 none tp=4,pp=2 4 none
there_and_back tied 2,48,96,6,1,333,1,0 pp=2,tp=3,zero=1 1 none dp=7,zero=3 5 zstd
there_and_back many 2,64,96,4,2,1000,0,0 dp=64,zero=1 4 none dp=5,tp=4,pp=2,zero=1 9 zstd
there_and_back empty 1,16,24,2,1,3,0,0 tp=16,vocab=8 1 none dp=1 7 none

# What is refused: before anything is read or written.
a=$work/a b=$work/b
"$make_root" "$a" 7 dp=2,zero=1 2 none 2,64,96,4,2,1001,0,0
refuse() {
    local code=$1 pattern=$2 rc=0 out
    shift 2
    out=$("$tool" reshard "$@" 2>&1) || rc=$?
    if [ $rc != "$code" ] || ! grep -Eq -- "$pattern" <<<"$out"; then
        complain "reshard $*: exit $rc, not $code: $out"
    fi
}
refuse 3 'is not 3 heads of equal size' "$a" --out "$b" --layout tp=2,heads=3
refuse 2 '"cp=2": dp=, tp=' "$a" --out "$b" --layout cp=2
refuse 2 'at least 128 MiB' "$a" --out "$b" --memory 1M
refuse 2 "SRC's own root" "$a" --out "$a" --parts 3
refuse 3 'no good checkpoint|no checkpoint' "$a" --out "$b" --step 8
refuse 2 'gives layout and parts already' "$a" --out "$b" --like "$a" --parts 3
[ ! -e "$b" ] || complain "a refused reshard has made $b"
refuse 0 'step-000000000007.g1: step 7.*tp 2.*needs up to' "$a" --out "$b" --layout tp=2 --dry-run
[ ! -e "$b" ] || complain "a dry run has made $b"

# Idempotent; another layout of the same step is replaced only when told.
"$tool" reshard "$a" --out "$b" --layout tp=2 >/dev/null
refuse 0 'there already, in that layout' "$a" --out "$b" --layout tp=2
refuse 3 'is there already, in another layout; --force replaces it' "$a" --out "$b" --parts 3
refuse 0 '3 parts' "$a" --out "$b" --parts 3 --force
"$make_root" "$work/c" 9 dp=1 1 none 1,16,24,2,1,3,0,0
refuse 3 'the other checkpoint has another shape' "$a" --out "$work/e" --like "$work/c"

# Damage: chunks, an index, a whole part, a manifest, from copies cut alike and cut otherwise.
flip() { # FILE BYTE
    local byte
    byte=$(od -An -tu1 -j"$2" -N1 "$1")
    printf '%b' "\\0$(printf %03o $((byte ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}
repaired() { # NAME PATTERN FROM...: root r is as it was again
    local name=$1 pattern=$2 out rc=0 from=()
    shift 2
    for path in "$@"; do from+=(--from "$path"); done
    out=$("$tool" repair "$work/r" "${from[@]}" --dry-run 2>&1) || rc=$?
    grep -q 'would be repaired' <<<"$out" || complain "$name: dry run: exit $rc: $out"
    "$tool" verify "$work/r" >/dev/null && complain "$name: the dry run has repaired"
    rc=0
    out=$("$tool" repair "$work/r" "${from[@]}" 2>&1) || rc=$?
    if [ $rc != 0 ] || ! grep -Eq -- "$pattern" <<<"$out"; then
        complain "$name: exit $rc: $out"
    fi
    same_files "$a" "$work/r" || complain "$name: not as it was"
}
cp -r "$a" "$work/r"
cp -r "$a" "$work/twin"
dir=$work/r/step-000000000007.g1
flip "$dir/part-n0.safetensors" 300000
repaired chunk 'part-n0.safetensors: repaired: chunk 0 .*taken from .*twin' "$work/twin"
flip "$dir/part-n0.safetensors" 300000
repaired chunk-otherwise 'written again from other copies' "$b"
rm "$dir/part-n1.index"
repaired index 'part-n1.index: repaired: .*taken from .*twin' "$work/twin"
flip "$dir/part-n0.index" 200
truncate -s 5000 "$dir/part-n1.safetensors"
repaired parts 'part-n1.safetensors: repaired: .*written again' "$b"
flip "$dir/manifest.json" 100
repaired manifest 'manifest.json: repaired: .*taken from .*twin' "$b" "$work/twin"
rm "$dir"/part-n0.*
flip "$work/twin/step-000000000007.g1/part-n0.safetensors" 100000 # a copy that is damaged itself
repaired two-copies 'written again' "$work/twin" "$b"
flip "$work/r/BELAY" 5
repaired root 'BELAY: repaired' "$work/twin"
flip "$dir/part-n0.safetensors" 300000
out=$("$tool" repair "$work/r" --from "$work/c" 2>&1) && complain "repair from nothing: exit 0"
grep -q 'not repaired: .*there is no other copy' <<<"$out" || complain "repair from nothing: $out"
"$tool" repair "$work/r" --from "$b" >/dev/null || complain "repair in the end: exit $?"
# Where nothing is left that could contradict: no manifest of another step.
cp -r "$a" "$work/s"
rm "$work"/s/step*/manifest.json "$work"/s/step*/*.index "$work"/s/step*/part-n1.safetensors
out=$("$tool" repair "$work/s" --from "$work/c/step-000000000009.g1" 2>&1) &&
    complain "repair from another step: exit 0"
grep -q 'no other copy has a manifest that fits' <<<"$out" || complain "repair from another step: $out"
[ ! -e "$work/s/step-000000000007.g1/manifest.json" ] || complain "repair put another step's manifest"

# Of a damaged source what is bad is taken from another copy.
flip "$dir/part-n0.safetensors" 300000
refuse 3 'chunk 0 .*digest differs' "$work/r" --out "$work/healed" --parts 1
rm -rf "$work/healed"
refuse 0 'is damaged; taken from' "$work/r" --out "$work/healed" --parts 1 --from "$b"
[ "$(digest_of "$a")" = "$(digest_of "$work/healed")" ] || complain "healed: another state digest"

# Verification beside a running job: whatever it has just read when retention takes the checkpoint
# away and its files are used again, that is no finding.
retired_at() { # N: 0 when it was stopped at its N-th read, 1 when it ended before
    local n=$1 pid rc=0
    rm -rf "$work/v"
    cp -r "$a" "$work/v"
    BELAY_FAIL=disk-read:stop:$n "$tool" verify "$work/v" >"$work/out" 2>&1 &
    pid=$!
    for ((i = 0; i < 3000; i++)); do
        [ -d /proc/$pid ] || break
        [[ $(sed 's/.*) //' /proc/$pid/stat 2>/dev/null) == T* ]] && break
        sleep 0.01
    done
    if [ -d /proc/$pid ]; then
        mkdir "$work/v/.trash"
        mv "$work/v/step-000000000007.g1" "$work/v/.trash/step-000000000007.g1.0000000000000001"
        for file in "$work"/v/.trash/step*/*; do
            printf 'used again' | dd of="$file" bs=1 conv=notrunc status=none
        done
        rm "$work"/v/.trash/step*/*.index
        kill -CONT $pid
    fi
    wait $pid || rc=$?
    [ $rc = 0 ] || complain "retired at read $n: exit $rc: $(cat "$work/out")"
    [ -d "$work/v/.trash" ]
}
if BELAY_FAIL=disk-read:exit_41:1 "$tool" ls "$a" >/dev/null 2>&1; then
    echo "a build without failpoints: not tried beside a running job"
else
    for ((n = 1; n < 100; n++)); do
        retired_at $n || break
    done
    [ $n -gt 3 ] || complain "only $n reads"
fi
exit $failed
