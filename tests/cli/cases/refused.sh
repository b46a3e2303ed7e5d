# SPDX-License-Identifier: Apache-2.0
# Arguments that make no sense: one line that names the thing, exit 2, or 3 for what is not built.
exec 2>&1
try "$BELAY"
try "$BELAY" --no-such-option
try "$BELAY" statsu
try "$BELAY" frobnicate
try "$BELAY" help frobnicate
try "$BELAY" status --jsn
try "$BELAY" status --jsn=1
try "$BELAY" status --json=1
try "$BELAY" status --zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz
try "$BELAY" status --follow
try "$BELAY" status extra
try "$BELAY" status --socket
try "$BELAY" status --socket=
try "$BELAY" events --since soon
try "$BELAY" events --since -1
try "$BELAY" events --since 99999999999999999999
try "$BELAY" run
try "$BELAY" run a.yaml b.yaml
try "$BELAY" run --recover
try "$BELAY" run a.yaml --accept-numerics-change
try "$BELAY" recover
try "$BELAY" recover --abandon --resume
for command in top drain undrain hold set plan bench sim; do
    try "$BELAY" $command
done
