# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154
# The train part of ./bench, which sources it: steps of two GPT-2 against other programs that train
# the same, against the matrix products alone, and the update against memory. Each round runs them
# one after the other; a value is the median of the rounds' ratios.
#
# A peer is a function tr_peer_NAME MODEL that prints the milliseconds of its steps, one a line,
# without those that warm up. More rows: see the end of bench_train.

# Layers, dim, heads, vocabulary; big is GPT-2 124M.
declare -A TR_SHAPE=([big]="12 768 12 50257" [small]="6 384 6 8192")
declare -A TR_GOAL_LLMC=([big]=4.0 [small]=3.0)
declare -A TR_STEPS=([big]=10 [small]=40)
declare -A TR_ROUNDS=([big]=$((runs < 2 ? runs : 2)) [small]=$((runs < 3 ? runs : 3))) # long ones
TR_COMPILE_S=150 # PyTorch's compiler gets so long

tr_threads=$(nproc)
tr_program=$CL_BIN/tests/bench/bench-train
tr_pid=
tr_clean() {
    [ -z "$tr_pid" ] || kill "$tr_pid" 2>/dev/null
}

# tr_job FILE MODEL LANES STEPS
tr_job() {
    local layers dim heads vocab
    read -r layers dim heads vocab <<<"${TR_SHAPE[$2]}"
    cat >"$1" <<YAML
name: bench-train
run_dir: $work/train.run
ranks: 1
lanes: $3
model: {arch: gpt2, layers: $layers, dim: $dim, heads: $heads, vocab: $vocab, context: 1024}
data: {files: [$work/$2/dev/data/tinyshakespeare/tiny_shakespeare_train.bin], tokenizer: shards}
train: {global_batch: $((4 * $3)), micro_batch: 4, seq_len: 64, steps: $4, lr: 1e-4, seed: 7}
backend: cpu
YAML
}

# tr_ours JOB RANKS THREADS TOKENS [COMMAND...]: milliseconds of the steps but the first three.
tr_ours() {
    local job=$1 ranks=$2 threads=$3 tokens=$4
    shift 4
    rm -f "$work/train.jsonl"
    "$@" "$CL_BIN/belay-train" --job "$job" --ranks "$ranks" --threads "$threads" \
        --metrics "$work/train.jsonl" >"$work/train.log" 2>&1 ||
        bl_die 3 "belay-train: $(tail -n 1 "$work/train.log")"
    jq -r --argjson t "$tokens" 'select(.step > 3) | 1000 * $t / .tokens_per_s' "$work/train.jsonl"
}

tr_peer_belay() {
    tr_job "$work/train.yaml" "$1" 1 "${TR_STEPS[$1]}"
    tr_ours "$work/train.yaml" 1 "$tr_threads" 256
}

# tr_llmc PROGRAM MODEL STEPS: it prints the time of each step, and knows no end but its own: it is
# stopped when it has said enough.
tr_llmc() {
    local line count=0
    coproc tr_run { cd "$work/$2" && exec env OMP_NUM_THREADS="$tr_threads" \
        OPENBLAS_NUM_THREADS="$tr_threads" stdbuf -oL "$1" 2>&1; }
    tr_pid=$tr_run_PID
    exec {tr_out}<&"${tr_run[0]}" # bash forgets its own when the process ends
    while [ "$count" -le "$3" ] && read -r line <&"$tr_out"; do
        [[ $line =~ ^step\ ([0-9]+):.*took\ ([0-9.]+)\ ms ]] || continue
        count=$((count + 1))
        [ "${BASH_REMATCH[1]}" = 0 ] || echo "${BASH_REMATCH[2]}"
    done
    exec {tr_out}<&-
    kill "$tr_pid" 2>/dev/null
    wait "$tr_pid" 2>/dev/null
    tr_pid=
    [ "$count" -gt "$3" ] || bl_die 3 "$1: ended early: $line"
}
tr_peer_llmc() {
    tr_llmc "$work/llmc" "$1" "$([ "$1" = big ] && echo 3 || echo 8)"
}
tr_peer_llmc_blas() {
    tr_llmc "$work/llmc_blas" "$1" 9
}
# tr_torch MODEL [OPTION]: 1 when it failed, and torch.log says why.
tr_torch() {
    local out
    # shellcheck disable=SC2086 # words
    out=$(timeout "$([ -n "${2:-}" ] && echo "$TR_COMPILE_S" || echo 0)" "$torch" "$BL_ROOT/tests/bench/torch_gpt2.py" ${TR_SHAPE[$1]} \
        "$tr_threads" "${TR_STEPS[$1]}" ${2:+"$2"} 2>"$work/torch.log") || return 1
    jq -r '.ms[3:][]' <<<"$out"
}
tr_peer_torch() {
    tr_torch "$1" || bl_die 3 "torch_gpt2.py: $(tail -n 1 "$work/torch.log")"
}
# It wants a C++ compiler and patience; without them its rows are left out.
tr_peer_torch_compiled() {
    tr_torch "$1" --compile || bl_say "$1: torch.compile: not in $TR_COMPILE_S s, or $(tail -n 1 "$work/torch.log")"
}

