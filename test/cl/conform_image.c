/* Image and sampler cases. */
#include "conform.h"

static bool images(void) {
    if (dev_bool(CL_DEVICE_IMAGE_SUPPORT))
        return true;
    tnote("the device has no images");
    return false;
}

static cl_mem image(cl_mem_flags f, cl_channel_order o, cl_channel_type t, cl_mem_object_type ty, size_t w, size_t h, size_t d, void *host) {
    cl_image_format fmt = {o, t};
    cl_image_desc desc = {.image_type = ty, .image_width = w, .image_height = h};
    if (ty == CL_MEM_OBJECT_IMAGE3D)
        desc.image_depth = d;
    else if (ty == CL_MEM_OBJECT_IMAGE2D_ARRAY || ty == CL_MEM_OBJECT_IMAGE1D_ARRAY)
        desc.image_array_size = d;
    cl_mem m;
    MK(m, clCreateImage(C, f, &fmt, &desc, host, &E));
    return m;
}

CASE(image_formats) {
    if (!images())
        return;
    static const cl_mem_object_type types[] = {CL_MEM_OBJECT_IMAGE1D, CL_MEM_OBJECT_IMAGE2D, CL_MEM_OBJECT_IMAGE3D,
                                               CL_MEM_OBJECT_IMAGE1D_ARRAY, CL_MEM_OBJECT_IMAGE2D_ARRAY, CL_MEM_OBJECT_IMAGE1D_BUFFER};
    for (size_t t = 0; t < 6; t++) {
        cl_uint n = 0;
        OK(clGetSupportedImageFormats(C, CL_MEM_READ_ONLY, types[t], 0, NULL, &n));
        T(n > 0);
        cl_image_format f[512];
        NEED(n <= 512);
        OK(clGetSupportedImageFormats(C, CL_MEM_READ_ONLY, types[t], n, f, NULL));
        bool rgba8 = false;
        for (cl_uint i = 0; i < n; i++)
            rgba8 |= f[i].image_channel_order == CL_RGBA && f[i].image_channel_data_type == CL_UNSIGNED_INT8;
        T(rgba8);
    }
    cl_uint n;
    ERR(clGetSupportedImageFormats(C, CL_MEM_READ_ONLY, CL_MEM_OBJECT_BUFFER, 0, NULL, &n), CL_INVALID_VALUE);
    ERR(clGetSupportedImageFormats(BAD, CL_MEM_READ_ONLY, CL_MEM_OBJECT_IMAGE2D, 0, NULL, &n), CL_INVALID_CONTEXT);
}

