/* Commands that use what earlier ones bring to the application's memory, and that it does not wait for. */
#include "conform.h"

enum { ROWS = 16 };

static void place(unsigned char *p, const unsigned char *v, size_t n, size_t pitch) {
    for (size_t r = 0; r < ROWS; r++)
        memcpy(p + r * pitch, v + r * (n / ROWS), n / ROWS);
}

static void gather(unsigned char *v, const unsigned char *p, size_t n, size_t pitch) {
    for (size_t r = 0; r < ROWS; r++)
        memcpy(v + r * (n / ROWS), p + r * pitch, n / ROWS);
}

/* move reads or writes a whole buffer, whose rows lie apart in the application's memory. */
static void move(bool write, cl_mem m, size_t n, unsigned char *p, size_t pitch, const cl_event *after) {
    size_t o[3] = {0}, region[3] = {n / ROWS, ROWS, 1}, row = n / ROWS;
    if (pitch == row && write)
        OK(clEnqueueWriteBuffer(Q, m, CL_FALSE, 0, n, p, after ? 1 : 0, after, NULL));
    else if (pitch == row)
        OK(clEnqueueReadBuffer(Q, m, CL_FALSE, 0, n, p, after ? 1 : 0, after, NULL));
    else if (write)
        OK(clEnqueueWriteBufferRect(Q, m, CL_FALSE, o, o, region, row, 0, pitch, 0, p, after ? 1 : 0, after, NULL));
    else
        OK(clEnqueueReadBufferRect(Q, m, CL_FALSE, o, o, region, row, 0, pitch, 0, p, after ? 1 : 0, after, NULL));
}

static const size_t sizes[] = {64, 4096, 200 << 10, 2 << 20};

static void passed_on(size_t n, unsigned char *p, bool apart_in, bool apart_out) {
    size_t in = n / ROWS * (apart_in ? 2 : 1), out = n / ROWS * (apart_out ? 2 : 1);
    unsigned char *v = malloc(n), *w = malloc(n), *want = malloc(n), *like = malloc(2 * n);
    cl_mem b = buffer(CL_MEM_READ_WRITE, n, NULL), c = buffer(CL_MEM_READ_WRITE, n, NULL);
    cl_event u;
    fill_bytes(v, n, 3);
    fill_bytes(p, 2 * n, 4);
    memcpy(like, p, 2 * n);
    place(like, v, n, in);
    gather(want, like, n, out);
    OK(clEnqueueWriteBuffer(Q, b, CL_TRUE, 0, n, v, 0, NULL, NULL));
    MK(u, clCreateUserEvent(C, &E));
    move(false, b, n, p, in, &u);
    move(true, c, n, p, out, NULL);
    OK(clSetUserEventStatus(u, CL_COMPLETE));
    OK(clEnqueueReadBuffer(Q, c, CL_TRUE, 0, n, w, 0, NULL, NULL));
    if (memcmp(w, want, n))
        tfail(__FILE__, __LINE__, "%zu bytes, apart %d %d", n, apart_in, apart_out);
    T(!memcmp(p, like, 2 * n));
    OK(clReleaseEvent(u));
    OK(clReleaseMemObject(b));
    OK(clReleaseMemObject(c));
    free(v);
    free(w);
    free(want);
    free(like);
}

CASE(read_is_passed_on) {
    /* Data is read to the application's memory, and sent on from there. */
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int how = 0; how < 8; how++) {
            size_t n = sizes[i];
            bool mapped = how & 4;
            cl_mem a = mapped ? buffer(CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, 2 * n, NULL) : NULL;
            unsigned char *p = mapped ? NULL : malloc(2 * n);
            if (mapped)
                MK(p, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, 2 * n, 0, NULL, NULL, &E));
            passed_on(n, p, how & 1, how & 2);
            if (mapped) {
                OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
                OK(clFinish(Q));
                OK(clReleaseMemObject(a));
            } else
                free(p);
        }
}

/* read_and_unmapped reads b into a region of a that is mapped, and unmaps it at once. */
static void read_and_unmapped(size_t n, size_t pitch, cl_mem a, cl_command_queue q) {
    unsigned char *v = malloc(n), *w = malloc(2 * n), *want = malloc(2 * n), *p;
    cl_mem b = buffer(CL_MEM_READ_WRITE, n, NULL);
    cl_event u, read;
    fill_bytes(v, n, 5);
    fill_bytes(want, 2 * n, 6);
    OK(clEnqueueWriteBuffer(Q, b, CL_TRUE, 0, n, v, 0, NULL, NULL));
    OK(clEnqueueWriteBuffer(Q, a, CL_TRUE, 0, 2 * n, want, 0, NULL, NULL));
    place(want, v, n, pitch);
    MK(p, clEnqueueMapBuffer(Q, a, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, 2 * n, 0, NULL, NULL, &E));
    MK(u, clCreateUserEvent(C, &E));
    move(false, b, n, p, pitch, &u);
    OK(clEnqueueMarkerWithWaitList(Q, 0, NULL, &read));
    cl_event gone;
    OK(clEnqueueUnmapMemObject(q, a, p, 1, &read, &gone));
    OK(clSetUserEventStatus(u, CL_COMPLETE));
    OK(clEnqueueReadBuffer(q, a, CL_TRUE, 0, 2 * n, w, 1, &gone, NULL));
    if (memcmp(w, want, 2 * n))
        tfail(__FILE__, __LINE__, "%zu bytes, %s", n, pitch > n / ROWS ? "apart" : "in one piece");
    OK(clFinish(Q));
    OK(clReleaseEvent(gone));
    OK(clReleaseEvent(read));
    OK(clReleaseEvent(u));
    OK(clReleaseMemObject(b));
    free(v);
    free(w);
    free(want);
}

