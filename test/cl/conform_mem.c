/* Buffer cases. */
#include "conform.h"

CASE(buffer_flags) {
    enum { N = 1024 };
    static const cl_mem_flags access[] = {0, CL_MEM_READ_WRITE, CL_MEM_READ_ONLY, CL_MEM_WRITE_ONLY};
    static const cl_mem_flags host[] = {0, CL_MEM_ALLOC_HOST_PTR, CL_MEM_COPY_HOST_PTR, CL_MEM_USE_HOST_PTR,
                                        CL_MEM_ALLOC_HOST_PTR | CL_MEM_COPY_HOST_PTR};
    static const cl_mem_flags hacc[] = {0, CL_MEM_HOST_READ_ONLY, CL_MEM_HOST_WRITE_ONLY, CL_MEM_HOST_NO_ACCESS};
    static unsigned char src[N] __attribute__((aligned(4096))), dst[N];
    for (size_t a = 0; a < 4; a++)
        for (size_t h = 0; h < 5; h++)
            for (size_t x = 0; x < 4; x++) {
                fill_bytes(src, N, (unsigned)(a * 100 + h * 10 + x));
                bool ptr = host[h] & (CL_MEM_COPY_HOST_PTR | CL_MEM_USE_HOST_PTR);
                cl_mem_flags f = access[a] | host[h] | hacc[x], got;
                cl_mem b = buffer(f, N, ptr ? src : NULL);
                OK(clGetMemObjectInfo(b, CL_MEM_FLAGS, sizeof got, &got, NULL));
                T(got == f || got == (f | CL_MEM_READ_WRITE));
                void *hp = src;
                OK(clGetMemObjectInfo(b, CL_MEM_HOST_PTR, sizeof hp, &hp, NULL));
                T(hp == (host[h] & CL_MEM_USE_HOST_PTR ? src : NULL));
                bool rd = !(hacc[x] & (CL_MEM_HOST_WRITE_ONLY | CL_MEM_HOST_NO_ACCESS));
                bool wr = !(hacc[x] & (CL_MEM_HOST_READ_ONLY | CL_MEM_HOST_NO_ACCESS));
                if (rd && ptr) {
                    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, N, dst, 0, NULL, NULL));
                    T(!memcmp(src, dst, N));
                }
                if (!rd)
                    ERR(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, N, dst, 0, NULL, NULL), CL_INVALID_OPERATION);
                if (wr)
                    OK(clEnqueueWriteBuffer(Q, b, CL_TRUE, 0, N, dst, 0, NULL, NULL));
                else
                    ERR(clEnqueueWriteBuffer(Q, b, CL_TRUE, 0, N, dst, 0, NULL, NULL), CL_INVALID_OPERATION);
                if (!rd)
                    ERRP(clEnqueueMapBuffer(Q, b, CL_TRUE, CL_MAP_READ, 0, N, 0, NULL, NULL, &E), CL_INVALID_OPERATION);
                if (!wr)
                    ERRP(clEnqueueMapBuffer(Q, b, CL_TRUE, CL_MAP_WRITE, 0, N, 0, NULL, NULL, &E), CL_INVALID_OPERATION);
                OK(clReleaseMemObject(b));
            }
}

