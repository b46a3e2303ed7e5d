/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stand-in of CUDA's runtime: order within and between streams, errors and when they are told,
 * faults on demand, the limits of the device; and of cuBLASLt: products and the list of algorithms.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cublasLt.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpusim/gpusim_control.h"
#include "tests/gpusim/self_kernels.h"

#define ok(call) assert_int_equal(call, cudaSuccess)

/* ---- streams ---- */

/* A gate that an operation of a stream waits at. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int is_open;
};

static void gate_init(struct gate *g)
{
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->changed, NULL);
    g->is_open = 0;
}

static void gate_wait(void *arg)
{
    struct gate *g = arg;
    pthread_mutex_lock(&g->lock);
    while (!g->is_open) {
        pthread_cond_wait(&g->changed, &g->lock);
    }
    pthread_mutex_unlock(&g->lock);
}

static void gate_open(struct gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->is_open = 1;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void test_runtime_copies_read_the_host_when_their_turn_comes(void **state)
{
    (void)state;
    cudaStream_t stream;
    struct gate gate;
    int host = 1, back = 0, *x = NULL;
    gate_init(&gate);
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ok(cudaMalloc((void **)&x, sizeof *x));
    ok(cudaLaunchHostFunc(stream, gate_wait, &gate));
    ok(cudaMemcpyAsync(x, &host, sizeof host, cudaMemcpyHostToDevice, stream));
    ok(cudaMemcpyAsync(&back, x, sizeof host, cudaMemcpyDeviceToHost, stream));
    assert_int_equal(cudaStreamQuery(stream), cudaErrorNotReady);
    host = 2;
    gate_open(&gate);
    ok(cudaStreamSynchronize(stream));
    ok(cudaStreamQuery(stream));
    assert_int_equal(back, 2);
    ok(cudaFree(x));
    ok(cudaStreamDestroy(stream));
}

static void test_runtime_an_event_orders_two_streams(void **state)
{
    (void)state;
    cudaStream_t a, b;
    cudaEvent_t event;
    struct gate gate;
    int one = 1, two = 2, back = 0, *x = NULL;
    gate_init(&gate);
    ok(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    ok(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    ok(cudaMalloc((void **)&x, sizeof *x));
    /* Nothing was recorded: waiting for it is waiting for nothing. */
    ok(cudaStreamWaitEvent(b, event, 0));
    ok(cudaMemcpyAsync(x, &two, sizeof two, cudaMemcpyHostToDevice, b));
    ok(cudaStreamSynchronize(b));
    ok(cudaEventQuery(event));
    ok(cudaLaunchHostFunc(a, gate_wait, &gate));
    ok(cudaMemcpyAsync(x, &one, sizeof one, cudaMemcpyHostToDevice, a));
    ok(cudaEventRecord(event, a));
    ok(cudaStreamWaitEvent(b, event, 0));
    ok(cudaMemcpyAsync(&back, x, sizeof back, cudaMemcpyDeviceToHost, b));
    assert_int_equal(cudaEventQuery(event), cudaErrorNotReady);
    assert_int_equal(cudaStreamQuery(b), cudaErrorNotReady);
    gate_open(&gate);
    ok(cudaStreamSynchronize(b));
    ok(cudaEventSynchronize(event));
    assert_int_equal(back, 1);
    ok(cudaEventDestroy(event));
    ok(cudaFree(x));
    ok(cudaStreamDestroy(a));
    ok(cudaStreamDestroy(b));
}

static void test_runtime_stream_zero_waits_for_blocking_streams(void **state)
{
    (void)state;
    cudaStream_t blocking;
    struct gate gate;
    int one = 1, back = 0, *x = NULL;
    gate_init(&gate);
    ok(cudaStreamCreate(&blocking));
    ok(cudaMalloc((void **)&x, sizeof *x));
    ok(cudaLaunchHostFunc(blocking, gate_wait, &gate));
    ok(cudaMemcpyAsync(x, &one, sizeof one, cudaMemcpyHostToDevice, blocking));
    ok(cudaMemcpyAsync(&back, x, sizeof back, cudaMemcpyDeviceToHost, NULL));
    assert_int_equal(cudaStreamQuery(NULL), cudaErrorNotReady);
    gate_open(&gate);
    ok(cudaStreamSynchronize(NULL));
    assert_int_equal(back, 1);
    ok(cudaFree(x));
    ok(cudaStreamDestroy(blocking));
}

