#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One training run, one digest, whatever the compiler: builds belay-train with gcc -O0, gcc -O3,
# clang and the address sanitizer, and compares what a short run ends in.
#
# BELAY_SOURCE: the source tree. BELAY_BUILD: a build folder; the variants stand in it, under
# digest-builds, but for those whose build folder of .ci/run stands in the tree already: these are
# brought up to date and used. Exit: 0 equal, 1 not equal, 3 could not, 77 a compiler is missing.
set -euo pipefail

source_dir=${BELAY_SOURCE:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)}
work=${BELAY_BUILD:-$source_dir/build}/digest-builds
mkdir -p "$work"

for compiler in gcc clang; do
    command -v "$compiler" >/dev/null || {
        echo "digest_builds: no $compiler here"
        exit 77
    }
done

cat "$source_dir"/docs/*.md >"$work/text.txt"
cat >"$work/job.yaml" <<YAML
name: digest-builds
run_dir: $work/run
ranks: 2
lanes: 6
model: {layers: 2, dim: 48, hidden: 96, heads: 4, kv_heads: 2, tied: true}
data: {files: [$work/text.txt]}
train: {global_batch: 12, micro_batch: 1, seq_len: 40, steps: 12, lr: 3e-3, warmup: 4,
        eval_every: 6}
YAML

# variant NAME FOLDER COMPILER MESON-OPTION...: prints the digest of the run.
variant() {
    local name=$1 dir=$source_dir/$2 compiler=$3
    shift 3
    if [ ! -e "$dir/build.ninja" ]; then
        dir=$work/$name
    fi
    if [ ! -e "$dir/build.ninja" ]; then
        CC=$compiler meson setup "$dir" "$source_dir" -Dtests=disabled "$@" >"$work/$name.log" 2>&1
    fi
    ninja -C "$dir" belay-train >>"$work/$name.log" 2>&1
    ASAN_OPTIONS=detect_leaks=0 "$dir/belay-train" --job "$work/job.yaml" --ranks "$ranks" \
        --digest >"$work/$name.out"
    sed -n 's/^digest //p' "$work/$name.out"
}

failed=0
first=
ranks=1
for row in \
    "gcc-O0 - gcc -Doptimization=0" \
    "gcc-O3 build-release gcc -Doptimization=3" \
    "clang-O2 build-clang clang -Doptimization=2" \
    "asan build-asan gcc -Doptimization=1 -Db_sanitize=address,undefined"; do
    read -r -a words <<<"$row"
    digest=$(variant "${words[@]}") || {
        echo "digest_builds: ${words[0]} failed; the end of its log:"
        tail -n 20 "$work/${words[0]}.log"
        exit 3
    }
    printf '%-10s %d ranks  %s\n' "${words[0]}" "$ranks" "$digest"
    [ -n "$digest" ] || exit 3
    first=${first:-$digest}
    [ "$digest" = "$first" ] || failed=1
    ranks=$((ranks + 1))
done
if [ $failed != 0 ]; then
    echo "digest_builds: the digests differ"
    exit 1
fi
