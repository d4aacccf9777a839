/*
 * sequences: how long common sequences of calls take, as one JSON object on stdout: medians in microseconds, by the name of the
 * sequence. One that the device cannot run is left out.
 *
 *   sequences [--n N] [--only TEXT]
 *
 * --only runs those whose names contain a text.
 */
#include "clx.h"
#include <pthread.h>
#include <stdbool.h>

enum { THREADS = 4, TURNS = 250, BIG = 1 << 26, MIB = 1 << 20, IMAGE = 256 };

static const char *source =
    "kernel void nul(global int *a) {}\n"
    "kernel void many(global int *a, global int *b, int c, int d, float e, float f, long g, long h) { a[0] = c + d + (int)e + (int)f + (int)g + (int)h + b[0]; }\n";

static cl_device_id dev;
static cl_context ctx;
static cl_program prog;
static cl_command_queue q, other, profiled, loose; /* loose: out of order, or NULL */
static cl_kernel nul, many;
static cl_mem a, b, pinned, image; /* image: NULL if there are none */
static char *host;
static cl_int e;

static cl_event launch(cl_command_queue on, cl_uint n, const cl_event *after) {
    size_t one = 1;
    cl_event ev;
    CLX_OK(clEnqueueNDRangeKernel(on, nul, 1, NULL, &one, NULL, n, after, &ev));
    return ev;
}

static void run(void) {
    size_t one = 1;
    CLX_OK(clEnqueueNDRangeKernel(q, nul, 1, NULL, &one, NULL, 0, NULL, NULL));
}

static void await(cl_uint n, cl_event *ev) {
    CLX_OK(clWaitForEvents(n, ev));
    for (cl_uint i = 0; i < n; i++)
        CLX_OK(clReleaseEvent(ev[i]));
}

static void finish(void) { CLX_OK(clFinish(q)); }

static void kernel_finish(void) { run(), finish(); }

static void kernel_wait(void) {
    cl_event ev = launch(q, 0, NULL);
    await(1, &ev);
}

static void kernel_poll(void) {
    cl_event ev = launch(q, 0, NULL);
    cl_int state = CL_QUEUED;
    CLX_OK(clFlush(q));
    while (state > CL_COMPLETE)
        CLX_OK(clGetEventInfo(ev, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state, NULL));
    CLX_OK(clReleaseEvent(ev));
}

static void kernel_times(void) {
    cl_event ev = launch(profiled, 0, NULL);
    CLX_OK(clWaitForEvents(1, &ev));
    cl_ulong t;
    for (cl_profiling_info x = CL_PROFILING_COMMAND_QUEUED; x <= CL_PROFILING_COMMAND_END; x++)
        CLX_OK(clGetEventProfilingInfo(ev, x, sizeof t, &t, NULL));
    CLX_OK(clReleaseEvent(ev));
}

static void kernel_gated(void) {
    cl_event gate = clCreateUserEvent(ctx, &e);
    CLX_OK(e);
    cl_event ev = launch(q, 1, &gate);
    CLX_OK(clFlush(q));
    CLX_OK(clSetUserEventStatus(gate, CL_COMPLETE));
    await(1, &ev);
    CLX_OK(clReleaseEvent(gate));
}

static void marker(void) {
    cl_event ev;
    CLX_OK(clEnqueueMarkerWithWaitList(q, 0, NULL, &ev));
    await(1, &ev);
}

static void barrier(void) {
    CLX_OK(clEnqueueBarrierWithWaitList(q, 0, NULL, NULL));
    finish();
}

static void two_queues(void) {
    cl_event ev[2] = {launch(q, 0, NULL)};
    CLX_OK(clFlush(q));
    ev[1] = launch(other, 1, ev);
    await(2, ev);
}

static void chain(void) {
    cl_event ev[10];
    for (int i = 0; i < 10; i++)
        ev[i] = launch(loose, i > 0, i > 0 ? &ev[i - 1] : NULL);
    await(10, ev);
}

static void beside(void) {
    cl_event ev[10];
    for (int i = 0; i < 10; i++)
        ev[i] = launch(loose, 0, NULL);
    await(10, ev);
}