static void test_runtime_destroying_a_stream_lets_it_finish(void **state)
{
    (void)state;
    cudaStream_t stream;
    cudaEvent_t event;
    struct gate gate;
    gate_init(&gate);
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ok(cudaEventCreate(&event));
    ok(cudaLaunchHostFunc(stream, gate_wait, &gate));
    ok(cudaEventRecord(event, stream));
    ok(cudaStreamDestroy(stream));
    assert_int_equal(cudaEventQuery(event), cudaErrorNotReady);
    gate_open(&gate);
    ok(cudaEventSynchronize(event));
    ok(cudaEventDestroy(event));
}

/* ---- memory ---- */

static void test_runtime_memory_is_limited_and_counted(void **state)
{
    (void)state;
    size_t before, total, now;
    void *p = NULL;
    ok(cudaMemGetInfo(&before, &total));
    assert_true(total == (size_t)64 << 20);
    assert_int_equal(cudaMalloc(&p, before + 1), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    ok(cudaGetLastError());
    ok(cudaMalloc(&p, (size_t)32 << 20));
    ok(cudaMemGetInfo(&now, &total));
    assert_true(before - now == (size_t)32 << 20);
    ok(cudaFree(p));
    ok(cudaMemGetInfo(&now, &total));
    assert_true(now == before);
}

static void test_runtime_host_memory_is_registered_once(void **state)
{
    (void)state;
    static char memory[8192];
    ok(cudaHostRegister(memory, sizeof memory, 0));
    assert_int_equal(cudaHostRegister(memory + 4096, 1, 0), cudaErrorHostMemoryAlreadyRegistered);
    ok(cudaHostUnregister(memory));
    assert_int_equal(cudaHostUnregister(memory), cudaErrorHostMemoryNotRegistered);
    cudaGetLastError();
}

static void test_runtime_copies_of_the_wrong_kind_are_refused(void **state)
{
    (void)state;
    int host = 0, *x = NULL;
    ok(cudaMalloc((void **)&x, 4 * sizeof *x));
    assert_int_equal(cudaMemcpy(&host, x, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(x + 3, &host, 8, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    assert_int_equal(cudaMemset(&host, 0, 4), cudaErrorInvalidValue);
    cudaGetLastError();
    ok(cudaFree(x));
}

/* ---- faults ---- */

static void test_runtime_a_late_error_stays(void **state)
{
    (void)state;
    float *x = NULL;
    ok(cudaMalloc((void **)&x, 256));
    gpusim_fault_set("late@2");
    self_scale(x, 1, 64, NULL);
    ok(cudaGetLastError());
    ok(cudaStreamSynchronize(NULL));
    self_scale(x, 1, 64, NULL);
    assert_int_equal(cudaStreamSynchronize(NULL), cudaErrorIllegalAddress);
    assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
    assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
    assert_int_equal(cudaMemset(x, 0, 256), cudaErrorIllegalAddress);
    gpusim_revive();
    ok(cudaFree(x));
}

static void test_runtime_a_refused_launch_is_told_once(void **state)
{
    (void)state;
    gpusim_fault_set("launch@1,malloc@2");
    self_empty(1, 32, 0, NULL);
    assert_int_equal(cudaGetLastError(), cudaErrorLaunchOutOfResources);
    self_empty(1, 32, 0, NULL);
    ok(cudaGetLastError());
    void *p, *q;
    ok(cudaMalloc(&p, 1));
    assert_int_equal(cudaMalloc(&q, 1), cudaErrorMemoryAllocation);
    cudaGetLastError();
    ok(cudaFree(p));
    gpusim_fault_set(NULL);
}

static void test_runtime_a_stuck_stream_stays_until_freed(void **state)
{
    (void)state;
    cudaStream_t stuck, other;
    ok(cudaStreamCreateWithFlags(&stuck, cudaStreamNonBlocking));
    ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    gpusim_fault_set("stuck@1");
    self_empty(1, 32, 0, stuck);
    self_empty(1, 32, 0, other);
    ok(cudaStreamSynchronize(other));
    assert_int_equal(cudaStreamQuery(stuck), cudaErrorNotReady);
    gpusim_unstick();
    ok(cudaStreamSynchronize(stuck));
    ok(cudaStreamDestroy(stuck));
    ok(cudaStreamDestroy(other));
}

/* ---- devices ---- */

static void test_runtime_visible_devices_are_counted(void **state)
{
    (void)state;
    int count;
    char bus[32];
    setenv("CUDA_VISIBLE_DEVICES", "3,1", 1);
    ok(cudaGetDeviceCount(&count));
    assert_int_equal(count, 2);
    ok(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
    assert_string_equal(bus, "0000:13:00.0");
    assert_int_equal(cudaSetDevice(2), cudaErrorInvalidDevice);
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    assert_int_equal(cudaGetDeviceCount(&count), cudaErrorNoDevice);
    setenv("GPUSIM_DRIVER", "12040", 1);
    assert_int_equal(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
    unsetenv("GPUSIM_DRIVER");
    unsetenv("CUDA_VISIBLE_DEVICES");
    cudaGetLastError();
}

static void guarded_read(void)
{
    volatile int *x = NULL;
    setenv("GPUSIM_GUARD", "1", 1);
    if (cudaMalloc((void **)&x, 4) != cudaSuccess || cudaMemset((void *)x, 0, 4) != cudaSuccess ||
        cudaFree(NULL) != cudaSuccess) {
        _exit(0);
    }
    _exit(x[0] == 12345);
}

static void test_runtime_a_guarded_device_kills_the_host_that_reads_it(void **state)
{
    (void)state;
    int status;
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        assert_non_null(freopen("/dev/null", "w", stderr));
        signal(SIGSEGV, SIG_DFL); /* cmocka would go on with the next test */
        guarded_read();
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_false(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- products ---- */

enum { M = 70, N = 9, K = 33 };

struct lt {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulHeuristicResult_t list[16];
    int count;
};

/* d[N,M] = b[N,K] a[M,K]^T, row-major: as y = x w^T. */
static void lt_open(struct lt *lt, cudaDataType_t type, uint32_t reductions)
{
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtMatmulPreference_t preference;
    uint64_t workspace = 4096;
    assert_int_equal(cublasLtCreate(&lt->handle), 0);
    assert_int_equal(cublasLtMatmulDescCreate(&lt->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), 0);
    cublasLtMatmulDescSetAttribute(lt->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                   sizeof transposed);
    assert_int_equal(cublasLtMatrixLayoutCreate(&lt->a, type, K, M, K), 0);
    assert_int_equal(cublasLtMatrixLayoutCreate(&lt->b, type, K, N, K), 0);
    assert_int_equal(cublasLtMatrixLayoutCreate(&lt->d, type, M, N, M), 0);
    assert_int_equal(cublasLtMatmulPreferenceCreate(&preference), 0);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &workspace, sizeof workspace);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                         &reductions, sizeof reductions);
    assert_int_equal(cublasLtMatmulAlgoGetHeuristic(lt->handle, lt->desc, lt->a, lt->b, lt->d,
                                                    lt->d, preference, 16, lt->list, &lt->count),
                     0);
    cublasLtMatmulPreferenceDestroy(preference);
}

static void lt_close(struct lt *lt)
{
    cublasLtMatrixLayoutDestroy(lt->a);
    cublasLtMatrixLayoutDestroy(lt->b);
    cublasLtMatrixLayoutDestroy(lt->d);
    cublasLtMatmulDescDestroy(lt->desc);
    cublasLtDestroy(lt->handle);
}

static uint32_t split_of(const struct lt *lt, int i)
{
    uint32_t split = 0;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(&lt->list[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split,
                                         sizeof split, &written);
    return split;
}

static void test_runtime_products_add_in_order_and_the_bias_once(void **state)
{
    (void)state;
    struct lt lt;
    float *a, *b, *d, *bias, alpha = 1, beta = 1;
    int i = 0;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    lt_open(&lt, CUDA_R_32F, CUBLASLT_REDUCTION_SCHEME_NONE);
    while (split_of(&lt, i) != 1 || lt.list[i].state != 0 || lt.list[i].workspaceSize > 4096) {
        i++;
        assert_true(i < lt.count);
    }
    ok(cudaMalloc((void **)&a, M * K * 4));
    ok(cudaMalloc((void **)&b, N * K * 4));
    ok(cudaMalloc((void **)&d, M * N * 4));
    ok(cudaMalloc((void **)&bias, M * 4));
    for (int j = 0; j < M * K; j++) {
        a[j] = sinf((float)j);
        b[j % (N * K)] = cosf((float)(j % (N * K)));
        d[j % (M * N)] = (float)(j % (M * N) % 7);
        bias[j % M] = (float)(j % M);
    }
    cublasLtMatmulDescSetAttribute(lt.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                   sizeof epilogue);
    cublasLtMatmulDescSetAttribute(lt.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    assert_int_equal(cublasLtMatmul(lt.handle, lt.desc, &alpha, a, lt.a, b, lt.b, &beta, d, lt.d, d,
                                    lt.d, &lt.list[i].algo, NULL, 0, NULL),
                     0);
    ok(cudaDeviceSynchronize());
    for (int n = 0; n < N; n++) {
        for (int m = 0; m < M; m++) {
            float sum = 0;
            for (int k = 0; k < K; k++) {
                sum += a[m * K + k] * b[n * K + k];
            }
            assert_true(d[n * M + m] == sum + (float)((n * M + m) % 7) + (float)m);
        }
    }
    lt_close(&lt);
    cudaFree(a);
    cudaFree(b);
    cudaFree(d);
    cudaFree(bias);
}

static void test_runtime_algorithms_begin_with_split_sums(void **state)
{
    (void)state;
    struct lt lt;
    lt_open(&lt, CUDA_R_16BF, CUBLASLT_REDUCTION_SCHEME_MASK);
    assert_int_equal(split_of(&lt, 0), 4);
    lt_close(&lt);
    lt_open(&lt, CUDA_R_16BF, CUBLASLT_REDUCTION_SCHEME_NONE);
    /* The library of the stand-in does not even keep to what is preferred. */
    assert_int_equal(split_of(&lt, 0), 2);
    assert_true(lt.count >= 4);
    lt_close(&lt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_runtime_a_guarded_device_kills_the_host_that_reads_it),
        cmocka_unit_test(test_runtime_copies_read_the_host_when_their_turn_comes),
        cmocka_unit_test(test_runtime_an_event_orders_two_streams),
        cmocka_unit_test(test_runtime_stream_zero_waits_for_blocking_streams),
        cmocka_unit_test(test_runtime_destroying_a_stream_lets_it_finish),
        cmocka_unit_test(test_runtime_memory_is_limited_and_counted),
        cmocka_unit_test(test_runtime_host_memory_is_registered_once),
        cmocka_unit_test(test_runtime_copies_of_the_wrong_kind_are_refused),
        cmocka_unit_test(test_runtime_a_late_error_stays),
        cmocka_unit_test(test_runtime_a_refused_launch_is_told_once),
        cmocka_unit_test(test_runtime_a_stuck_stream_stays_until_freed),
        cmocka_unit_test(test_runtime_visible_devices_are_counted),
        cmocka_unit_test(test_runtime_products_add_in_order_and_the_bias_once),
        cmocka_unit_test(test_runtime_algorithms_begin_with_split_sums),
    };
    setenv("GPUSIM_MEMORY_MIB", "64", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
