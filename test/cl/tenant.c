/*
 * tenant: a program that shares a GPU with others. It launches kernels of one length, waits for each, and thinks in between.
 *
 *   tenant --us N [--iterations N] [--seconds N] [--think-us N] [--seed N] [--ahead N] [--loop]
 *
 * Without --iterations the kernel is one of test/cl/gpushim.c that takes as many microseconds by the clock as --us says,
 * within 20 %. With it, each kernel computes so many rounds. --ahead launches that many kernels before it waits. When it ends, by
 * time or with its standard input, it prints a line "K start end" in nanoseconds for each kernel, as the device's clock has them.
 * --loop launches a kernel without an end instead. --allocate N makes buffers of 8 MiB first, and writes to them, until it has N MiB or is
 * refused, and prints "allocated N MiB, then E".
 *
 *   tenant --calibrate N
 *
 * prints how many rounds take N microseconds.
 */
#include "clx.h"
#include <math.h>
#include <poll.h>
#include <stdbool.h>

static const char *source =
    "__kernel void gpushim_takes(__global uint *a) { }\n"
    "__kernel void compute(__global uint *a, uint rounds) { uint x = a[0]; for (uint i = 0; i < rounds; i++) x = x * 2654435761u + i; a[0] = x; }\n"
    "__kernel void forever(__global volatile uint *a) { while (a[1] == 0) a[2] += 1; }\n";

static uint64_t state = 1;

static double uniform(void)
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(state >> 11) / 9007199254740992.0;
}

static bool ended(void)
{
    struct pollfd p = {.fd = 0, .events = POLLIN};
    char c;
    return poll(&p, 1, 0) > 0 && read(0, &c, 1) <= 0;
}

struct run { cl_ulong start, end; };

int main(int argc, char **argv)
{
    double us = 1000, seconds = 5, think = 200, calibrate = 0, allocate = 0;
    unsigned iterations = 0, ahead = 1;
    bool loop = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--loop")) {
            loop = true;
            continue;
        }
        CLX_CHECK(i + 1 < argc, "%s: a value is missing", argv[i]);
        double v = atof(argv[i + 1]);
        if (!strcmp(argv[i], "--us")) us = v;
        else if (!strcmp(argv[i], "--iterations")) iterations = (unsigned)v;
        else if (!strcmp(argv[i], "--seconds")) seconds = v;
        else if (!strcmp(argv[i], "--think-us")) think = v;
        else if (!strcmp(argv[i], "--seed")) state = (uint64_t)v;
        else if (!strcmp(argv[i], "--ahead")) ahead = (unsigned)v;
        else if (!strcmp(argv[i], "--calibrate")) calibrate = v;
        else if (!strcmp(argv[i], "--allocate")) allocate = v;
        else CLX_CHECK(0, "unknown option %s", argv[i]);
        i++;
    }
    CLX_CHECK(ahead >= 1 && ahead <= 4096, "--ahead %u", ahead);
    cl_int e;
    cl_device_id d = clx_device(0, NULL);
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    CLX_OK(e);
    cl_command_queue q = clCreateCommandQueue(c, d, CL_QUEUE_PROFILING_ENABLE, &e);
    CLX_OK(e);
    cl_program p = clx_build(c, d, source, "");
    cl_mem m = clCreateBuffer(c, CL_MEM_READ_WRITE, 4096, NULL, &e);
    CLX_OK(e);
    uint32_t zero = 0;
    CLX_OK(clEnqueueFillBuffer(q, m, &zero, 4, 0, 4096, 0, NULL, NULL));
    CLX_OK(clFinish(q));
    bool computes = iterations || calibrate > 0;
    cl_kernel k = clCreateKernel(p, loop ? "forever" : computes ? "compute" : "gpushim_takes", &e);
    CLX_OK(e);
    CLX_OK(clSetKernelArg(k, 0, sizeof m, &m));
    if (calibrate > 0) {
        cl_uint rounds = 100000;
        double best = 1e18;
        for (int i = 0; i < 500; i++) { /* a card takes some 100 ms to get up to its clock */
            CLX_OK(clSetKernelArg(k, 1, 4, &rounds));
            size_t one = 1;
            cl_event ran;
            cl_ulong from, to;
            CLX_OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &one, &one, 0, NULL, &ran));
            CLX_OK(clFinish(q));
            CLX_OK(clGetEventProfilingInfo(ran, CL_PROFILING_COMMAND_START, 8, &from, NULL));
            CLX_OK(clGetEventProfilingInfo(ran, CL_PROFILING_COMMAND_END, 8, &to, NULL));
            CLX_OK(clReleaseEvent(ran));
            best = fmin(best, (double)(to - from) * 1e-9);
        }
        printf("%.0f\n", calibrate * 1e-6 / best * rounds);
        return 0;
    }
    if (computes && !loop)
        CLX_OK(clSetKernelArg(k, 1, 4, &iterations));
    if (allocate > 0) {
        const size_t piece = 8 << 20;
        size_t have = 0;
        e = CL_SUCCESS;
        while (have < (size_t)allocate) {
            cl_mem x = clCreateBuffer(c, CL_MEM_READ_WRITE, piece, NULL, &e);
            if (!e && !(e = clEnqueueFillBuffer(q, x, &zero, 4, 0, piece, 0, NULL, NULL)))
                e = clFinish(q);
            if (e)
                break;
            have += piece >> 20;
        }
        printf("allocated %zu MiB, then %d\n", have, e);
    }
    size_t most = 1 << 20, n = 0;
    struct run *runs = malloc(most * sizeof *runs);
    cl_event *ev = calloc(ahead, sizeof *ev);
    CLX_CHECK(runs && ev, "out of memory");
    puts("ready");
    fflush(stdout);
    double until = clx_now() + seconds;
    while (clx_now() < until && !ended() && n + ahead <= most) {
        for (unsigned i = 0; i < ahead; i++) {
            if (loop) /* its turn begins with another command */
                CLX_OK(clEnqueueFillBuffer(q, m, &zero, 4, 0, 4096, 0, NULL, NULL));
            size_t work = computes || loop ? 1 : (size_t)(us * (0.8 + 0.4 * uniform())), one = 1;
            CLX_OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &work, &one, 0, NULL, &ev[i]));
        }
        e = clFinish(q);
        if (e) {
            printf("lost %d\n", e);
            return 3;
        }
        for (unsigned i = 0; i < ahead; i++) {
            CLX_OK(clGetEventProfilingInfo(ev[i], CL_PROFILING_COMMAND_START, 8, &runs[n].start, NULL));
            CLX_OK(clGetEventProfilingInfo(ev[i], CL_PROFILING_COMMAND_END, 8, &runs[n].end, NULL));
            CLX_OK(clReleaseEvent(ev[i]));
            n++;
        }
        if (think > 0) {
            struct timespec t = {0, 0};
            double ns = -log(1 - uniform()) * think * 1000;
            t.tv_sec = (time_t)(ns / 1e9);
            t.tv_nsec = (long)(ns - (double)t.tv_sec * 1e9);
            if (think < 10000)
                nanosleep(&t, NULL);
            else /* it ends in the middle */
                ppoll(&(struct pollfd){.fd = 0, .events = POLLIN}, 1, &t, NULL);
        }
    }
    for (size_t i = 0; i < n; i++)
        printf("K %llu %llu\n", (unsigned long long)runs[i].start, (unsigned long long)runs[i].end);
    return 0;
}
