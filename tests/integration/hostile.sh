#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Clients that stall, talk nonsense or come by the thousand, ranks that write without end and leave
# processes behind, a state directory without room: training goes on and ends in the same bits.
# shellcheck disable=SC2317,SC2119,SC2034 # cases are called by name
# shellcheck source=tests/integration/harness.sh
. "$(dirname "${BASH_SOURCE[0]}")/harness.sh"

IT_SECONDS=${IT_SECONDS:-120}
IT_PACE_MS=40

# fds NODE: how many descriptors its daemon holds.
fds() {
    find "/proc/${CL_PID[$1]}/fd" -mindepth 1 2>/dev/null | wc -l
}

# private_kib PID: memory that is only its own, memfds not counted.
private_kib() {
    awk '/^[0-9a-f]+-[0-9a-f]+ /{shared = /memfd:/}
         /^Private_(Clean|Dirty):/ && !shared {sum += $2} END {print sum + 0}' "/proc/$1/smaps"
}

# attack ADDRESS...: HOST:PORT or a path. Each gets connections that say nothing, half a header, half
# a frame, a huge length, noise, a good header with a wrong digest, and 1000 at once; all stay open
# until standard input ends. Prints a line when all stand.
attack() {
    python3 -c '
import os, resource, socket, struct, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
head = struct.pack("<IHHIIQQQ", 0x31594c42, 1, 1, 64, 0, 0, 0, 12345)
words = [b"", head[:20], head + b"x" * 10, struct.pack("<IHHIIQQQ", 0x31594c42, 1, 1, 1 << 31, 0, 0, 0, 0),
         os.urandom(4096), head + b"y" * 64, b"GET / HTTP/1.0\r\n\r\n",
         struct.pack("<IHHIIQQQ", 0x31594c42, 1, 4, 1 << 20, 2, 0, 0, 0) + b"z" * 100000]
kept = []
def connect(where, word):
    s = socket.socket(socket.AF_UNIX if where.startswith("/") else socket.AF_INET)
    s.settimeout(2)
    try:
        s.connect(where if where.startswith("/") else (where.rsplit(":", 1)[0], int(where.rsplit(":", 1)[1])))
        s.setblocking(False)
        if word: s.send(word)
        kept.append(s)
    except OSError:
        s.close()
for where in sys.argv[1:]:
    for word in words: connect(where, word)
for where in sys.argv[1:]:
    for i in range(1000): connect(where, words[i % 4])
print(len(kept), flush=True)
sys.stdin.read()' "$@"
}

answers() {
    cl_status_raw "$1" >/dev/null
}

case_sockets() {
    NODES=2
    STEPS=500
    it_begin 2 node0 node1
    it_ready 5
    local before0 before1 kib0 shims bulk
    before0=$(fds node0)
    before1=$(fds node1)
    kib0=$(private_kib "${CL_PID[node0]}")
    mapfile -t shims < <(find "$CL_DIR"/node?/state/jobs -name '*.sock')
    bulk=$(jq -r .bulk "$CL_DIR/node0/state/ports.json")
    coproc ATTACK { attack "$(cl_socket node0)" "$(cl_socket node1)" "127.0.0.1:${CL_PORT[node0]}" \
        "127.0.0.1:${CL_PORT[node1]}" "$bulk" "${shims[@]}"; }
    # shellcheck disable=SC2034 # the pid is set by coproc
    local pid=$ATTACK_PID count
    read -r -t 60 count <&"${ATTACK[0]}" || it_fail "the attack did not come to stand"
    [ "$count" -gt 1000 ] || it_fail "only $count connections stood"
    it_wait 5 "node0 answers while it is attacked" answers node0
    it_wait 5 "node1 answers while it is attacked" answers node1
    local kib
    kib=$(private_kib "${CL_PID[node0]}")
    echo "private memory of the head's daemon: $kib0 KiB before, $kib KiB under attack"
    [ "$kib" -lt $((kib0 + 24576)) ] || it_fail "its memory grew from $kib0 to $kib KiB"
    # A rank dies now: it must be known, replaced and attached to all the same.
    it_before
    kill -KILL "$(cl_rank_pid 1)"
    it_wait 20 "recovery under attack" it_recovered
    kill "$pid" 2>/dev/null
    it_end 60
    it_recoveries 1 1
    it_wait 10 "descriptors of node0 are what they were" fds_at_most node0 "$before0"
    it_wait 10 "descriptors of node1 are what they were" fds_at_most node1 "$before1"
}
fds_at_most() {
    [ "$(fds "$1")" -le "$2" ]
}

# A wrapper around the trainer: what it does first is in TREE.
wrapper() {
    printf '#!/usr/bin/env bash\n%s\nexec %s\n' "$1" "$CL_BIN/belay-train" >"$IT_DIR/wrapper"
    chmod +x "$IT_DIR/wrapper"
    COMMAND="[$IT_DIR/wrapper]"
}

