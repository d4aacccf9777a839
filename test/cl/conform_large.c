/* Transfers that are too large to be put aside whole. */
#include "conform.h"

enum { MIB = 1 << 20 };

static unsigned char *bytes(size_t n, unsigned seed) {
    unsigned char *p = malloc(n);
    NEED(p);
    fill_bytes(p, n, seed);
    return p;
}

/* What waits takes turns, and reads bring all of it. */
CASE(large_held_by_a_user_event) {
    enum { N = 4, S = 18 * MIB + 12345 };
    unsigned char *src[N], *dst[N];
    cl_mem m[N];
    cl_event ue;
    MK(ue, clCreateUserEvent(C, &E));
    for (int i = 0; i < N; i++) {
        src[i] = bytes(S, (unsigned)i);
        dst[i] = calloc(1, S);
        m[i] = buffer(0, S, NULL);
        OK(clEnqueueWriteBuffer(Q, m[i], CL_FALSE, 0, S, src[i], i == 0, i == 0 ? &ue : NULL, NULL));
        OK(clEnqueueReadBuffer(Q, m[i], CL_FALSE, 0, S, dst[i], 0, NULL, NULL));
    }
    OK(clFlush(Q));
    OK(clSetUserEventStatus(ue, CL_COMPLETE));
    OK(clFinish(Q));
    for (int i = 0; i < N; i++) {
        T(!memcmp(src[i], dst[i], S));
        free(src[i]);
        free(dst[i]);
        OK(clReleaseMemObject(m[i]));
    }
    OK(clReleaseEvent(ue));
}

/* A write may send what an earlier command of the queue reads. */
CASE(write_of_what_is_being_read) {
    static const size_t sizes[] = {600, 64 * 1024, 3 * MIB, 9 * MIB + 7};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int blocking = 0; blocking < 2; blocking++) {
            size_t n = sizes[i];
            unsigned char *first = bytes(n, 5), *between = calloc(1, n), *last = calloc(1, n);
            cl_mem a = buffer(CL_MEM_COPY_HOST_PTR, n, first), b = buffer(0, n, NULL);
            OK(clEnqueueReadBuffer(Q, a, CL_FALSE, 0, n, between, 0, NULL, NULL));
            OK(clEnqueueWriteBuffer(Q, b, blocking ? CL_TRUE : CL_FALSE, 0, n, between, 0, NULL, NULL));
            OK(clEnqueueReadBuffer(Q, b, CL_FALSE, 0, n, last, 0, NULL, NULL));
            OK(clFinish(Q));
            T(!memcmp(first, between, n));
            T(!memcmp(first, last, n));
            free(first), free(between), free(last);
            OK(clReleaseMemObject(a));
            OK(clReleaseMemObject(b));
        }
}

static void sub_rect(size_t w, size_t h, size_t z, size_t gap, bool blocking) {
    size_t row = w + gap, slice = row * (h + 1), n = slice * (z + 1);
    unsigned char *src = bytes(n, 3), *dst = calloc(1, n);
    NEED(dst);
    cl_mem m = buffer(0, n, NULL);
    size_t bo[3] = {gap / 2, 1, 1}, ho[3] = {gap / 3, 0, 1}, r[3] = {w, h, z};
    OK(clEnqueueWriteBufferRect(Q, m, blocking ? CL_TRUE : CL_FALSE, bo, ho, r, row, slice, row, slice, src, 0, NULL, NULL));
    OK(clEnqueueReadBufferRect(Q, m, blocking ? CL_TRUE : CL_FALSE, bo, ho, r, row, slice, row, slice, dst, 0, NULL, NULL));
    OK(clFinish(Q));
    size_t wrong = 0;
    for (size_t k = 0; k <= z; k++)
        for (size_t j = 0; j <= h; j++)
            for (size_t i = 0; i < row; i++) {
                size_t at = k * slice + j * row + i;
                bool in = i >= ho[0] && i < ho[0] + w && j < h && k >= 1;
                wrong += dst[at] != (in ? src[at] : 0);
            }
    if (wrong)
        tfail(__FILE__, __LINE__, "%zux%zux%zu, gap %zu: %zu bytes are wrong", w, h, z, gap, wrong);
    free(src), free(dst);
    OK(clReleaseMemObject(m));
}

CASE(large_rects) {
    for (int blocking = 0; blocking < 2; blocking++) {
        sub_rect(3001, 1000, 2, 30, blocking);       /* rows of a slice */
        sub_rect(1000, 300, 20, 9, blocking);        /* whole slices */
        sub_rect(2 * MIB + 4099, 2, 1, 12, blocking); /* parts of a row */
        sub_rect(2 * MIB, 3, 1, 0, blocking);
    }
}

