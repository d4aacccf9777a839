/*
 * endure: integer work on one device for as long as wanted, that checks itself at every step.
 *
 *   endure [--kib K] [--ballast M] [--iterations N | --seconds S | --until FILE] [--seed X] [--pause MS] [--cpu]
 *
 * K KiB stay on the device, 8192 if not said, and are worked on; K is a multiple of 8. An iteration makes every word anew of two words of the iteration before, so that
 * one wrong bit anywhere, ever, shows in all that follows. The same is done beside it by the program itself, and 16 sums of all
 * words are compared. Each iteration prints "iteration N ok T", T the seconds of the monotonic clock; the first wrong one says
 * what differs and ends the program. The last line is "result OK N HEX" or "result WRONG N HEX"; HEX depends on K, X and N
 * alone, so that whoever knows what it has to be need not believe either side. M MiB more lie on the device from the beginning
 * and are looked at in the end. --until runs until FILE is there. With --cpu no
 * OpenCL is used: the program does the device's part too, which tells a faulty machine from a faulty runtime.
 */
#include "clx.h"
#include <stdbool.h>

enum { SUMS = 16, GROUP = 64 };

/* The device and the program run the same text. */
#define RULES                                                                                                                    \
    uint32_t endure_first(uint32_t i, uint32_t seed) {                                                                           \
        uint32_t x = (i ^ seed) * 1664525u + 1013904223u;                                                                        \
        return x ^ x >> 15;                                                                                                      \
    }                                                                                                                            \
    uint32_t endure_next(uint32_t a, uint32_t b, uint32_t i, uint32_t k) {                                                       \
        uint32_t x = a ^ b * 129u ^ (k * 2654435761u + i);                                                             \
        for (int j = 0; j < 4; j++) {                                                                                            \
            x = x * 1664525u + 1013904223u;                                                                                      \
            x ^= x >> 13;                                                                                                        \
        }                                                                                                                        \
        return x;                                                                                                                \
    }                                                                                                                            \
    uint32_t endure_other(uint32_t i, uint32_t k, uint32_t words) { return (i + k * 131u + 1u) % words; }                        \
    uint32_t endure_weigh(uint32_t x, uint32_t i) { return (x ^ i) * (2u * (i >> 4) + 1u); }
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

RULES

static const char *source =
    "#define uint32_t uint\n" TEXT(RULES) "\n"
    "kernel void first(global uint *a, uint seed) { uint i = (uint)get_global_id(0); a[i] = endure_first(i, seed); }\n"
    "kernel void next(global const uint *a, global uint *b, uint k, uint words) {\n"
    "  uint i = (uint)get_global_id(0); b[i] = endure_next(a[i], a[endure_other(i, k, words)], i, k); }\n"
    "kernel void sum(global const uint *a, global uint *sums, local uint *l, uint each) {\n"
    "  uint t = (uint)get_local_id(0), at = (uint)get_group_id(0) * each;\n"
    "  uint s = 0;\n"
    "  for (uint i = at + t; i < at + each; i += (uint)get_local_size(0)) s += endure_weigh(a[i], i);\n" /* i & 15 is t & 15 */
    "  l[t] = s;\n"
    "  barrier(CLK_LOCAL_MEM_FENCE);\n"
    "  if (t < 16) { for (uint j = t + 16; j < get_local_size(0); j += 16) s += l[j]; atomic_add(&sums[t], s); }\n"
    "}\n";

static struct {
    uint32_t kib, ballast, seed;
    unsigned long iterations;
    double seconds;
    const char *until;
    unsigned pause;
    bool cpu;
} opt = {.kib = 8192, .seed = 1, .iterations = 100};

static uint32_t words; /* of each of the two buffers */

/* plain is the work in the program's own memory. */
struct plain {
    uint32_t *a, *b;
};

static void plain_start(struct plain *p) {
    p->a = malloc((size_t)words * 4);
    p->b = malloc((size_t)words * 4);
    CLX_CHECK(p->a && p->b, "no memory");
    for (uint32_t i = 0; i < words; i++)
        p->a[i] = endure_first(i, opt.seed);
}

static void plain_step(struct plain *p, uint32_t k, uint32_t sums[SUMS]) {
    memset(sums, 0, SUMS * sizeof *sums);
    for (uint32_t i = 0; i < words; i++)
        p->b[i] = endure_next(p->a[i], p->a[endure_other(i, k, words)], i, k);
    uint32_t *t = p->a;
    p->a = p->b;
    p->b = t;
    for (uint32_t i = 0; i < words; i++)
        sums[i % SUMS] += endure_weigh(p->a[i], i);
}

