#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What `belay doctor` says of GPUs, over a stand-in for the driver's library (BELAY_NVML).
set -euo pipefail
PATH=$BELAY_BUILD:$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export BELAY_NVML_STANDIN=$work/gpus
failed=0

# doctor_has STATE NAME PATTERN: a line of the report
doctor_has() {
    if ! grep -Eq "^$1 +$2 +.*$3" "$work/out"; then
        echo "no line '$1 $2 ... $3' in:"
        cat "$work/out"
        failed=1
    fi
}
doctor() {
    belay doctor --socket "$work/none" >"$work/out" || true
}

cat >"$work/gpus" <<'GPUS'
device GPU-a 85899345920 2147483648
set 0 ecc 1
set 0 mode 3
set 0 persistence 1
set 0 temperature 41
held 0 4242 2147483648
GPUS
NCCL_COMM_BLOCKING=1 doctor
doctor_has ok 'gpu driver' '1 devices'
doctor_has ok 'gpu 0' '2\.0 GiB of 80\.0 GiB in use, 41 C'
doctor_has note 'gpu 0' 'held by pid 4242 \(2\.0 GiB\)'
doctor_has note environment 'NCCL_COMM_BLOCKING=1 is set here; .*could not be aborted'
if grep -Eq '^(finding|note) +gpu 0 +[^m ]' "$work/out"; then
    echo "a sound GPU is complained about"
    cat "$work/out"
    failed=1
fi

cat >>"$work/gpus" <<'GPUS'
set 0 mode 2
set 0 uncorrected 2
set 0 pending 0
set 0 failed 1
set 0 slow 64
GPUS
doctor
doctor_has finding 'gpu 0' 'PROHIBITED'
doctor_has finding 'gpu 0' '2 uncorrectable memory errors'
doctor_has finding 'gpu 0' 'could not be replaced'
doctor_has finding 'gpu 0' 'below its clocks: heat'

echo 'fail read 15' >>"$work/gpus" # lost
doctor
doctor_has finding 'gpu 0' '.'

BELAY_NVML=$work/nothing doctor
doctor_has note 'gpu driver' 'no driver.*backend cpu only'
exit $failed
