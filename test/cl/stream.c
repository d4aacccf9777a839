/*
 * stream: a long deterministic integer workload, to be swapped while it runs.
 *
 *   stream [--seconds S | --iterations N | --stdin] [--mib M | --kib K] [--buffers B] [--seed X] [--threads T] [--queues Q]
 *          [--events] [--mapped] [--images] [--ticks] [--verbose] [--write-percent P]
 *
 * An iteration mixes every buffer of every thread, hashes them through atomics in local and global memory and, with
 * --images, sends a part through an image. --verbose prints a line with the time after each iteration. The last line is
 * "checksum N HEX": it depends on the options and on N, the iterations done, alone. --events adds callbacks, user events and a
 * check that profiling times only grow. --mapped keeps a region mapped over several iterations and writes it through
 * the mapping. --ticks interrupts its threads' system calls all the time. --stdin runs until standard input ends or has a line. --write-percent P lets an iteration touch only P percent of the buffers.
 */
#include "clx.h"
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/time.h>

static const char *source =
    "#define STEP(x) ((x) * 1664525u + 1013904223u)\n"
    "kernel void init(global uint *a, uint seed) { uint i = (uint)get_global_id(0); uint x = i ^ seed; x = STEP(x); x ^= x >> 15; a[i] = STEP(x); }\n"
    "kernel void lcg(global uint *a, uint k) { size_t i = get_global_id(0); uint x = a[i] ^ k; for (int j = 0; j < 4; j++) { x = STEP(x); x ^= x >> 13; } a[i] = x; }\n"
    "kernel void blend(global uint *a, global const uint *b, uint n, uint shift) { uint i = (uint)get_global_id(0); a[i] += b[(i + shift) % n] * 2654435761u; }\n"
    "kernel void hash(global const uint *a, global uint *h, local uint *l) {\n"
    "  size_t t = get_local_id(0);\n"
    "  if (t < 16) l[t] = 0;\n"
    "  barrier(CLK_LOCAL_MEM_FENCE);\n"
    "  uint x = a[get_global_id(0)];\n"
    "  atomic_add(&l[x & 15], x >> 4);\n"
    "  atomic_add(&l[(x >> 8) & 15], x * 31u);\n" /* additions commute: the order of the work-items does not show */
    "  barrier(CLK_LOCAL_MEM_FENCE);\n"
    "  if (t < 16) atomic_add(&h[t], l[t]);\n"
    "}\n";

static const char *image_source =
    "constant sampler_t S = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP_TO_EDGE | CLK_FILTER_NEAREST;\n"
    "kernel void img(read_only image2d_t s, write_only image2d_t d, uint k) { int2 c = (int2)(get_global_id(0), get_global_id(1));\n"
    "  uint4 v = read_imageui(s, S, c) + read_imageui(s, S, c + (int2)(1, 0)) + k; write_imageui(d, c, v & 255u); }\n";

static struct {
    double seconds;
    long iterations;
    size_t kib, buffers;
    unsigned seed, percent;
    int threads, queues;
    bool events, mapped, images, ticks, verbose, until_stdin;
} opt = {.iterations = 20, .kib = 1024, .buffers = 4, .seed = 1, .percent = 100, .threads = 1, .queues = 1};

enum { MAX_QUEUES = 8, IW = 64, IH = 32 };

struct worker {
    int id;
    uint64_t sum;
};

static cl_context ctx;
static cl_device_id dev;
static cl_program prog, iprog;
static long goal; /* iterations every thread must do, once known */
static pthread_barrier_t round_barrier;
static atomic_bool finish;
static double started;
static atomic_ulong callbacks, callbacks_due;

static void CL_CALLBACK on_done(cl_event e, cl_int status, void *user) {
    (void)e;
    (void)user;
    if (status == CL_COMPLETE)
        callbacks++;
}

static uint64_t fold(uint64_t s, uint32_t v) {
    s = (s ^ v) * 0x100000001b3ull;
    return s ^ s >> 29;
}

static cl_kernel make(cl_program p, const char *name) {
    cl_int e;
    cl_kernel k = clCreateKernel(p, name, &e);
    CLX_OK(e);
    return k;
}

static void arg(cl_kernel k, cl_uint i, size_t n, const void *v) { CLX_OK(clSetKernelArg(k, i, n, v)); }