/* device is the work in OpenCL. */
struct device {
    cl_command_queue queue;
    cl_mem a, b, sums, ballast;
    cl_kernel next, sum;
};

enum { PIECE = 1 << 18 }; /* words of ballast that are written and read at once: 1 MiB */

static void arg(cl_kernel k, cl_uint i, size_t n, const void *v) { CLX_OK(clSetKernelArg(k, i, n, v)); }

static void device_start(struct device *d) {
    cl_int e;
    cl_device_id dev = clx_device(0, NULL);
    char name[256] = "";
    CLX_OK(clGetDeviceInfo(dev, CL_DEVICE_NAME, sizeof name - 1, name, NULL));
    printf("device %s\n", name);
    cl_context ctx = clCreateContext(NULL, 1, &dev, NULL, NULL, &e);
    CLX_OK(e);
    cl_program prog = clx_build(ctx, dev, source, "");
    d->queue = clCreateCommandQueue(ctx, dev, 0, &e);
    CLX_OK(e);
    cl_mem *m[] = {&d->a, &d->b};
    for (int i = 0; i < 2; i++) {
        *m[i] = clCreateBuffer(ctx, CL_MEM_READ_WRITE, (size_t)words * 4, NULL, &e);
        CLX_OK(e);
    }
    d->sums = clCreateBuffer(ctx, CL_MEM_READ_WRITE, SUMS * 4, NULL, &e);
    CLX_OK(e);
    if (opt.ballast) {
        d->ballast = clCreateBuffer(ctx, CL_MEM_READ_WRITE, (size_t)opt.ballast << 20, NULL, &e);
        CLX_OK(e);
        uint32_t *piece = malloc(PIECE * 4);
        CLX_CHECK(piece, "no memory");
        for (uint32_t at = 0; at < opt.ballast; at++) {
            for (uint32_t i = 0; i < PIECE; i++)
                piece[i] = endure_first(at * PIECE + i, ~opt.seed);
            CLX_OK(clEnqueueWriteBuffer(d->queue, d->ballast, CL_TRUE, (size_t)at << 20, PIECE * 4, piece, 0, NULL, NULL));
        }
        free(piece);
    }
    cl_kernel first = clCreateKernel(prog, "first", &e);
    CLX_OK(e);
    d->next = clCreateKernel(prog, "next", &e);
    CLX_OK(e);
    d->sum = clCreateKernel(prog, "sum", &e);
    CLX_OK(e);
    arg(first, 0, sizeof d->a, &d->a);
    arg(first, 1, sizeof opt.seed, &opt.seed);
    size_t n = words;
    CLX_OK(clEnqueueNDRangeKernel(d->queue, first, 1, NULL, &n, NULL, 0, NULL, NULL));
    CLX_OK(clFinish(d->queue));
    CLX_OK(clReleaseKernel(first));
}

static void device_step(struct device *d, uint32_t k, uint32_t sums[SUMS]) {
    static const uint32_t zero[SUMS];
    size_t n = words, local = GROUP, groups = 64, all = groups * local;
    uint32_t each = words / (uint32_t)groups;
    arg(d->next, 0, sizeof d->a, &d->a);
    arg(d->next, 1, sizeof d->b, &d->b);
    arg(d->next, 2, sizeof k, &k);
    arg(d->next, 3, sizeof words, &words);
    arg(d->sum, 0, sizeof d->b, &d->b);
    arg(d->sum, 1, sizeof d->sums, &d->sums);
    arg(d->sum, 2, GROUP * 4, NULL);
    arg(d->sum, 3, sizeof each, &each);
    CLX_OK(clEnqueueWriteBuffer(d->queue, d->sums, CL_FALSE, 0, sizeof zero, zero, 0, NULL, NULL));
    CLX_OK(clEnqueueNDRangeKernel(d->queue, d->next, 1, NULL, &n, NULL, 0, NULL, NULL));
    CLX_OK(clEnqueueNDRangeKernel(d->queue, d->sum, 1, NULL, &all, &local, 0, NULL, NULL));
    CLX_OK(clEnqueueReadBuffer(d->queue, d->sums, CL_TRUE, 0, SUMS * 4, sums, 0, NULL, NULL));
    cl_mem t = d->a;
    d->a = d->b;
    d->b = t;
}

