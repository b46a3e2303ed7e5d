/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/stage.h"

#include <errno.h>
#include <stdlib.h>

#include "base/clock.h"

#define STAGE_RECEIVES 4u /* inputs that are asked for ahead */
#define STAGE_SENDS    4u /* outputs that may be under way */

#define EARLY_BYTES_OTHER (1u << 20) /* for whatever else is small */
#define EARLY_BYTES_FRAME 1024u      /* that keeping a message may cost beside its bytes */

#define TAG_FORWARD  1u
#define TAG_BACKWARD 2u

struct stage_message {
    kern_real *data; /* [stream_elems] */
    struct comm_request *request;
};

struct train_stage {
    struct train_stage_config config;
    uint64_t vstages;
    kern_real *memory; /* of all messages */
    uint64_t memory_bytes;
    struct stage_message receives[STAGE_RECEIVES], sends[STAGE_SENDS];
    uint64_t wait_ns, run_ns; /* of the last run */
    int32_t *tokens;          /* by set: [tokens], and as many targets */
};

/* One run of a schedule. */
struct stage_run {
    struct train_stage *stage;
    const struct train_pipeline *pipeline;
    const struct train_work *work;
    struct train_hooks hooks;
    struct comm *comm;
    uint64_t asked;                          /* operations whose input was asked for */
    uint64_t received, received_asked, sent; /* messages so far */
};

/* ---- life ---- */

static uint64_t stream_bytes(const struct train_stage_config *config)
{
    return config->stream_elems * config->kern->real_bytes;
}

uint64_t train_stage_bytes(const struct train_stage_config *config)
{
    uint64_t messages = config->grid.pp > 1 ? STAGE_RECEIVES + STAGE_SENDS : 0;
    return messages * stream_bytes(config);
}

uint64_t train_stage_token_bytes(const struct train_stage_config *config)
{
    return 2 * config->sets * config->tokens * sizeof(int32_t);
}

uint64_t train_stage_early_bytes(const struct train_stage_config *config)
{
    /* Activations that the stage before has sent wait for their backward there, and gradients that
     * the stage behind has sent are of what waits here: each at most the first stage's bound. */
    uint64_t bound = train_pipeline_bound(config->grid.pp, 0, config->chunks);
    uint64_t messages = config->grid.pp > 1 ? 2 * bound : 0;
    return EARLY_BYTES_OTHER + messages * (stream_bytes(config) + EARLY_BYTES_FRAME);
}

int train_stage_new(struct train_stage **ret, const struct train_stage_config *config,
                    struct bl_errmsg *msg)
{
    struct train_stage *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return bl_err_code(msg, -ENOMEM, "stage");
    }
    s->config = *config;
    s->vstages = (uint64_t)config->grid.pp * config->chunks;
    s->tokens = calloc(2 * (size_t)config->sets * config->tokens, sizeof *s->tokens);
    if (config->grid.pp > 1) {
        s->memory_bytes = train_stage_bytes(config);
        s->memory = config->kern->ops->alloc(config->kern, s->memory_bytes);
    }
    if (s->tokens == NULL || (config->grid.pp > 1 && s->memory == NULL)) {
        train_stage_free(s);
        return bl_err_code(msg, -ENOMEM, "%llu bytes for messages between stages",
                           (unsigned long long)train_stage_bytes(config));
    }
    for (uint32_t i = 0; s->memory != NULL && i < STAGE_RECEIVES + STAGE_SENDS; i++) {
        struct stage_message *m =
            i < STAGE_RECEIVES ? &s->receives[i] : &s->sends[i - STAGE_RECEIVES];
        m->data = kern_real_at(config->kern, s->memory, i * config->stream_elems);
    }
    *ret = s;
    return 0;
}

void train_stage_free(struct train_stage *stage)
{
    if (stage == NULL) {
        return;
    }
    if (stage->memory != NULL) {
        stage->config.kern->ops->free(stage->config.kern, stage->memory, stage->memory_bytes);
    }
    free(stage->tokens);
    free(stage);
}

/* ---- messages ---- */

static uint64_t vstage_of(const struct train_stage *s, const struct train_pipe_op *op)
{
    return (uint64_t)op->chunk * s->config.grid.pp + s->config.grid.p;
}

/* Virtual stage that the operation's input comes from, or -1. */
static int64_t source_of(const struct train_stage *s, const struct train_pipe_op *op)
{
    int64_t v = (int64_t)vstage_of(s, op);
    if (op->backward) {
        return v + 1 < (int64_t)s->vstages ? v + 1 : -1;
    }
    return v - 1;
}

