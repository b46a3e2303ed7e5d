#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# belayd.service under a real systemd: a container over this very system, booted in a second.
#
#   - the unit is verified without a word, and starts by readiness;
#   - systemctl restart, kill -9 and a hang of the daemon (watchdog) in the middle of a job:
#     the ranks keep their process ids, and the run ends in the digest of the trainer alone.
#
# Needs root, systemd-nspawn and overlayfs; else 77.
set -uo pipefail
build=${BELAY_BUILD:?the build folder}
unit=belayd.service
steps=${STEPS:-1500}

skip() {
    echo "skip: $*"
    exit 77
}
fail() {
    echo "FAILED: $*"
    [ -z "$leader" ] || inside journalctl -u $unit -n 30 --no-pager -o cat 2>/dev/null
    exit 1
}
say() {
    printf '%6s ms  %s\n' "$(($(now_ms) - begun))" "$*"
}
now_ms() {
    local now=$EPOCHREALTIME
    echo $((${now%.*} * 1000 + 10#${now#*.} / 1000))
}

[ "$(id -u)" = 0 ] || skip "needs root"
command -v systemd-nspawn >/dev/null || skip "systemd-nspawn is not installed"
for program in belayd belay belay-shim belay-engine belay-train; do
    [ -x "$build/$program" ] || skip "$program is not built"
done

begun=$(now_ms)
leader=
nspawn=
work=$(mktemp -d /tmp/belay-systemd.XXXXXX)
cleanup() {
    if [ -n "$nspawn" ]; then
        [ -z "$leader" ] || kill -s RTMIN+4 "$leader" 2>/dev/null
        local deadline=$((SECONDS + 15))
        while kill -0 "$nspawn" 2>/dev/null && [ $SECONDS -lt $deadline ]; do sleep 0.1; done
        kill -KILL "$nspawn" 2>/dev/null
        wait "$nspawn" 2>/dev/null
    fi
    umount "$work/root" 2>/dev/null || umount -l "$work/root" 2>/dev/null
    umount "$work" 2>/dev/null || umount -l "$work" 2>/dev/null
    rmdir "$work" 2>/dev/null
}
trap cleanup EXIT
mount -t tmpfs -o size=3g,mode=755 tmpfs "$work" || skip "no tmpfs can be mounted"
mkdir "$work/up" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/up,workdir=$work/work" "$work/root" ||
    skip "no overlay can be mounted over /"
root=$work/root

inside() {
    nsenter -t "$leader" -a --wd=/ env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        LANG=C.UTF-8 "$@"
}
# wait_for SECONDS TEXT COMMAND...: polls until the command succeeds.
wait_for() {
    local deadline=$((SECONDS + $1)) text=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || fail "not in time: $text"
        sleep 0.1
    done
}

# --- install, as the page says it ---------------------------------------------------------------
DESTDIR=$root meson install -C "$build" --no-rebuild --quiet || fail "meson install"
prefix=$(jq -r '.[] | select(.name == "prefix").value' "$build/meson-info/intro-buildoptions.json")
conf=$prefix/etc/belay
[ "$prefix" != /usr ] || conf=/etc/belay
mkdir -p "$root$conf" "$root/srv/run"
cp "$root$prefix/share/doc/belay/examples/belayd.yaml" "$root$conf/belayd.yaml"
systemd-sysusers --root="$root" >/dev/null 2>&1 || fail "systemd-sysusers"
cat /usr/share/common-licenses/GPL-3 /usr/share/common-licenses/GPL-2 >"$root/srv/run/text.txt"
cat >"$root/srv/run/job.yaml" <<YAML
name: service
run_dir: out
ranks: 2
lanes: 4
model: {layers: 2, dim: 64, hidden: 176, heads: 4, kv_heads: 2}
data: {files: [text.txt]}
train: {global_batch: 4, micro_batch: 1, seq_len: 64, steps: $steps, lr: 0.003, warmup: 10, seed: 7}
backend: cpu
threads: 1
roots: [{path: ckpt, shared: true, every: 500, keep: 2}]
YAML
# A shorter watchdog, so that the test is short.
mkdir -p "$root/etc/systemd/system/$unit.d"
printf '[Service]\nWatchdogSec=3s\n' >"$root/etc/systemd/system/$unit.d/test.conf"

# --- boot ---------------------------------------------------------------------------------------
systemd-nspawn -D "$root" --register=no --keep-unit --link-journal=no --private-network \
    --capability=CAP_IPC_LOCK -q -- \
    /lib/systemd/systemd --unit=basic.target --show-status=0 </dev/null >"$work/console" 2>&1 &
nspawn=$!
deadline=$((SECONDS + 20))
until leader=$(pgrep -P $nspawn | head -n 1) && [ -n "$leader" ] &&
    inside systemctl is-active -q basic.target 2>/dev/null; do
    if [ $SECONDS -ge $deadline ] || ! kill -0 $nspawn 2>/dev/null; then
        leader=
        cat "$work/console"
        skip "a systemd does not boot here"
    fi
    sleep 0.1
done
say "systemd booted"
inside chown -R belay:belay /srv/run

out=$(inside systemd-analyze verify "$prefix/lib/systemd/system/$unit" 2>&1)
[ -z "$out" ] || fail "systemd-analyze verify says: $out"
say "systemd-analyze verify is silent"

inside systemctl start $unit || fail "systemctl start"
has_status() {
    [ -n "$(inside systemctl show -P StatusText $unit)" ]
}
wait_for 10 "a status line" has_status
say "started: $(inside systemctl show -P StatusText $unit)"

# --- a job --------------------------------------------------------------------------------------
as_belay() {
    inside setpriv --reuid=belay --regid=belay --init-groups "$@"
}
belay() {
    as_belay "$prefix/bin/belay" "$@" --socket /run/belay/belayd.sock
}
main_pid() {
    inside systemctl show -P MainPID $unit
}
rank_pids() {
    inside pgrep -x belay-train | sort -n | tr '\n' ' '
}
step_now() {
    belay status --json 2>/dev/null | jq -r '.step // 0'
}
step_reached() {
    [ "$(step_now)" -ge "$1" ]
}
wait_steps() {
    local to=$(($(step_now) + $1))
    wait_for 60 "step $to" step_reached "$to"
}
same_ranks() {
    [ "$(rank_pids)" = "$ranks" ] || fail "$1: ranks were $ranks, are $(rank_pids)"
}
daemon_answers() {
    [ "$(main_pid)" != "$1" ] && [ "$(main_pid)" != 0 ] && belay status --json | jq -e . >/dev/null
}

alone=$(as_belay "$prefix/bin/belay-train" --job /srv/run/job.yaml --ranks 2 --digest 2>/dev/null | tail -n 1)
[ -n "$alone" ] || fail "belay-train alone prints no digest"
say "the trainer alone: $alone"

belay run /srv/run/job.yaml --json >"$work/run.json" 2>"$work/run.log" &
run=$!
wait_for 60 "the first steps" step_reached 5
ranks=$(rank_pids)
[ "$(wc -w <<<"$ranks")" = 2 ] || fail "ranks: $ranks"

pid=$(main_pid)
inside systemctl restart $unit || fail "systemctl restart"
wait_for 20 "an answer after restart" daemon_answers "$pid"
wait_steps 3
same_ranks "systemctl restart"
say "systemctl restart: ranks $ranks train on at step $(step_now)"

pid=$(main_pid)
inside kill -KILL "$pid"
wait_for 20 "an answer after kill -9" daemon_answers "$pid"
wait_steps 3
same_ranks "kill -9"
say "kill -9: ranks train on at step $(step_now)"

pid=$(main_pid)
inside kill -STOP "$pid"
wait_for 40 "the watchdog's restart" daemon_answers "$pid"
inside journalctl -u $unit -o cat --no-pager | grep -i "watchdog timeout" >/dev/null ||
    fail "the journal knows of no watchdog timeout"
wait_steps 3
same_ranks "watchdog"
say "hang: the watchdog started the daemon again, ranks train on at step $(step_now)"

deadline=$((SECONDS + 120))
while kill -0 $run 2>/dev/null && [ $SECONDS -lt $deadline ]; do sleep 0.2; done
kill $run 2>/dev/null && fail "the run does not end: step $(step_now) of $steps"
wait $run
rc=$?
[ $rc = 0 ] || fail "belay run: exit $rc: $(tail -n 1 "$work/run.log")"
digest=$(tail -n 1 "$work/run.json" | jq -r .digest)
[ "digest $digest" = "$alone" ] || fail "the run ended in $digest, the trainer alone in: $alone"
say "the run ended in the same digest"
inside systemctl stop $unit || fail "systemctl stop"
say "passed"
