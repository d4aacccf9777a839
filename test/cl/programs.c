/*
 * programs: an application with many programs and buffers in several contexts.
 *
 *   programs [--programs N] [--buffers N] [--contexts N] [--rounds N] [--stdin] [--grow N]
 *
 * Each round launches every kernel and checks all that it computed. --grow builds N programs more in each round. With
 * --stdin rounds go on until standard input ends.
 */
#include "clx.h"
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        cl_int e_ = (call);                                                                                            \
        if (e_) {                                                                                                      \
            fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, e_);                                         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { WORDS = 256, MAX = 4096 };

static cl_device_id device;
static unsigned nprograms = 100, nbuffers = 400, ncontexts = 4, rounds = 10, grow;
static cl_context contexts[16];
static cl_command_queue queues[16];
static cl_kernel kernels[MAX];
static cl_mem buffers[MAX];
static cl_uint want[MAX][WORDS];
static unsigned seed;

static void make_program(unsigned i) {
    char src[2048];
    cl_int e;
    snprintf(src, sizeof src,
             "uint mix%u(uint x, uint n) { for (uint i = 0; i < n; i++) x = rotate(x * %uu + i, %uu) ^ (x >> %u); return x; }\n"
             "kernel void k%u(global uint *a, uint n, ulong add) { size_t i = get_global_id(0); a[i] = mix%u(a[i], n) + (uint)add; }\n",
             i, 2 * (seed + i) + 1, i % 31 + 1, i % 7 + 1, i, i);
    const char *s = src;
    cl_program p = clCreateProgramWithSource(contexts[i % ncontexts], 1, &s, NULL, &e);
    OK(e);
    OK(clBuildProgram(p, 1, &device, "", NULL, NULL));
    char name[16];
    snprintf(name, sizeof name, "k%u", i);
    kernels[i] = clCreateKernel(p, name, &e);
    OK(e);
    OK(clReleaseProgram(p));
}

static cl_uint mix(unsigned i, cl_uint x, cl_uint n) {
    unsigned r = i % 31 + 1;
    for (cl_uint j = 0; j < n; j++) {
        cl_uint y = x * (2 * (seed + i) + 1) + j;
        x = (y << r | y >> (32 - r)) ^ (x >> (i % 7 + 1));
    }
    return x;
}

/* step launches a kernel on a buffer of its context. */
static void step(unsigned k, unsigned b) {
    unsigned c = k % ncontexts;
    cl_uint n = 3 + k % 5;
    cl_ulong add = k;
    size_t g = WORDS;
    OK(clSetKernelArg(kernels[k], 0, sizeof(cl_mem), &buffers[b]));
    OK(clSetKernelArg(kernels[k], 1, sizeof n, &n));
    OK(clSetKernelArg(kernels[k], 2, sizeof add, &add));
    OK(clEnqueueNDRangeKernel(queues[c], kernels[k], 1, NULL, &g, NULL, 0, NULL, NULL));
    for (int i = 0; i < WORDS; i++)
        want[b][i] = mix(k, want[b][i], n) + (cl_uint)add;
}

static bool ended(bool from_stdin, unsigned round) {
    struct pollfd p = {.fd = 0, .events = POLLIN};
    char c;
    if (!from_stdin)
        return round >= rounds;
    return poll(&p, 1, 0) > 0 && read(0, &c, 1) <= 0;
}

int main(int argc, char **argv) {
    cl_platform_id p;
    bool from_stdin = false;
    cl_int e;
    for (int i = 1; i < argc; i++) {
        unsigned *to = !strcmp(argv[i], "--programs") ? &nprograms : !strcmp(argv[i], "--buffers") ? &nbuffers : !strcmp(argv[i], "--contexts") ? &ncontexts :
                       !strcmp(argv[i], "--rounds") ? &rounds : !strcmp(argv[i], "--grow") ? &grow : !strcmp(argv[i], "--seed") ? &seed : NULL;
        if (!strcmp(argv[i], "--stdin"))
            from_stdin = true;
        else if (to && i + 1 < argc)
            *to = (unsigned)strtoul(argv[++i], NULL, 10);
        else {
            fprintf(stderr, "usage: programs [--programs N] [--buffers N] [--contexts N] [--rounds N] [--grow N] [--seed N] [--stdin]\n");
            return 2;
        }
    }
    if (!nprograms || nprograms > MAX || nbuffers > MAX || !ncontexts || ncontexts > 16 || nbuffers < ncontexts) {
        fprintf(stderr, "programs: bad numbers\n");
        return 2;
    }
    device = clx_device(0, &p);
    double t = clx_now();
    for (unsigned i = 0; i < ncontexts; i++) {
        contexts[i] = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
        OK(e);
        queues[i] = clCreateCommandQueue(contexts[i], device, 0, &e);
        OK(e);
    }
    for (unsigned i = 0; i < nbuffers; i++) {
        for (unsigned j = 0; j < WORDS; j++)
            want[i][j] = i * 1000 + j;
        buffers[i] = clCreateBuffer(contexts[i % ncontexts], CL_MEM_COPY_HOST_PTR, sizeof want[i], want[i], &e);
        OK(e);
    }
    for (unsigned i = 0; i < nprograms; i++)
        make_program(i);
    printf("%u programs, %u buffers, %u contexts in %.2f s\n", nprograms, nbuffers, ncontexts, clx_now() - t);
    fflush(stdout);
    double longest = 0;
    for (unsigned r = 1; !ended(from_stdin, r - 1); r++) {
        for (unsigned g = 0; g < grow && nprograms < MAX; g++)
            make_program(nprograms++);
        double begin = clx_now();
        for (unsigned k = 0; k < nprograms; k++)
            step(k, (k + r * ncontexts) % (nbuffers - nbuffers % ncontexts));
        for (unsigned b = 0; b < nbuffers; b++) {
            cl_uint got[WORDS];
            OK(clEnqueueReadBuffer(queues[b % ncontexts], buffers[b], CL_TRUE, 0, sizeof got, got, 0, NULL, NULL));
            if (memcmp(got, want[b], sizeof got)) {
                fprintf(stderr, "round %u: buffer %u is wrong\n", r, b);
                return 1;
            }
        }
        longest = clx_now() - begin > longest ? clx_now() - begin : longest;
        printf("round %u: %u programs, right\n", r, nprograms);
        fflush(stdout);
    }
    printf("all right; longest round %.1f ms\n", longest * 1e3);
    return 0;
}