static void hundred(void) {
    cl_event ev[100];
    for (int i = 0; i < 100; i++)
        ev[i] = launch(q, 0, NULL);
    await(100, ev);
}

static void arguments(void) {
    size_t one = 1;
    for (cl_int i = 0; i < 100; i++) {
        cl_float f = (cl_float)i;
        cl_long l = i;
        CLX_OK(clSetKernelArg(many, 0, sizeof a, &a));
        CLX_OK(clSetKernelArg(many, 1, sizeof b, &b));
        CLX_OK(clSetKernelArg(many, 2, sizeof i, &i));
        CLX_OK(clSetKernelArg(many, 3, sizeof i, &i));
        CLX_OK(clSetKernelArg(many, 4, sizeof f, &f));
        CLX_OK(clSetKernelArg(many, 5, sizeof f, &f));
        CLX_OK(clSetKernelArg(many, 6, sizeof l, &l));
        CLX_OK(clSetKernelArg(many, 7, sizeof l, &l));
        CLX_OK(clEnqueueNDRangeKernel(q, many, 1, NULL, &one, NULL, 0, NULL, NULL));
    }
    finish();
}

static void write_now(size_t n) { CLX_OK(clEnqueueWriteBuffer(q, a, CL_TRUE, 0, n, host, 0, NULL, NULL)); }
static void read_now(size_t n) { CLX_OK(clEnqueueReadBuffer(q, a, CL_TRUE, 0, n, host, 0, NULL, NULL)); }
static void write_4k(void) { write_now(4096); }
static void write_64k(void) { write_now(65536); }
static void write_1m(void) { write_now(MIB); }
static void read_4k(void) { read_now(4096); }
static void read_64k(void) { read_now(65536); }
static void read_1m(void) { read_now(MIB); }

static void round_trip(size_t n) {
    CLX_OK(clEnqueueWriteBuffer(q, a, CL_FALSE, 0, n, host, 0, NULL, NULL));
    run();
    CLX_OK(clEnqueueReadBuffer(q, a, CL_FALSE, 0, n, host, 0, NULL, NULL));
    finish();
}

static void round_4k(void) { round_trip(4096); }
static void round_1m(void) { round_trip(MIB); }

static void writes(void) {
    for (size_t i = 0; i < 16; i++)
        CLX_OK(clEnqueueWriteBuffer(q, a, CL_FALSE, i * 8192, 4096, host + i * 4096, 0, NULL, NULL));
    finish();
}

static void rect(void) {
    size_t at[3] = {0}, size[3] = {64, 64, 1};
    CLX_OK(clEnqueueWriteBufferRect(q, a, CL_TRUE, at, at, size, 128, 0, 64, 0, host, 0, NULL, NULL));
}

static void copy(void) {
    CLX_OK(clEnqueueCopyBuffer(q, a, b, 0, 0, 4096, 0, NULL, NULL));
    finish();
}

static void fill(void) {
    cl_int zero = 0;
    CLX_OK(clEnqueueFillBuffer(q, a, &zero, sizeof zero, 0, 4096, 0, NULL, NULL));
    finish();
}

static void map(cl_mem m, cl_map_flags how, size_t n, bool sets) {
    void *p = clEnqueueMapBuffer(q, m, CL_TRUE, how, 0, n, 0, NULL, NULL, &e);
    CLX_OK(e);
    if (sets)
        memset(p, 1, n);
    CLX_OK(clEnqueueUnmapMemObject(q, m, p, 0, NULL, NULL));
    finish();
}

static void map_4k(void) { map(a, CL_MAP_WRITE, 4096, false); }
static void map_1m(void) { map(a, CL_MAP_READ, MIB, false); }
static void map_pinned(void) { map(pinned, CL_MAP_WRITE, MIB, true); }
static void map_anew(void) { map(pinned, CL_MAP_WRITE_INVALIDATE_REGION, MIB, true); }

static void buffer(void) {
    cl_mem m = clCreateBuffer(ctx, CL_MEM_READ_WRITE, MIB, NULL, &e);
    CLX_OK(e);
    CLX_OK(clReleaseMemObject(m));
}