CASE(buffer_errors) {
    int z[16] = {0};
    ERRP(clCreateBuffer(BAD, 0, 64, NULL, &E), CL_INVALID_CONTEXT);
    ERRP(clCreateBuffer(C, 0, 0, NULL, &E), CL_INVALID_BUFFER_SIZE);
    ERRP(clCreateBuffer(C, CL_MEM_READ_ONLY | CL_MEM_WRITE_ONLY, 64, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateBuffer(C, CL_MEM_USE_HOST_PTR | CL_MEM_COPY_HOST_PTR, 64, z, &E), CL_INVALID_VALUE);
    ERRP(clCreateBuffer(C, CL_MEM_USE_HOST_PTR | CL_MEM_ALLOC_HOST_PTR, 64, z, &E), CL_INVALID_VALUE);
    ERRP(clCreateBuffer(C, CL_MEM_HOST_READ_ONLY | CL_MEM_HOST_WRITE_ONLY, 64, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateBuffer(C, (cl_mem_flags)1 << 60, 64, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateBuffer(C, 0, 64, z, &E), CL_INVALID_HOST_PTR);
    ERRP(clCreateBuffer(C, CL_MEM_COPY_HOST_PTR, 64, NULL, &E), CL_INVALID_HOST_PTR);
    ERRP(clCreateBuffer(C, CL_MEM_USE_HOST_PTR, 64, NULL, &E), CL_INVALID_HOST_PTR);
    E = 0;
    cl_mem m = clCreateBuffer(C, 0, (size_t)dev_ulong(CL_DEVICE_MAX_MEM_ALLOC_SIZE) + 4096, NULL, &E);
    T(!m && (E == CL_INVALID_BUFFER_SIZE || E == CL_MEM_OBJECT_ALLOCATION_FAILURE || E == CL_OUT_OF_RESOURCES));
    m = buffer(0, 64, NULL);
    ERR(clEnqueueReadBuffer(Q, m, CL_TRUE, 60, 8, z, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadBuffer(Q, m, CL_TRUE, 65, 1, z, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadBuffer(Q, m, CL_TRUE, 0, 8, NULL, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueWriteBuffer(Q, m, CL_TRUE, (size_t)-4, 8, z, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueWriteBuffer(Q, m, CL_TRUE, 0, 8, NULL, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadBuffer(Q, BAD, CL_TRUE, 0, 8, z, 0, NULL, NULL), CL_INVALID_MEM_OBJECT);
    ERR(clEnqueueReadBuffer(BAD, m, CL_TRUE, 0, 8, z, 0, NULL, NULL), CL_INVALID_COMMAND_QUEUE);
    ERR(clEnqueueFillBuffer(Q, m, z, 3, 0, 63, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueFillBuffer(Q, m, z, 4, 2, 8, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueFillBuffer(Q, m, z, 4, 0, 6, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueFillBuffer(Q, m, z, 4, 60, 8, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueFillBuffer(Q, m, NULL, 4, 0, 8, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueFillBuffer(Q, m, z, 0, 0, 8, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueFillBuffer(Q, m, z, 256, 0, 64, 0, NULL, NULL), CL_INVALID_VALUE);
    ERRP(clEnqueueMapBuffer(Q, m, CL_TRUE, CL_MAP_READ, 60, 8, 0, NULL, NULL, &E), CL_INVALID_VALUE);
    ERRP(clEnqueueMapBuffer(Q, m, CL_TRUE, 1 << 10, 0, 8, 0, NULL, NULL, &E), CL_INVALID_VALUE);
    ERRP(clEnqueueMapBuffer(Q, m, CL_TRUE, CL_MAP_WRITE | CL_MAP_WRITE_INVALIDATE_REGION, 0, 8, 0, NULL, NULL, &E), CL_INVALID_VALUE);
    ERR(clEnqueueUnmapMemObject(Q, m, z, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueUnmapMemObject(Q, m, NULL, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueMigrateMemObjects(Q, 0, NULL, 0, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueMigrateMemObjects(Q, 1, &m, 1 << 9, 0, NULL, NULL), CL_INVALID_VALUE);
    OK(clEnqueueMigrateMemObjects(Q, 1, &m, CL_MIGRATE_MEM_OBJECT_HOST, 0, NULL, NULL));
    OK(clEnqueueMigrateMemObjects(Q, 1, &m, CL_MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED, 0, NULL, NULL));
    OK(clFinish(Q));
    OK(clReleaseMemObject(m));
    ERR(clRetainMemObject(BAD), CL_INVALID_MEM_OBJECT);
    ERR(clReleaseMemObject(BAD), CL_INVALID_MEM_OBJECT);
}

CASE(buffer_info) {
    cl_mem b = buffer(CL_MEM_READ_WRITE, 100, NULL);
    cl_mem_object_type t;
    size_t sz, off = 9;
    cl_uint n;
    cl_context c;
    cl_mem parent = b;
    OK(clGetMemObjectInfo(b, CL_MEM_TYPE, sizeof t, &t, NULL));
    OK(clGetMemObjectInfo(b, CL_MEM_SIZE, sizeof sz, &sz, NULL));
    T(t == CL_MEM_OBJECT_BUFFER && sz == 100);
    OK(clGetMemObjectInfo(b, CL_MEM_MAP_COUNT, sizeof n, &n, NULL));
    T(n == 0);
    OK(clGetMemObjectInfo(b, CL_MEM_CONTEXT, sizeof c, &c, NULL));
    OK(clGetMemObjectInfo(b, CL_MEM_ASSOCIATED_MEMOBJECT, sizeof parent, &parent, NULL));
    OK(clGetMemObjectInfo(b, CL_MEM_OFFSET, sizeof off, &off, NULL));
    T(c == C && parent == NULL && off == 0);
    if (V >= 200) {
        cl_bool svm = 1;
        OK(clGetMemObjectInfo(b, CL_MEM_USES_SVM_POINTER, sizeof svm, &svm, NULL));
        T(svm == 0);
    }
    ERR(clGetMemObjectInfo(b, 0x7777, sizeof t, &t, NULL), CL_INVALID_VALUE);
    ERR(clGetMemObjectInfo(b, CL_MEM_SIZE, 1, &sz, NULL), CL_INVALID_VALUE);
    T(refs_mem(b) == 1);
    OK(clRetainMemObject(b));
    T(refs_mem(b) == 2);
    OK(clReleaseMemObject(b));
    OK(clReleaseMemObject(b));
    if (V >= 300) {
        cl_mem_properties pr[4] = {9};
        MK(b, clCreateBufferWithProperties(C, NULL, CL_MEM_READ_WRITE, 64, NULL, &E));
        OK(clGetMemObjectInfo(b, CL_MEM_PROPERTIES, sizeof pr, pr, &sz));
        T(sz == 0 || (sz == sizeof *pr && pr[0] == 0));
        OK(clReleaseMemObject(b));
        cl_mem_properties bad[] = {0x7777, 1, 0};
        ERRP(clCreateBufferWithProperties(C, bad, CL_MEM_READ_WRITE, 64, NULL, &E), CL_INVALID_PROPERTY);
    }
}

CASE(read_write_sizes) {
    static const size_t sizes[] = {1, 3, 4, 63, 64, 65, 4095, 4096, 4097, 65536, 1 << 20, (1 << 20) + 13, 9 << 20};
    size_t max = (9 << 20) + 64;
    unsigned char *a = malloc(max), *b = malloc(max);
    NEED(a && b);
    cl_mem m = buffer(CL_MEM_READ_WRITE, max, NULL);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t off = 0; off < 64; off += 31)
            for (int blocking = 0; blocking < 2; blocking++) {
                fill_bytes(a, sizes[i], (unsigned)(i * 7 + off));
                memset(b, 0, sizes[i]);
                OK(clEnqueueWriteBuffer(Q, m, blocking, off, sizes[i], a, 0, NULL, NULL));
                if (blocking)
                    memset(a, 0xee, sizes[i]); /* a blocking write is done with the pointer */
                OK(clEnqueueReadBuffer(Q, m, blocking, off, sizes[i], b, 0, NULL, NULL));
                if (!blocking)
                    OK(clFinish(Q));
                fill_bytes(a, sizes[i], (unsigned)(i * 7 + off));
                T(!memcmp(a, b, sizes[i]));
            }
    OK(clReleaseMemObject(m));
    free(a);
    free(b);
}

CASE(many_pending_reads) {
    enum { N = 9000 }; /* and nothing is waited for in between */
    static int out[N][16];
    cl_mem m = buffer(CL_MEM_READ_WRITE, 64, NULL);
    cl_kernel k = kernel1("kernel void set(global int *a, int v) { a[get_global_id(0)] = v + (int)get_global_id(0); }", "set");
    arg_mem(k, 0, m);
    size_t n = 16;
    for (int i = 0; i < N; i++) {
        arg_int(k, 1, i);
        OK(clEnqueueNDRangeKernel(Q, k, 1, NULL, &n, NULL, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(Q, m, CL_FALSE, 0, 64, out[i], 0, NULL, NULL));
    }
    OK(clFinish(Q));
    for (int i = 0; i < N; i++)
        for (int j = 0; j < 16; j++)
            if (out[i][j] != i + j) {
                tfail(__FILE__, __LINE__, "read %d[%d] is %d", i, j, out[i][j]);
                i = N - 1;
                break;
            }
    OK(clReleaseMemObject(m));
    OK(clReleaseKernel(k));
}

static void rect_copy(unsigned char *d, const size_t *dorg, size_t drp, size_t dsp, const unsigned char *s, const size_t *sorg, size_t srp,
                      size_t ssp, const size_t *r) {
    for (size_t z = 0; z < r[2]; z++)
        for (size_t y = 0; y < r[1]; y++)
            memcpy(d + dorg[0] + (dorg[1] + y) * drp + (dorg[2] + z) * dsp, s + sorg[0] + (sorg[1] + y) * srp + (sorg[2] + z) * ssp, r[0]);
}

CASE(rect) {
    enum { W = 40, H = 20, Z = 6, S = W * H * Z };
    static unsigned char dev[S], host[S], back[S], expect[S];
    cl_mem a = buffer(0, S, NULL), b = buffer(0, S, NULL);
    fill_bytes(dev, S, 1);
    fill_bytes(host, S, 2);
    OK(clEnqueueWriteBuffer(Q, a, CL_TRUE, 0, S, dev, 0, NULL, NULL));
    size_t bo[3] = {5, 3, 1}, ho[3] = {2, 1, 0}, r[3] = {17, 9, 4};
    size_t hrp = 33, hsp = 33 * 13;
    OK(clEnqueueWriteBufferRect(Q, a, CL_TRUE, bo, ho, r, W, W * H, hrp, hsp, host, 0, NULL, NULL));
    rect_copy(dev, bo, W, W * H, host, ho, hrp, hsp, r);
    OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, S, back, 0, NULL, NULL));
    T(!memcmp(back, dev, S));
    memset(back, 7, S);
    memset(expect, 7, S);
    OK(clEnqueueReadBufferRect(Q, a, CL_FALSE, bo, ho, r, W, W * H, hrp, hsp, back, 0, NULL, NULL));
    OK(clFinish(Q));
    rect_copy(expect, ho, hrp, hsp, dev, bo, W, W * H, r);
    T(!memcmp(back, expect, S));
    /* Pitches of 0 mean tightly packed. */
    memset(back, 0, S);
    memset(expect, 0, S);
    size_t o[3] = {0, 0, 0};
    OK(clEnqueueReadBufferRect(Q, a, CL_TRUE, o, o, r, 0, 0, 0, 0, back, 0, NULL, NULL));
    memcpy(expect, dev, r[0] * r[1] * r[2]);
    T(!memcmp(back, expect, S));
    int zero = 0;
    OK(clEnqueueFillBuffer(Q, b, &zero, 4, 0, S, 0, NULL, NULL));
    memset(expect, 0, S);
    OK(clEnqueueCopyBufferRect(Q, a, b, bo, ho, r, W, W * H, hrp, hsp, 0, NULL, NULL));
    rect_copy(expect, ho, hrp, hsp, dev, bo, W, W * H, r);
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, S, back, 0, NULL, NULL));
    T(!memcmp(back, expect, S));
    /* Within one buffer, not overlapping. */
    size_t o2[3] = {20, 10, 1}, r2[3] = {8, 4, 2}, o1[3] = {0, 0, 1};
    OK(clEnqueueCopyBufferRect(Q, a, a, o1, o2, r2, W, W * H, W, W * H, 0, NULL, NULL));
    memcpy(expect, dev, S);
    rect_copy(expect, o2, W, W * H, dev, o1, W, W * H, r2);
    OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, S, back, 0, NULL, NULL));
    T(!memcmp(back, expect, S));
    size_t ov[3] = {4, 2, 1};
    ERR(clEnqueueCopyBufferRect(Q, a, a, o1, ov, r2, W, W * H, W, W * H, 0, NULL, NULL), CL_MEM_COPY_OVERLAP);
    size_t rz[3] = {0, 1, 1}, big[3] = {W, H, Z + 1}, r1[3] = {16, 2, 1};
    ERR(clEnqueueReadBufferRect(Q, a, CL_TRUE, o, o, rz, W, 0, W, 0, back, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadBufferRect(Q, a, CL_TRUE, o, o, big, W, W * H, W, W * H, back, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueReadBufferRect(Q, a, CL_TRUE, o, o, r1, 8, 0, W, 0, back, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueWriteBufferRect(Q, a, CL_TRUE, o, o, r1, W, 0, W, 0, NULL, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueWriteBufferRect(Q, a, CL_TRUE, o, o, r1, W, W + 1, W, 0, host, 0, NULL, NULL), CL_INVALID_VALUE);
    OK(clReleaseMemObject(a));
    OK(clReleaseMemObject(b));
}

CASE(copy_fill) {
    enum { N = 4096 };
    static unsigned char v[N], w[N];
    fill_bytes(v, N, 3);
    cl_mem a = buffer(CL_MEM_COPY_HOST_PTR, N, v), b = buffer(0, N, NULL);
    OK(clEnqueueCopyBuffer(Q, a, b, 0, 0, N, 0, NULL, NULL));
    OK(clEnqueueCopyBuffer(Q, a, b, 100, 2000, 500, 0, NULL, NULL));
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, N, w, 0, NULL, NULL));
    memcpy(v + 2000, (unsigned char *)memcpy(malloc(N), v, N) + 100, 500);
    T(!memcmp(v, w, N));
    ERR(clEnqueueCopyBuffer(Q, a, a, 0, 10, 100, 0, NULL, NULL), CL_MEM_COPY_OVERLAP);
    ERR(clEnqueueCopyBuffer(Q, a, a, 10, 0, 100, 0, NULL, NULL), CL_MEM_COPY_OVERLAP);
    OK(clEnqueueCopyBuffer(Q, a, a, 0, 100, 100, 0, NULL, NULL));
    ERR(clEnqueueCopyBuffer(Q, a, b, N - 4, 0, 8, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clEnqueueCopyBuffer(Q, a, b, 0, N - 4, 8, 0, NULL, NULL), CL_INVALID_VALUE);
    static const size_t ps[] = {1, 2, 4, 8, 16, 32, 64, 128};
    for (size_t i = 0; i < sizeof ps / sizeof *ps; i++) {
        unsigned char p[128];
        fill_bytes(p, ps[i], (unsigned)i);
        OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, N, v, 0, NULL, NULL));
        OK(clEnqueueFillBuffer(Q, a, p, ps[i], ps[i] * 3, ps[i] * 5, 0, NULL, NULL));
        memset(p, 0, sizeof p); /* the pattern is taken at once */
        fill_bytes(p, ps[i], (unsigned)i);
        for (size_t j = 0; j < 5; j++)
            memcpy(v + ps[i] * (3 + j), p, ps[i]);
        OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, N, w, 0, NULL, NULL));
        T(!memcmp(v, w, N));
    }
    OK(clReleaseMemObject(a));
    OK(clReleaseMemObject(b));
}

CASE(sub_buffer) {
    size_t align = dev_uint(CL_DEVICE_MEM_BASE_ADDR_ALIGN) / 8, n = align * 8;
    unsigned char *v = malloc(n), *w = malloc(n);
    fill_bytes(v, n, 5);
    cl_mem a = buffer(CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, n, v);
    cl_buffer_region r = {align * 2, align * 3};
    cl_mem s;
    MK(s, clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, &r, &E));
    cl_mem parent;
    size_t off, sz;
    cl_mem_flags fl;
    OK(clGetMemObjectInfo(s, CL_MEM_ASSOCIATED_MEMOBJECT, sizeof parent, &parent, NULL));
    OK(clGetMemObjectInfo(s, CL_MEM_OFFSET, sizeof off, &off, NULL));
    OK(clGetMemObjectInfo(s, CL_MEM_SIZE, sizeof sz, &sz, NULL));
    OK(clGetMemObjectInfo(s, CL_MEM_FLAGS, sizeof fl, &fl, NULL));
    T(parent == a && off == r.origin && sz == r.size && (fl & CL_MEM_READ_WRITE));
    OK(clEnqueueReadBuffer(Q, s, CL_TRUE, 0, r.size, w, 0, NULL, NULL));
    T(!memcmp(w, v + r.origin, r.size));
    /* Writes through one are seen through the other. */
    cl_kernel k = kernel1("kernel void inc(global uchar *a) { a[get_global_id(0)]++; }", "inc");
    arg_mem(k, 0, s);
    run1(k, r.size);
    for (size_t i = 0; i < r.size; i++)
        v[r.origin + i]++;
    OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, n, w, 0, NULL, NULL));
    T(!memcmp(v, w, n));
    unsigned char ff = 0xff;
    OK(clEnqueueFillBuffer(Q, a, &ff, 1, r.origin, align, 0, NULL, NULL));
    OK(clEnqueueReadBuffer(Q, s, CL_TRUE, 0, r.size, w, 0, NULL, NULL));
    T(w[0] == 0xff && w[align - 1] == 0xff && w[align] == v[r.origin + align]);
    /* The parent lives as long as its parts. */
    OK(clReleaseMemObject(a));
    OK(clEnqueueReadBuffer(Q, s, CL_TRUE, 0, 1, w, 0, NULL, NULL));
    T(w[0] == 0xff);
    a = s;
    cl_buffer_region any = {0, align};
    ERRP(clCreateSubBuffer(s, 0, CL_BUFFER_CREATE_TYPE_REGION, &any, &E), CL_INVALID_MEM_OBJECT);
    OK(clReleaseMemObject(s));
    a = buffer(CL_MEM_READ_ONLY, n, NULL);
    cl_buffer_region mis = {1, 4}, zero = {0, 0}, over = {align * 7, align * 2};
    if (align > 1)
        ERRP(clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, &mis, &E), CL_MISALIGNED_SUB_BUFFER_OFFSET);
    ERRP(clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, &zero, &E), CL_INVALID_BUFFER_SIZE);
    ERRP(clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, &over, &E), CL_INVALID_VALUE);
    ERRP(clCreateSubBuffer(a, CL_MEM_READ_WRITE, CL_BUFFER_CREATE_TYPE_REGION, &any, &E), CL_INVALID_VALUE);
    ERRP(clCreateSubBuffer(a, CL_MEM_USE_HOST_PTR, CL_BUFFER_CREATE_TYPE_REGION, &any, &E), CL_INVALID_VALUE);
    ERRP(clCreateSubBuffer(a, 0, 0x7777, &any, &E), CL_INVALID_VALUE);
    ERRP(clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateSubBuffer(BAD, 0, CL_BUFFER_CREATE_TYPE_REGION, &any, &E), CL_INVALID_MEM_OBJECT);
    OK(clReleaseMemObject(a));
    OK(clReleaseKernel(k));
    free(v);
    free(w);
}

CASE(copy_between_sub_buffers) {
    size_t align = dev_uint(CL_DEVICE_MEM_BASE_ADDR_ALIGN) / 8;
    cl_mem a = buffer(CL_MEM_READ_WRITE, align * 4, NULL), s[2];
    cl_buffer_region r0 = {0, align * 2}, r1 = {align, align * 2};
    MK(s[0], clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, &r0, &E));
    MK(s[1], clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, &r1, &E));
    /* They share the second quarter. */
    ERR(clEnqueueCopyBuffer(Q, s[0], s[1], align, 0, align, 0, NULL, NULL), CL_MEM_COPY_OVERLAP);
    OK(clEnqueueCopyBuffer(Q, s[0], s[1], 0, align, align, 0, NULL, NULL));
    OK(clFinish(Q));
    OK(clReleaseMemObject(s[0]));
    OK(clReleaseMemObject(s[1]));
    OK(clReleaseMemObject(a));
}

CASE(map_buffer) {
    enum { N = 1 << 16 };
    static unsigned char v[N], w[N];
    fill_bytes(v, N, 9);
    cl_mem a = buffer(CL_MEM_READ_WRITE, N, NULL);
    OK(clEnqueueWriteBuffer(Q, a, CL_TRUE, 0, N, v, 0, NULL, NULL));
    unsigned char *p, *q;
    cl_uint n;
    MK(p, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_READ, 0, N, 0, NULL, NULL, &E));
    T(!memcmp(p, v, N));
    OK(clGetMemObjectInfo(a, CL_MEM_MAP_COUNT, sizeof n, &n, NULL));
    T(n == 1);
    /* A second, partial and overlapping map for reading. */
    MK(q, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_READ, 1000, 5000, 0, NULL, NULL, &E));
    T(!memcmp(q, v + 1000, 5000));
    OK(clGetMemObjectInfo(a, CL_MEM_MAP_COUNT, sizeof n, &n, NULL));
    T(n == 2);
    OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
    OK(clFinish(Q));
    T(!memcmp(q, v + 1000, 5000));
    OK(clEnqueueUnmapMemObject(Q, a, q, 0, NULL, NULL));
    OK(clFinish(Q));
    OK(clGetMemObjectInfo(a, CL_MEM_MAP_COUNT, sizeof n, &n, NULL));
    T(n == 0);
    /* Writing through several disjoint maps. */
    MK(p, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_WRITE, 100, 200, 0, NULL, NULL, &E));
    MK(q, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_WRITE_INVALIDATE_REGION, 40000, 3001, 0, NULL, NULL, &E));
    T(!memcmp(p, v + 100, 200)); /* CL_MAP_WRITE gives the present content */
    memset(p + 10, 0x11, 50);
    fill_bytes(q, 3001, 77);
    memset(v + 110, 0x11, 50);
    fill_bytes(v + 40000, 3001, 77);
    cl_event ev;
    OK(clEnqueueUnmapMemObject(Q, a, q, 0, NULL, NULL));
    OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, &ev));
    OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, N, w, 1, &ev, NULL));
    T(!memcmp(v, w, N));
    OK(clReleaseEvent(ev));
    /* Non-blocking, behind a user event. */
    cl_event u;
    MK(u, clCreateUserEvent(C, &E));
    OK(clEnqueueFillBuffer(Q, a, "\5", 1, 0, N, 1, &u, NULL));
    MK(p, clEnqueueMapBuffer(Q, a, CL_FALSE, CL_MAP_READ | CL_MAP_WRITE, 10, 90, 0, NULL, &ev, &E));
    OK(clSetUserEventStatus(u, CL_COMPLETE));
    OK(clWaitForEvents(1, &ev));
    T(p[0] == 5 && p[89] == 5);
    memset(p, 6, 90);
    OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
    OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, N, w, 0, NULL, NULL));
    T(w[9] == 5 && w[10] == 6 && w[99] == 6 && w[100] == 5);
    OK(clReleaseEvent(ev));
    OK(clReleaseEvent(u));
    OK(clReleaseMemObject(a));
}

