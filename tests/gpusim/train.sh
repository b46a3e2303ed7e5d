#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# belay-train over the simulated device: one digest whatever the order of threads and streams, no
# touch of device memory by the host, losses that are the CPU's, errors of the device told.
#
# BELAY_BUILD: the build folder. BELAY_CUDA_SIM: the plug-in. Exit: 0 good, 1 not.
set -euo pipefail

train=$BELAY_BUILD/belay-train
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export BELAY_CUDA_PLUGIN=$BELAY_CUDA_SIM

# job FILE BACKEND PRECISION
job() {
    cat >"$work/$1" <<YAML
name: sim
run_dir: $work/run
ranks: 1
lanes: 2
backend: $2
model: {layers: 2, dim: 32, hidden: 48, heads: 4, kv_heads: 2, tied: true}
data: {files: [$work/text.txt]}
train: {global_batch: 4, micro_batch: 1, seq_len: 24, steps: 3, lr: 3e-3, warmup: 1,
        precision: $3}
YAML
}

# run JOB [NAME=VALUE...]: what it printed.
run() {
    local file=$1
    shift
    env "$@" "$train" --job "$work/$file" --digest 2>&1
}

fail() {
    echo "train.sh: $1"
    exit 1
}

digest_of() {
    sed -n 's/^digest //p' <<<"$1"
}

losses_of() {
    sed -n 's/^step [0-9/]* loss \([0-9.]*\) .*/\1/p' <<<"$1"
}

# Numbers of two lists differ by at most the tolerance.
close_enough() {
    paste <(echo "$1") <(echo "$2") | awk -v tolerance="$3" '
        { d = $1 - $2; if (NF != 2 || d > tolerance || d < -tolerance) bad = 1 }
        END { exit bad || NR != 3 }'
}

seq 1 3000 >"$work/text.txt"
job cpu.yaml cpu fp32
cpu=$(run cpu.yaml) || fail "on the CPU: $cpu"
for precision in fp32 bf16; do
    job device.yaml cuda $precision
    first=$(run device.yaml GPUSIM_SEED=0) || fail "$precision: $first"
    grep -q 'backend cuda: device 0: gpusim' <<<"$first" || fail "not on the device: $first"
    tolerance=0.00001
    [ $precision = fp32 ] || tolerance=0.01
    close_enough "$(losses_of "$cpu")" "$(losses_of "$first")" $tolerance ||
        fail "$precision: other losses than the CPU's: $cpu; $first"
    for order in "GPUSIM_SEED=5" "GPUSIM_SEED=6 GPUSIM_STREAMS=sync GPUSIM_GUARD=1"; do
        # shellcheck disable=SC2086 # several settings
        again=$(run device.yaml $order) || fail "$precision, $order: $again"
        [ "$(digest_of "$again")" = "$(digest_of "$first")" ] ||
            fail "$precision, $order: another digest: $again; $first"
    done
    echo "$precision: digest $(digest_of "$first")"
done

for fault in late@300 ecc@300 copy@8; do
    rc=0
    said=$(run device.yaml GPUSIM_FAULT=$fault) || rc=$?
    [ $rc = 3 ] || fail "$fault: exit $rc: $said"
    grep -q 'illegal memory access\|ECC' <<<"$said" || fail "$fault: $said"
    echo "$fault: $(tail -n 1 <<<"$said")"
done

# Too little memory: the sum, and who has the rest.
printf 'device GPU-0 85899345920 2147483648\nheld 0 4242 2147483648\n' >"$work/gpus"
rc=0
said=$(run device.yaml GPUSIM_MEMORY_MIB=33 BELAY_NVML_STANDIN="$work/gpus" \
    BELAY_NVML="$BELAY_BUILD/tests/nvml/nvml_standin.so") || rc=$?
[ $rc = 2 ] || fail "short memory: exit $rc: $said"
grep -q 'MiB of memory are wanted (.* planned, 32.0 MiB beside .*held by pid 4242 (2.0 GiB)' <<<"$said" ||
    fail "short memory: $said"
echo "short memory: $(tail -n 1 <<<"$said")"