/* Write, read, copy, fill, map: one image of every type and supported format. */
static void every_format(cl_mem_object_type type, size_t w, size_t h, size_t d) {
    cl_image_format f[512];
    cl_uint n = 0;
    OK(clGetSupportedImageFormats(C, CL_MEM_READ_WRITE, type, 512, f, &n));
    for (cl_uint i = 0; i < n && i < 512; i++) {
        if (f[i].image_channel_order == CL_DEPTH || f[i].image_channel_order == CL_DEPTH_STENCIL)
            continue;
        cl_image_desc desc = {.image_type = type, .image_width = w, .image_height = h};
        if (type == CL_MEM_OBJECT_IMAGE3D)
            desc.image_depth = d;
        else
            desc.image_array_size = d;
        cl_mem a, b;
        MK(a, clCreateImage(C, CL_MEM_READ_WRITE, &f[i], &desc, NULL, &E));
        MK(b, clCreateImage(C, CL_MEM_READ_WRITE, &f[i], &desc, NULL, &E));
        size_t es = 0;
        OK(clGetImageInfo(a, CL_IMAGE_ELEMENT_SIZE, sizeof es, &es, NULL));
        NEED(es >= 1 && es <= 16);
        size_t hh = h ? h : 1, dd = d ? d : 1, total = w * hh * dd * es;
        unsigned char *v = malloc(total), *r = calloc(1, total);
        fill_bytes(v, total, i);
        size_t o[3] = {0, 0, 0}, reg[3] = {w, hh, dd};
        if (type == CL_MEM_OBJECT_IMAGE1D_ARRAY)
            reg[1] = dd, reg[2] = 1;
        OK(clEnqueueWriteImage(Q, a, CL_FALSE, o, reg, 0, 0, v, 0, NULL, NULL));
        OK(clEnqueueReadImage(Q, a, CL_TRUE, o, reg, 0, 0, r, 0, NULL, NULL));
        if (memcmp(v, r, total))
            tfail(__FILE__, __LINE__, "write/read differ, type 0x%x order 0x%x data 0x%x", type, f[i].image_channel_order, f[i].image_channel_data_type);
        OK(clEnqueueCopyImage(Q, a, b, o, o, reg, 0, NULL, NULL));
        memset(r, 0, total);
        OK(clEnqueueReadImage(Q, b, CL_TRUE, o, reg, 0, 0, r, 0, NULL, NULL));
        if (memcmp(v, r, total))
            tfail(__FILE__, __LINE__, "copy differs, type 0x%x order 0x%x data 0x%x", type, f[i].image_channel_order, f[i].image_channel_data_type);
        size_t rp = 0, sp = 0;
        unsigned char *p;
        MK(p, clEnqueueMapImage(Q, b, CL_TRUE, CL_MAP_READ, o, reg, &rp, type == CL_MEM_OBJECT_IMAGE1D || type == CL_MEM_OBJECT_IMAGE2D ? NULL : &sp, 0,
                                NULL, NULL, &E));
        bool same = true;
        for (size_t z = 0; z < dd; z++)
            for (size_t y = 0; y < hh; y++)
                same &= !memcmp(p + z * sp + y * rp, v + (z * hh + y) * w * es, w * es);
        if (!same)
            tfail(__FILE__, __LINE__, "map differs, type 0x%x order 0x%x data 0x%x", type, f[i].image_channel_order, f[i].image_channel_data_type);
        OK(clEnqueueUnmapMemObject(Q, b, p, 0, NULL, NULL));
        OK(clFinish(Q));
        cl_uint color[4] = {1, 1, 1, 1};
        cl_channel_type ct = f[i].image_channel_data_type;
        if (ct == CL_UNSIGNED_INT8 || ct == CL_UNSIGNED_INT16 || ct == CL_UNSIGNED_INT32 || ct == CL_SIGNED_INT8 || ct == CL_SIGNED_INT16 || ct == CL_SIGNED_INT32) {
            OK(clEnqueueFillImage(Q, b, color, o, reg, 0, NULL, NULL));
            OK(clEnqueueReadImage(Q, b, CL_TRUE, o, reg, 0, 0, r, 0, NULL, NULL));
            size_t bytes = ct == CL_UNSIGNED_INT8 || ct == CL_SIGNED_INT8 ? 1 : ct == CL_UNSIGNED_INT16 || ct == CL_SIGNED_INT16 ? 2 : 4;
            bool ok = true;
            for (size_t j = 0; j < total; j++)
                ok &= r[j] == (j % bytes == 0);
            if (!ok)
                tfail(__FILE__, __LINE__, "fill differs, type 0x%x order 0x%x data 0x%x", type, f[i].image_channel_order, ct);
        }
        free(v);
        free(r);
        OK(clReleaseMemObject(a));
        OK(clReleaseMemObject(b));
    }
}

CASE(image_all_formats_1d) {
    if (images())
        every_format(CL_MEM_OBJECT_IMAGE1D, 37, 0, 0);
}
CASE(image_all_formats_2d) {
    if (images())
        every_format(CL_MEM_OBJECT_IMAGE2D, 19, 7, 0);
}
CASE(image_all_formats_3d) {
    if (images())
        every_format(CL_MEM_OBJECT_IMAGE3D, 9, 5, 4);
}
CASE(image_all_formats_1d_array) {
    if (images())
        every_format(CL_MEM_OBJECT_IMAGE1D_ARRAY, 13, 0, 5);
}
CASE(image_all_formats_2d_array) {
    if (images())
        every_format(CL_MEM_OBJECT_IMAGE2D_ARRAY, 9, 5, 3);
}

