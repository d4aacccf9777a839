/*
 * clbench: costs of single OpenCL calls, as one JSON object on stdout. Times in microseconds, rates in GB/s (10^9).
 *
 *   clbench [--n N] [--mib M] [--pipelined P] [--rounds R]
 */
#include "clx.h"
#include <semaphore.h>

enum { REGIONS = 1024, CALLBACKS = 500, CALLBACK_SECONDS = 10, TAKES_US = 300 };

static double *samples;
static int count;

static void report(const char *name, double scale) {
    qsort(samples, (size_t)count, sizeof *samples, clx_dbl_cmp);
    printf(", \"%s_p50\": %.4f, \"%s_p99\": %.4f", name, samples[count / 2] * scale, name, samples[(int)(count * 0.99)] * scale);
}

static void CL_CALLBACK told(cl_event e, cl_int status, void *sem) {
    (void)e, (void)status;
    sem_post(sem);
}

static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, clx_dbl_cmp);
    return v[n / 2];
}

int main(int argc, char **argv) {
    int n = 2000, rounds = 5;
    long pipelined = 20000, mib = 256;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--n"))
            n = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--mib"))
            mib = atol(argv[i + 1]);
        else if (!strcmp(argv[i], "--pipelined"))
            pipelined = atol(argv[i + 1]);
        else if (!strcmp(argv[i], "--rounds"))
            rounds = atoi(argv[i + 1]);
        else {
            fprintf(stderr, "clbench: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    CLX_CHECK(n >= 10 && rounds >= 1 && rounds <= 64 && mib >= 1 && pipelined >= 1, "value out of range");
    samples = calloc((size_t)n, sizeof *samples);
    count = n;
    cl_platform_id p;
    cl_device_id d = clx_device(0, &p);
    char name[256] = "";
    CLX_OK(clGetDeviceInfo(d, CL_DEVICE_NAME, sizeof name, name, NULL));
    for (char *s = name; *s; s++)
        if (*s == '"' || *s == '\\')
            *s = ' ';
    printf("{\"device\": \"%s\"", name);
    cl_int e;
    double t = clx_now();
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    CLX_OK(e);
    cl_command_queue q = clCreateCommandQueue(c, d, 0, &e);
    CLX_OK(e);
    printf(", \"context_ms\": %.3f", (clx_now() - t) * 1e3);
    t = clx_now();
    cl_program prog = clx_build(c, d, "kernel void nul(global int *a) {}", "");
    printf(", \"build_ms\": %.3f", (clx_now() - t) * 1e3);
    cl_kernel k = clCreateKernel(prog, "nul", &e);
    CLX_OK(e);
    cl_mem b = clCreateBuffer(c, CL_MEM_READ_WRITE, 4096, NULL, &e);
    CLX_OK(e);
    CLX_OK(clSetKernelArg(k, 0, sizeof b, &b));
    size_t one = 1;
    int word = 1;
    for (int i = 0; i < 200; i++) {
        CLX_OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &one, NULL, 0, NULL, NULL));
        CLX_OK(clFinish(q));
    }
    for (int i = 0; i < n; i++) {
        t = clx_now();
        CLX_OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &one, NULL, 0, NULL, NULL));
        CLX_OK(clFinish(q));
        samples[i] = clx_now() - t;
    }
    report("null_us", 1e6);
    for (int i = 0; i < n; i++) {
        t = clx_now();
        CLX_OK(clEnqueueWriteBuffer(q, b, CL_TRUE, 0, 4, &word, 0, NULL, NULL));
        samples[i] = clx_now() - t;
    }
    report("write4_us", 1e6);
    for (int i = 0; i < n; i++) {
        t = clx_now();
        CLX_OK(clEnqueueReadBuffer(q, b, CL_TRUE, 0, 4, &word, 0, NULL, NULL));
        samples[i] = clx_now() - t;
    }
    report("read4_us", 1e6);
    for (int i = 0; i < n; i++) {
        t = clx_now();
        CLX_OK(clSetKernelArg(k, 0, sizeof b, &b));
        samples[i] = clx_now() - t;
    }
    report("set_arg_us", 1e6);
    for (int i = 0; i < n; i++) {
        t = clx_now();
        cl_mem m = clCreateBuffer(c, CL_MEM_READ_WRITE, 4096, NULL, &e);
        CLX_OK(e);
        CLX_OK(clReleaseMemObject(m));
        samples[i] = clx_now() - t;
    }
    report("buffer_us", 1e6);
    cl_program prog2 = clx_build(c, d, "kernel void takes(global uint *a, uint rounds) { uint x = a[0]; for (uint i = 0; i < rounds; i++) x = x * 2654435761u + i; a[0] = x; }", "");
    cl_kernel takes = clCreateKernel(prog2, "takes", &e);
    CLX_OK(e);
    CLX_OK(clSetKernelArg(takes, 0, sizeof b, &b));
    for (cl_uint rounds = 1000, enough = 0; enough < 3 && rounds < 1u << 30; rounds += enough ? 0 : rounds / 2) {
        CLX_OK(clSetKernelArg(takes, 1, sizeof rounds, &rounds));
        t = clx_now();
        CLX_OK(clEnqueueNDRangeKernel(q, takes, 1, NULL, &one, NULL, 0, NULL, NULL));
        CLX_OK(clFinish(q));
        enough = clx_now() - t >= TAKES_US * 1e-6 ? enough + 1 : 0;
    }
    sem_t ended;
    CLX_CHECK(!sem_init(&ended, 0, 0), "no semaphore");
    count = n < CALLBACKS ? n : CALLBACKS;
    for (int i = 0; i < count; i++) {
        t = clx_now();
        CLX_OK(clEnqueueNDRangeKernel(q, takes, 1, NULL, &one, NULL, 0, NULL, NULL));
        CLX_OK(clFinish(q));
        samples[i] = clx_now() - t;
    }
    report("takes_us", 1e6);
    for (int i = 0; i < count; i++) { /* the same kernel, and the callback that tells its end */
        cl_event ev;
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += CALLBACK_SECONDS;
        t = clx_now();
        CLX_OK(clEnqueueNDRangeKernel(q, takes, 1, NULL, &one, NULL, 0, NULL, &ev));
        CLX_OK(clSetEventCallback(ev, CL_COMPLETE, told, &ended));
        CLX_OK(clFlush(q));
        CLX_CHECK(!sem_timedwait(&ended, &until), "callback %d has not come in %d s", i, CALLBACK_SECONDS);
        samples[i] = clx_now() - t;
        CLX_OK(clReleaseEvent(ev));
    }
    report("callback_us", 1e6);
    count = n;
    CLX_OK(clReleaseKernel(takes));
    CLX_OK(clReleaseProgram(prog2));
    double v[64], w[64];
    for (int r = 0; r < rounds; r++) {
        t = clx_now();
        for (long i = 0; i < pipelined; i++)
            CLX_OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &one, NULL, 0, NULL, NULL));
        CLX_OK(clFinish(q));
        v[r] = (double)pipelined / (clx_now() - t);
    }
    printf(", \"pipelined_per_s\": %.1f", median(v, rounds));
    size_t size = (size_t)mib << 20;
    unsigned char *h = malloc(size);
    CLX_CHECK(h, "no memory");
    memset(h, 1, size);
    cl_mem regions = clCreateBuffer(c, CL_MEM_READ_WRITE, REGIONS * 1024, NULL, &e);
    CLX_OK(e);
    cl_mem big = clCreateBuffer(c, CL_MEM_READ_WRITE, size, NULL, &e);
    CLX_OK(e);
    CLX_OK(clEnqueueWriteBuffer(q, big, CL_TRUE, 0, size, h, 0, NULL, NULL)); /* pages exist from here on */
    CLX_OK(clEnqueueReadBuffer(q, big, CL_TRUE, 0, size, h, 0, NULL, NULL));
    for (int r = 0; r < rounds; r++) {
        t = clx_now();
        CLX_OK(clEnqueueWriteBuffer(q, big, CL_TRUE, 0, size, h, 0, NULL, NULL));
        v[r] = (double)size / (clx_now() - t) / 1e9;
        t = clx_now();
        CLX_OK(clEnqueueReadBuffer(q, big, CL_TRUE, 0, size, h, 0, NULL, NULL));
        w[r] = (double)size / (clx_now() - t) / 1e9;
    }
    printf(", \"write_gbs\": %.3f, \"read_gbs\": %.3f", median(v, rounds), median(w, rounds));
    for (int r = 0; r < rounds; r++) { /* a page of a large region is changed */
        t = clx_now();
        unsigned char *m = clEnqueueMapBuffer(q, big, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, size, 0, NULL, NULL, &e);
        CLX_OK(e);
        v[r] = clx_now() - t;
        m[size / 2] = (unsigned char)r;
        t = clx_now();
        CLX_OK(clEnqueueUnmapMemObject(q, big, m, 0, NULL, NULL));
        CLX_OK(clFinish(q));
        w[r] = clx_now() - t;
        unsigned char got = 0;
        CLX_OK(clEnqueueReadBuffer(q, big, CL_TRUE, size / 2, 1, &got, 0, NULL, NULL));
        CLX_CHECK(got == (unsigned char)r, "the mapped region holds %d, not %d", got, r);
    }
    printf(", \"map_ms\": %.3f, \"unmap_page_ms\": %.3f", median(v, rounds) * 1e3, median(w, rounds) * 1e3);
    for (int r = 0; r < rounds; r++) { /* many small regions are mapped, written and unmapped */
        void *m[REGIONS];
        t = clx_now();
        for (size_t i = 0; i < REGIONS; i++) {
            m[i] = clEnqueueMapBuffer(q, regions, CL_FALSE, CL_MAP_READ | CL_MAP_WRITE, i * 1024, 1024, 0, NULL, NULL, &e);
            CLX_OK(e);
        }
        CLX_OK(clFinish(q));
        for (size_t i = 0; i < REGIONS; i++)
            memset(m[i], r + (int)i + 1, 1024);
        for (size_t i = 0; i < REGIONS; i++)
            CLX_OK(clEnqueueUnmapMemObject(q, regions, m[i], 0, NULL, NULL));
        CLX_OK(clFinish(q));
        v[r] = clx_now() - t;
        unsigned char got[REGIONS * 1024];
        CLX_OK(clEnqueueReadBuffer(q, regions, CL_TRUE, 0, sizeof got, got, 0, NULL, NULL));
        for (size_t i = 0; i < sizeof got; i++)
            CLX_CHECK(got[i] == (unsigned char)(r + (int)(i / 1024) + 1), "region %zu holds %d in round %d", i / 1024, got[i], r);
    }
    printf(", \"regions_ms\": %.3f}\n", median(v, rounds) * 1e3);
    CLX_OK(clReleaseMemObject(regions));
    CLX_OK(clReleaseMemObject(big));
    CLX_OK(clReleaseMemObject(b));
    CLX_OK(clReleaseKernel(k));
    CLX_OK(clReleaseProgram(prog));
    CLX_OK(clReleaseCommandQueue(q));
    CLX_OK(clReleaseContext(c));
    return 0;
}