static void buffer_of(void) {
    cl_mem m = clCreateBuffer(ctx, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, MIB, host, &e);
    CLX_OK(e);
    CLX_OK(clReleaseMemObject(m));
}

static void buffer_used(void) {
    cl_mem m = clCreateBuffer(ctx, CL_MEM_READ_WRITE, MIB, NULL, &e);
    CLX_OK(e);
    CLX_OK(clSetKernelArg(nul, 0, sizeof m, &m));
    kernel_finish();
    CLX_OK(clSetKernelArg(nul, 0, sizeof a, &a));
    CLX_OK(clReleaseMemObject(m));
}

static void part(void) {
    cl_buffer_region r = {0, 65536};
    cl_mem m = clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, &r, &e);
    CLX_OK(e);
    CLX_OK(clReleaseMemObject(m));
}

static void image_both(void) {
    size_t at[3] = {0}, size[3] = {IMAGE, IMAGE, 1};
    CLX_OK(clEnqueueWriteImage(q, image, CL_TRUE, at, size, 0, 0, host, 0, NULL, NULL));
    CLX_OK(clEnqueueReadImage(q, image, CL_TRUE, at, size, 0, 0, host, 0, NULL, NULL));
}

static void kernel_object(void) {
    cl_kernel k = clCreateKernel(prog, "many", &e);
    CLX_OK(e);
    CLX_OK(clReleaseKernel(k));
}

static void queue(void) {
    cl_command_queue x = clCreateCommandQueue(ctx, dev, 0, &e);
    CLX_OK(e);
    CLX_OK(clReleaseCommandQueue(x));
}

static void build(void) { CLX_OK(clReleaseProgram(clx_build(ctx, dev, source, ""))); }

/* thread launches kernels on a queue of its own, and waits for each. */
static void *thread(void *unused) {
    size_t one = 1;
    cl_int err;
    cl_command_queue x = clCreateCommandQueue(ctx, dev, 0, &err);
    CLX_OK(err);
    cl_kernel k = clCreateKernel(prog, "nul", &err);
    CLX_OK(err);
    CLX_OK(clSetKernelArg(k, 0, sizeof a, &a));
    for (int i = 0; i < TURNS; i++) {
        CLX_OK(clEnqueueNDRangeKernel(x, k, 1, NULL, &one, NULL, 0, NULL, NULL));
        CLX_OK(clFinish(x));
    }
    CLX_OK(clReleaseKernel(k));
    CLX_OK(clReleaseCommandQueue(x));
    return unused;
}

static void threads(void) {
    pthread_t t[THREADS];
    for (int i = 0; i < THREADS; i++)
        CLX_CHECK(!pthread_create(&t[i], NULL, thread, NULL), "no thread");
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
}

static const struct {
    const char *name;
    void (*f)(void);
    int part; /* it runs n / part times */
} all[] = {
    {"kernel + clFinish", kernel_finish, 1},
    {"kernel + clWaitForEvents", kernel_wait, 1},
    {"kernel, its state polled", kernel_poll, 1},
    {"kernel, waited for, its four times", kernel_times, 1},
    {"kernel that a user event holds", kernel_gated, 1},
    {"marker, waited for", marker, 1},
    {"barrier + clFinish", barrier, 1},
    {"clFinish of an idle queue", finish, 1},
    {"kernels on two queues, one after the other", two_queues, 1},
    {"10 kernels out of order, one after the other", chain, 2},
    {"10 kernels out of order, beside each other", beside, 2},
    {"100 kernels with events", hundred, 4},
    {"100 kernels, each with 8 new arguments", arguments, 4},
    {"blocking write of 4 KiB", write_4k, 1},
    {"blocking write of 64 KiB", write_64k, 1},
    {"blocking write of 1 MiB", write_1m, 2},
    {"blocking read of 4 KiB", read_4k, 1},
    {"blocking read of 64 KiB", read_64k, 1},
    {"blocking read of 1 MiB", read_1m, 2},
    {"write, kernel and read of 4 KiB", round_4k, 1},
    {"write, kernel and read of 1 MiB", round_1m, 2},
    {"16 writes of 4 KiB", writes, 2},
    {"rectangle of 64 x 64 B", rect, 1},
    {"copy of 4 KiB", copy, 1},
    {"fill of 4 KiB", fill, 1},
    {"map 4 KiB to write", map_4k, 1},
    {"map 1 MiB to read", map_1m, 2},
    {"map 1 MiB of ALLOC_HOST_PTR, write it", map_pinned, 2},
    {"the same, its old content not needed", map_anew, 2},
    {"buffer of 1 MiB", buffer, 1},
    {"buffer of 1 MiB with COPY_HOST_PTR", buffer_of, 2},
    {"buffer of 1 MiB that a kernel uses", buffer_used, 2},
    {"sub-buffer", part, 1},
    {"write and read an image of 256 KiB", image_both, 2},
    {"kernel object", kernel_object, 1},
    {"queue", queue, 2},
    {"program that was built before", build, 20},
    {"4 threads, 250 kernels + clFinish each", threads, 50},
};

