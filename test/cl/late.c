/*
 * late: asks to unmap a region, lets the request wait for a user event, and writes the region meanwhile. It prints "waits N" and
 * goes on at each line of standard input. What it reads back in the end has to be what it wrote.
 *
 *   late [--kib N] [--rounds R]
 */
#include "clx.h"

int main(int argc, char **argv) {
    long kib = 256, rounds = 2;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--kib"))
            kib = atol(argv[i + 1]);
        else if (!strcmp(argv[i], "--rounds"))
            rounds = atol(argv[i + 1]);
        else {
            fprintf(stderr, "late: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    CLX_CHECK(kib >= 1 && kib <= 1 << 20 && rounds >= 1 && rounds <= 100, "value out of range");
    cl_platform_id p;
    cl_device_id d = clx_device(0, &p);
    cl_int e;
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    CLX_OK(e);
    cl_command_queue q = clCreateCommandQueue(c, d, 0, &e);
    CLX_OK(e);
    size_t n = (size_t)kib << 10;
    unsigned char *got = malloc(n), fill = 9;
    CLX_CHECK(got, "no memory");
    cl_mem b = clCreateBuffer(c, CL_MEM_READ_WRITE, n, NULL, &e);
    CLX_OK(e);
    CLX_OK(clEnqueueFillBuffer(q, b, &fill, 1, 0, n, 0, NULL, NULL));
    for (long r = 0; r < rounds; r++) {
        cl_event u = clCreateUserEvent(c, &e);
        CLX_OK(e);
        unsigned char *m = clEnqueueMapBuffer(q, b, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, n, 0, NULL, NULL, &e);
        CLX_OK(e);
        memset(m, 10 + (int)r, n / 4);
        CLX_OK(clEnqueueUnmapMemObject(q, b, m, 1, &u, NULL));
        CLX_OK(clFlush(q));
        memset(m + n / 4, 50 + (int)r, n / 4);
        printf("waits %ld\n", r);
        fflush(stdout);
        for (int ch = getchar(); ch != EOF && ch != '\n'; ch = getchar())
            ;
        memset(m + n / 2, 90 + (int)r, n / 4);
        CLX_OK(clSetUserEventStatus(u, CL_COMPLETE));
        CLX_OK(clEnqueueReadBuffer(q, b, CL_TRUE, 0, n, got, 0, NULL, NULL));
        for (size_t i = 0; i < n; i++) {
            int want = i < n / 4 ? 10 + (int)r : i < n / 2 ? 50 + (int)r : i < n / 4 * 3 ? 90 + (int)r : 9;
            CLX_CHECK(got[i] == want, "byte %zu is %d in round %ld, not %d", i, got[i], r, want);
        }
        CLX_OK(clReleaseEvent(u));
    }
    puts("ok");
    return 0;
}