static void unmapped_at_once(cl_kernel late, cl_mem a, size_t n) {
    static unsigned char w[1 << 18];
    for (int r = 1; r < 6; r++) {
        cl_uchar v = (cl_uchar)(r * 11);
        size_t one = 1, wrong = 0;
        void *p;
        OK(clEnqueueNDRangeKernel(Q, late, 1, NULL, &one, NULL, 0, NULL, NULL));
        OK(clEnqueueFillBuffer(Q, a, &v, 1, 0, n, 0, NULL, NULL));
        MK(p, clEnqueueMapBuffer(Q, a, CL_FALSE, CL_MAP_READ | CL_MAP_WRITE, 0, n, 0, NULL, NULL, &E));
        OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, n, w, 0, NULL, NULL));
        for (size_t i = 0; i < n; i++)
            wrong += w[i] != v;
        T(!wrong);
    }
}

CASE(unmap_at_once) {
    /* The application has no time to write, nor to see the region: the content stays. */
    enum { N = 1 << 18 };
    static unsigned char host[N];
    cl_kernel late = kernel1("kernel void late(global int *a) { int x = a[0]; for (int i = 0; i < 2000000; i++) x = x * 5 + i; a[0] = x; }", "late");
    cl_mem b = buffer(CL_MEM_READ_WRITE, 4, NULL);
    arg_mem(late, 0, b);
    for (size_t n = 1000; n <= N; n += N - 1000) {
        cl_mem a = buffer(CL_MEM_READ_WRITE, n, NULL);
        unmapped_at_once(late, a, n);
        OK(clReleaseMemObject(a));
        a = buffer(CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, n, host);
        unmapped_at_once(late, a, n);
        OK(clReleaseMemObject(a));
    }
    OK(clReleaseMemObject(b));
    OK(clReleaseKernel(late));
}