CASE(large_images) {
    if (!dev_bool(CL_DEVICE_IMAGE_SUPPORT))
        return;
    enum { W = 1500, H = 1100, GAP = 52 };
    cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
    cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = W, .image_height = H};
    size_t row = W * 4 + GAP, n = row * H, o[3] = {0, 0, 0}, r[3] = {W, H, 1};
    for (int blocking = 0; blocking < 2; blocking++) {
        unsigned char *src = bytes(n, 9), *dst = calloc(1, n);
        cl_mem m;
        MK(m, clCreateImage(C, CL_MEM_READ_WRITE, &f, &d, NULL, &E));
        OK(clEnqueueWriteImage(Q, m, blocking ? CL_TRUE : CL_FALSE, o, r, row, 0, src, 0, NULL, NULL));
        OK(clEnqueueReadImage(Q, m, blocking ? CL_TRUE : CL_FALSE, o, r, row, 0, dst, 0, NULL, NULL));
        OK(clFinish(Q));
        size_t wrong = 0;
        for (size_t i = 0; i < n; i++)
            wrong += dst[i] != (i % row < W * 4 ? src[i] : 0);
        T(!wrong);
        free(src), free(dst);
        OK(clReleaseMemObject(m));
    }
}

static atomic_int arrived;
static const unsigned char *want;
static unsigned char *got;
static size_t many;

static void CL_CALLBACK on_read(cl_event e, cl_int st, void *user) {
    (void)e, (void)user;
    atomic_store(&arrived, st == CL_COMPLETE && !memcmp(want, got, many) ? 1 : 2);
}

/* An application that only waits for a callback makes no call meanwhile. */
CASE(large_without_a_waiting_call) {
    many = 20 * MIB + 1;
    unsigned char *src = bytes(many, 4);
    want = src;
    got = calloc(1, many);
    atomic_store(&arrived, 0);
    cl_mem m = buffer(0, many, NULL);
    cl_event e;
    OK(clEnqueueWriteBuffer(Q, m, CL_FALSE, 0, many, src, 0, NULL, NULL));
    OK(clEnqueueReadBuffer(Q, m, CL_FALSE, 0, many, got, 0, NULL, &e));
    OK(clSetEventCallback(e, CL_COMPLETE, on_read, NULL));
    OK(clFlush(Q));
    T(wait_until(&arrived, 1, 60000));
    OK(clReleaseEvent(e));
    OK(clReleaseMemObject(m));
    free(src), free(got);
}

