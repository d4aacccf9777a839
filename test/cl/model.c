/*
 * model: a random OpenCL program that carries a model of itself on the processor. Every byte that it gets back from the
 * device is compared with the model, so it needs no undisturbed run to be judged by: whatever is done to it from outside, a
 * line that begins with BAD is a wrong result.
 *
 *   model [--seconds N] [--seed N] [--threads N] [--kib N] [--no-images]
 *
 * It ends after that time, or when its standard input ends. Each thread has objects, queues and a model of its own in one
 * context. It prints "ops N" once a second, and "done ops N errors N bad N" in the end; the exit status is 1 if anything was wrong.
 */
#include "clx.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

static const char *source =
    "__kernel void scramble(__global uint *a, uint k, uint n) { uint i = get_global_id(0); if (i < n) a[i] = a[i] * 2654435761u + k + i; }\n"
    "__kernel void addto(__global uint *a, __global const uint *b, uint n) { uint i = get_global_id(0); if (i < n) a[i] += b[i] ^ (a[i] >> 3); }\n"
    "__kernel void turnover(__global uint *a, __local uint *l, uint n) {\n"
    "  uint t = get_local_id(0), w = get_local_size(0), o = get_group_id(0) * w + t;\n"
    "  l[t] = o < n ? a[o] : 0; barrier(CLK_LOCAL_MEM_FENCE);\n"
    "  if ((get_group_id(0) + 1) * w <= n) a[o] = l[w - 1 - t] + 1; }\n"
    "__kernel void tally(__global const uint *a, __global uint *c, uint n) { uint i = get_global_id(0); if (i < n) atomic_add(&c[a[i] & 15u], 1u); }\n"
    "__kernel void slide(read_only image2d_t in, write_only image2d_t out, sampler_t s, int dx) {\n"
    "  int2 p = (int2)(get_global_id(0), get_global_id(1)); uint4 v = read_imageui(in, s, p + (int2)(dx, 0));\n"
    "  write_imageui(out, p, v + (uint4)(1, 2, 3, p.x)); }\n";
static const char *small_source = "__kernel void scale(__global uint *a, uint n) { uint i = get_global_id(0); if (i < n) a[i] = a[i] * M + A; }\n";

enum { BUFFERS = 8, IMAGES = 2, WIDTH = 48, HEIGHT = 40, PIXELS = WIDTH * HEIGHT, LATER = 24, LOCAL = 32 };

static cl_device_id device;
static cl_context context;
static _Atomic long ops, errors, bad;
static _Atomic int stop;
static bool images = true;
static size_t most; /* elements of a buffer */

struct buffer {
    cl_mem mem;
    uint32_t *model, *host; /* host: of CL_MEM_USE_HOST_PTR */
    size_t n;
};

/* later is a command that was not waited for: what it reads is compared, what it writes from is kept, until it is over. */
struct later {
    cl_event event;
    uint32_t *data, *want;
    size_t n, from;
    const struct buffer *b; /* that was read, from an element on; NULL: another object */
    const char *what;
};

struct mapping {
    struct buffer *b;
    cl_mem through; /* the buffer, or a part of it */
    uint32_t *p;
    size_t from, n;
    bool write;
    double until;
};

struct worker {
    pthread_t thread;
    uint64_t state;
    int number;
    cl_command_queue q, any; /* in order, out of order */
    cl_program program;
    cl_kernel mix, add, turn, count, shift;
    cl_sampler sampler;
    struct buffer b[BUFFERS];
    struct { cl_mem mem; uint32_t *model; } image[IMAGES];
    struct later later[LATER];
    int laters;
    cl_event gate; /* commands wait for it */
    double gate_until;
    struct mapping map;
    uint32_t *scratch;
    unsigned doubtful; /* buffers of which a part was wrong */
};

static uint32_t rnd(struct worker *w) {
    w->state = w->state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(w->state >> 33);
}
static size_t below(struct worker *w, size_t n) { return rnd(w) % n; }