static void *work(void *u) {
    struct worker *w = u;
    size_t words = opt.kib * 256;
    cl_uint n32 = (cl_uint)words;
    cl_int e;
    cl_command_queue q[MAX_QUEUES];
    for (int i = 0; i < opt.queues; i++) {
        q[i] = clCreateCommandQueue(ctx, dev, opt.events ? CL_QUEUE_PROFILING_ENABLE : 0, &e);
        CLX_OK(e);
    }
    cl_mem *b = calloc(opt.buffers, sizeof *b);
    cl_kernel init = make(prog, "init"), lcg = make(prog, "lcg"), blend = make(prog, "blend"), hash = make(prog, "hash"), img = NULL;
    for (size_t i = 0; i < opt.buffers; i++) {
        b[i] = clCreateBuffer(ctx, CL_MEM_READ_WRITE, words * 4, NULL, &e);
        CLX_OK(e);
        cl_uint s = opt.seed + (cl_uint)(i * 77) + (cl_uint)w->id * 1000;
        arg(init, 0, sizeof b[i], &b[i]);
        arg(init, 1, sizeof s, &s);
        CLX_OK(clEnqueueNDRangeKernel(q[0], init, 1, NULL, &words, NULL, 0, NULL, NULL));
    }
    cl_uint zero[16] = {0}, sums[16];
    cl_mem h = clCreateBuffer(ctx, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, sizeof zero, zero, &e);
    CLX_OK(e);
    cl_mem im[2] = {NULL, NULL};
    if (opt.images) {
        cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
        cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = IW, .image_height = IH};
        for (int i = 0; i < 2; i++) {
            im[i] = clCreateImage(ctx, CL_MEM_READ_WRITE, &f, &d, NULL, &e);
            CLX_OK(e);
        }
        img = make(iprog, "img");
    }
    CLX_OK(clFinish(q[0]));
    cl_uint *map = NULL;
    size_t map_words = words < 4096 ? words : 4096;
    cl_ulong last_end = 0;
    size_t local = 64;
    for (long it = 0;; it++) {
        pthread_barrier_wait(&round_barrier);
        if (finish)
            break;
        size_t active = opt.percent >= 100 ? opt.buffers : (opt.buffers * opt.percent + 99) / 100;
        cl_event chain = NULL, gate = NULL;
        if (opt.events) {
            gate = clCreateUserEvent(ctx, &e);
            CLX_OK(e);
            chain = gate;
        }
        for (size_t i = 0; i < active; i++) {
            cl_uint k = (cl_uint)it * 2654435761u + (cl_uint)i, shift = (cl_uint)(it * 131 + (long)i);
            cl_mem other = b[(i + 1) % opt.buffers];
            cl_command_queue qq = q[i % (size_t)opt.queues];
            cl_event ev[3];
            bool skip = opt.mapped && i == 0 && map; /* a mapped buffer may not be written by a kernel */
            if (skip)
                continue;
            arg(lcg, 0, sizeof b[i], &b[i]);
            arg(lcg, 1, sizeof k, &k);
            CLX_OK(clEnqueueNDRangeKernel(qq, lcg, 1, NULL, &words, NULL, chain != NULL, chain ? &chain : NULL, &ev[0]));
            if (opt.buffers > 1 && !(opt.mapped && other == b[0])) {
                arg(blend, 0, sizeof b[i], &b[i]);
                arg(blend, 1, sizeof other, &other);
                arg(blend, 2, sizeof n32, &n32);
                arg(blend, 3, sizeof shift, &shift);
            } else {
                arg(blend, 0, sizeof b[i], &b[i]);
                arg(blend, 1, sizeof h, &h);
                cl_uint one = 1;
                arg(blend, 2, sizeof one, &one);
                arg(blend, 3, sizeof shift, &shift);
            }
            CLX_OK(clEnqueueNDRangeKernel(qq, blend, 1, NULL, &words, NULL, 1, &ev[0], &ev[1]));
            arg(hash, 0, sizeof b[i], &b[i]);
            arg(hash, 1, sizeof h, &h);
            arg(hash, 2, 64, NULL);
            CLX_OK(clEnqueueNDRangeKernel(qq, hash, 1, NULL, &words, &local, 1, &ev[1], &ev[2]));
            if (opt.events) {
                CLX_OK(clSetEventCallback(ev[2], CL_COMPLETE, on_done, NULL));
                callbacks_due++;
            }
            for (int j = 0; j < opt.queues; j++)
                CLX_OK(clFlush(q[j]));
            CLX_OK(clReleaseEvent(ev[0]));
            CLX_OK(clReleaseEvent(ev[1]));
            if (chain && chain != gate)
                CLX_OK(clReleaseEvent(chain));
            chain = ev[2];
        }
        if (opt.images) {
            size_t o[3] = {0}, r[3] = {IW, IH, 1};
            cl_uint k = (cl_uint)it;
            CLX_OK(clEnqueueCopyBufferToImage(q[0], b[opt.buffers - 1], im[0], 0, o, r, chain != NULL, chain ? &chain : NULL, NULL));
            arg(img, 0, sizeof im[0], &im[0]);
            arg(img, 1, sizeof im[1], &im[1]);
            arg(img, 2, sizeof k, &k);
            CLX_OK(clEnqueueNDRangeKernel(q[0], img, 2, NULL, r, NULL, 0, NULL, NULL));
            CLX_OK(clEnqueueCopyImageToBuffer(q[0], im[1], b[opt.buffers - 1], o, r, 0, 0, NULL, NULL));
        }
        if (gate) {
            CLX_OK(clSetUserEventStatus(gate, CL_COMPLETE));
            if (chain != gate)
                CLX_OK(clReleaseEvent(gate));
        }
        cl_event rd;
        CLX_OK(clEnqueueReadBuffer(q[0], h, CL_FALSE, 0, sizeof sums, sums, chain != NULL, chain ? &chain : NULL, &rd));
        CLX_OK(clFlush(q[0]));
        CLX_OK(clWaitForEvents(1, &rd));
        if (opt.events) {
            cl_ulong s, en;
            CLX_OK(clGetEventProfilingInfo(rd, CL_PROFILING_COMMAND_START, sizeof s, &s, NULL));
            CLX_OK(clGetEventProfilingInfo(rd, CL_PROFILING_COMMAND_END, sizeof en, &en, NULL));
            CLX_CHECK(s <= en && s >= last_end, "profiling went back: start %llu, end %llu, end before %llu", (unsigned long long)s,
                      (unsigned long long)en, (unsigned long long)last_end);
            last_end = en;
        }
        CLX_OK(clReleaseEvent(rd));
        if (chain)
            CLX_OK(clReleaseEvent(chain));
        for (int i = 0; i < opt.queues; i++)
            CLX_OK(clFinish(q[i]));
        for (int i = 0; i < 16; i++)
            w->sum = fold(w->sum, sums[i]);
        if (opt.mapped) {
            if (!map) {
                map = clEnqueueMapBuffer(q[0], b[0], CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 256, map_words * 4 - 256, 0, NULL, NULL, &e);
                CLX_OK(e);
            }
            for (size_t j = 0; j < map_words - 64; j++)
                map[j] = map[j] * 3u + (cl_uint)it;
            if (it % 7 == 6) {
                CLX_OK(clEnqueueUnmapMemObject(q[0], b[0], map, 0, NULL, NULL));
                CLX_OK(clFinish(q[0]));
                map = NULL;
            }
        }
        pthread_barrier_wait(&round_barrier);
        if (w->id == 0) {
            if (opt.verbose) {
                printf("iteration %ld at %.6f\n", it + 1, clx_wall());
                fflush(stdout);
            }
            goal = it + 1;
            struct pollfd in = {.fd = 0, .events = POLLIN};
            if (opt.until_stdin ? poll(&in, 1, 0) > 0 : opt.seconds > 0 ? clx_now() - started >= opt.seconds : it + 1 >= opt.iterations)
                finish = true;
        }
    }
    if (map)
        CLX_OK(clEnqueueUnmapMemObject(q[0], b[0], map, 0, NULL, NULL));
    /* Everything that is in memory counts, not only what was hashed on the way. */
    cl_uint *out = malloc(words * 4);
    for (size_t i = 0; i < opt.buffers; i++) {
        CLX_OK(clEnqueueReadBuffer(q[0], b[i], CL_TRUE, 0, words * 4, out, 0, NULL, NULL));
        for (size_t j = 0; j < words; j++)
            w->sum = fold(w->sum, out[j]);
        CLX_OK(clReleaseMemObject(b[i]));
    }
    free(out);
    free(b);
    CLX_OK(clReleaseMemObject(h));
    for (int i = 0; i < 2; i++)
        if (im[i])
            CLX_OK(clReleaseMemObject(im[i]));
    cl_kernel ks[] = {init, lcg, blend, hash, img};
    for (size_t i = 0; i < 5; i++)
        if (ks[i])
            CLX_OK(clReleaseKernel(ks[i]));
    for (int i = 0; i < opt.queues; i++)
        CLX_OK(clReleaseCommandQueue(q[i]));
    return NULL;
}

