/* Helpers shared by the OpenCL test programs. */
#ifndef CLX_H
#define CLX_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_0_APIS
#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#define CL_USE_DEPRECATED_OPENCL_2_0_APIS
#define CL_USE_DEPRECATED_OPENCL_2_1_APIS
#define CL_USE_DEPRECATED_OPENCL_2_2_APIS
#include <CL/cl.h>
#include <CL/cl_ext.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static inline double clx_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline double clx_wall(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#define CLX_OK(e)                                                                                                      \
    do {                                                                                                               \
        cl_int clx_e = (e);                                                                                            \
        if (clx_e != CL_SUCCESS) {                                                                                     \
            fprintf(stderr, "%s:%d: %s: OpenCL error %d\n", __FILE__, __LINE__, #e, clx_e);                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define CLX_CHECK(c, ...)                                                                                              \
    do {                                                                                                               \
        if (!(c)) {                                                                                                    \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* clx_device returns device number `index` counted over all platforms. */
static inline cl_device_id clx_device(unsigned index, cl_platform_id *platform) {
    cl_platform_id p[16];
    cl_uint np = 0;
    if (clGetPlatformIDs(16, p, &np) != CL_SUCCESS || np == 0) {
        fprintf(stderr, "no OpenCL platform\n");
        exit(1);
    }
    for (cl_uint i = 0; i < np && i < 16; i++) {
        cl_device_id d[32];
        cl_uint nd = 0;
        if (clGetDeviceIDs(p[i], CL_DEVICE_TYPE_ALL, 32, d, &nd) != CL_SUCCESS)
            continue;
        if (index < nd) {
            if (platform)
                *platform = p[i];
            return d[index];
        }
        index -= nd;
    }
    fprintf(stderr, "no such OpenCL device\n");
    exit(1);
}

static inline cl_program clx_build(cl_context c, cl_device_id d, const char *src, const char *opt) {
    cl_int e;
    cl_program p = clCreateProgramWithSource(c, 1, &src, NULL, &e);
    CLX_OK(e);
    e = clBuildProgram(p, 1, &d, opt, NULL, NULL);
    if (e != CL_SUCCESS) {
        static char log[16384];
        clGetProgramBuildInfo(p, d, CL_PROGRAM_BUILD_LOG, sizeof log - 1, log, NULL);
        fprintf(stderr, "build: OpenCL error %d\n%s\n", e, log);
        exit(1);
    }
    return p;
}

static inline int clx_dbl_cmp(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}
#endif