#define OK(call)                                                                                                                 \
    do {                                                                                                                         \
        cl_int ok_ = (call);                                                                                                     \
        if (ok_) {                                                                                                               \
            printf("ERROR %d of %s, line %d\n", ok_, #call, __LINE__);                                                           \
            fflush(stdout);                                                                                                      \
            if (++errors > 20)                                                                                                   \
                exit(2);                                                                                                         \
        }                                                                                                                        \
    } while (0)

/* wrong says what is wrong, and when in the time of the daemon's log. */
static void wrong(struct worker *w, const char *what, const char *how) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    bad++;
    printf("BAD %s: thread %d, operation %ld, at %02ld:%02ld:%02ld.%03ld: %s\n", what, w->number, (long)ops, t.tv_sec / 3600 % 24, t.tv_sec / 60 % 60, t.tv_sec % 60,
           t.tv_nsec / 1000000, how);
    fflush(stdout);
}

/* same compares what was read of a buffer from an element on, or of another object (NULL), and has the model follow what is
 * there, so that each fault is told once. */
static void same(struct worker *w, const char *what, const struct buffer *b, size_t from, const uint32_t *got, uint32_t *want, size_t n) {
    char how[300], of[60] = "";
    size_t first = n, last = 0, faults = 0, zeros = 0;
    if (!memcmp(got, want, n * 4))
        return;
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i]) {
            first = faults++ ? first : i;
            last = i;
            zeros += !got[i];
        }
    if (b) {
        snprintf(of, sizeof of, ", which begins at %zu of the %zu of buffer %d", from, b->n, (int)(b - w->b));
        w->doubtful |= 1u << (b - w->b);
    }
    snprintf(how, sizeof how, "element %zu of %zu is %#x, not %#x (%zu are wrong, up to element %zu, and %zu of them are 0)%s", first, n, got[first], want[first], faults, last,
             zeros, of);
    wrong(w, what, how);
    memcpy(want, got, n * 4);
}

static uint32_t *copy_of(const uint32_t *p, size_t n) {
    uint32_t *c = malloc(n * 4 + 4);
    CLX_CHECK(c, "no memory");
    return memcpy(c, p, n * 4);
}

static void settle_first(struct worker *w) {
    struct later l = w->later[0];
    memmove(w->later, w->later + 1, (size_t)--w->laters * sizeof l);
    OK(clWaitForEvents(1, &l.event));
    cl_int status = 0;
    OK(clGetEventInfo(l.event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL));
    if (status != CL_COMPLETE) {
        char how[40];
        snprintf(how, sizeof how, "it is %d, not CL_COMPLETE", status);
        wrong(w, "status of a command that was waited for", how);
    }
    if (l.want)
        same(w, l.what, l.b, l.from, l.data, l.want, l.n);
    free(l.data);
    free(l.want);
    OK(clReleaseEvent(l.event));
}

static void open_gate(struct worker *w) {
    if (!w->gate)
        return;
    OK(clSetUserEventStatus(w->gate, CL_COMPLETE));
    OK(clReleaseEvent(w->gate));
    w->gate = NULL;
}

static void settle(struct worker *w) {
    open_gate(w);
    while (w->laters)
        settle_first(w);
}

/* keep has the worker look after a command's memory; data of a read comes with what it must be. */
static void keep(struct worker *w, cl_event e, uint32_t *data, uint32_t *want, size_t n, const char *what) {
    if (w->laters == LATER) {
        open_gate(w);
        settle_first(w);
    }
    w->later[w->laters++] = (struct later){.event = e, .data = data, .want = want, .n = n, .what = what};
}