CASE(newer_read_of_the_same_memory) {
    /* The first read is not waited for, and the last one has the last word. */
    static const size_t sizes[] = {4, 2 << 20};
    for (int i = 0; i < 2; i++) {
        size_t n = sizes[i];
        cl_mem a = buffer(CL_MEM_READ_WRITE, n, NULL);
        unsigned char *x = calloc(1, n);
        for (int r = 1; r < 6; r++) {
            cl_uchar old = (cl_uchar)r, new = (cl_uchar)(r * 11);
            OK(clEnqueueFillBuffer(Q, a, &old, 1, 0, n, 0, NULL, NULL));
            OK(clEnqueueReadBuffer(Q, a, CL_FALSE, 0, n, x, 0, NULL, NULL));
            OK(clEnqueueFillBuffer(Q, a, &new, 1, 0, n, 0, NULL, NULL));
            OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, n, x, 0, NULL, NULL));
            T(x[0] == new && x[n - 1] == new);
            OK(clFinish(Q));
            T(x[0] == new && x[n - 1] == new);
        }
        free(x);
        OK(clReleaseMemObject(a));
    }
}

CASE(plane_of_a_volume) {
    /* One row of each slice, and the slices lie apart. */
    enum { X = 4096, Y = 8, Z = 512 };
    unsigned char *v = malloc((size_t)X * Y * Z), *host = malloc((size_t)X * Y * Z);
    fill_bytes(v, (size_t)X * Y * Z, 1);
    size_t o[3] = {0}, reg[3] = {X, 1, Z}, wrong = 0;
    cl_mem a = buffer(CL_MEM_READ_WRITE, (size_t)X * Y * Z, NULL);
    OK(clEnqueueWriteBuffer(Q, a, CL_TRUE, 0, (size_t)X * Y * Z, v, 0, NULL, NULL));
    memset(host, 7, (size_t)X * Y * Z);
    OK(clEnqueueReadBufferRect(Q, a, CL_TRUE, o, o, reg, X, X * Y, X, X * Y, host, 0, NULL, NULL));
    for (size_t i = 0; i < (size_t)X * Y * Z; i++)
        wrong += host[i] != (i / X % Y ? 7 : v[i]);
    T(!wrong);
    OK(clReleaseMemObject(a));
    free(v);
    free(host);
}