CASE(image_info) {
    if (!images())
        return;
    cl_mem m = image(CL_MEM_READ_ONLY, CL_RGBA, CL_UNSIGNED_INT8, CL_MEM_OBJECT_IMAGE3D, 16, 8, 4, NULL);
    cl_image_format f;
    size_t v;
    cl_uint n;
    cl_mem_object_type t;
    OK(clGetImageInfo(m, CL_IMAGE_FORMAT, sizeof f, &f, NULL));
    T(f.image_channel_order == CL_RGBA && f.image_channel_data_type == CL_UNSIGNED_INT8);
    static const struct {
        cl_image_info i;
        size_t want;
    } q[] = {{CL_IMAGE_ELEMENT_SIZE, 4}, {CL_IMAGE_WIDTH, 16}, {CL_IMAGE_HEIGHT, 8}, {CL_IMAGE_DEPTH, 4}, {CL_IMAGE_ARRAY_SIZE, 0}};
    for (size_t i = 0; i < 5; i++) {
        OK(clGetImageInfo(m, q[i].i, sizeof v, &v, NULL));
        if (v != q[i].want)
            tfail(__FILE__, __LINE__, "image info 0x%x is %zu, not %zu", q[i].i, v, q[i].want);
    }
    OK(clGetImageInfo(m, CL_IMAGE_ROW_PITCH, sizeof v, &v, NULL));
    T(v >= 64);
    OK(clGetImageInfo(m, CL_IMAGE_SLICE_PITCH, sizeof v, &v, NULL));
    T(v >= 512);
    OK(clGetImageInfo(m, CL_IMAGE_NUM_MIP_LEVELS, sizeof n, &n, NULL));
    T(n == 0);
    OK(clGetImageInfo(m, CL_IMAGE_NUM_SAMPLES, sizeof n, &n, NULL));
    T(n == 0);
    cl_mem bb = m;
    OK(clGetImageInfo(m, CL_IMAGE_BUFFER, sizeof bb, &bb, NULL));
    T(bb == NULL);
    OK(clGetMemObjectInfo(m, CL_MEM_TYPE, sizeof t, &t, NULL));
    T(t == CL_MEM_OBJECT_IMAGE3D);
    ERR(clGetImageInfo(m, 0x7777, sizeof v, &v, NULL), CL_INVALID_VALUE);
    ERR(clGetImageInfo(m, CL_IMAGE_WIDTH, 1, &v, NULL), CL_INVALID_VALUE);
    cl_mem b = buffer(0, 16, NULL);
    ERR(clGetImageInfo(b, CL_IMAGE_WIDTH, sizeof v, &v, NULL), CL_INVALID_MEM_OBJECT);
    OK(clReleaseMemObject(b));
    OK(clReleaseMemObject(m));
}