static void nothing(int signal) { (void)signal; }

/* tick has a signal every 2 ms, for other threads than this one. */
static void tick(void) {
    struct sigaction a = {.sa_handler = nothing, .sa_flags = SA_RESTART};
    struct itimerval v = {{0, 2000}, {0, 2000}};
    sigset_t s;
    sigemptyset(&s);
    sigaddset(&s, SIGALRM);
    CLX_CHECK(!sigaction(SIGALRM, &a, NULL) && !pthread_sigmask(SIG_BLOCK, &s, NULL) && !setitimer(ITIMER_REAL, &v, NULL), "no timer");
}

int main(int argc, char **argv) {
    unsigned device = 0;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(a, "--events"))
            opt.events = true;
        else if (!strcmp(a, "--mapped"))
            opt.mapped = true;
        else if (!strcmp(a, "--images"))
            opt.images = true;
        else if (!strcmp(a, "--ticks"))
            opt.ticks = true;
        else if (!strcmp(a, "--stdin"))
            opt.until_stdin = true;
        else if (!strcmp(a, "--verbose"))
            opt.verbose = true;
        else if (!v) {
            fprintf(stderr, "stream: unknown option or no value: %s\n", a);
            return 2;
        } else {
            i++;
            if (!strcmp(a, "--seconds"))
                opt.seconds = atof(v);
            else if (!strcmp(a, "--iterations"))
                opt.iterations = atol(v);
            else if (!strcmp(a, "--mib"))
                opt.kib = strtoul(v, NULL, 0) * 1024;
            else if (!strcmp(a, "--kib"))
                opt.kib = strtoul(v, NULL, 0);
            else if (!strcmp(a, "--buffers"))
                opt.buffers = strtoul(v, NULL, 0);
            else if (!strcmp(a, "--seed"))
                opt.seed = (unsigned)strtoul(v, NULL, 0);
            else if (!strcmp(a, "--threads"))
                opt.threads = atoi(v);
            else if (!strcmp(a, "--queues"))
                opt.queues = atoi(v);
            else if (!strcmp(a, "--write-percent"))
                opt.percent = (unsigned)atoi(v);
            else if (!strcmp(a, "--device"))
                device = (unsigned)atoi(v);
            else {
                fprintf(stderr, "stream: unknown option %s\n", a);
                return 2;
            }
        }
    }
    if (opt.threads < 1 || opt.threads > 64 || opt.queues < 1 || opt.queues > MAX_QUEUES || opt.buffers < 1 || opt.kib < 16 || opt.kib > 2048 * 1024) {
        fprintf(stderr, "stream: value out of range\n");
        return 2;
    }
    cl_platform_id platform;
    cl_int e;
    dev = clx_device(device, &platform);
    ctx = clCreateContext(NULL, 1, &dev, NULL, NULL, &e);
    CLX_OK(e);
    prog = clx_build(ctx, dev, source, "");
    if (opt.images) {
        cl_bool has = 0;
        CLX_OK(clGetDeviceInfo(dev, CL_DEVICE_IMAGE_SUPPORT, sizeof has, &has, NULL));
        CLX_CHECK(has, "the device has no images");
        iprog = clx_build(ctx, dev, image_source, "");
    }
    pthread_barrier_init(&round_barrier, NULL, (unsigned)opt.threads);
    pthread_t t[64];
    struct worker w[64];
    started = clx_now();
    for (int i = 0; i < opt.threads; i++) {
        w[i] = (struct worker){.id = i, .sum = 0xcbf29ce484222325ull};
        CLX_CHECK(!pthread_create(&t[i], NULL, work, &w[i]), "no thread");
    }
    if (opt.ticks)
        tick();
    uint64_t sum = 0;
    for (int i = 0; i < opt.threads; i++) {
        pthread_join(t[i], NULL);
        sum = fold(sum, (uint32_t)w[i].sum);
        sum = fold(sum, (uint32_t)(w[i].sum >> 32));
    }
    for (int i = 0; i < 2000 && callbacks != callbacks_due; i++)
        usleep(1000);
    CLX_CHECK(callbacks == callbacks_due, "%lu callbacks of %lu came", (unsigned long)callbacks, (unsigned long)callbacks_due);
    CLX_OK(clReleaseProgram(prog));
    if (iprog)
        CLX_OK(clReleaseProgram(iprog));
    CLX_OK(clReleaseContext(ctx));
    printf("checksum %ld %016llx\n", goal, (unsigned long long)sum);
    return 0;
}