# Grandchildren, one in a session of its own and with another parent, go with their rank.
case_tree() {
    # shellcheck disable=SC2016 # for the wrapper
    wrapper "(setsid bash -c 'echo \$\$ >>$IT_DIR/left; exec sleep 1000' &)
sleep 1000 & echo \$! >>$IT_DIR/left"
    STEPS=60
    it_begin 2 node0
    it_ready 5
    local pids
    pids=$(cat "$IT_DIR/left")
    [ "$(wc -w <<<"$pids")" = 4 ] || it_fail "not four grandchildren: $pids"
    kill -KILL "$(cl_rank_pid 1)"
    it_wait 20 "recovery" it_recovered
    it_end
    # shellcheck disable=SC2086,SC2046
    it_wait 5 "all grandchildren are gone" gone $pids $(cat "$IT_DIR/left")
}
gone() {
    local pid
    for pid; do
        ! kill -0 "$pid" 2>/dev/null || [ "$(cut -d' ' -f3 "/proc/$pid/stat")" = Z ] || return 1
    done
}

# 400 MB of noise, lines without end, and a flood of short ones: rotated, bounded, still its lines.
case_log() {
    wrapper "(head -c 400000000 /dev/urandom; yes | head -c 2000000; head -c 3000000 /dev/zero; echo >$IT_DIR/silence) &"
    STEPS=500
    it_begin 1 node0
    it_ready 2
    it_wait 60 "the end of the noise" test -e "$IT_DIR/silence"
    local kib shim files
    shim=$(ps -o ppid= -p "$(cl_rank_pid 0)" | tr -d ' ')
    kib=$(private_kib "$shim")
    echo "private memory of the shim: $kib KiB; of the daemon: $(private_kib "${CL_PID[node0]}") KiB"
    [ "$kib" -lt 16384 ] || it_fail "the shim holds $kib KiB"
    [ "$(private_kib "${CL_PID[node0]}")" -lt 32768 ] || it_fail "the daemon grew"
    files=$(find "$CL_DIR/run/logs" -name 'rank-0000.log*' -printf '%s %f\n')
    awk '$1 > 68000000 {bad = 1} {n++} END {exit bad || n != 4}' <<<"$files" ||
        it_fail "not four files of 64 MiB at most: $files"
    it_end 60
    it_recoveries 0 0
    grep -qa "^step 500/500 loss" "$CL_DIR/run/logs/rank-0000.log" || it_fail "the trainer's last line is not in its log"
}

# The state directory is full: ranks go on, somebody is told; with room again a recovery works.
case_state_full() {
    STEPS=200
    it_job 2
    it_alone
    mkdir -p "$CL_DIR/node0/state"
    mount -t tmpfs -o size=8m tmpfs "$CL_DIR/node0/state" 2>/dev/null || it_skip "no tmpfs can be mounted"
    IT_MOUNTED=$CL_DIR/node0/state
    it_cluster node0
    cl_run "$JOB_FILE"
    it_ready 10
    dd if=/dev/zero of="$IT_MOUNTED/fill" bs=64k 2>/dev/null
    kill -KILL "$(cl_rank_pid 1)"
    it_wait 20 "status says that the store takes no changes" full_is_told
    rm "$IT_MOUNTED/fill"
    it_wait 20 "recovery with room again" it_recovered
    it_end 60
    it_lost 1
}
# What the daemon would know its ranks by is gone: they are ended, not left to train beside others.
case_forgotten() {
    STEPS=100
    it_begin 2 node0
    it_ready 25
    local pids
    mapfile -t pids < <(cl_rank_pids)
    cl_node_kill node0 KILL
    rm "$CL_DIR"/node0/state/jobs/*/run.json
    it_node node0
    it_wait 5 "the old ranks are gone" gone "${pids[@]}"
    it_wait 20 "recovery from disk" it_recovered
    it_end 60
    it_each_step
}

# A shim that is stopped when its daemon comes back is killed, and the run goes on.
case_shim_hangs() {
    STEPS=300
    it_begin 2 node0
    it_ready 10
    local rank shim
    rank=$(cl_rank_pid 1)
    shim=$(ps -o ppid= -p "$rank" | tr -d ' ')
    kill -STOP "$shim"
    cl_node_kill node0 KILL
    BELAY_TIME_SCALE=0.3 it_node node0
    it_wait 10 "the shim is killed" gone "$shim" "$rank"
    it_wait 20 "recovery" it_recovered
    it_end 60
}

full_is_told() {
    cl_status_raw node0 | jq -e "$CL_JQ_RUN"' any($r.needs[]?; test("store"))' >/dev/null ||
        grep -q "store: .*full" "$CL_DIR/node0/belayd.log"
}

it_main "$@"
