#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# import, export, diff, show and sample as a person meets them, over small models that are made here
# and, where BELAY_TEST_DATA is set, over one that was really trained: what it writes is known.
set -euo pipefail
tool=$BELAY_BUILD/ckpt-tool
train=$BELAY_BUILD/belay-train
dir=$(mktemp -d "${TMPDIR:-/tmp}/belay-foreign.XXXXXX")
trap 'rm -rf "$dir"' EXIT
cd "$dir"
failed=0

# check CODE PATTERN COMMAND...: exit code, and an extended regular expression in the output
check() {
    local code=$1 pattern=$2 rc=0 out
    shift 2
    out=$("$@" 2>&1) || rc=$?
    if [ "$rc" != "$code" ] || ! grep -Eq -- "$pattern" <<<"$out"; then
        printf '%s\n  exit %s (not %s), pattern %s, output:\n%s\n' "$*" "$rc" "$code" "$pattern" "$out"
        failed=1
    fi
}

complain() {
    echo "$*"
    failed=1
}

# le BYTES NUMBER: little-endian
le() {
    local i
    for ((i = 0; i < $1; i++)); do
        # shellcheck disable=SC2059 # the format is the byte
        printf "\\x$(printf %02x $(($2 >> 8 * i & 255)))"
    done
}

# floats COUNT SEED: so many fp32 of about 1/16 to 2, both signs, all different enough
floats() {
    LC_ALL=C awk -v n="$1" -v s="$2" 'BEGIN {
        for (i = 0; i < n; i++) {
            s = (s * 16807) % 2147483647
            printf "%c%c%c%c", 1 + s % 254, 1 + int(s / 256) % 254, 1 + int(s / 65536) % 254,
                61 + s % 2 * 128 + int(s / 7) % 2
        }
    }'
}

# ---- A small Llama in llama2.c's layout: dim 8, hidden 12, 2 layers, 2 heads, 1 key-value head
{
    for n in 8 12 2 2 1 16 32; do le 4 $n; done
    floats 1256 1
} >small.bin
check 0 'llama, 2 layers, width 8.*vocabulary 16, context 32, tied' \
    "$tool" import --from llama2c small.bin --dry-run --out a-none
check 0 'q_proj.weight +<- model.layers.0.self_attn.q_proj.weight, pairs of rows to halves' \
    "$tool" import --from llama2c small.bin --dry-run
[ ! -e a-none ] || complain "a dry run wrote something"

for codec in none zstd auto; do
    check 0 'state digest [0-9a-f]{32}$' \
        "$tool" import --from llama2c small.bin --codec $codec --out a-$codec
    check 0 'good' "$tool" verify a-$codec
    check 0 '1 file$' "$tool" export a-$codec --to hf --out hf-$codec
    check 0 '20 tensors' "$tool" import --from hf hf-$codec --codec $codec --out b-$codec
    diff -r a-$codec b-$codec || complain "codec $codec: import, export, import differ"
    check 0 '20 tensors in both, 20 equal bit for bit' "$tool" diff a-none a-$codec
done
cmp hf-none/model.safetensors hf-zstd/model.safetensors || complain "exports of two codecs differ"
check 0 '20 equal' "$tool" diff small.bin a-zstd
check 0 '20 equal' "$tool" diff hf-none small.bin
check 0 '"equal":true.*"schema":1' "$tool" diff a-none hf-none --json --only params
check 0 '"state_digest":"[0-9a-f]{32}"' \
    "$tool" import --from hf hf-none --out j --json --run my-run --step 12
check 0 'my-run' "$tool" show j --step 12
check 3 'no good checkpoint of step 3' "$tool" show j --step 3