static void make(struct worker *w, struct buffer *b) {
    static const cl_mem_flags flags[] = {CL_MEM_READ_WRITE, CL_MEM_COPY_HOST_PTR, CL_MEM_ALLOC_HOST_PTR, CL_MEM_ALLOC_HOST_PTR | CL_MEM_COPY_HOST_PTR, CL_MEM_USE_HOST_PTR};
    cl_int e;
    b->n = rnd(w) % 3 ? 1 + below(w, most / 16) : most / 2 + below(w, most / 2);
    b->model = malloc(b->n * 4 + 4);
    CLX_CHECK(b->model, "no memory");
    for (size_t i = 0; i < b->n; i++)
        b->model[i] = rnd(w);
    cl_mem_flags f = flags[below(w, 5)];
    b->host = NULL;
    if (f & CL_MEM_USE_HOST_PTR)
        b->host = copy_of(b->model, b->n);
    b->mem = clCreateBuffer(context, f, b->n * 4, b->host ? b->host : f & CL_MEM_COPY_HOST_PTR ? b->model : NULL, &e);
    OK(e);
    if (!b->host && !(f & CL_MEM_COPY_HOST_PTR)) {
        uint32_t *src = copy_of(b->model, b->n);
        cl_event ev = NULL;
        OK(clEnqueueWriteBuffer(w->q, b->mem, CL_FALSE, 0, b->n * 4, src, 0, NULL, &ev));
        keep(w, ev, src, NULL, 0, "");
    }
}

static void launch(struct worker *w, cl_command_queue q, cl_kernel k, size_t n, size_t local, cl_uint nw, const cl_event *wait, cl_event *e) {
    size_t g = (n + LOCAL - 1) / LOCAL * LOCAL;
    (void)w;
    OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &g, local ? &local : NULL, nw, wait, e));
}

static void mix_model(uint32_t *m, size_t n, uint32_t k) {
    for (size_t i = 0; i < n; i++)
        m[i] = m[i] * 2654435761u + k + (uint32_t)i;
}

static void mix(struct worker *w, cl_command_queue q, cl_mem mem, uint32_t *model, size_t n, cl_uint nw, const cl_event *wait, cl_event *e) {
    cl_uint k = rnd(w), c = (cl_uint)n;
    OK(clSetKernelArg(w->mix, 0, sizeof mem, &mem));
    OK(clSetKernelArg(w->mix, 1, sizeof k, &k));
    OK(clSetKernelArg(w->mix, 2, sizeof c, &c));
    launch(w, q, w->mix, n, 0, nw, wait, e);
    mix_model(model, n, k);
}

static void read_whole(struct worker *w, struct buffer *b) {
    OK(clEnqueueReadBuffer(w->q, b->mem, CL_TRUE, 0, b->n * 4, w->scratch, 0, NULL, NULL));
    same(w, "blocking read", b, 0, w->scratch, b->model, b->n);
    w->doubtful &= ~(1u << (b - w->b));
}

/* ---- operations. a and c are buffers that are not mapped. */

static void op_add(struct worker *w, struct buffer *a, struct buffer *c) {
    if (a == c)
        return;
    cl_uint n = (cl_uint)(a->n < c->n ? a->n : c->n);
    OK(clSetKernelArg(w->add, 0, sizeof a->mem, &a->mem));
    OK(clSetKernelArg(w->add, 1, sizeof c->mem, &c->mem));
    OK(clSetKernelArg(w->add, 2, sizeof n, &n));
    launch(w, w->q, w->add, n, 0, 0, NULL, NULL);
    for (size_t i = 0; i < n; i++)
        a->model[i] += c->model[i] ^ (a->model[i] >> 3);
}

static void op_turn(struct worker *w, struct buffer *a) {
    cl_uint n = (cl_uint)a->n;
    OK(clSetKernelArg(w->turn, 0, sizeof a->mem, &a->mem));
    OK(clSetKernelArg(w->turn, 1, LOCAL * 4, NULL));
    OK(clSetKernelArg(w->turn, 2, sizeof n, &n));
    launch(w, w->q, w->turn, n, LOCAL, 0, NULL, NULL);
    for (size_t g = 0; (g + 1) * LOCAL <= n; g++) {
        uint32_t t[LOCAL];
        for (int i = 0; i < LOCAL; i++)
            t[i] = a->model[g * LOCAL + LOCAL - 1 - (size_t)i] + 1;
        memcpy(a->model + g * LOCAL, t, sizeof t);
    }
}

