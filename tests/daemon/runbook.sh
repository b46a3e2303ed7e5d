#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# docs/runbook.md is what the event tables make, and every event has its three sentences.
set -eu
page=$BELAY_SOURCE/docs/runbook.md
"$1" | diff -u "$page" - || {
    echo "docs/runbook.md is not current: build daemon/belay-runbook, let it write the page"
    exit 1
}
if grep -nE '^- \*\*[A-Za-z]+:\*\* \.?$' "$page"; then
    echo "an event has an empty sentence"
    exit 1
fi
