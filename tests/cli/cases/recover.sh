# SPDX-License-Identifier: Apache-2.0
# belay run --recover without a daemon: what is said of the root comes first.
exec 2>&1
golden=$BELAY_SOURCE/tests/golden/v1
try "$BELAY" run --recover nowhere --socket none.sock
mkdir empty
try "$BELAY" run --recover empty --socket none.sock
cp -r "$golden/bad/manifest-bit" broken
try "$BELAY" run --recover broken --socket none.sock