# tr_llmc_build: train_gpt2 by its own Makefile's flags, in a copy, and again with its two matrix
# products under other names, so that those of llmc_blas.c come in.
tr_llmc_build() {
    local flags log=$work/llmc.log
    cp -r "$llmc" "$work/llmc.src"
    (cd "$work/llmc.src" && make -B train_gpt2) >"$log" 2>&1 ||
        bl_die 3 "llm.c: $(tail -n 1 "$log")"
    cp "$work/llmc.src/train_gpt2" "$work/llmc"
    flags=$(grep -E '^[a-z]*(cc|gcc|clang) .*train_gpt2\.c' "$log" | grep -oE -- '(^| )-(O|m|f|D)[^ ]*' | tr '\n' ' ')
    sed -E 's/^void matmul_(forward|backward)\(/void own_matmul_\1(/' \
        "$work/llmc.src/train_gpt2.c" >"$work/llmc.src/blas.c"
    # shellcheck disable=SC2046,SC2086 # words
    (cd "$work/llmc.src" && cc $flags -w -I. -I"$BL_ROOT" -include tests/bench/llmc_blas.h blas.c \
        "$BL_ROOT/tests/bench/llmc_blas.c" -o "$work/llmc_blas" \
        $(pkg-config --cflags --libs openblas) -lm -lgomp) >>"$log" 2>&1 ||
        bl_die 3 "llm.c with OpenBLAS: $(tail -n 1 "$log")"
}

# tr_peers NAME...: each model's rounds, their medians in files $work/tr.MODEL.NAME.
tr_peers() {
    local model round name ms
    for model in "${models[@]}"; do
        for ((round = 1; round <= TR_ROUNDS[$model]; round++)); do
            for name in "$@"; do
                # Compiling takes longer than all the rest: once.
                [ "$name" != torch_compiled ] || [ "$round" = 1 ] || continue
                spare_note
                tr_peer_"$name" "$model" >"$work/tr.steps" || exit 3
                ms=$(median <"$work/tr.steps")
                [ -n "$ms" ] || continue
                echo "$ms" >>"$work/tr.$model.$name"
                bl_say "$model $name: $ms ms a step"
            done
        done
    done
}

# tr_ratio MODEL NAME: the median of the rounds' ratios to ours.
tr_ratio() {
    paste "$work/tr.$1.$2" "$work/tr.$1.belay" | awk 'NF == 2 { print $1 / $2 }' | median
}

# tr_row NAME MODEL PEER GOAL
tr_row() {
    local name=$1
    [ "$2" = big ] || name=$1.$2
    result "$name" "$(tr_ratio "$2" "$3")" ratio "$4" higher \
        "tokens a second, ${TR_SHAPE[$2]}: $(median <"$work/tr.$2.belay") ms a step, theirs $(median <"$work/tr.$2.$3"); $tr_threads threads, ${TR_ROUNDS[$2]} rounds"
}