/* More transfers at once than there are lanes, ordered by events alone, the memory objects released at once. */
CASE(large_out_of_order) {
    enum { N = 9, S = 5 * MIB };
    cl_command_queue q = queue(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
    unsigned char *src[N], *dst[N];
    cl_event w[N], r[N];
    for (int i = 0; i < N; i++) {
        src[i] = bytes(S, (unsigned)i + 20);
        dst[i] = calloc(1, S);
        cl_mem m = buffer(0, S, NULL);
        OK(clEnqueueWriteBuffer(q, m, CL_FALSE, 0, S, src[i], 0, NULL, &w[i]));
        OK(clEnqueueReadBuffer(q, m, CL_FALSE, 0, S, dst[i], 1, &w[i], &r[i]));
        OK(clReleaseMemObject(m));
    }
    OK(clWaitForEvents(N, r));
    for (int i = 0; i < N; i++) {
        T(!memcmp(src[i], dst[i], S));
        T(status(w[i]) == CL_COMPLETE);
        OK(clReleaseEvent(w[i]));
        OK(clReleaseEvent(r[i]));
        free(src[i]), free(dst[i]);
    }
    OK(clReleaseCommandQueue(q));
}

/* A transfer after an event that failed fails, and what comes after it in its queue goes on. */
CASE(large_after_a_failed_event) {
    enum { S = 9 * MIB };
    unsigned char *src = bytes(S, 6);
    cl_mem m = buffer(0, S, NULL);
    cl_event ue, e;
    MK(ue, clCreateUserEvent(C, &E));
    OK(clEnqueueWriteBuffer(Q, m, CL_FALSE, 0, S, src, 1, &ue, &e));
    OK(clSetUserEventStatus(ue, -5));
    T(clWaitForEvents(1, &e) == CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
    T(status(e) < 0);
    (void)clFinish(Q);
    OK(clEnqueueWriteBuffer(Q, m, CL_FALSE, 0, S, src, 0, NULL, NULL));
    OK(clFinish(Q));
    OK(clReleaseEvent(e));
    OK(clReleaseEvent(ue));
    OK(clReleaseMemObject(m));
    free(src);
}

/* first_content makes an image from memory with pitches, and reads it. */
static void first_content(cl_mem_object_type type, size_t w, size_t h, size_t z, size_t layers, size_t gap) {
    size_t row = w * 4 + gap, slice = type == CL_MEM_OBJECT_IMAGE1D_ARRAY ? row : row * (h + (gap ? 1 : 0));
    size_t lines = h ? h : 1, parts = layers ? layers : z ? z : 1, n = slice * parts;
    unsigned char *src = bytes(n, 9), *dst = calloc(1, w * 4 * lines * parts);
    NEED(dst);
    cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
    cl_image_desc d = {.image_type = type, .image_width = w, .image_height = h, .image_depth = z, .image_array_size = layers,
                       .image_row_pitch = gap ? row : 0, .image_slice_pitch = gap && parts > 1 ? slice : 0};
    cl_mem m;
    MK(m, clCreateImage(C, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR | CL_MEM_HOST_READ_ONLY, &f, &d, src, &E));
    size_t o[3] = {0}, r[3] = {w, lines, parts};
    if (type == CL_MEM_OBJECT_IMAGE1D_ARRAY)
        r[1] = parts, r[2] = 1;
    OK(clEnqueueReadImage(Q, m, CL_TRUE, o, r, 0, 0, dst, 0, NULL, NULL));
    size_t wrong = 0;
    for (size_t k = 0; k < parts; k++)
        for (size_t j = 0; j < lines; j++)
            wrong += memcmp(dst + (k * lines + j) * w * 4, src + k * slice + j * row, w * 4) != 0;
    if (wrong)
        tfail(__FILE__, __LINE__, "image of type %#x, %zux%zux%zu, gap %zu: %zu rows are wrong", type, w, lines, parts, gap, wrong);
    free(src), free(dst);
    OK(clReleaseMemObject(m));
}

/* The first content of an object is there when its creation returns, whatever its flags say of the host's later accesses. */
CASE(large_first_content) {
    enum { S = 18 * MIB + 4321 };
    static const cl_mem_flags from[] = {CL_MEM_COPY_HOST_PTR, CL_MEM_USE_HOST_PTR, CL_MEM_COPY_HOST_PTR | CL_MEM_ALLOC_HOST_PTR},
                              later[] = {0, CL_MEM_HOST_READ_ONLY, CL_MEM_HOST_WRITE_ONLY, CL_MEM_HOST_NO_ACCESS};
    unsigned char *src = NULL, *dst = malloc(S), *want = bytes(S, 7);
    NEED(dst && want && !posix_memalign((void **)&src, 4096, S));
    for (size_t i = 0; i < 3; i++)
        for (size_t j = 0; j < 4; j++) {
            memcpy(src, want, S);
            memset(dst, 0, S);
            cl_mem a = buffer(from[i] | later[j] | CL_MEM_READ_ONLY, S, src), b = buffer(0, S, NULL);
            if (!(from[i] & CL_MEM_USE_HOST_PTR))
                memset(src, 0, S); /* it is ours again */
            cl_mem_flags flags = 0;
            OK(clGetMemObjectInfo(a, CL_MEM_FLAGS, sizeof flags, &flags, NULL));
            T(flags == (from[i] | later[j] | CL_MEM_READ_ONLY));
            OK(clEnqueueCopyBuffer(Q, a, b, 0, 0, S, 0, NULL, NULL));
            OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, S, dst, 0, NULL, NULL));
            T(!memcmp(dst, want, S));
            OK(clReleaseMemObject(a));
            OK(clReleaseMemObject(b));
        }
    free(src), free(dst), free(want);
    for (size_t gap = 0; dev_bool(CL_DEVICE_IMAGE_SUPPORT) && gap <= 64; gap += 64) {
        first_content(CL_MEM_OBJECT_IMAGE2D, 1500, 1100, 0, 0, gap);
        first_content(CL_MEM_OBJECT_IMAGE3D, 300, 200, 40, 0, gap);
        first_content(CL_MEM_OBJECT_IMAGE2D_ARRAY, 300, 200, 0, 40, gap);
        first_content(CL_MEM_OBJECT_IMAGE1D_ARRAY, 1500, 0, 0, 1100, gap);
    }
}