/* Virtual stage that its output goes to, or -1. */
static int64_t target_of(const struct train_stage *s, const struct train_pipe_op *op)
{
    int64_t v = (int64_t)vstage_of(s, op);
    if (op->backward) {
        return v - 1;
    }
    return v + 1 < (int64_t)s->vstages ? v + 1 : -1;
}

static uint32_t rank_of(const struct train_stage *s, int64_t vstage)
{
    const struct train_grid *g = &s->config.grid;
    return train_grid_at(g, g->t, (uint32_t)(vstage % g->pp), g->d);
}

static uint64_t tag_of(const struct train_pipe_op *op, uint64_t sender)
{
    return (uint64_t)(op->backward ? TAG_BACKWARD : TAG_FORWARD) << 48 | sender << 32 | op->micro;
}

/* Asks for inputs of the operations to come while there are buffers. */
static int ask_ahead(struct stage_run *run, struct bl_errmsg *msg)
{
    struct train_stage *s = run->stage;
    while (run->asked < run->pipeline->op_count &&
           run->received_asked - run->received < STAGE_RECEIVES) {
        const struct train_pipe_op *op = &run->pipeline->ops[run->asked++];
        int64_t from = source_of(s, op);
        if (from < 0) {
            continue;
        }
        struct stage_message *m = &s->receives[run->received_asked++ % STAGE_RECEIVES];
        int rc = comm_recv_start(run->comm, rank_of(s, from), tag_of(op, (uint64_t)from), m->data,
                                 stream_bytes(&s->config), &m->request, msg);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int await(struct stage_run *run, struct stage_message *m, struct bl_errmsg *msg)
{
    struct comm_request *request = m->request;
    m->request = NULL;
    if (comm_is_done(request)) {
        return comm_wait(run->comm, request, msg);
    }
    uint64_t before = bl_now_ns();
    int rc = comm_wait(run->comm, request, msg);
    run->stage->wait_ns += bl_now_ns() - before;
    return rc;
}

static int receive(struct stage_run *run, const struct train_pipe_op *op, const kern_real **ret,
                   struct bl_errmsg *msg)
{
    *ret = NULL;
    if (source_of(run->stage, op) < 0) {
        return 0;
    }
    struct stage_message *m = &run->stage->receives[run->received % STAGE_RECEIVES];
    *ret = m->data; /* stays until `received` counts it */
    return await(run, m, msg);
}

/* A buffer for the operation's output, or NULL where it goes nowhere. */
static int take_output(struct stage_run *run, const struct train_pipe_op *op, kern_real **ret,
                       struct bl_errmsg *msg)
{
    *ret = NULL;
    if (target_of(run->stage, op) < 0) {
        return 0;
    }
    struct stage_message *m = &run->stage->sends[run->sent % STAGE_SENDS];
    *ret = m->data;
    return m->request == NULL ? 0 : await(run, m, msg);
}

/* Hands messages over to neighbours that wait for them, the oldest first. */
static void push_sends(struct stage_run *run)
{
    uint64_t first = run->sent < STAGE_SENDS ? 0 : run->sent - STAGE_SENDS;
    for (uint64_t i = first; i < run->sent; i++) {
        struct comm_request *request = run->stage->sends[i % STAGE_SENDS].request;
        if (request != NULL && !comm_is_done(request)) {
            comm_push(run->comm, request);
        }
    }
}

static int send_output(struct stage_run *run, const struct train_pipe_op *op, struct bl_errmsg *msg)
{
    struct train_stage *s = run->stage;
    int64_t to = target_of(s, op);
    if (to < 0) {
        return 0;
    }
    struct stage_message *m = &s->sends[run->sent++ % STAGE_SENDS];
    int rc = comm_send_start(run->comm, rank_of(s, to), tag_of(op, vstage_of(s, op)), m->data,
                             stream_bytes(&s->config), &m->request, msg);
    if (rc == 0) {
        push_sends(run);
    }
    return rc;
}

static int poke(void *ctx, struct bl_errmsg *msg)
{
    struct stage_run *run = ctx;
    int rc = run->work->poke == NULL ? 0 : run->work->poke(run->work->ctx, msg);
    if (rc != 0 || run->comm == NULL) {
        return rc;
    }
    comm_poke(run->comm);
    push_sends(run);
    return comm_is_aborted(run->comm) ? bl_err_code(msg, BL_EABORTED, "between layers") : 0;
}

/* ---- operations ---- */

/* The passes call the hooks of the work; between units the run looks after its messages. */
static int run_weights(void *ctx, uint32_t unit, int backward, const kern_real **ret,
                       struct bl_errmsg *msg)
{
    const struct train_hooks *h = &((struct stage_run *)ctx)->work->hooks;
    return h->weights(h->ctx, unit, backward, ret, msg);
}

static int run_grads(void *ctx, uint32_t unit, float **ret, struct bl_errmsg *msg)
{
    const struct train_hooks *h = &((struct stage_run *)ctx)->work->hooks;
    return h->grads(h->ctx, unit, ret, msg);
}

static int run_grads_done(void *ctx, uint32_t unit, struct bl_errmsg *msg)
{
    const struct train_hooks *h = &((struct stage_run *)ctx)->work->hooks;
    return h->grads_done(h->ctx, unit, msg);
}

static int pass(struct stage_run *run, const struct train_pipe_op *op, const kern_real *input,
                kern_real *output, struct bl_errmsg *msg)
{
    struct train_stage *s = run->stage;
    uint64_t v = vstage_of(s, op), tokens_at = 2 * op->set * s->config.tokens, counted;
    int32_t *tokens = s->tokens + tokens_at, *targets = tokens + s->config.tokens;
    struct train_flow flow = {.chunk = op->chunk, .set = op->set};
    flow.eval = run->pipeline->op_count == (uint64_t)run->pipeline->micros * s->config.chunks;
    int rc = 0;
    if (!op->backward && (v == 0 || v + 1 == s->vstages)) {
        rc = run->work->read(run->work->ctx, op->micro, (uint32_t)v, tokens, targets, msg);
    }
    flow.tokens = v == 0 ? tokens : NULL;
    flow.targets = v + 1 == s->vstages ? targets : NULL;
    if (rc == 0) {
        rc = run->work->begin(run->work->ctx, op, &flow, msg);
    }
    if (rc != 0) {
        return rc;
    }
    if (op->backward) {
        flow.dout = input;
        flow.din = output;
        return train_model_backward(s->config.model, &flow, &run->hooks, msg);
    }
    flow.in = input;
    flow.out = output;
    return train_model_forward(s->config.model, &flow, &run->hooks, &counted, msg);
}

static int operate(struct stage_run *run, const struct train_pipe_op *op, struct bl_errmsg *msg)
{
    const kern_real *input;
    kern_real *output;
    int rc = ask_ahead(run, msg);
    if (rc == 0) {
        rc = receive(run, op, &input, msg);
    }
    if (rc == 0) {
        rc = take_output(run, op, &output, msg);
    }
    if (rc == 0) {
        rc = pass(run, op, input, output, msg);
    }
    if (rc == 0) {
        run->received += input != NULL;
        rc = send_output(run, op, msg);
    }
    return rc == 0 ? run->work->end(run->work->ctx, op, msg) : rc;
}

int train_stage_run(struct train_stage *stage, const struct train_pipeline *pipeline,
                    const struct train_work *work, struct comm *comm, struct bl_errmsg *msg)
{
    struct stage_run run = {.stage = stage, .pipeline = pipeline, .work = work, .comm = comm};
    run.hooks = (struct train_hooks){.ctx = &run,
                                     .weights = run_weights,
                                     .grads = run_grads,
                                     .grads_done = run_grads_done,
                                     .poke = poke,
                                     .tp = work->hooks.tp};
    BL_ASSERT(pipeline->sets <= stage->config.sets && pipeline->chunks == stage->config.chunks);
    uint64_t before = bl_now_ns();
    int rc = 0;
    stage->wait_ns = stage->run_ns = 0;
    for (uint32_t i = 0; i < STAGE_SENDS; i++) {
        stage->sends[i].request = NULL; /* those of a run that failed went with its communicator */
    }
    for (uint64_t i = 0; rc == 0 && i < pipeline->op_count; i++) {
        rc = operate(&run, &pipeline->ops[i], msg);
    }
    for (uint32_t i = 0; rc == 0 && i < STAGE_SENDS; i++) {
        rc = stage->sends[i].request == NULL ? 0 : await(&run, &stage->sends[i], msg);
    }
    stage->run_ns = bl_now_ns() - before;
    return rc;
}

double train_stage_idle(const struct train_stage *stage)
{
    return stage->run_ns == 0 ? 0 : (double)stage->wait_ns / (double)stage->run_ns;
}
