/*
 * content: how fast objects with a first content are made, as a table like clpeak's.
 *
 * Each is made, brought to the device by a command that is waited for, compared by its last bytes, and released.
 */
#include "clx.h"

enum { MIB = 512, SIDE = 8192, TIMES = 4 }; /* the sides are the largest that all tested devices take */

static void line(const char *name, double bytes, double seconds) { printf("  %-24s : %.2f\n", name, bytes / seconds / 1e9); }

int main(void) {
    cl_device_id d = clx_device(0, NULL);
    cl_int e;
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    CLX_OK(e);
    cl_command_queue q = clCreateCommandQueue(c, d, 0, &e);
    CLX_OK(e);
    size_t n = (size_t)MIB << 20;
    unsigned char *src = malloc(n), got[16];
    CLX_CHECK(src, "no memory");
    memset(src, 7, n);
    cl_bool images = CL_FALSE;
    CLX_OK(clGetDeviceInfo(d, CL_DEVICE_IMAGE_SUPPORT, sizeof images, &images, NULL));
    cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
    cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = SIDE, .image_height = SIDE};
    printf("  Transfer bandwidth (GBPS)\n");
    for (int image = 0; image <= (images ? 1 : 0); image++) {
        size_t size = image ? (size_t)4 * SIDE * SIDE : n;
        unsigned char *end = src + size - sizeof got;
        double took = 0;
        for (int i = 0; i < TIMES; i++) {
            memset(end, i + 1, sizeof got);
            double from = clx_now();
            cl_mem m = image ? clCreateImage(c, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, &f, &desc, src, &e)
                             : clCreateBuffer(c, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, n, src, &e);
            CLX_OK(e);
            size_t at[3] = {SIDE - 4, SIDE - 1, 0}, part[3] = {4, 1, 1};
            CLX_OK(image ? clEnqueueReadImage(q, m, CL_TRUE, at, part, 0, 0, got, 0, NULL, NULL)
                         : clEnqueueReadBuffer(q, m, CL_TRUE, n - sizeof got, sizeof got, got, 0, NULL, NULL));
            took += clx_now() - from;
            CLX_CHECK(!memcmp(got, end, sizeof got), "wrong content");
            CLX_OK(clReleaseMemObject(m));
        }
        line(image ? "image with content" : "buffer with content", (double)TIMES * (double)size, took);
    }
    return 0;
}