# ---- Several files, other types
check 0 '[2-9] files$' "$tool" export a-zstd --to hf --out many --max-shard 4k
[ -e many/model.safetensors.index.json ] || complain "no index of several files"
check 0 '20 equal' "$tool" diff many a-zstd
check 2 'max-shard' "$tool" export a-zstd --to hf --out many --max-shard 100
check 0 'bf16, 1 file' "$tool" export a-zstd --to hf --out many --max-shard 4k --dtype bf16 --force
check 0 '20 tensors' "$tool" import --from hf many --out m1
check 0 '' "$tool" export m1 --to hf --out many2 --max-shard 4k --dtype bf16
diff -r many many2 || complain "bf16 there and back differs"
check 1 'model.norm.weight: dtype: F32\[8\], BF16\[8\]' "$tool" diff a-none many
check 1 '8 of 8 differ, max 0.*relative 0.00' "$tool" diff a-none many
check 0 'fp16' "$tool" export a-none --to hf --out half --dtype fp16
check 0 'model.norm.weight +F16 +\[8\] ' "$tool" show half --stats
check 0 '"nan":0,' "$tool" show a-none --stats --json
check 0 'model.norm.weight +F32 +\[8\]$' "$tool" show hf-none

# ---- Nothing is overwritten, nothing is left half
check 3 'a-none is there already and not empty: --force' \
    "$tool" import --from llama2c small.bin --out a-none
check 0 '' "$tool" import --from llama2c small.bin --out a-none --codec none --force
check 0 '' "$tool" export a-none --to hf --out hf-none --force
diff -r a-none b-none || complain "--force made something else"
touch hf-none/notes.txt
check 3 'hf-none holds "notes.txt"' "$tool" export a-none --to hf --out hf-none --force
rm hf-none/notes.txt
check 3 'holds "manifest.json"' "$tool" import --from llama2c small.bin --out a-none/step-000000000000.g0 --force
killed=0 rc=1
for ((at = 1; rc != 0 && at < 200; at += 3)); do
    rc=0
    BELAY_FAIL=disk-op:kill:$at "$tool" import --from llama2c small.bin --out k --codec none \
        >/dev/null 2>&1 || rc=$?
    [ $rc = 0 ] || [ ! -e k ] || complain "an import that was killed at $at shows at its place"
    killed=$((killed + (rc != 0)))
done
echo "an import was killed at $killed places and started again each time"
[ $killed = 0 ] || [ $killed -gt 5 ] || complain "few kills, or the import failed by itself"
diff -r a-none k || complain "an import after killed ones differs"
[ ! -e .k.belay-tmp ] || complain "a temporary directory is left"

# ---- What does not fit the model is listed, and waived only by name
edit() { # edit NAME SED: a copy of hf-none whose config.json was changed
    rm -rf "$1"
    cp -r hf-none "$1"
    sed -i "$2" "$1/config.json"
}
edit more 's/"num_hidden_layers": 2/"num_hidden_layers": 3/'
check 3 'missing: model.layers.2.mlp.up_proj.weight is not there' \
    "$tool" import --from hf more --out no
check 3 '9 findings; not imported' "$tool" import --from hf more --out no
edit fewer 's/"num_hidden_layers": 2/"num_hidden_layers": 1/'
check 3 'extra: model.layers.1.mlp.up_proj.weight is no tensor' \
    "$tool" import --from hf fewer --out no
layer=model.layers.1
names=(input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj
    post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj)
check 3 '8 findings' "$tool" import --from hf fewer --out no --allow-extra $layer.mlp.up_proj.weight
allow=()
for name in "${names[@]}"; do allow+=(--allow-extra "$layer.$name.weight"); done
check 0 '11 tensors' "$tool" import --from hf fewer --out fewer.root "${allow[@]}"
check 2 'nothing to allow' "$tool" import --from hf hf-none --out no --allow-missing lm_head.weight
edit untied 's/"tie_word_embeddings": true/"tie_word_embeddings": false/'
check 3 'missing: lm_head.weight' "$tool" import --from hf untied --out no
check 0 '' "$tool" import --from hf untied --out headless --allow-missing lm_head.weight
check 3 'missing: lm_head.weight is not in the checkpoint' \
    "$tool" export headless --to hf --out no
edit wide 's/"hidden_size": 8/"hidden_size": 16/; s/"head_dim": 4/"head_dim": 8/'
check 3 'shape: model.norm.weight is \[8\]: the model.s sizes make it \[16\]' \
    "$tool" import --from hf wide --out no
