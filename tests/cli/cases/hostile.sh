# SPDX-License-Identifier: Apache-2.0
# What answers at the socket is no daemon: one line, exit 3, no hang.
exec 2>&1
serve() {
    rm -f fake.sock
    python3 -c 'import os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.bind("fake.new")
s.listen(1)
os.rename("fake.new", "fake.sock")
c = s.accept()[0]
c.recv(65536)
c.sendall(bytes.fromhex(sys.argv[1]))
c.shutdown(socket.SHUT_WR)
while c.recv(65536):
    pass' "$1" &
    until [ -S fake.sock ]; do sleep 0.01; done
    try "$BELAY" status --socket fake.sock
    wait
}
echo "nothing:"
serve ""
echo "another protocol:"
serve 485454502f312e312034303020426164205265717565737420202020202020202020202020202020
echo "a frame of 4 GiB:"
serve 424c593101000100ffffffff00000000000000000000000000000000000000000000000000000000
echo "a frame whose digest is wrong:"
serve 424c593101000100020000000000000000000000000000000000000000000000000000000000000001020304
echo "version 2:"
serve 424c593102000100000000000000000000000000000000000000000000000000998fd2b5f2d4c3000000