/* A buffer is made, used and released at once; what the kernel counts is read without a wait. */
static void op_count(struct worker *w, struct buffer *a) {
    uint32_t zero[16] = {0}, want[16] = {0};
    cl_int e;
    cl_mem c = clCreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, sizeof zero, zero, &e);
    OK(e);
    cl_uint n = (cl_uint)a->n;
    OK(clSetKernelArg(w->count, 0, sizeof a->mem, &a->mem));
    OK(clSetKernelArg(w->count, 1, sizeof c, &c));
    OK(clSetKernelArg(w->count, 2, sizeof n, &n));
    launch(w, w->q, w->count, n, 0, 0, NULL, NULL);
    for (size_t i = 0; i < n; i++)
        want[a->model[i] & 15]++;
    uint32_t *got = copy_of(zero, 16);
    cl_event ev = NULL;
    OK(clEnqueueReadBuffer(w->q, c, CL_FALSE, 0, sizeof zero, got, 0, NULL, &ev));
    keep(w, ev, got, copy_of(want, 16), 16, "counts of a buffer that was released");
    OK(clReleaseMemObject(c));
}

static void op_read_later(struct worker *w, struct buffer *a) {
    size_t n = 1 + below(w, a->n), at = below(w, a->n - n + 1);
    uint32_t *got = copy_of(a->model + at, n);
    memset(got, 0xee, n * 4);
    cl_event e = NULL;
    OK(clEnqueueReadBuffer(w->q, a->mem, CL_FALSE, at * 4, n * 4, got, 0, NULL, &e));
    keep(w, e, got, copy_of(a->model + at, n), n, "non-blocking read");
    w->later[w->laters - 1].b = a;
    w->later[w->laters - 1].from = at;
}

static void op_write(struct worker *w, struct buffer *a) {
    size_t n = 1 + below(w, a->n), at = below(w, a->n - n + 1);
    for (size_t i = 0; i < n; i++)
        a->model[at + i] = rnd(w);
    uint32_t *src = copy_of(a->model + at, n);
    if (!w->gate && rnd(w) & 1) {
        OK(clEnqueueWriteBuffer(w->q, a->mem, CL_TRUE, at * 4, n * 4, src, 0, NULL, NULL));
        memset(src, 0x11, n * 4);
        free(src);
        return;
    }
    cl_event e = NULL;
    OK(clEnqueueWriteBuffer(w->q, a->mem, CL_FALSE, at * 4, n * 4, src, 0, NULL, &e));
    keep(w, e, src, NULL, 0, "");
}

static void op_copy(struct worker *w, struct buffer *a, struct buffer *c) {
    if (a == c)
        return;
    size_t n = 1 + below(w, a->n < c->n ? a->n : c->n), from = below(w, c->n - n + 1), to = below(w, a->n - n + 1);
    OK(clEnqueueCopyBuffer(w->q, c->mem, a->mem, from * 4, to * 4, n * 4, 0, NULL, NULL));
    memcpy(a->model + to, c->model + from, n * 4);
}

static void op_fill(struct worker *w, struct buffer *a) {
    size_t n = 1 + below(w, a->n), at = below(w, a->n - n + 1);
    uint32_t v = rnd(w);
    OK(clEnqueueFillBuffer(w->q, a->mem, &v, 4, at * 4, n * 4, 0, NULL, NULL));
    for (size_t i = 0; i < n; i++)
        a->model[at + i] = v;
}

