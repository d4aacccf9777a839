/*
 * footprint: the memory that the OpenCL library adds to a process, in KiB, as JSON.
 *
 * Resident memory is taken before the library is loaded and after a small job. Mappings of the shared memfds (ring, arena,
 * state) are counted apart: "arena" is theirs, "added" is everything else.
 */
#include "clx.h"
#include <dlfcn.h>
#include <stdbool.h>

struct rss {
    long total, memfd;
};

static struct rss measure(void) {
    struct rss r = {0, 0};
    FILE *f = fopen("/proc/self/smaps", "r");
    CLX_CHECK(f, "no /proc/self/smaps");
    char line[1024];
    bool shared = false;
    while (fgets(line, sizeof line, f)) {
        unsigned long a, b;
        long kb;
        if (sscanf(line, "%lx-%lx", &a, &b) == 2)
            shared = strstr(line, "/memfd:") != NULL;
        else if (sscanf(line, "Rss: %ld kB", &kb) == 1) {
            r.total += kb;
            if (shared)
                r.memfd += kb;
        }
    }
    fclose(f);
    return r;
}

/* The library is loaded with dlopen, so that its own pages count. */
#define F(name) __typeof__(&name) p_##name = (__typeof__(&name))dlsym(lib, #name)

int main(void) {
    struct rss before = measure();
    before = measure(); /* the first one allocates stdio's memory */
    void *lib = dlopen("libOpenCL.so.1", RTLD_NOW);
    CLX_CHECK(lib, "%s", dlerror());
    F(clGetPlatformIDs);
    F(clGetDeviceIDs);
    F(clCreateContext);
    F(clCreateCommandQueue);
    F(clCreateProgramWithSource);
    F(clBuildProgram);
    F(clCreateKernel);
    F(clCreateBuffer);
    F(clSetKernelArg);
    F(clEnqueueNDRangeKernel);
    F(clEnqueueReadBuffer);
    cl_platform_id p;
    cl_device_id d;
    cl_int e;
    CLX_OK(p_clGetPlatformIDs(1, &p, NULL));
    CLX_OK(p_clGetDeviceIDs(p, CL_DEVICE_TYPE_ALL, 1, &d, NULL));
    cl_context c = p_clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    CLX_OK(e);
    cl_command_queue q = p_clCreateCommandQueue(c, d, 0, &e);
    CLX_OK(e);
    const char *src = "kernel void f(global int *a) { a[get_global_id(0)] = 3; }";
    cl_program pr = p_clCreateProgramWithSource(c, 1, &src, NULL, &e);
    CLX_OK(e);
    CLX_OK(p_clBuildProgram(pr, 0, NULL, "", NULL, NULL));
    cl_kernel k = p_clCreateKernel(pr, "f", &e);
    CLX_OK(e);
    cl_mem b = p_clCreateBuffer(c, 0, 4096, NULL, &e);
    CLX_OK(e);
    CLX_OK(p_clSetKernelArg(k, 0, sizeof b, &b));
    size_t n = 1024;
    static int v[1024];
    CLX_OK(p_clEnqueueNDRangeKernel(q, k, 1, NULL, &n, NULL, 0, NULL, NULL));
    CLX_OK(p_clEnqueueReadBuffer(q, b, CL_TRUE, 0, sizeof v, v, 0, NULL, NULL));
    CLX_CHECK(v[1023] == 3, "wrong result");
    struct rss after = measure();
    printf("{\"added_kib\": %ld, \"arena_kib\": %ld}\n", after.total - after.memfd - (before.total - before.memfd), after.memfd - before.memfd);
    return 0;
}