CASE(unmap_waits_for_user_event) {
    /* It is asked for first, and the application writes before it lets it run. */
    enum { N = 1 << 18 };
    static unsigned char w[N], host[N];
    for (int how = 0; how < 4; how++) {
        size_t n = how & 1 ? N : 1000;
        cl_mem a = buffer(CL_MEM_READ_WRITE | (how & 2 ? CL_MEM_USE_HOST_PTR : 0), n, how & 2 ? host : NULL);
        OK(clEnqueueFillBuffer(Q, a, "\1", 1, 0, n, 0, NULL, NULL));
        for (int r = 2; r < 6; r++) {
            cl_event u;
            unsigned char *p;
            MK(u, clCreateUserEvent(C, &E));
            MK(p, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, n, 0, NULL, NULL, &E));
            T(p[0] == r - 1 && p[n - 1] == r - 1);
            OK(clEnqueueUnmapMemObject(Q, a, p, 1, &u, NULL));
            OK(clFlush(Q));
            memset(p, r, n);
            OK(clSetUserEventStatus(u, CL_COMPLETE));
            OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, n, w, 0, NULL, NULL));
            size_t wrong = 0;
            for (size_t i = 0; i < n; i++)
                wrong += w[i] != r;
            T(!wrong);
            OK(clReleaseEvent(u));
        }
        OK(clReleaseMemObject(a));
    }
}