CASE(read_to_a_region_that_is_unmapped) {
    cl_command_queue any = queue(dev_ulong(CL_DEVICE_QUEUE_PROPERTIES) & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int how = 0; how < 8; how++) {
            size_t n = sizes[i];
            void *host = NULL;
            NEED(!(how & 2) || !posix_memalign(&host, 4096, 2 * n));
            cl_mem a = buffer(CL_MEM_READ_WRITE | (how & 2 ? CL_MEM_USE_HOST_PTR : 0), 2 * n, host);
            read_and_unmapped(n, n / ROWS * (how & 1 ? 2 : 1), a, how & 4 ? any : Q);
            OK(clReleaseMemObject(a));
            OK(clFinish(Q));
            free(host);
        }
    OK(clReleaseCommandQueue(any));
}

CASE(read_to_an_image_that_is_unmapped) {
    enum { X = 64, Y = 48 };
    static unsigned char v[X * Y * 4], w[sizeof v], host[sizeof v];
    if (!dev_bool(CL_DEVICE_IMAGE_SUPPORT))
        return;
    cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
    cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = X, .image_height = Y};
    size_t o[3] = {0}, whole[3] = {X, Y, 1}, row;
    fill_bytes(v, sizeof v, 7);
    for (int mine = 0; mine < 2; mine++) {
        cl_mem a, b;
        cl_event u;
        unsigned char *p;
        MK(a, clCreateImage(C, CL_MEM_READ_WRITE | (mine ? CL_MEM_USE_HOST_PTR : 0), &f, &d, mine ? host : NULL, &E));
        MK(b, clCreateImage(C, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, &f, &d, v, &E));
        MK(p, clEnqueueMapImage(Q, a, CL_TRUE, CL_MAP_WRITE, o, whole, &row, NULL, 0, NULL, NULL, &E));
        MK(u, clCreateUserEvent(C, &E));
        OK(clEnqueueReadImage(Q, b, CL_FALSE, o, whole, row, 0, p, 1, &u, NULL));
        OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
        OK(clSetUserEventStatus(u, CL_COMPLETE));
        memset(w, 0, sizeof w);
        OK(clEnqueueReadImage(Q, a, CL_TRUE, o, whole, 0, 0, w, 0, NULL, NULL));
        T(!memcmp(v, w, sizeof v));
        OK(clReleaseEvent(u));
        OK(clReleaseMemObject(a));
        OK(clReleaseMemObject(b));
    }
}

/* slow fills a buffer when it has computed for some time. */
static cl_kernel slow(cl_mem m, size_t n) {
    cl_kernel k = kernel1("kernel void slow(global int *a, int n, int v) { int x = v; for (int i = 0; i < 2000000; i++) x = x * 5 + i; for (int i = 0; i < n; i++) a[i] = v + (x == 77 && v < 0); }", "slow");
    arg_mem(k, 0, m);
    arg_int(k, 1, (cl_int)(n / 4));
    return k;
}