int main(int argc, char **argv) {
    int n = 400;
    const char *only = "";
    for (int i = 1; i < argc; i += 2) {
        CLX_CHECK(i + 1 < argc, "%s: a value is missing", argv[i]);
        if (!strcmp(argv[i], "--n"))
            n = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--only"))
            only = argv[i + 1];
        else
            CLX_CHECK(0, "unknown option %s", argv[i]);
    }
    CLX_CHECK(n >= 10 && n <= 1000000, "--n %d", n);
    double *took = malloc((size_t)n * sizeof *took);
    host = calloc(1, MIB);
    CLX_CHECK(took && host, "no memory");
    dev = clx_device(0, NULL);
    ctx = clCreateContext(NULL, 1, &dev, NULL, NULL, &e);
    CLX_OK(e);
    cl_command_queue *queues[] = {&q, &other, &profiled, &loose};
    for (size_t i = 0; i < 4; i++) {
        *queues[i] = clCreateCommandQueue(ctx, dev, i == 2 ? CL_QUEUE_PROFILING_ENABLE : i == 3 ? CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE : 0, &e);
        if (e && i == 3)
            loose = NULL;
        else
            CLX_OK(e);
    }
    prog = clx_build(ctx, dev, source, "");
    nul = clCreateKernel(prog, "nul", &e);
    CLX_OK(e);
    many = clCreateKernel(prog, "many", &e);
    CLX_OK(e);
    a = clCreateBuffer(ctx, CL_MEM_READ_WRITE, BIG, NULL, &e);
    CLX_OK(e);
    b = clCreateBuffer(ctx, CL_MEM_READ_WRITE, BIG, NULL, &e);
    CLX_OK(e);
    pinned = clCreateBuffer(ctx, CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, MIB, NULL, &e);
    CLX_OK(e);
    CLX_OK(clSetKernelArg(nul, 0, sizeof a, &a));
    cl_image_format format = {CL_RGBA, CL_UNORM_INT8};
    cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = IMAGE, .image_height = IMAGE};
    image = clCreateImage(ctx, CL_MEM_READ_WRITE, &format, &desc, NULL, &e);
    for (size_t i = 0, first = 1; i < sizeof all / sizeof *all; i++) {
        bool needs = all[i].f == image_both ? image != NULL : all[i].f == chain || all[i].f == beside ? loose != NULL : true;
        if (!needs || !strstr(all[i].name, only))
            continue;
        int times = n / all[i].part > 3 ? n / all[i].part : 3;
        for (int j = -times / 10 - 1; j < times; j++) { /* the first ones are not counted */
            double t = clx_now();
            all[i].f();
            if (j >= 0)
                took[j] = clx_now() - t;
        }
        qsort(took, (size_t)times, sizeof *took, clx_dbl_cmp);
        printf("%s\"%s\": %.2f", first ? "{" : ",\n ", all[i].name, took[times / 2] * 1e6);
        first = 0;
    }
    printf("}\n");
    return 0;
}