tr_rows() {
    local model
    for model in "${models[@]}"; do
        if [ -n "$llmc" ]; then
            tr_row train.vs_llmc "$model" llmc "${TR_GOAL_LLMC[$model]}"
            tr_row train.vs_llmc_blas "$model" llmc_blas 1.25
        fi
        if [ -n "$torch" ]; then
            tr_row train.vs_torch "$model" torch 1.0
            ! [ -e "$work/tr.$model.torch_compiled" ] ||
                tr_row train.vs_torch_compiled "$model" torch_compiled 1.0
        fi
    done
}

# tr_gemm MODEL: the passes beside the products, in one process; the step from the runs before.
tr_gemm() {
    local out name step suffix=
    [ "$1" = big ] || suffix=.$1
    spare_begin
    spare_note
    # shellcheck disable=SC2086 # words
    out=$("$tr_program" gemm ${TR_SHAPE[$1]} "$tr_threads" 5) || exit 3
    step=$(median <"$work/tr.$1.belay")
    for name in fwd_bwd step; do
        # Model FLOP/s over the BLAS's FLOP/s.
        result "train.vs_gemm.$name$suffix" "$(jq -r --arg n $name --argjson step "$step" \
            '(if $n == "step" then $step else .pass_ms end) as $ms
            | (.model_flops / $ms) / (.gemm_flops / ([.tiled_ms, .threaded_ms] | min))' <<<"$out")" \
            ratio "$([ $name = step ] && echo 0.75 || echo 0.85)" higher \
            "$(jq -r --arg n $name --argjson step "$step" '"\(if $n == "step" then $step else .pass_ms end) ms; products by tiles \(.tiled_ms) ms, by OpenBLAS with threads \(.threaded_ms) ms"' <<<"$out")"
    done
}

tr_adamw() {
    local out
    spare_begin
    spare_note
    out=$("$tr_program" adamw "$tr_threads" "$((runs > 5 ? runs : 5))") || exit 3
    result adamw.vs_stream "$(jq -r '.adamw_gbs / ([.copy_gbs, .scale_gbs, .in_place_gbs] | max)' <<<"$out")" \
        ratio 0.8 higher \
        "$(jq -r '"GB/s: \(.adamw_gbs); memcpy \(.copy_gbs), scaled copy \(.scale_gbs), scaled in place \(.in_place_gbs)"' <<<"$out")"
}

# Two ranks with one thread each on two cores over twice one rank on one core: the same two lanes.
tr_dp() {
    local round one two
    if [ "$(nproc)" -lt 2 ]; then
        return
    fi
    spare_begin
    tr_job "$work/dp.yaml" small 2 24
    for ((round = 1; round <= TR_ROUNDS[small]; round++)); do
        spare_note
        one=$(tr_ours "$work/dp.yaml" 1 1 512 taskset -c 0 | median)
        two=$(tr_ours "$work/dp.yaml" 2 1 512 taskset -c 0,1 | median)
        awk -v a="$one" -v b="$two" 'BEGIN { print a / b / 2, a, b }' >>"$work/tr.dp"
    done
    result dp.efficiency "$(awk '{ print $1 }' "$work/tr.dp" | median)" ratio 0.90 higher \
        "$(awk '{ print $2 }' "$work/tr.dp" | median) ms a step of one rank on one core, $(awk '{ print $3 }' "$work/tr.dp" | median) ms of two on two"
}

bench_train() {
    local model peers=(belay)
    if [ -n "$llmc" ]; then
        tr_llmc_build
        peers+=(llmc llmc_blas)
    fi
    [ -z "$torch" ] || peers+=(torch torch_compiled)
    for model in "${models[@]}"; do
        mkdir -p "$work/$model"
        # shellcheck disable=SC2086 # words
        "$tr_program" files "$work/$model" ${TR_SHAPE[$model]} >/dev/null || exit 3
    done
    tr_peers "${peers[@]}"
    tr_rows
    for model in "${models[@]}"; do
        tr_gemm "$model"
        rm -f "$work/$model/gpt2_124M.bin"
    done
    tr_adamw
    tr_dp
    # shellcheck source=tests/bench/pipeline.sh
    . "$BL_ROOT/tests/bench/pipeline.sh"
    bench_train_pipeline
}