/* A buffer as a matrix of rows of 16 elements; a rectangle of it is written, copied or read. */
static void op_rect(struct worker *w, struct buffer *a) {
    size_t rows = a->n / 16;
    if (rows < 4)
        return;
    if (rows > 64)
        rows = 64;
    size_t cols = 1 + below(w, 8), high = 1 + below(w, rows / 2), x = below(w, 8), y = below(w, rows / 2);
    size_t o[3] = {x * 4, y, 0}, zero[3] = {0}, r[3] = {cols * 4, high, 1};
    switch (rnd(w) % 3) {
    case 0: {
        uint32_t *src = malloc(cols * high * 4);
        CLX_CHECK(src, "no memory");
        for (size_t i = 0; i < cols * high; i++)
            src[i] = a->model[(y + i / cols) * 16 + x + i % cols] = rnd(w);
        cl_event e = NULL;
        OK(clEnqueueWriteBufferRect(w->q, a->mem, CL_FALSE, o, zero, r, 64, 0, cols * 4, 0, src, 0, NULL, &e));
        keep(w, e, src, NULL, 0, "");
        return;
    }
    case 1: {
        size_t to[3] = {(8 + (8 - cols)) * 4, y, 0};
        if (x + cols > 8 + (8 - cols)) /* the two would overlap */
            return;
        OK(clEnqueueCopyBufferRect(w->q, a->mem, a->mem, o, to, r, 64, 0, 64, 0, 0, NULL, NULL));
        for (size_t i = 0; i < cols * high; i++)
            a->model[(y + i / cols) * 16 + 16 - cols + i % cols] = a->model[(y + i / cols) * 16 + x + i % cols];
        return;
    }
    }
    uint32_t *got = calloc(cols * high, 4), *want = malloc(cols * high * 4);
    CLX_CHECK(got && want, "no memory");
    for (size_t i = 0; i < cols * high; i++)
        want[i] = a->model[(y + i / cols) * 16 + x + i % cols];
    cl_event e = NULL;
    OK(clEnqueueReadBufferRect(w->q, a->mem, CL_FALSE, o, zero, r, 64, 0, cols * 4, 0, got, 0, NULL, &e));
    keep(w, e, got, want, cols * high, "read of a rectangle");
}

static void op_part(struct worker *w, struct buffer *a) {
    if (a->n < 4096)
        return;
    cl_buffer_region r = {4096, (a->n / 2 & ~(size_t)1023) * 4};
    if (!r.size || r.origin + r.size > a->n * 4)
        return;
    cl_int e;
    cl_mem s = clCreateSubBuffer(a->mem, CL_MEM_READ_WRITE, CL_BUFFER_CREATE_TYPE_REGION, &r, &e);
    OK(e);
    mix(w, w->q, s, a->model + 1024, r.size / 4, 0, NULL, NULL);
    OK(clReleaseMemObject(s));
}

static void op_any_order(struct worker *w, struct buffer *a) {
    settle(w);
    OK(clFinish(w->q));
    cl_event e[3] = {NULL};
    mix(w, w->any, a->mem, a->model, a->n, 0, NULL, &e[0]);
    mix(w, w->any, a->mem, a->model, a->n, 1, &e[0], &e[1]);
    OK(clEnqueueReadBuffer(w->any, a->mem, CL_FALSE, 0, a->n * 4, w->scratch, 1, &e[1], &e[2]));
    OK(clFlush(w->any));
    OK(clWaitForEvents(1, &e[2]));
    same(w, "read behind two events", a, 0, w->scratch, a->model, a->n);
    cl_ulong begin = 0, end = 0;
    OK(clGetEventProfilingInfo(e[0], CL_PROFILING_COMMAND_START, sizeof begin, &begin, NULL));
    OK(clGetEventProfilingInfo(e[1], CL_PROFILING_COMMAND_END, sizeof end, &end, NULL));
    if (end < begin)
        wrong(w, "profile", "the second kernel ended before the first began");
    for (int i = 0; i < 3; i++)
        OK(clReleaseEvent(e[i]));
}

