/*
 * latency: how long single calls take, while other things are done to the machine.
 *
 * A kernel adds one to a number that is read back at once; each time it has to be right. For each line of standard input it
 * prints the figures since the one before, as a JSON object with times in microseconds. It ends with its standard input.
 */
#include "clx.h"
#include <poll.h>

enum { MOST = 1 << 22, PAUSE_US = 500 };

int main(void) {
    cl_device_id d = clx_device(0, NULL);
    cl_int e;
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    CLX_OK(e);
    cl_command_queue q = clCreateCommandQueue(c, d, 0, &e);
    CLX_OK(e);
    cl_program p = clx_build(c, d, "kernel void next(global uint *a) { a[0]++; }", "");
    cl_kernel k = clCreateKernel(p, "next", &e);
    CLX_OK(e);
    cl_uint want = 0, got = 0;
    cl_mem b = clCreateBuffer(c, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, 4, &want, &e);
    CLX_OK(e);
    CLX_OK(clSetKernelArg(k, 0, sizeof b, &b));
    double *took = malloc(MOST * sizeof *took);
    CLX_CHECK(took, "no memory");
    int n = 0;
    for (char line[16];;) {
        struct pollfd in = {.fd = 0, .events = POLLIN};
        if (poll(&in, 1, 0) > 0) {
            if (!fgets(line, sizeof line, stdin))
                break;
            qsort(took, (size_t)n, sizeof *took, clx_dbl_cmp);
            if (n)
                printf("{\"calls\": %d, \"p50\": %.2f, \"p99\": %.2f, \"most\": %.2f}\n", n, took[n / 2] * 1e6, took[(int)(n * 0.99)] * 1e6, took[n - 1] * 1e6);
            else
                printf("{}\n");
            fflush(stdout);
            n = 0;
        }
        double t = clx_now();
        size_t one = 1;
        CLX_OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &one, NULL, 0, NULL, NULL));
        CLX_OK(clEnqueueReadBuffer(q, b, CL_TRUE, 0, sizeof got, &got, 0, NULL, NULL));
        t = clx_now() - t;
        if (n < MOST)
            took[n++] = t;
        want++;
        CLX_CHECK(got == want, "BAD: %u and not %u", got, want);
        usleep(PAUSE_US);
    }
    printf("right %u\n", want);
    return 0;
}
