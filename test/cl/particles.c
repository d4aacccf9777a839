/*
 * particles: time steps like those of LAMMPS with its GPU package, in integers. In each, the host moves its particles and sends
 * their places, three kernels compute forces on them, and the host waits for these. Lists of neighbours stay on the GPU and
 * are made anew every 16 steps.
 *
 *   particles [--steps N] [--particles N] [--rounds N] [--mark PERCENT]
 *
 * prints "mark" after that part of the steps, and at the end "sum S, N s, M s": what the last forces add up to, and how long the
 * steps took, and the second half of them.
 */
#include "clx.h"

static const char *source =
    "kernel void neighbours(global const uint *x, global uint *list, uint n, uint step) {\n"
    "    uint i = get_global_id(0);\n"
    "    for (uint k = 0; k < 8; k++) list[k * n + i] = (x[i] * 2654435761u + k * 40503u + step) % n;\n"
    "}\n"
    "kernel void pair(global const uint *x, global const uint *list, global uint *f, uint n, uint rounds) {\n"
    "    uint i = get_global_id(0), s = x[i];\n"
    "    for (uint r = 0; r < rounds; r++)\n"
    "        for (uint k = 0; k < 8; k++) s = s * 1664525u + (x[list[k * n + i]] ^ (s >> 13)) + r;\n"
    "    f[i] = s;\n"
    "}\n"
    "kernel void bond(global const uint *f, global uint *g, uint n) {\n"
    "    uint i = get_global_id(0);\n"
    "    g[i] = f[i] + f[(i + 1) % n] * 3u;\n"
    "}\n"
    "kernel void integrate(global const uint *g, global uint *f) {\n"
    "    uint i = get_global_id(0);\n"
    "    f[i] = g[i] ^ (g[i] >> 7);\n"
    "}\n";

static cl_context c;
static cl_command_queue q;

static cl_mem buffer(size_t size) {
    cl_int e;
    cl_mem m = clCreateBuffer(c, CL_MEM_READ_WRITE, size, NULL, &e);
    CLX_OK(e);
    cl_uint zero = 0;
    CLX_OK(clEnqueueFillBuffer(q, m, &zero, 4, 0, size, 0, NULL, NULL));
    return m;
}

static cl_kernel kernel(cl_program p, const char *name) {
    cl_int e;
    cl_kernel k = clCreateKernel(p, name, &e);
    CLX_OK(e);
    return k;
}

static void launch(cl_kernel k, size_t n) { CLX_OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &n, NULL, 0, NULL, NULL)); }

int main(int argc, char **argv) {
    unsigned steps = 1000, n = 65536, rounds = 4, mark = 0;
    for (int i = 1; i < argc; i += 2) {
        CLX_CHECK(i + 1 < argc, "%s: a value is missing", argv[i]);
        unsigned v = (unsigned)atol(argv[i + 1]);
        if (!strcmp(argv[i], "--steps")) steps = v;
        else if (!strcmp(argv[i], "--particles")) n = v;
        else if (!strcmp(argv[i], "--rounds")) rounds = v;
        else if (!strcmp(argv[i], "--mark")) mark = v;
        else CLX_CHECK(0, "unknown option %s", argv[i]);
    }
    CLX_CHECK(steps >= 1 && n >= 16 && n <= 1 << 24 && mark <= 100, "value out of range");
    cl_device_id d = clx_device(0, NULL);
    cl_int e;
    c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    CLX_OK(e);
    q = clCreateCommandQueue(c, d, 0, &e);
    CLX_OK(e);
    cl_program p = clx_build(c, d, source, "");
    size_t size = n * sizeof(cl_uint);
    cl_mem x = buffer(size), f = buffer(size), g = buffer(size), list = buffer(8 * size);
    cl_kernel kn = kernel(p, "neighbours"), kp = kernel(p, "pair"), kb = kernel(p, "bond"), ki = kernel(p, "integrate");
    CLX_OK(clSetKernelArg(kn, 0, sizeof x, &x));
    CLX_OK(clSetKernelArg(kn, 1, sizeof list, &list));
    CLX_OK(clSetKernelArg(kn, 2, sizeof n, &n));
    CLX_OK(clSetKernelArg(kp, 0, sizeof x, &x));
    CLX_OK(clSetKernelArg(kp, 1, sizeof list, &list));
    CLX_OK(clSetKernelArg(kp, 2, sizeof f, &f));
    CLX_OK(clSetKernelArg(kp, 3, sizeof n, &n));
    CLX_OK(clSetKernelArg(kp, 4, sizeof rounds, &rounds));
    CLX_OK(clSetKernelArg(kb, 0, sizeof f, &f));
    CLX_OK(clSetKernelArg(kb, 1, sizeof g, &g));
    CLX_OK(clSetKernelArg(kb, 2, sizeof n, &n));
    CLX_OK(clSetKernelArg(ki, 0, sizeof g, &g));
    CLX_OK(clSetKernelArg(ki, 1, sizeof f, &f));
    CLX_OK(clFinish(q));
    cl_uint *place = calloc(n, sizeof *place), *force = calloc(n, sizeof *force);
    for (unsigned i = 0; i < n; i++)
        force[i] = i * 2246822519u;
    double t = clx_now(), half = t;
    for (unsigned s = 0; s < steps; s++) {
        if (s == steps / 2)
            half = clx_now();
        if (mark && s == (unsigned)((uint64_t)steps * mark / 100)) {
            puts("mark");
            fflush(stdout);
        }
        for (unsigned i = 0; i < n; i++)
            place[i] += force[i];
        CLX_OK(clEnqueueWriteBuffer(q, x, CL_TRUE, 0, size, place, 0, NULL, NULL));
        if (s % 16 == 0) {
            CLX_OK(clSetKernelArg(kn, 3, sizeof s, &s));
            launch(kn, n);
        }
        launch(kp, n);
        launch(kb, n);
        launch(ki, n);
        CLX_OK(clEnqueueReadBuffer(q, f, CL_TRUE, 0, size, force, 0, NULL, NULL));
    }
    double end = clx_now();
    uint64_t sum = 0;
    for (unsigned i = 0; i < n; i++)
        sum = sum * 31 + force[i];
    printf("sum %016llx, %.6f s, %.6f s\n", (unsigned long long)sum, end - t, end - half);
    return 0;
}