static void op_gate(struct worker *w) {
    if (w->gate || rnd(w) % 8)
        return;
    cl_int e;
    w->gate = clCreateUserEvent(context, &e);
    OK(e);
    w->gate_until = clx_now() + 0.01 * (double)below(w, 60);
    if (rnd(w) & 1)
        OK(clEnqueueMarkerWithWaitList(w->q, 1, &w->gate, NULL));
    else
        OK(clEnqueueBarrierWithWaitList(w->q, 1, &w->gate, NULL));
}

static void op_map(struct worker *w, struct buffer *a) {
    static const cl_map_flags flags[] = {CL_MAP_READ, CL_MAP_WRITE, CL_MAP_READ | CL_MAP_WRITE, CL_MAP_WRITE_INVALIDATE_REGION};
    if (w->map.p || w->gate)
        return;
    struct mapping m = {.b = a, .through = a->mem, .n = 1 + below(w, a->n)};
    m.from = below(w, a->n - m.n + 1);
    cl_map_flags f = flags[below(w, 4)];
    cl_int e;
    cl_event ev = NULL;
    bool blocking = rnd(w) & 1;
    m.p = clEnqueueMapBuffer(w->q, a->mem, blocking, f, m.from * 4, m.n * 4, 0, NULL, &ev, &e);
    OK(e);
    if (e)
        return;
    OK(clWaitForEvents(1, &ev));
    OK(clReleaseEvent(ev));
    if (f != CL_MAP_WRITE_INVALIDATE_REGION) {
        if (memcmp(m.p, a->model + m.from, m.n * 4))
            same(w, "mapping", a, m.from, copy_of(m.p, m.n), a->model + m.from, m.n);
    } else
        for (size_t i = 0; i < m.n; i++)
            m.p[i] = a->model[m.from + i] = rnd(w);
    m.write = f != CL_MAP_READ;
    m.until = clx_now() + 0.01 * (double)below(w, 80);
    w->map = m;
}

static void unmap(struct worker *w) {
    struct mapping *m = &w->map;
    for (int i = 0; m->write && i < 16; i++) {
        size_t at = below(w, m->n);
        m->p[at] = m->b->model[m->from + at] = rnd(w);
    }
    OK(clEnqueueUnmapMemObject(w->q, m->through, m->p, 0, NULL, NULL));
    m->p = NULL;
}

static void op_new(struct worker *w, struct buffer *a) {
    if (a->host) { /* its memory must outlive the commands */
        settle(w);
        OK(clFinish(w->q));
    }
    OK(clReleaseMemObject(a->mem));
    if (a->host)
        free(a->host);
    free(a->model);
    make(w, a);
}

static void op_image(struct worker *w) {
    if (!images)
        return;
    int k = rnd(w) & 1;
    cl_int dx = (cl_int)below(w, 9) - 4;
    size_t g[2] = {WIDTH, HEIGHT}, o[3] = {0}, r[3] = {WIDTH, HEIGHT, 1};
    uint32_t *in = w->image[k].model, *out = w->image[!k].model;
    OK(clSetKernelArg(w->shift, 0, sizeof(cl_mem), &w->image[k].mem));
    OK(clSetKernelArg(w->shift, 1, sizeof(cl_mem), &w->image[!k].mem));
    OK(clSetKernelArg(w->shift, 2, sizeof w->sampler, &w->sampler));
    OK(clSetKernelArg(w->shift, 3, sizeof dx, &dx));
    OK(clEnqueueNDRangeKernel(w->q, w->shift, 2, NULL, g, NULL, 0, NULL, NULL));
    for (int y = 0; y < HEIGHT; y++)
        for (int x = 0; x < WIDTH; x++) {
            int u = x + dx < 0 ? 0 : x + dx >= WIDTH ? WIDTH - 1 : x + dx;
            for (int z = 0; z < 4; z++)
                out[(y * WIDTH + x) * 4 + z] = in[(y * WIDTH + u) * 4 + z] + (uint32_t)(z < 3 ? z + 1 : x);
        }
    switch (rnd(w) % 4) {
    case 0: {
        uint32_t *got = calloc(PIXELS, 16);
        cl_event e = NULL;
        OK(clEnqueueReadImage(w->q, w->image[!k].mem, CL_FALSE, o, r, 0, 0, got, 0, NULL, &e));
        keep(w, e, got, copy_of(out, PIXELS * 4), PIXELS * 4, "read of an image");
        break;
    }
    case 1: {
        for (size_t i = 0; i < PIXELS * 4; i++)
            out[i] = rnd(w);
        uint32_t *src = copy_of(out, PIXELS * 4);
        cl_event e = NULL;
        OK(clEnqueueWriteImage(w->q, w->image[!k].mem, CL_FALSE, o, r, 0, 0, src, 0, NULL, &e));
        keep(w, e, src, NULL, 0, "");
        break;
    }
    case 2: {
        if (w->gate)
            break;
        cl_int e;
        size_t pitch = 0;
        char *p = clEnqueueMapImage(w->q, w->image[!k].mem, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, o, r, &pitch, NULL, 0, NULL, NULL, &e);
        OK(e);
        for (size_t y = 0; !e && y < HEIGHT; y++) {
            uint32_t *row = (uint32_t *)(p + y * pitch);
            if (memcmp(row, out + y * WIDTH * 4, WIDTH * 16))
                same(w, "mapping of an image", NULL, 0, row, out + y * WIDTH * 4, WIDTH * 4);
            row[y] = out[y * WIDTH * 4 + y] = rnd(w);
        }
        OK(clEnqueueUnmapMemObject(w->q, w->image[!k].mem, p, 0, NULL, NULL));
        break;
    }
    }
}

