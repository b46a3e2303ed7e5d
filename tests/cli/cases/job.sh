# SPDX-License-Identifier: Apache-2.0
# Wrong jobs: file, line and column; missing text; too few tokens. Nothing is started, exit 2. The
# socket is one that nobody listens at: had belay come so far, the exit code were 3.
exec 2>&1
good() {
    cat <<YAML
name: tiny
run_dir: $PWD/run
ranks: 2
lanes: 4
model: {layers: 2, dim: 64, hidden: 176, heads: 4, kv_heads: 2}
data: {files: [$PWD/text.txt]}
train: {global_batch: 8, micro_batch: 1, seq_len: 64, steps: 20, lr: 0.003, warmup: 2, seed: 7}
roots: [{path: $PWD/checkpoints, shared: true, every: 5, keep: 2}]
YAML
}
# wrong NAME SED-SCRIPT
wrong() {
    good | sed "$2" >"$1.yaml"
    try "$BELAY" run "$1.yaml" --socket none.sock
}
seq 1 4000 >text.txt
head -c 40 text.txt >short.txt
try "$BELAY" run nowhere.yaml --socket none.sock
try "$BELAY" run . --socket none.sock
wrong key 's/^ranks:/rnaks:/'
wrong number 's/^lanes: 4/lanes: four/'
wrong bound 's/^ranks: 2/ranks: 0/'
wrong batch 's/global_batch: 8/global_batch: 7/'
wrong heads 's/kv_heads: 2/kv_heads: 3/'
wrong yaml 's/^ranks: 2/ranks: [2/'
wrong twice 's/^lanes: 4/ranks: 4/'
wrong later 's/^lanes: 4/lanes: 4\nprotect: peer/'
wrong text 's/text.txt/missing.txt/'
wrong short 's/text.txt/short.txt/'
echo 'what is not checked here is refused by the daemon alone:'
good >good.yaml
"$BELAY" run good.yaml --socket none.sock >out 2>&1
echo "exit $?"
tail -n 3 out
ls
