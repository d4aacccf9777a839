/*
 * gullible: an application that believes what its OpenCL library says, for a test that plays a hostile executor.
 *
 *   gullible map2d | map3d | map1darray | image | binaries | names
 *
 * Prints the error of the call in question.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEED(e)                                                                                                        \
    do {                                                                                                               \
        if (e) {                                                                                                       \
            fprintf(stderr, "line %d: %d\n", __LINE__, e);                                                             \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

int main(int argc, char **argv) {
    cl_platform_id p;
    cl_device_id d;
    cl_int e;
    if (argc != 2)
        return 2;
    NEED(clGetPlatformIDs(1, &p, NULL));
    NEED(clGetDeviceIDs(p, CL_DEVICE_TYPE_ALL, 1, &d, NULL));
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    NEED(e);
    if (!strncmp(argv[1], "map", 3) || !strcmp(argv[1], "image")) {
        cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
        cl_image_desc i = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 16, .image_height = 16};
        size_t o[3] = {0}, r[3] = {16, 16, 1}, row = 0, slice = 0;
        if (!strcmp(argv[1], "map3d"))
            i.image_type = CL_MEM_OBJECT_IMAGE3D, i.image_depth = r[2] = 4;
        if (!strcmp(argv[1], "map1darray"))
            i.image_type = CL_MEM_OBJECT_IMAGE1D_ARRAY, i.image_height = 0, i.image_array_size = 16;
        cl_command_queue q = clCreateCommandQueueWithProperties(c, d, NULL, &e);
        NEED(e);
        cl_mem m = clCreateImage(c, CL_MEM_READ_WRITE, &f, &i, NULL, &e);
        if (argv[1][0] == 'i') {
            printf("%d\n", e);
            return 0;
        }
        NEED(e);
        char *at = clEnqueueMapImage(q, m, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, o, r, &row, &slice, 0, NULL, NULL, &e);
        for (size_t z = 0; !e && z < r[2]; z++) /* as an application does */
            for (size_t y = 0; y < r[1]; y++)
                memset(at + z * slice + y * (argv[1][3] == '1' ? slice : row), 7, 64);
        printf("%d\n", e);
        return 0;
    }
    const char *src = "kernel void f(global int *a) { a[0] = 1; }";
    cl_program g = clCreateProgramWithSource(c, 1, &src, NULL, &e);
    NEED(e);
    if (!strcmp(argv[1], "names")) {
        size_t n = 0;
        printf("%d\n", clGetProgramInfo(g, CL_PROGRAM_KERNEL_NAMES, 0, NULL, &n));
        return 0;
    }
    size_t n = 0;
    NEED(clGetProgramInfo(g, CL_PROGRAM_BINARY_SIZES, sizeof n, &n, NULL));
    unsigned char *b = malloc(n), *bs[1] = {b};
    printf("%d\n", clGetProgramInfo(g, CL_PROGRAM_BINARIES, sizeof bs, bs, NULL));
    free(b);
    return 0;
}
