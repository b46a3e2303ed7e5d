#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ckpt-tool as a person meets it: output and exit codes, over the golden roots.
set -euo pipefail
tool=$BELAY_BUILD/ckpt-tool
golden=$BELAY_SOURCE/tests/golden/v1
failed=0

# check CODE PATTERN COMMAND...: exit code, and an extended regular expression in the output
check() {
    local code=$1 pattern=$2 rc=0 out
    shift 2
    out=$("$@" 2>&1) || rc=$?
    if [ "$rc" != "$code" ] || ! grep -Eq -- "$pattern" <<<"$out"; then
        printf '%s\n  exit %s (not %s), pattern %s, output:\n%s\n' "$*" "$rc" "$code" "$pattern" "$out"
        failed=1
    fi
}

good=$golden/good/step-000000000007.g2
check 0 'run 00000000000000aa' "$tool" ls "$golden/good"
check 0 ' 7 +good +8\.1 KiB .* 2\.5000 +1 +2 +none +dp2,zero1 +step-000000000007\.g2' "$tool" ls "$golden/good/"
check 0 '^state digest  da661cae214f14121a58f246146d5eaf$' "$tool" show "$good"
check 0 'w@\[0:2,0:4\], at byte 4096' "$tool" show "$golden/good" --tensors
check 0 'good \(2 parts, 8\.1 KiB read' "$tool" verify "$good"
check 0 "parts' bytes not looked at" "$tool" verify --fast "$golden/good"
check 0 '"good":true.*"schema":1' "$tool" verify "$golden/good" --json
check 0 '"schema":1,"seed":"18446744073709551615"' "$tool" show "$good" --json
check 0 '"state":"good"' "$tool" ls "$golden/good" --json
for bad in "$golden"/bad/*; do
    check 1 "$(sed 's/[][()\.*^$+?{|]/\\&/g' "$bad/expect")" "$tool" verify "$bad"
    check 1 '"good":false' "$tool" verify "$bad" --json
    check 0 '^run ' "$tool" ls "$bad"
done
check 1 'part-0000.safetensors: chunk 0' "$tool" verify "$golden/bad/part-bit-data/step-000000000007.g2"
check 0 'good' "$tool" verify --fast "$golden/bad/part-bit-data"
check 3 'manifest: digest differs' "$tool" show "$golden/bad/manifest-bit/step-000000000007.g2"
check 3 'no good checkpoint in it' "$tool" show "$golden/bad/manifest-bit"
check 3 'No such file or directory' "$tool" ls "$golden/none"
check 3 'is no checkpoint root: it has no BELAY file' "$tool" ls "$golden"
check 2 'the root to write to is missing' "$tool" reshard "$golden/good"
check 2 'says nothing of what to keep' "$tool" prune "$golden/good"
check 2 'xyz: unknown verb' "$tool" xyz "$golden/good"
check 2 'ls: a path is missing' "$tool" ls
check 2 'a verb is missing' "$tool"
check 2 '--fst: unknown option' "$tool" verify --fst "$golden/good"
check 2 'one path is enough' "$tool" show "$golden/good" "$golden/good"
check 0 '^run .*bad/part-short' "$tool" ls "$golden/good" "$golden/bad/part-short"
check 0 'examples' "$tool" --help
check 0 '^ckpt-tool [0-9]' "$tool" --version
exit $failed