/* device_ballast counts the words of the ballast that have changed. */
static uint32_t device_ballast(struct device *d) {
    uint32_t *piece = malloc(PIECE * 4), bad = 0;
    CLX_CHECK(piece, "no memory");
    for (uint32_t at = 0; at < opt.ballast; at++) {
        CLX_OK(clEnqueueReadBuffer(d->queue, d->ballast, CL_TRUE, (size_t)at << 20, PIECE * 4, piece, 0, NULL, NULL));
        for (uint32_t i = 0; i < PIECE; i++)
            if (piece[i] != endure_first(at * PIECE + i, ~opt.seed) && bad++ == 0)
                printf("word %u of the ballast has changed\n", at * PIECE + i);
    }
    free(piece);
    return bad;
}

/* differ counts the words that are not the same, and says the first. */
static uint32_t differ(const uint32_t *got, const uint32_t *want) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < words; i++)
        if (got[i] != want[i] && count++ == 0)
            printf("word %u is %08x, here %08x\n", i, got[i], want[i]);
    return count;
}

static uint64_t fold(uint64_t s, uint32_t v) {
    s = (s ^ v) * 0x100000001b3ull;
    return s ^ s >> 29;
}

static bool over(unsigned long done, double began) {
    if (opt.until)
        return access(opt.until, F_OK) == 0;
    return opt.seconds > 0 ? clx_now() - began >= opt.seconds : done >= opt.iterations;
}

static void options(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(a, "--cpu")) {
            opt.cpu = true;
            continue;
        }
        CLX_CHECK(v, "unknown option or no value: %s", a);
        i++;
        if (!strcmp(a, "--kib"))
            opt.kib = (uint32_t)strtoul(v, NULL, 0);
        else if (!strcmp(a, "--ballast"))
            opt.ballast = (uint32_t)strtoul(v, NULL, 0);
        else if (!strcmp(a, "--iterations"))
            opt.iterations = strtoul(v, NULL, 0);
        else if (!strcmp(a, "--seconds"))
            opt.seconds = atof(v);
        else if (!strcmp(a, "--until"))
            opt.until = v;
        else if (!strcmp(a, "--seed"))
            opt.seed = (uint32_t)strtoul(v, NULL, 0);
        else if (!strcmp(a, "--pause"))
            opt.pause = (unsigned)strtoul(v, NULL, 0);
        else
            CLX_CHECK(false, "unknown option %s", a);
    }
    CLX_CHECK(opt.kib >= 8 && opt.kib <= 1 << 20 && opt.kib % 8 == 0, "--kib: 8 to 1048576, a multiple of 8");
    CLX_CHECK(opt.ballast <= 1024, "--ballast: up to 1024");
}

int main(int argc, char **argv) {
    options(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    words = opt.kib << 7; /* 4 bytes, two buffers */
    printf("start %d\n", (int)getpid());
    struct plain here, cpu;
    struct device dev;
    if (opt.cpu)
        plain_start(&cpu);
    else
        device_start(&dev);
    plain_start(&here);
    double began = clx_now();
    uint64_t result = 0xcbf29ce484222325ull;
    unsigned long n = 0;
    uint32_t wrong = 0;
    do {
        uint32_t got[SUMS], want[SUMS];
        if (opt.cpu)
            plain_step(&cpu, (uint32_t)n, got);
        else
            device_step(&dev, (uint32_t)n, got);
        plain_step(&here, (uint32_t)n, want);
        for (int i = 0; i < SUMS; i++)
            result = fold(result, got[i]);
        n++;
        if (memcmp(got, want, sizeof got) != 0) {
            printf("iteration %lu wrong %.6f\n", n, clx_now());
            wrong = 1;
            break;
        }
        printf("iteration %lu ok %.6f\n", n, clx_now());
        if (opt.pause)
            usleep(opt.pause * 1000);
    } while (!over(n, began));

    /* The sums could be right by chance, or wrong by themselves: every word counts. */
    uint32_t *all = opt.cpu ? cpu.a : malloc((size_t)words * 4);
    CLX_CHECK(all, "no memory");
    if (!opt.cpu)
        CLX_OK(clEnqueueReadBuffer(dev.queue, dev.a, CL_TRUE, 0, (size_t)words * 4, all, 0, NULL, NULL));
    uint32_t bad = differ(all, here.a);
    for (uint32_t i = 0; i < words; i++)
        result = fold(result, all[i]);
    if (!opt.cpu)
        bad += device_ballast(&dev);
    if (wrong || bad) {
        printf("%u words differ\n", bad);
        printf("result WRONG %lu %016llx\n", n, (unsigned long long)result);
        return 1;
    }
    printf("result OK %lu %016llx\n", n, (unsigned long long)result);
    return 0;
}