CASE(barrier_holds_large_transfers) {
    enum { N = 1 << 20 };
    if (!(dev_ulong(CL_DEVICE_QUEUE_PROPERTIES) & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE))
        return;
    cl_command_queue q = queue(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
    cl_mem a = buffer(CL_MEM_READ_WRITE, N, NULL), b = buffer(CL_MEM_READ_WRITE, N, NULL);
    cl_kernel k = slow(a, N);
    cl_int *x = malloc(N), *y = malloc(N);
    size_t one = 1;
    for (int r = 1; r < 5; r++) {
        size_t wrong = 0;
        arg_int(k, 2, r);
        memset(x, 0, N);
        OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &one, NULL, 0, NULL, NULL));
        OK(clEnqueueBarrierWithWaitList(q, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(q, a, CL_FALSE, 0, N, x, 0, NULL, NULL));
        OK(clEnqueueBarrierWithWaitList(q, 0, NULL, NULL));
        OK(clEnqueueWriteBuffer(q, b, CL_FALSE, 0, N, x, 0, NULL, NULL));
        OK(clEnqueueBarrierWithWaitList(q, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(q, b, CL_TRUE, 0, N, y, 0, NULL, NULL));
        for (int i = 0; i < N / 4; i++)
            wrong += x[i] != r || y[i] != r;
        T(!wrong);
    }
    free(x);
    free(y);
    OK(clReleaseKernel(k));
    OK(clReleaseMemObject(a));
    OK(clReleaseMemObject(b));
    OK(clReleaseCommandQueue(q));
}

struct reading { cl_int *x; size_t n; cl_int want; atomic_int seen; };

static void CL_CALLBACK destroyed(cl_mem m, void *data) {
    (void)m;
    struct reading *r = data;
    atomic_store(&r->seen, r->x[0] == r->want && r->x[r->n / 4 - 1] == r->want ? 1 : -1);
}

CASE(read_before_the_buffer_is_destroyed) {
    static const size_t some[] = {4096, 200 << 10, 2 << 20};
    for (int i = 0; i < 3; i++) {
        size_t n = some[i], one = 1;
        cl_mem a = buffer(CL_MEM_READ_WRITE, n, NULL);
        cl_kernel k = slow(a, n);
        struct reading r = {.x = calloc(1, n), .n = n, .want = 9 + i};
        arg_int(k, 2, r.want);
        OK(clSetMemObjectDestructorCallback(a, destroyed, &r));
        OK(clEnqueueNDRangeKernel(Q, k, 1, NULL, &one, NULL, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(Q, a, CL_FALSE, 0, n, r.x, 0, NULL, NULL));
        OK(clFlush(Q));
        OK(clReleaseKernel(k));
        OK(clReleaseMemObject(a));
        for (int ms = 0; ms < 10000 && !atomic_load(&r.seen); ms++)
            sleep_ms(1);
        T(atomic_load(&r.seen) == 1);
        OK(clFinish(Q));
        free(r.x);
    }
}

CASE(map_after_a_read_of_the_same_memory) {
    /* The read is older than the map, and both bring data to the memory of the buffer. */
    enum { N = 4096 };
    void *host;
    NEED(!posix_memalign(&host, 4096, N));
    cl_mem a = buffer(CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, N, host), b = buffer(CL_MEM_READ_WRITE, N, NULL);
    for (cl_uchar r = 1; r < 20; r++) {
        cl_event old, mapped;
        cl_int st;
        unsigned char *p;
        OK(clEnqueueMarkerWithWaitList(Q, 0, NULL, &old));
        OK(clWaitForEvents(1, &old));
        OK(clEnqueueFillBuffer(Q, b, "\0", 1, 0, N, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(Q, b, CL_FALSE, 0, N, host, 0, NULL, NULL));
        OK(clEnqueueFillBuffer(Q, a, &r, 1, 0, N, 0, NULL, NULL));
        MK(p, clEnqueueMapBuffer(Q, a, CL_FALSE, CL_MAP_READ, 0, N, 0, NULL, &mapped, &E));
        OK(clFlush(Q));
        sleep_ms(r % 4);
        OK(clGetEventInfo(old, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof st, &st, NULL));
        OK(clWaitForEvents(1, &mapped));
        T(p[0] == r && p[N - 1] == r);
        OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, NULL));
        OK(clFinish(Q));
        OK(clReleaseEvent(old));
        OK(clReleaseEvent(mapped));
    }
    OK(clReleaseMemObject(a));
    OK(clReleaseMemObject(b));
    free(host);
}

struct told { cl_int *x, want; atomic_int *right, *all; };

static void CL_CALLBACK told(cl_event e, cl_int st, void *data) {
    (void)e;
    struct told *t = data;
    atomic_fetch_add(t->right, st == CL_COMPLETE && *t->x == t->want);
    atomic_fetch_add(t->all, 1);
}

CASE(callbacks_see_their_reads) {
    enum { N = 2000 };
    static cl_int x[N];
    static struct told t[N];
    static atomic_int right, all;
    atomic_store(&right, 0);
    atomic_store(&all, 0);
    cl_mem a = buffer(CL_MEM_READ_WRITE, 4, NULL);
    for (int i = 0; i < N; i++) {
        cl_event e;
        t[i] = (struct told){&x[i], i + 1, &right, &all};
        x[i] = 0;
        OK(clEnqueueFillBuffer(Q, a, &t[i].want, 4, 0, 4, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(Q, a, CL_FALSE, 0, 4, &x[i], 0, NULL, &e));
        OK(clSetEventCallback(e, CL_COMPLETE, told, &t[i]));
        OK(clReleaseEvent(e));
        if (i % 8 == 7)
            OK(clFlush(Q));
    }
    OK(clFlush(Q));
    T(wait_until(&all, N, 20000));
    T(atomic_load(&right) == N);
    OK(clReleaseMemObject(a));
}
