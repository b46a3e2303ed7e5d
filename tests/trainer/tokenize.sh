#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# belay-train tokenize: shards that a job trains on, refusals, and GPT-2's own tokens of a real text.
set -euo pipefail
train=$BELAY_BUILD/belay-train
work=$(mktemp -d "${TMPDIR:-/tmp}/belay-tokenize.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() {
    echo "FAILED: $*"
    exit 1
}

# refused CODE TEXT COMMAND...
refused() {
    local code=$1 text=$2 rc=0 out
    shift 2
    out=$("$@" 2>&1) || rc=$?
    if [ "$rc" != "$code" ] || ! grep -qF -- "$text" <<<"$out"; then
        fail "$*: exit $rc, not $code with '$text': $out"
    fi
}

printf 'e space\n' >bad.bpe
printf '#version: 0.2\nt h\nth e\ni n\ne r\n' >small.bpe
cp "$BELAY_SOURCE/LICENSE" text.txt
"$train" tokenize --merges small.bpe --val-tokens 1000 --out a --quiet text.txt >out
grep -q '^a_val.bin: 1000 tokens$' out || fail "no shard for evaluation: $(cat out)"
[ -z "$(find . -name '*.tmp')" ] || fail "a temporary file is left"
refused 2 'a_val.bin: is there already; --force replaces it' \
    "$train" tokenize --merges small.bpe --val-tokens 1000 --out a text.txt
refused 2 'bad.bpe:1: a word that no line before this one makes' \
    "$train" tokenize --merges bad.bpe --out b text.txt
refused 2 'missing.txt: No such file' "$train" tokenize --merges small.bpe --out b text.txt missing.txt
refused 2 '--merges FILE is missing' "$train" tokenize --out b text.txt
printf 'ab\n\n\377' >latin.txt
refused 2 'latin.txt: of the document at byte 4: byte 0: not UTF-8' \
    "$train" tokenize --merges small.bpe --documents paragraph --out b latin.txt
[ -z "$(find . -name 'b_*')" ] || fail "a shard of a failed run is left"

# Several shards hold the same tokens as one.
"$train" tokenize --merges small.bpe --val-tokens 1000 --shard-tokens 3000 --out many --quiet text.txt >out
[ "$(find . -name 'many_train_*.bin' | wc -l)" -ge 2 ] || fail "one shard only: $(cat out)"
cmp a_val.bin many_val.bin
cmp <(tail -c +1025 a_train.bin) <(for shard in many_train_*.bin; do tail -c +1025 "$shard"; done)

cat >job.yaml <<YAML
name: shards
ranks: 2
lanes: 2
model: {layers: 1, dim: 16, heads: 2, vocab: 261}
data: {tokenizer: shards, files: [a_train.bin, a_val.bin], weights: [3, 1], eval_files: [a_val.bin]}
train: {global_batch: 4, micro_batch: 1, seq_len: 32, steps: 6, eval_every: 3}
YAML
"$train" --job job.yaml --ranks 1 --digest >one 2>&1 || fail "$(cat one)"
"$train" --job job.yaml --ranks 2 --digest >two 2>&1 || fail "$(cat two)"
grep -q '^digest' one || fail "$(cat one)"
[ "$(grep '^digest' one)" = "$(grep '^digest' two)" ] || fail "$(cat one two)"
# The dry run counts a slot for each root beside the two that steps take by turns.
"$train" --check job.yaml >out
grep -q 'with 3 slots' out || fail "not three slots without a root: $(cat out)"
echo 'roots: [{path: r1}, {path: r2}, {path: r3}]' | cat job.yaml - >roots.yaml
"$train" --check roots.yaml >out
grep -q 'with 5 slots' out || fail "not five slots with three roots: $(cat out)"
sed 's/vocab: 261/vocab: 259/' job.yaml >small.yaml
refused 2 'a_train.bin: offset' "$train" --check small.yaml
truncate -s 2000 a_val.bin
refused 2 'a_val.bin: offset 8: the header says 1000 tokens' "$train" --check job.yaml

# Another implementation of the same rules made these digests of the same text.
data=${BELAY_TEST_DATA:-}
if [ -f "$data/tinyshakespeare.txt" ] && [ -f "$data/gpt2_vocab.bpe" ]; then
    "$train" tokenize --merges "$data/gpt2_vocab.bpe" --documents paragraph --val-tokens 32768 \
        --out tiny --quiet "$data/tinyshakespeare.txt" >out
    grep -q '^338028 tokens of 1115394 bytes, vocabulary 50257' out || fail "$(cat out)"
    sha256sum -c --quiet <<'SUMS'
fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62  tiny_val.bin
8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8  tiny_train.bin
SUMS
else
    echo "BELAY_TEST_DATA is not set: GPT-2's tokens of a real text were not compared"
fi