CASE(map_twice_same_region) {
    cl_mem a = buffer(CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, 4096, NULL);
    OK(clEnqueueFillBuffer(Q, a, "\3", 1, 0, 4096, 0, NULL, NULL));
    void *p, *q;
    cl_uint n;
    MK(p, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_READ, 0, 4096, 0, NULL, NULL, &E));
    MK(q, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_READ, 0, 4096, 0, NULL, NULL, &E));
    OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
    OK(clFinish(Q));
    OK(clGetMemObjectInfo(a, CL_MEM_MAP_COUNT, sizeof n, &n, NULL));
    T(n == 1 && ((unsigned char *)q)[4095] == 3);
    OK(clEnqueueUnmapMemObject(Q, a, q, 0, NULL, NULL));
    OK(clFinish(Q));
    OK(clReleaseMemObject(a));
}

CASE(map_pointer_as_source) {
    /* The application may hand a mapped pointer to other calls. */
    cl_mem a = buffer(CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, 1 << 20, NULL), b = buffer(CL_MEM_READ_WRITE, 1 << 20, NULL);
    unsigned char *p;
    static unsigned char w[1 << 20];
    MK(p, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_WRITE | CL_MAP_READ, 0, 1 << 20, 0, NULL, NULL, &E));
    fill_bytes(p, 1 << 20, 4);
    OK(clEnqueueWriteBuffer(Q, b, CL_FALSE, 0, 1 << 20, p, 0, NULL, NULL));
    OK(clFinish(Q));
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 1 << 20, w, 0, NULL, NULL));
    T(!memcmp(p, w, 1 << 20));
    memset(p, 0, 1 << 20);
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 1 << 20, p, 0, NULL, NULL));
    T(!memcmp(p, w, 1 << 20));
    OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
    OK(clFinish(Q));
    OK(clReleaseMemObject(a));
    OK(clReleaseMemObject(b));
}

