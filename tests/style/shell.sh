#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The scripts pass shellcheck.
set -euo pipefail
# shellcheck source=tests/style/lib.sh
. "$(dirname "$0")/lib.sh"
command -v shellcheck >/dev/null || {
    echo "skip: shellcheck is not installed"
    exit 77
}
mapfile -t scripts < <(style_scripts)
cd "$style_root"
# SC2015: `a && b || c` is used where c may run in both cases. SC1010: "done" is also a verdict.
shellcheck -x -s bash -e SC2015 -e SC1010 "${scripts[@]}" || style_complain "shellcheck complains"
style_end "${#scripts[@]} scripts"
