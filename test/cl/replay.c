/*
 * replay: leaves L live objects behind after C calls, then waits for a line on stdin (or its end).
 *
 *   replay [--calls C] [--live L] [--mib M]
 *
 * The calls are what a long-lived application makes: buffers, kernels, events, programs' arguments come and go, kernels are
 * launched. A swap at that point must cost what the live objects cost, not what the history was.
 */
#include "clx.h"

int main(int argc, char **argv) {
    long calls = 1000000, live = 1000, mib = 64;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--calls"))
            calls = atol(argv[i + 1]);
        else if (!strcmp(argv[i], "--live"))
            live = atol(argv[i + 1]);
        else if (!strcmp(argv[i], "--mib"))
            mib = atol(argv[i + 1]);
        else {
            fprintf(stderr, "replay: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    CLX_CHECK(live >= 16 && live <= 100000 && mib >= 1 && mib <= 65536, "value out of range");
    cl_platform_id p;
    cl_device_id d = clx_device(0, &p);
    cl_int e;
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    CLX_OK(e);
    cl_command_queue q = clCreateCommandQueue(c, d, 0, &e);
    CLX_OK(e);
    cl_program prog = clx_build(c, d, "kernel void add(global uint *a, uint k) { a[get_global_id(0)] += k; }", "");
    long nk = live / 10, nb = live - nk - 4; /* the rest: context, queue, program and an event */
    size_t size = (size_t)mib * (1 << 20) / (size_t)nb & ~(size_t)255;
    if (size < 256)
        size = 256;
    cl_kernel *k = calloc((size_t)nk, sizeof *k);
    cl_mem *b = calloc((size_t)nb, sizeof *b);
    cl_uint *want = calloc((size_t)nb, sizeof *want), zero = 0;
    for (long i = 0; i < nk; i++) {
        k[i] = clCreateKernel(prog, "add", &e);
        CLX_OK(e);
    }
    for (long i = 0; i < nb; i++) {
        b[i] = clCreateBuffer(c, CL_MEM_READ_WRITE, size, NULL, &e);
        CLX_OK(e);
        CLX_OK(clEnqueueFillBuffer(q, b[i], &zero, 4, 0, size, 0, NULL, NULL));
    }
    CLX_OK(clFinish(q));
    long n = 3 + nk + 2 * nb;
    size_t g = 16;
    double t = clx_now();
    for (cl_uint i = 0; n < calls; i++) {
        long bi = (long)(i % (cl_uint)nb), ki = (long)(i % (cl_uint)nk);
        CLX_OK(clSetKernelArg(k[ki], 0, sizeof b[bi], &b[bi]));
        CLX_OK(clSetKernelArg(k[ki], 1, sizeof i, &i));
        n += 2;
        if (i % 8 == 0) {
            CLX_OK(clEnqueueNDRangeKernel(q, k[ki], 1, NULL, &g, NULL, 0, NULL, NULL));
            want[bi] += i;
            n++;
        }
        if (i % 16 == 0) { /* churn: an object is replaced */
            cl_mem m = clCreateBuffer(c, CL_MEM_READ_WRITE, 4096, NULL, &e);
            CLX_OK(e);
            CLX_OK(clReleaseMemObject(m));
            n += 2;
        }
        if (i % 64 == 0) {
            cl_kernel x = clCreateKernel(prog, "add", &e);
            CLX_OK(e);
            CLX_OK(clReleaseKernel(k[ki]));
            k[ki] = x;
            n += 2;
        }
        if (i % 4096 == 0) {
            CLX_OK(clFinish(q));
            n++;
        }
    }
    CLX_OK(clFinish(q));
    printf("ready: %ld calls in %.2f s, %ld live objects, %zu bytes\n", n, clx_now() - t, live, size * (size_t)nb);
    fflush(stdout);
    for (int ch = getchar(); ch != EOF && ch != '\n'; ch = getchar())
        ;
    for (long i = 0; i < nb; i++) {
        cl_uint v = ~want[i];
        CLX_OK(clEnqueueReadBuffer(q, b[i], CL_TRUE, 0, 4, &v, 0, NULL, NULL));
        CLX_CHECK(v == want[i], "buffer %ld holds %u, not %u", i, v, want[i]);
    }
    puts("ok");
    return 0;
}