CASE(use_host_ptr) {
    enum { N = 5000 };
    static unsigned char v[N + 16] __attribute__((aligned(4096)));
    unsigned char *src[2] = {v, v + 1}; /* aligned, and not */
    for (int i = 0; i < 2; i++) {
        fill_bytes(src[i], N, 8);
        cl_mem a = buffer(CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, N, src[i]);
        cl_kernel k = kernel1("kernel void inc(global uchar *a) { a[get_global_id(0)] += 3; }", "inc");
        arg_mem(k, 0, a);
        run1(k, N);
        unsigned char *p, w[N];
        MK(p, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 7, 100, 0, NULL, NULL, &E));
        T(p == src[i] + 7); /* required for USE_HOST_PTR */
        unsigned char e[N];
        fill_bytes(e, N, 8);
        for (int j = 0; j < N; j++)
            e[j] += 3;
        T(!memcmp(p, e + 7, 100));
        memset(p, 1, 100);
        memset(e + 7, 1, 100);
        OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, N, w, 0, NULL, NULL));
        T(!memcmp(w, e, N));
        OK(clReleaseMemObject(a));
        OK(clReleaseKernel(k));
    }
}

static void CL_CALLBACK mem_gone(cl_mem m, void *u) {
    (void)m;
    atomic_int *a = u;
    atomic_fetch_add(a, 1);
}
static atomic_int order_next, order[3];
static void CL_CALLBACK mem_order(cl_mem m, void *u) {
    (void)m;
    *(atomic_int *)u = ++order_next;
}