edit lies 's/"hidden_size": 8/"hidden_size": 800000000/'
check 3 'config.json: ' "$tool" import --from hf lies --out no
head -c 5000 hf-none/model.safetensors >more/model.safetensors
check 3 'do not fit shape or file' "$tool" import --from hf more --out no
head -c 5000 small.bin >short.bin
check 3 '5000 bytes; the header .* makes it 5052' "$tool" import --from llama2c short.bin --out no
rm more/config.json
check 3 'config.json: No such file' "$tool" import --from hf more --out no
if [ -e no ] || [ -e .no.belay-tmp ]; then
    complain "a refused import left something"
fi

# ---- Padding of the vocabulary is asked for
check 0 '' "$tool" export a-none --to hf --out padded --pad-vocab 24
check 0 'embed_tokens.weight +F32 +\[24,8\]' "$tool" show padded
check 0 '' "$tool" import --from hf padded --out p --vocab 16 --codec none
diff -r a-none p || complain "a padded vocabulary does not come back"
sed -i 's/"vocab_size": 24/"vocab_size": 16/' padded/config.json
check 3 '\[24,8\].*\[16,8\]' "$tool" import --from hf padded --out no
check 3 '--vocab N: the vocabulary has padding' "$tool" import --from hf padded --out no
check 3 '--vocab 25: there are 24 rows' "$tool" import --from hf padded --out no --vocab 25

# ---- A difference of one bit
cp -r hf-none bit
printf '\x7e' | dd of=bit/model.safetensors bs=1 seek=$(($(stat -c %s bit/model.safetensors) - 1)) \
    conv=notrunc status=none
check 1 'model.norm.weight: 1 of 8 differ' "$tool" diff hf-none bit
check 1 '1 of 1128 elements differ' "$tool" diff bit a-zstd
check 1 '"differing":1,' "$tool" diff bit a-zstd --json
check 3 'element \[7\] is [-0-9.e+]+: over the largest F16 \(--overflow' bash -c \
    "'$tool' import --from hf bit --out huge >/dev/null && '$tool' export huge --to hf --dtype fp16 --out no"
check 0 'fp16' "$tool" export huge --to hf --dtype fp16 --overflow clamp --out clamped

