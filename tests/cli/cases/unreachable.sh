# SPDX-License-Identifier: Apache-2.0
# No daemon: which socket, and how to start one. Exit 3.
exec 2>&1
# shellcheck disable=SC2086 # some are two words
for command in status events 'events --follow' save stop resume 'recover --abandon' promote; do
    try "$BELAY" $command --socket "$PWD/none.sock"
done
# A socket that nobody listens at any more.
python3 -c 'import socket, sys
socket.socket(socket.AF_UNIX).bind(sys.argv[1])' "$PWD/stale.sock"
try "$BELAY" status --socket "$PWD/stale.sock"
try "$BELAY" save --socket "$PWD/stale.sock"
BELAY_SOCKET_PATH=$PWD/elsewhere.sock try "$BELAY" status --json
try "$BELAY" status --prometheus --socket "$PWD/none.sock" # says so on stdout too
try "$BELAY" status --prometheus --json