CASE(mem_destructor) {
    static atomic_int n;
    n = 0;
    order_next = 0;
    cl_mem a = buffer(0, 64, NULL);
    OK(clSetMemObjectDestructorCallback(a, mem_gone, &n));
    ERR(clSetMemObjectDestructorCallback(a, NULL, NULL), CL_INVALID_VALUE);
    ERR(clSetMemObjectDestructorCallback(BAD, mem_gone, &n), CL_INVALID_MEM_OBJECT);
    OK(clRetainMemObject(a));
    OK(clReleaseMemObject(a));
    T(n == 0);
    OK(clReleaseMemObject(a));
    T(wait_until(&n, 1, 3000));
    /* Called in the reverse order of registration. */
    a = buffer(0, 64, NULL);
    for (int i = 0; i < 3; i++)
        OK(clSetMemObjectDestructorCallback(a, mem_order, &order[i]));
    OK(clReleaseMemObject(a));
    T(wait_until(&order_next, 3, 3000));
    T(order[2] == 1 && order[1] == 2 && order[0] == 3);
    /* Not before the commands that use the object are done. */
    n = 0;
    a = buffer(0, 64, NULL);
    OK(clSetMemObjectDestructorCallback(a, mem_gone, &n));
    cl_event u;
    MK(u, clCreateUserEvent(C, &E));
    OK(clEnqueueFillBuffer(Q, a, "\1", 1, 0, 64, 1, &u, NULL));
    OK(clFlush(Q));
    OK(clReleaseMemObject(a));
    sleep_ms(20);
    T(n == 0);
    OK(clSetUserEventStatus(u, CL_COMPLETE));
    OK(clFinish(Q));
    T(wait_until(&n, 1, 3000));
    OK(clReleaseEvent(u));
}

CASE(release_while_used) {
    /* A kernel's arguments and the kernel itself may be released once enqueued. */
    int v = 5, w = 0;
    cl_mem a = buffer(CL_MEM_COPY_HOST_PTR, 4, &v), b = buffer(0, 4, NULL);
    cl_kernel k = kernel1("kernel void f(global int *a, global int *b) { b[0] = a[0] * 2; }", "f");
    arg_mem(k, 0, a);
    arg_mem(k, 1, b);
    cl_event u;
    MK(u, clCreateUserEvent(C, &E));
    size_t n = 1;
    OK(clEnqueueNDRangeKernel(Q, k, 1, NULL, &n, NULL, 1, &u, NULL));
    OK(clReleaseMemObject(a));
    OK(clReleaseKernel(k));
    OK(clSetUserEventStatus(u, CL_COMPLETE));
    OK(clReleaseEvent(u));
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &w, 0, NULL, NULL));
    T(w == 10);
    OK(clReleaseMemObject(b));
}

CASE(buffer_churn) {
    for (int i = 0; i < 3000; i++) {
        cl_mem m = buffer(0, 4096 + (size_t)(i % 7) * 1000, NULL);
        if (i % 100 == 0)
            OK(clEnqueueFillBuffer(Q, m, "\1", 1, 0, 4096, 0, NULL, NULL));
        OK(clReleaseMemObject(m));
    }
}