# ---- GPT-2, as the first ones were saved (no "transformer." in front): width 4, 1 layer, 5 tokens
rm -rf gpt2
mkdir gpt2
cat >gpt2/config.json <<'EOF'
{"model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 3, "vocab_size": 5}
EOF
header='{' at=0
for entry in wte.weight:5,4 wpe.weight:3,4 h.0.ln_1.weight:4 h.0.ln_1.bias:4 \
    h.0.attn.c_attn.weight:4,12 h.0.attn.c_attn.bias:12 h.0.attn.c_proj.weight:4,4 \
    h.0.attn.c_proj.bias:4 h.0.ln_2.weight:4 h.0.ln_2.bias:4 h.0.mlp.c_fc.weight:4,16 \
    h.0.mlp.c_fc.bias:16 h.0.mlp.c_proj.weight:16,4 h.0.mlp.c_proj.bias:4 ln_f.weight:4 \
    ln_f.bias:4 h.0.attn.bias:3; do
    shape=${entry#*:}
    bytes=$((4 * ${shape/,/*}))
    [ $at = 0 ] || header+=,
    header+="\"${entry%:*}\":{\"dtype\":\"F32\",\"shape\":[$shape],\"data_offsets\":[$at,$((at + bytes))]}"
    at=$((at + bytes))
done
header+='}'
{
    le 8 ${#header}
    printf %s "$header"
    floats $((at / 4)) 7
} >gpt2/model.safetensors
check 0 'gpt2, 1 layers, width 4, feed-forward 16' "$tool" import --from hf gpt2 --out g --codec none
check 0 '20 tensors in both, 20 equal' "$tool" diff g gpt2
check 0 'gpt2, 16 tensors' "$tool" export g --to hf --out gpt2.out
check 0 '' "$tool" import --from hf gpt2.out --out g2 --codec none
diff -r g g2 || complain "GPT-2 does not come back"
check 2 'a vocabulary of 5 tokens: --tokenizer FILE is missing' "$train" sample --model g

# ---- Training on: the first weights are the imported ones, in every layout
{
    for n in 8 12 2 2 1 256 32; do le 4 $n; done
    floats 3176 5
} >bytes.bin
check 0 'vocabulary 256' "$tool" import --from llama2c bytes.bin --out start
seq 1 400 >text
cat >job.yaml <<EOF
name: on
run_dir: run
ranks: 1
lanes: 4
model: {layers: 2, dim: 8, hidden: 12, heads: 2, kv_heads: 1, vocab: 256, tied: true}
data: {files: [text]}
train: {global_batch: 4, seq_len: 16, steps: 2, lr: 1e-3, init: start}
EOF
one=$("$train" --job job.yaml --digest | tail -1)
for other in "--ranks 3" "--threads 2"; do
    # shellcheck disable=SC2086 # two words
    [ "$("$train" --job job.yaml --digest $other | tail -1)" = "$one" ] ||
        complain "training on with $other is something else"
done
sed 's/, init: start//' job.yaml >random.yaml
[ "$("$train" --job random.yaml --digest | tail -1)" != "$one" ] || complain "train.init does nothing"
[ "$("$train" --probe --job random.yaml | head -1)" != "$("$train" --probe --job job.yaml | head -1)" ] ||
    complain "the function does not depend on the first weights"
sed 's/hidden: 12/hidden: 13/' job.yaml >other.yaml
check 2 'train.init .*start: it is of another model: model.hidden differs' "$train" --job other.yaml
# The same shapes, but other positions: no tensor would tell.
sed 's/tied: true/tied: true, rope_factor: 8/' job.yaml >other.yaml
check 2 'it is of another model: model.rope_factor differs' "$train" --job other.yaml
sed 's/init: start/init: hf-none/' job.yaml >other.yaml
check 2 'ckpt-tool import makes one' "$train" --job other.yaml

# ---- Options
check 2 '--from is hf or llama2c' "$tool" import small.bin --out no
check 2 '--out: missing' "$tool" import --from llama2c small.bin
check 2 '--codec is auto, none or zstd' "$tool" import --from llama2c small.bin --out no --codec gz
check 2 '--to is hf' "$tool" export a-none --out no
check 2 '--dtype is fp32, bf16 or fp16' "$tool" export a-none --to hf --out no --dtype int8
check 3 'is no checkpoint of Belay' "$tool" export hf-none --to hf --out no
check 2 'diff' "$tool" diff a-none

# ---- A model that was really trained: its text is known, byte by byte
data=${BELAY_TEST_DATA:-}
if [ -z "$data" ]; then
    echo "without BELAY_TEST_DATA: the trained model was not tried"
    exit $failed
fi
says() { # says PATH: at temperature 0, 200 steps
    "$train" sample --model "$1" --tokenizer "$data/tok512.bin" --temperature 0 --steps 200 |
        cmp - "$data/stories260K.greedy200.txt" || complain "$1 says something else"
}
says "$data/stories260K.bin"
for codec in none zstd auto; do
    check 0 '' "$tool" import --from llama2c "$data/stories260K.bin" --codec $codec --out s-$codec
    check 0 '' "$tool" export s-$codec --to hf --out t-$codec --max-shard 300k
    check 0 '' "$tool" import --from hf t-$codec --codec $codec --out u-$codec
    diff -r s-$codec u-$codec || complain "stories260K, codec $codec: comes back changed"
    says s-$codec
    says t-$codec
    says u-$codec/step-000000000000.g0
done
check 0 'Once upon a time' "$train" sample --model s-zstd --tokenizer "$data/tok512.bin" \
    --prompt 'Once upon a time' --steps 20 --top-p 0.5 --temperature 0.7
check 2 '--tokenizer FILE is missing' "$train" sample --model s-zstd
check 2 'tok512.bin' "$train" sample --model a-none --tokenizer "$data/tok512.bin"
exit $failed