CASE(image_errors) {
    if (!images())
        return;
    cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8}, bad = {CL_RGBA, 0x7777}, odd = {CL_RGB, CL_UNSIGNED_INT8};
    cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 8, .image_height = 8};
    unsigned char px[256] = {0};
    ERRP(clCreateImage(C, 0, NULL, &d, NULL, &E), CL_INVALID_IMAGE_FORMAT_DESCRIPTOR);
    ERRP(clCreateImage(C, 0, &f, NULL, NULL, &E), CL_INVALID_IMAGE_DESCRIPTOR);
    ERRP(clCreateImage(BAD, 0, &f, &d, NULL, &E), CL_INVALID_CONTEXT);
    E = 0;
    cl_mem m = clCreateImage(C, 0, &bad, &d, NULL, &E);
    T(!m && (E == CL_INVALID_IMAGE_FORMAT_DESCRIPTOR || E == CL_IMAGE_FORMAT_NOT_SUPPORTED));
    m = clCreateImage(C, 0, &odd, &d, NULL, &E);
    T(!m && (E == CL_INVALID_IMAGE_FORMAT_DESCRIPTOR || E == CL_IMAGE_FORMAT_NOT_SUPPORTED));
    ERRP(clCreateImage(C, CL_MEM_COPY_HOST_PTR, &f, &d, NULL, &E), CL_INVALID_HOST_PTR);
    ERRP(clCreateImage(C, 0, &f, &d, px, &E), CL_INVALID_HOST_PTR);
    ERRP(clCreateImage(C, CL_MEM_READ_ONLY | CL_MEM_WRITE_ONLY, &f, &d, NULL, &E), CL_INVALID_VALUE);
    cl_image_desc d0 = d, dt = d, dp = d, dbig = d;
    d0.image_width = 0;
    dt.image_type = CL_MEM_OBJECT_BUFFER;
    dp.image_row_pitch = 3;
    dbig.image_width = dev_size(CL_DEVICE_IMAGE2D_MAX_WIDTH) + 1;
    E = 0;
    m = clCreateImage(C, 0, &f, &d0, NULL, &E);
    T(!m && (E == CL_INVALID_IMAGE_SIZE || E == CL_INVALID_IMAGE_DESCRIPTOR));
    ERRP(clCreateImage(C, 0, &f, &dt, NULL, &E), CL_INVALID_IMAGE_DESCRIPTOR);
    ERRP(clCreateImage(C, 0, &f, &dp, NULL, &E), CL_INVALID_IMAGE_DESCRIPTOR);
    ERRP(clCreateImage(C, 0, &f, &dbig, NULL, &E), CL_INVALID_IMAGE_SIZE);
    m = image(CL_MEM_READ_WRITE, CL_RGBA, CL_UNSIGNED_INT8, CL_MEM_OBJECT_IMAGE2D, 8, 8, 0, NULL);
    size_t o[3] = {0}, r[3] = {8, 8, 1}, big[3] = {9, 8, 1}, deep[3] = {8, 8, 2}, zero[3] = {0, 8, 1}, o4[3] = {4, 0, 0}, oz[3] = {0, 0, 1};
    ERR(clEnqueueReadImage(Q, m, CL_TRUE, o, big, 0, 0, px, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadImage(Q, m, CL_TRUE, o4, r, 0, 0, px, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadImage(Q, m, CL_TRUE, o, deep, 0, 0, px, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadImage(Q, m, CL_TRUE, oz, r, 0, 0, px, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadImage(Q, m, CL_TRUE, o, zero, 0, 0, px, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadImage(Q, m, CL_TRUE, o, r, 8, 0, px, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueWriteImage(Q, m, CL_TRUE, o, r, 0, 0, NULL, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadImage(Q, BAD, CL_TRUE, o, r, 0, 0, px, 0, NULL, NULL), CL_INVALID_MEM_OBJECT);
    cl_mem m2 = image(CL_MEM_READ_WRITE, CL_RGBA, CL_FLOAT, CL_MEM_OBJECT_IMAGE2D, 8, 8, 0, NULL);
    ERR(clEnqueueCopyImage(Q, m, m2, o, o, r, 0, NULL, NULL), CL_IMAGE_FORMAT_MISMATCH);
    size_t r4[3] = {6, 6, 1}, o2[3] = {1, 1, 0};
    ERR(clEnqueueCopyImage(Q, m, m, o, o2, r4, 0, NULL, NULL), CL_MEM_COPY_OVERLAP);
    cl_mem b = buffer(0, 200, NULL);
    ERR(clEnqueueCopyImageToBuffer(Q, m, b, o, r, 0, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueCopyBufferToImage(Q, b, m, 0, o, r, 0, NULL, NULL), CL_INVALID_VALUE);
    OK(clReleaseMemObject(b));
    OK(clReleaseMemObject(m));
    OK(clReleaseMemObject(m2));
}

CASE(image_regions) {
    if (!images())
        return;
    enum { W = 31, H = 17 };
    static cl_uint v[W * H], r[W * H];
    fill_bytes(v, sizeof v, 6);
    cl_mem a = image(CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, CL_RGBA, CL_UNSIGNED_INT8, CL_MEM_OBJECT_IMAGE2D, W, H, 0, v);
    size_t o[3] = {0}, all[3] = {W, H, 1}, po[3] = {5, 4, 0}, pr[3] = {11, 6, 1};
    OK(clEnqueueReadImage(Q, a, CL_TRUE, o, all, 0, 0, r, 0, NULL, NULL));
    T(!memcmp(v, r, sizeof v));
    /* A part, with a host pitch, blocking or not. */
    static cl_uint h[64 * 20];
    fill_bytes(h, sizeof h, 60);
    OK(clEnqueueWriteImage(Q, a, CL_FALSE, po, pr, 64 * 4, 0, h, 0, NULL, NULL));
    for (size_t y = 0; y < pr[1]; y++)
        memcpy(v + (po[1] + y) * W + po[0], h + y * 64, pr[0] * 4);
    OK(clEnqueueReadImage(Q, a, CL_TRUE, o, all, 0, 0, r, 0, NULL, NULL));
    T(!memcmp(v, r, sizeof v));
    memset(h, 0, sizeof h);
    OK(clEnqueueReadImage(Q, a, CL_TRUE, po, pr, 64 * 4, 0, h, 0, NULL, NULL));
    for (size_t y = 0; y < pr[1]; y++) {
        T(!memcmp(v + (po[1] + y) * W + po[0], h + y * 64, pr[0] * 4));
        T(h[y * 64 + pr[0]] == 0);
    }
    cl_uint *p;
    size_t rp;
    MK(p, clEnqueueMapImage(Q, a, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, po, pr, &rp, NULL, 0, NULL, NULL, &E));
    for (size_t y = 0; y < pr[1]; y++)
        for (size_t x = 0; x < pr[0]; x++) {
            cl_uint *px = (cl_uint *)((char *)p + y * rp) + x;
            T(*px == v[(po[1] + y) * W + po[0] + x]);
            *px ^= 0x01010101;
            v[(po[1] + y) * W + po[0] + x] ^= 0x01010101;
        }
    OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
    cl_mem b = buffer(0, sizeof v, NULL);
    OK(clEnqueueCopyImageToBuffer(Q, a, b, o, all, 0, 0, NULL, NULL));
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, sizeof r, r, 0, NULL, NULL));
    T(!memcmp(v, r, sizeof v));
    OK(clEnqueueFillBuffer(Q, b, "\7", 1, 0, sizeof v, 0, NULL, NULL));
    OK(clEnqueueCopyBufferToImage(Q, b, a, 8, po, pr, 0, NULL, NULL));
    for (size_t y = 0; y < pr[1]; y++)
        memset(v + (po[1] + y) * W + po[0], 7, pr[0] * 4);
    OK(clEnqueueReadImage(Q, a, CL_TRUE, o, all, 0, 0, r, 0, NULL, NULL));
    T(!memcmp(v, r, sizeof v));
    cl_uint c[4] = {1, 2, 3, 4};
    OK(clEnqueueFillImage(Q, a, c, po, pr, 0, NULL, NULL));
    for (size_t y = 0; y < pr[1]; y++)
        for (size_t x = 0; x < pr[0]; x++)
            v[(po[1] + y) * W + po[0] + x] = 0x04030201;
    OK(clEnqueueReadImage(Q, a, CL_TRUE, o, all, 0, 0, r, 0, NULL, NULL));
    T(!memcmp(v, r, sizeof v));
    OK(clReleaseMemObject(a));
    OK(clReleaseMemObject(b));
}

CASE(image_use_host_ptr) {
    if (!images())
        return;
    enum { W = 8, H = 4, PITCH = 12 };
    static cl_uint v[PITCH * H] __attribute__((aligned(4096))), r[W * H];
    fill_bytes(v, sizeof v, 6);
    cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
    cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = W, .image_height = H, .image_row_pitch = PITCH * 4};
    static const cl_mem_flags fl[2] = {CL_MEM_USE_HOST_PTR, CL_MEM_COPY_HOST_PTR};
    for (int i = 0; i < 2; i++) {
        cl_mem a;
        MK(a, clCreateImage(C, CL_MEM_READ_WRITE | fl[i], &f, &d, v, &E));
        size_t o[3] = {0}, all[3] = {W, H, 1};
        OK(clEnqueueReadImage(Q, a, CL_TRUE, o, all, 0, 0, r, 0, NULL, NULL));
        for (int y = 0; y < H; y++)
            T(!memcmp(r + y * W, v + y * PITCH, W * 4));
        OK(clReleaseMemObject(a));
    }
}

CASE(image_from_buffer) {
    if (!images())
        return;
    cl_uint v[64];
    fill_bytes(v, sizeof v, 2);
    cl_mem b = buffer(CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, sizeof v, v), m;
    cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
    cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE1D_BUFFER, .image_width = 64, .buffer = b};
    MK(m, clCreateImage(C, CL_MEM_READ_WRITE, &f, &d, NULL, &E));
    cl_mem back = NULL;
    OK(clGetMemObjectInfo(m, CL_MEM_ASSOCIATED_MEMOBJECT, sizeof back, &back, NULL));
    T(back == b);
    cl_kernel k = kernel1("kernel void f(read_only image1d_buffer_t i, global uint *o) { int x = (int)get_global_id(0); uint4 p = read_imageui(i, x);"
                          " o[x] = p.x | p.y << 8 | p.z << 16 | p.w << 24; }",
                          "f");
    cl_mem o = buffer(0, sizeof v, NULL);
    cl_uint w[64];
    arg_mem(k, 0, m);
    arg_mem(k, 1, o);
    run1(k, 64);
    OK(clEnqueueReadBuffer(Q, o, CL_TRUE, 0, sizeof w, w, 0, NULL, NULL));
    T(!memcmp(v, w, sizeof v));
    OK(clReleaseMemObject(b));
    OK(clReleaseMemObject(m));
    OK(clReleaseMemObject(o));
    OK(clReleaseKernel(k));
}

CASE(image_kernels) {
    if (!images())
        return;
    cl_program p = build("constant sampler_t S = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP_TO_EDGE | CLK_FILTER_NEAREST;\n"
                         "kernel void inv(read_only image2d_t a, write_only image2d_t b) { int2 c = (int2)(get_global_id(0), get_global_id(1));\n"
                         " write_imageui(b, c, 255 - read_imageui(a, S, c)); }\n"
                         "kernel void smp(read_only image2d_t a, sampler_t s, global uint *o) { o[get_global_id(0)] = read_imageui(a, s, (int2)((int)get_global_id(0) - 2, 0)).x; }\n"
                         "kernel void vol(read_only image3d_t a, global uint *o) { int4 c = (int4)(get_global_id(0), get_global_id(1), get_global_id(2), 0);\n"
                         " o[c.x + 4 * (c.y + 4 * c.z)] = read_imageui(a, S, c).y + get_image_depth(a); }\n"
                         "kernel void arr(read_only image2d_array_t a, global uint *o) { int4 c = (int4)(get_global_id(0), get_global_id(1), get_global_id(2), 0);\n"
                         " o[c.x + 4 * (c.y + 4 * c.z)] = read_imageui(a, S, c).z + (uint)get_image_array_size(a); }\n");
    cl_kernel k;
    enum { W = 12, H = 5 };
    unsigned char v[W * H * 4], w[W * H * 4];
    fill_bytes(v, sizeof v, 3);
    cl_mem a = image(CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, CL_RGBA, CL_UNSIGNED_INT8, CL_MEM_OBJECT_IMAGE2D, W, H, 0, v),
           b = image(CL_MEM_WRITE_ONLY, CL_RGBA, CL_UNSIGNED_INT8, CL_MEM_OBJECT_IMAGE2D, W, H, 0, NULL);
    size_t o[3] = {0}, r[3] = {W, H, 1};
    MK(k, clCreateKernel(p, "inv", &E));
    arg_mem(k, 0, a);
    arg_mem(k, 1, b);
    OK(clEnqueueNDRangeKernel(Q, k, 2, NULL, r, NULL, 0, NULL, NULL));
    OK(clEnqueueReadImage(Q, b, CL_TRUE, o, r, 0, 0, w, 0, NULL, NULL));
    bool ok = true;
    for (size_t i = 0; i < sizeof v; i++)
        ok &= w[i] == 255 - v[i];
    T(ok);
    OK(clReleaseKernel(k));
    MK(k, clCreateKernel(p, "smp", &E));
    cl_mem out = buffer(0, 4096, NULL);
    static const cl_addressing_mode modes[] = {CL_ADDRESS_CLAMP_TO_EDGE, CL_ADDRESS_CLAMP};
    for (int i = 0; i < 2; i++) {
        cl_sampler s;
        MK(s, clCreateSampler(C, CL_FALSE, modes[i], CL_FILTER_NEAREST, &E));
        arg_mem(k, 0, a);
        OK(clSetKernelArg(k, 1, sizeof s, &s));
        arg_mem(k, 2, out);
        run1(k, W + 4);
        cl_uint q[W + 4];
        OK(clEnqueueReadBuffer(Q, out, CL_TRUE, 0, sizeof q, q, 0, NULL, NULL));
        for (int x = 0; x < W + 4; x++) {
            int sx = x - 2;
            cl_uint want = modes[i] == CL_ADDRESS_CLAMP && (sx < 0 || sx >= W) ? 0 : v[4 * (sx < 0 ? 0 : sx >= W ? W - 1 : sx)];
            T(q[x] == want);
        }
        OK(clReleaseSampler(s));
    }
    OK(clReleaseKernel(k));
    static const char *names[2] = {"vol", "arr"};
    static const cl_mem_object_type types[2] = {CL_MEM_OBJECT_IMAGE3D, CL_MEM_OBJECT_IMAGE2D_ARRAY};
    for (int t = 0; t < 2; t++) {
        unsigned char vv[4 * 4 * 3 * 4];
        fill_bytes(vv, sizeof vv, 30);
        cl_mem c = image(CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, CL_RGBA, CL_UNSIGNED_INT8, types[t], 4, 4, 3, vv);
        MK(k, clCreateKernel(p, names[t], &E));
        arg_mem(k, 0, c);
        arg_mem(k, 1, out);
        size_t g[3] = {4, 4, 3};
        OK(clEnqueueNDRangeKernel(Q, k, 3, NULL, g, NULL, 0, NULL, NULL));
        cl_uint q[48];
        OK(clEnqueueReadBuffer(Q, out, CL_TRUE, 0, sizeof q, q, 0, NULL, NULL));
        bool same = true;
        for (int i = 0; i < 48; i++)
            same &= q[i] == vv[4 * i + 1 + t] + 3u;
        if (!same)
            tfail(__FILE__, __LINE__, "kernel %s differs", names[t]);
        OK(clReleaseKernel(k));
        OK(clReleaseMemObject(c));
    }
    OK(clReleaseMemObject(a));
    OK(clReleaseMemObject(b));
    OK(clReleaseMemObject(out));
    OK(clReleaseProgram(p));
}

CASE(samplers) {
    if (!images())
        return;
    cl_sampler s;
    MK(s, clCreateSampler(C, CL_TRUE, CL_ADDRESS_REPEAT, CL_FILTER_LINEAR, &E));
    cl_bool n;
    cl_addressing_mode am;
    cl_filter_mode fm;
    cl_context c;
    cl_uint rc;
    OK(clGetSamplerInfo(s, CL_SAMPLER_NORMALIZED_COORDS, sizeof n, &n, NULL));
    OK(clGetSamplerInfo(s, CL_SAMPLER_ADDRESSING_MODE, sizeof am, &am, NULL));
    OK(clGetSamplerInfo(s, CL_SAMPLER_FILTER_MODE, sizeof fm, &fm, NULL));
    OK(clGetSamplerInfo(s, CL_SAMPLER_CONTEXT, sizeof c, &c, NULL));
    OK(clGetSamplerInfo(s, CL_SAMPLER_REFERENCE_COUNT, sizeof rc, &rc, NULL));
    T(n == CL_TRUE && am == CL_ADDRESS_REPEAT && fm == CL_FILTER_LINEAR && c == C && rc == 1);
    OK(clRetainSampler(s));
    OK(clReleaseSampler(s));
    ERR(clGetSamplerInfo(s, 0x7777, sizeof n, &n, NULL), CL_INVALID_VALUE);
    OK(clReleaseSampler(s));
    ERRP(clCreateSampler(BAD, CL_TRUE, CL_ADDRESS_REPEAT, CL_FILTER_LINEAR, &E), CL_INVALID_CONTEXT);
    ERRP(clCreateSampler(C, CL_TRUE, 0x7777, CL_FILTER_LINEAR, &E), CL_INVALID_VALUE);
    ERRP(clCreateSampler(C, CL_TRUE, CL_ADDRESS_REPEAT, 0x7777, &E), CL_INVALID_VALUE);
    ERR(clReleaseSampler(BAD), CL_INVALID_SAMPLER);
    if (V >= 200) {
        cl_sampler_properties pr[] = {CL_SAMPLER_NORMALIZED_COORDS, CL_FALSE, CL_SAMPLER_FILTER_MODE, CL_FILTER_NEAREST, 0};
        MK(s, clCreateSamplerWithProperties(C, pr, &E));
        OK(clGetSamplerInfo(s, CL_SAMPLER_NORMALIZED_COORDS, sizeof n, &n, NULL));
        T(n == CL_FALSE);
        OK(clReleaseSampler(s));
    }
}

CASE(image_deprecated_constructors) {
    if (!images())
        return;
    cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
    cl_mem m;
    MK(m, clCreateImage2D(C, CL_MEM_READ_WRITE, &f, 8, 8, 0, NULL, &E));
    size_t w;
    OK(clGetImageInfo(m, CL_IMAGE_WIDTH, sizeof w, &w, NULL));
    T(w == 8);
    OK(clReleaseMemObject(m));
    MK(m, clCreateImage3D(C, CL_MEM_READ_WRITE, &f, 8, 8, 4, 0, 0, NULL, &E));
    OK(clGetImageInfo(m, CL_IMAGE_DEPTH, sizeof w, &w, NULL));
    T(w == 4);
    OK(clReleaseMemObject(m));
}