/* A program of its own, built while others run, and a kernel of it that outlives it. */
static void op_program(struct worker *w, struct buffer *a) {
    char options[80];
    uint32_t m = rnd(w) | 1, c = rnd(w);
    cl_uint n = (cl_uint)a->n;
    cl_int e;
    if (rnd(w) % 12)
        return;
    snprintf(options, sizeof options, "-D M=%uu -D A=%uu", m, c);
    cl_program p = clx_build(context, device, small_source, options);
    cl_kernel k = clCreateKernel(p, "scale", &e);
    OK(e);
    OK(clReleaseProgram(p));
    OK(clSetKernelArg(k, 0, sizeof a->mem, &a->mem));
    OK(clSetKernelArg(k, 1, sizeof n, &n));
    launch(w, w->q, k, n, 0, 0, NULL, NULL);
    OK(clReleaseKernel(k));
    for (size_t i = 0; i < a->n; i++)
        a->model[i] = a->model[i] * m + c;
}

static void one(struct worker *w) {
    ops++;
    if (w->gate && clx_now() > w->gate_until)
        open_gate(w);
    if (w->map.p && clx_now() > w->map.until)
        unmap(w);
    struct buffer *a = &w->b[below(w, BUFFERS)], *c = &w->b[below(w, BUFFERS)];
    if (w->map.p && (a == w->map.b || c == w->map.b))
        return;
    if (!w->gate && !w->map.p)
        for (int i = 0; i < BUFFERS; i++)
            if (w->doubtful >> i & 1) /* say all that is wrong with it */
                read_whole(w, &w->b[i]);
    switch (rnd(w) % 20) {
    case 0: case 1: case 2: mix(w, w->q, a->mem, a->model, a->n, 0, NULL, NULL); break;
    case 3: op_add(w, a, c); break;
    case 4: op_turn(w, a); break;
    case 5: op_count(w, a); break;
    case 6: case 7: op_read_later(w, a); break;
    case 8: case 9: op_write(w, a); break;
    case 10: op_copy(w, a, c); break;
    case 11: op_fill(w, a); break;
    case 12: op_rect(w, a); break;
    case 13: op_part(w, a); break;
    case 14: op_any_order(w, a); break;
    case 15: op_gate(w); break;
    case 16: op_map(w, a); break;
    case 17: op_image(w); break;
    case 18:
        if (rnd(w) % 4 == 0)
            op_new(w, a);
        else
            op_program(w, a);
        break;
    default:
        if (!w->gate)
            read_whole(w, a);
    }
    if (w->laters > LATER / 2 && rnd(w) % 8 == 0)
        settle(w);
}

static void *work(void *arg) {
    struct worker *w = arg;
    cl_int e;
    w->q = clCreateCommandQueue(context, device, w->number & 1 ? 0 : CL_QUEUE_PROFILING_ENABLE, &e);
    OK(e);
    w->any = clCreateCommandQueue(context, device, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE | CL_QUEUE_PROFILING_ENABLE, &e);
    if (e)
        w->any = clCreateCommandQueue(context, device, CL_QUEUE_PROFILING_ENABLE, &e);
    OK(e);
    w->program = clx_build(context, device, source, "-cl-std=CL1.2");
    const char *names[] = {"scramble", "addto", "turnover", "tally", "slide"};
    cl_kernel *kernels[] = {&w->mix, &w->add, &w->turn, &w->count, &w->shift};
    for (int i = 0; i < 5; i++) {
        *kernels[i] = clCreateKernel(w->program, names[i], &e);
        OK(e);
    }
    w->scratch = malloc(most * 4 + 4);
    CLX_CHECK(w->scratch, "no memory");
    for (int i = 0; i < BUFFERS; i++)
        make(w, &w->b[i]);
    for (int i = 0; images && i < IMAGES; i++) {
        cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT32};
        cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = WIDTH, .image_height = HEIGHT};
        w->image[i].model = malloc(PIXELS * 16);
        for (size_t j = 0; j < PIXELS * 4; j++)
            w->image[i].model[j] = rnd(w);
        w->image[i].mem = clCreateImage(context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, &f, &d, w->image[i].model, &e);
        OK(e);
    }
    w->sampler = clCreateSampler(context, CL_FALSE, CL_ADDRESS_CLAMP_TO_EDGE, CL_FILTER_NEAREST, &e);
    OK(e);
    while (!stop)
        one(w);
    settle(w);
    if (w->map.p)
        unmap(w);
    OK(clFinish(w->q));
    for (int i = 0; i < BUFFERS; i++)
        read_whole(w, &w->b[i]);
    for (int i = 0; i < BUFFERS; i++)
        OK(clReleaseMemObject(w->b[i].mem));
    return NULL;
}

static size_t option(int argc, char **argv, const char *name, size_t otherwise) {
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], name))
            return strtoull(argv[i + 1], NULL, 10);
    return otherwise;
}

int main(int argc, char **argv) {
    double seconds = (double)option(argc, argv, "--seconds", 1u << 30);
    size_t seed = option(argc, argv, "--seed", 1), threads = option(argc, argv, "--threads", 1);
    most = option(argc, argv, "--kib", 1024) * 256;
    for (int i = 1; i < argc; i++)
        images &= strcmp(argv[i], "--no-images") != 0;
    cl_int e;
    device = clx_device(0, NULL);
    context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
    CLX_OK(e);
    struct worker *ws = calloc(threads, sizeof *ws);
    for (size_t i = 0; i < threads; i++) {
        ws[i].number = (int)i;
        ws[i].state = (seed * 7919 + i) * 77777 + 1;
        CLX_CHECK(!pthread_create(&ws[i].thread, NULL, work, &ws[i]), "no thread");
    }
    double end = clx_now() + seconds;
    struct pollfd in = {.fd = 0, .events = POLLIN};
    while (clx_now() < end) {
        char c[64];
        if (poll(&in, 1, 1000) > 0 && read(0, c, sizeof c) <= 0)
            break;
        printf("ops %ld errors %ld bad %ld\n", (long)ops, (long)errors, (long)bad);
        fflush(stdout);
    }
    stop = 1;
    for (size_t i = 0; i < threads; i++)
        pthread_join(ws[i].thread, NULL);
    printf("done ops %ld errors %ld bad %ld\n", (long)ops, (long)errors, (long)bad);
    return bad || errors;
}
