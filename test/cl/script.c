/*
 * script: executes a list of OpenCL operations, for the property test that swaps the GPU between them.
 *
 *   script FILE
 *
 * A line is "THREAD OPERATION NUMBER… [> EVENT] [< EVENT…]"; objects are numbered by the script. "threads N" comes first;
 * "barrier" makes all threads meet; "#" begins a comment. "pause N" prints "paused N" and waits until standard input has
 * brought byte N, or has ended. What it prints depends on the script alone if the script is free of races: results of
 * reads and of mapped regions, every live object's content, every live event's status, callbacks and anything unexpected.
 */
#include "clx.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

static const char *source =
    "#ifndef MUL\n#define MUL 1664525u\n#endif\n"
    "struct S { uchar a; ushort b; uint c; uint d[3]; };\n"
    "kernel void lcg(global uint *a, uint k) { size_t i = get_global_id(0); uint x = a[i] ^ k; x = x * MUL + 1013904223u; a[i] = x ^ (x >> 13); }\n"
    "kernel void blend(global uint *a, global const uint *b, uint n, uint shift) { uint i = (uint)get_global_id(0); a[i] += b[(i + shift) % n] * 2654435761u; }\n"
    "kernel void hash(global const uint *a, global uint *h, local uint *l) {\n"
    "  size_t t = get_local_id(0);\n"
    "  if (t < 16) l[t] = 0;\n"
    "  barrier(CLK_LOCAL_MEM_FENCE);\n"
    "  uint x = a[get_global_id(0)];\n"
    "  atomic_add(&l[x & 15], x >> 4);\n"
    "  barrier(CLK_LOCAL_MEM_FENCE);\n"
    "  if (t < 16) atomic_add(&h[t], l[t]);\n"
    "}\n"
    "kernel void record(global uint *a, struct S s, uint4 v, ulong w) { size_t i = get_global_id(0); a[i] = a[i] * 3u + s.a + s.b + s.c + s.d[i % 3] + v.x + v.y * (uint)i + v.z + v.w + (uint)(w >> 32); }\n"
    "kernel void table(global uint *a, constant uint *c) { size_t i = get_global_id(0); a[i] ^= c[i & 15] + (uint)i; }\n"
    "kernel void swapin(global uint *a, global uint *b) { local uint l[16]; size_t t = get_local_id(0), i = get_global_id(0); l[t & 15] = a[i]; barrier(CLK_LOCAL_MEM_FENCE); a[i] = l[15 - (t & 15)] + b[i]; b[i] = b[i] * 5u + 1u; }\n";

static const char *image_source =
    "constant sampler_t S = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP_TO_EDGE | CLK_FILTER_NEAREST;\n"
    "kernel void im2(read_only image2d_t s, write_only image2d_t d, uint k) { int2 c = (int2)(get_global_id(0), get_global_id(1));\n"
    "  uint4 v = read_imageui(s, S, c) + k; write_imageui(d, c, v & 255u); }\n"
    "kernel void im2s(read_only image2d_t s, sampler_t p, global uint *a) { int2 c = (int2)(get_global_id(0), get_global_id(1));\n"
    "  uint4 v = read_imageui(s, p, c + (int2)(1, 1)); a[c.y * 8 + c.x] += v.x + v.y * 3u + v.z * 5u + v.w * 7u; }\n"
    "kernel void im3(read_only image3d_t s, global uint *a) { int4 c = (int4)(get_global_id(0), get_global_id(1), get_global_id(2), 0);\n"
    "  uint4 v = read_imageui(s, S, c); a[(c.z * 4 + c.y) * 4 + c.x] += v.x + v.w; }\n"
    "kernel void ima(read_only image2d_array_t s, global uint *a) { int4 c = (int4)(get_global_id(0), get_global_id(1), get_global_id(2), 0);\n"
    "  uint4 v = read_imageui(s, S, c); a[(c.z * 4 + c.y) * 4 + c.x] ^= v.x + v.y; }\n"
    "kernel void imb(read_only image1d_buffer_t s, global uint *a) { int i = (int)get_global_id(0); a[i] = a[i] * 7u + read_imageui(s, i).x; }\n";

static const char *library = "#include \"ext.h\"\nuint ext(uint x) { return x * EXT + 11u; }\n";
static const char *client = "#include \"ext.h\"\nkernel void callext(global uint *a, uint k) { size_t i = get_global_id(0); a[i] = ext(a[i] ^ k); }\n";
static const char *header = "#define EXT 69069u\nuint ext(uint x);\n";

/* The arguments of each kernel: o an object, u/v/w/r plain values of 4, 16, 8 bytes and a struct, l local memory, s a sampler. */
static const struct { const char *name, *args; } kernels[] = {
    {"lcg", "ou"}, {"blend", "oouu"}, {"hash", "ool"}, {"record", "orvw"}, {"table", "oo"}, {"swapin", "oo"},
    {"im2", "oou"}, {"im2s", "oso"}, {"im3", "oo"}, {"ima", "oo"}, {"imb", "oo"}, {"callext", "ou"},
};

struct rec { cl_uchar a; cl_ushort b; cl_uint c, d[3]; };

enum { N = 1024, MAX_NUM = 40, MAX_WAIT = 64, MAX_THREADS = 8, MAX_PAUSE = 256 };

struct mem {
    cl_mem m;
    int ctx, image; /* image: bytes of an element, 0 for a buffer */
    bool view;      /* an image of a buffer, which shows the content */
    bool lines;     /* a 1D array */
    cl_mem_flags flags;
    size_t size, r[3];
    char *host;
};
struct map { cl_uint *p; size_t size, rows, slices, row, slice; int mem; bool image; };
struct result { uint64_t hash; void *data; size_t size; bool used, device; };
struct event { cl_event e; int queue; bool user; };
struct cb { atomic_int count, status; int event; };

static cl_device_id dev;
static cl_context ctx[8];
static cl_command_queue queue[64];
static cl_ulong queue_props[64];
static int queue_ctx[64];
static struct mem mem[N];
static cl_program prog[N];
static cl_kernel kern[N];
static int kern_type[N];
static cl_sampler samp[N];
static struct event event[8 * N];
static struct map map[N];
static struct result result[4 * N];
static struct cb cb[N];
static pthread_barrier_t meet;
static pthread_mutex_t in_lock = PTHREAD_MUTEX_INITIALIZER, out_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t in_cond = PTHREAD_COND_INITIALIZER;
static bool released[MAX_PAUSE], in_end;

static struct line { int number, thread; char *text; } *lines;
static size_t line_count;

static uint64_t fnv(const void *p, size_t n, uint64_t h) {
    const unsigned char *b = p;
    for (size_t i = 0; i < n; i++)
        h = (h ^ b[i]) * 0x100000001b3ull;
    return h;
}
#define FNV 0xcbf29ce484222325ull

static void pattern(void *p, size_t n, uint32_t seed) {
    unsigned char *b = p;
    for (size_t i = 0; i < n; i++) {
        uint32_t x = (uint32_t)(i + 1) * 2654435761u ^ seed * 40503u;
        b[i] = (unsigned char)(x >> 24 ^ x >> 9);
    }
}

static void *memory(size_t n) {
    void *p = aligned_alloc(4096, (n + 4095) & ~(size_t)4095);
    CLX_CHECK(p, "no memory");
    return p;
}

static void CL_CALLBACK on_event(cl_event e, cl_int status, void *user) {
    (void)e;
    struct cb *c = user;
    c->status = status;
    c->count++;
}

static void *reader(void *u) {
    (void)u;
    unsigned char b;
    while (read(0, &b, 1) == 1) {
        pthread_mutex_lock(&in_lock);
        released[b] = true;
        pthread_cond_broadcast(&in_cond);
        pthread_mutex_unlock(&in_lock);
    }
    pthread_mutex_lock(&in_lock);
    in_end = true;
    pthread_cond_broadcast(&in_cond);
    pthread_mutex_unlock(&in_lock);
    return NULL;
}

/* complain prints what the same script prints again only if it fails in the same way. */
static void complain(const struct line *l, const char *what, long code) {
    pthread_mutex_lock(&out_lock);
    printf("line %d: %s: %s %ld\n", l->number, l->text, what, code);
    fflush(stdout);
    pthread_mutex_unlock(&out_lock);
}

static void set_result(size_t r, void *data, size_t n, bool now) {
    result[r].used = true;
    if (now) {
        result[r].hash = fnv(data, n, FNV);
        free(data);
    } else {
        result[r].data = data;
        result[r].size = n;
    }
}

static cl_int build(cl_program *out, int c, const char *src, const char *options) {
    cl_int e;
    *out = clCreateProgramWithSource(ctx[c], 1, &src, NULL, &e);
    return e ? e : clBuildProgram(*out, 1, &dev, options, NULL, NULL);
}

static cl_int link_program(cl_program *out, int c) {
    cl_int e;
    const char *name = "ext.h";
    cl_program h = clCreateProgramWithSource(ctx[c], 1, &header, NULL, &e), in[2];
    const char *src[2] = {library, client};
    for (int i = 0; i < 2 && !e; i++) {
        in[i] = clCreateProgramWithSource(ctx[c], 1, &src[i], NULL, &e);
        if (!e)
            e = clCompileProgram(in[i], 1, &dev, "", 1, &h, &name, NULL, NULL);
    }
    if (e)
        return e;
    *out = clLinkProgram(ctx[c], 1, &dev, "", 2, in, NULL, NULL, &e);
    clReleaseProgram(h);
    clReleaseProgram(in[0]);
    clReleaseProgram(in[1]);
    return e;
}

static cl_int from_binary(cl_program *out, int c, cl_program p) {
    size_t n = 0;
    cl_int e = clGetProgramInfo(p, CL_PROGRAM_BINARY_SIZES, sizeof n, &n, NULL);
    if (e)
        return e;
    unsigned char *b = memory(n);
    if ((e = clGetProgramInfo(p, CL_PROGRAM_BINARIES, sizeof b, &b, NULL)))
        return e;
    cl_int st;
    *out = clCreateProgramWithBinary(ctx[c], 1, &dev, &n, (const unsigned char **)&b, &st, &e);
    free(b);
    return e ? e : clBuildProgram(*out, 1, &dev, "", NULL, NULL);
}

static cl_int set_args(cl_kernel k, int type, const uint64_t *v) {
    cl_int e = CL_SUCCESS;
    const char *t = kernels[type].args;
    for (cl_uint i = 0; t[i] && !e; i++) {
        cl_uint u = (cl_uint)v[i], u4[4] = {u, u * 3, u ^ 0x55, 7};
        cl_ulong w = v[i] << 29 | v[i];
        struct rec r = {.a = (cl_uchar)u, .b = (cl_ushort)(u * 7), .c = u * 31, .d = {u, u + 1, u + 2}};
        switch (t[i]) {
        case 'o': e = clSetKernelArg(k, i, sizeof(cl_mem), &mem[v[i]].m); break;
        case 's': e = clSetKernelArg(k, i, sizeof(cl_sampler), &samp[v[i]]); break;
        case 'l': e = clSetKernelArg(k, i, 64, NULL); break;
        case 'u': e = clSetKernelArg(k, i, 4, &u); break;
        case 'v': e = clSetKernelArg(k, i, 16, u4); break;
        case 'w': e = clSetKernelArg(k, i, 8, &w); break;
        case 'r': e = clSetKernelArg(k, i, sizeof r, &r); break;
        }
    }
    return e;
}

static uint64_t info(void) {
    static const cl_device_info what[] = {CL_DEVICE_NAME, CL_DEVICE_VENDOR, CL_DEVICE_VERSION, CL_DEVICE_EXTENSIONS, CL_DEVICE_GLOBAL_MEM_SIZE,
        CL_DEVICE_MAX_WORK_GROUP_SIZE, CL_DEVICE_MAX_MEM_ALLOC_SIZE, CL_DEVICE_LOCAL_MEM_SIZE, CL_DEVICE_IMAGE3D_MAX_DEPTH, CL_DEVICE_MAX_COMPUTE_UNITS,
        CL_DEVICE_IMAGE_MAX_BUFFER_SIZE, CL_DEVICE_MEM_BASE_ADDR_ALIGN, CL_DRIVER_VERSION, CL_DEVICE_TYPE};
    uint64_t h = FNV;
    static const size_t room = 65536;
    char *b = malloc(room);
    for (size_t i = 0; i < sizeof what / sizeof *what; i++) {
        size_t n = 0;
        if (clGetDeviceInfo(dev, what[i], room, b, &n) == CL_SUCCESS)
            h = fnv(b, n, h);
    }
    free(b);
    return h;
}

/* each visits the rows of a mapped region. */
#define EACH_ROW(m, row)                                                                                               \
    for (size_t z_ = 0; z_ < (m)->slices; z_++)                                                                        \
        for (size_t y_ = 0; y_ < (m)->rows; y_++)                                                                      \
            for (char *row = (char *)(m)->p + z_ * (m)->slice + y_ * (m)->row; row; row = NULL)

static void run(struct line *l) {
    char *copy = strdup(l->text), *save, *t = strtok_r(copy, " ", &save);
    char op[32];
    snprintf(op, sizeof op, "%s", t);
    uint64_t a[MAX_NUM] = {0};
    int na = 0, out = -1, nw = 0, waits[MAX_WAIT], into = 0;
    while ((t = strtok_r(NULL, " ", &save))) {
        if (*t == '>')
            into = 1;
        else if (*t == '<')
            into = 2;
        else if (into == 1)
            out = atoi(t);
        else if (into == 2 && nw < MAX_WAIT)
            waits[nw++] = atoi(t);
        else if (into == 0 && na < MAX_NUM)
            a[na++] = strtoull(t, NULL, 0);
    }
    free(copy);
    cl_event w[MAX_WAIT], *wl = nw ? w : NULL, got = NULL, *ev = out >= 0 ? &got : NULL;
    for (int i = 0; i < nw; i++)
        w[i] = event[waits[i]].e;
    cl_uint n = (cl_uint)nw;
    cl_int e = CL_SUCCESS;
    cl_command_queue q = queue[a[0] % 64];
#define IS(name) (!strcmp(op, name))
    if (IS("ctx"))
        ctx[a[0]] = clCreateContext(NULL, 1, &dev, NULL, NULL, &e);
    else if (IS("queue")) {
        cl_queue_properties p[] = {CL_QUEUE_PROPERTIES, a[2], 0};
        queue[a[0]] = clCreateCommandQueueWithProperties(ctx[a[1]], dev, p, &e);
        queue_props[a[0]] = a[2];
        queue_ctx[a[0]] = (int)a[1];
    } else if (IS("buf")) { /* buf B C flags size seed */
        struct mem *m = &mem[a[0]];
        *m = (struct mem){.ctx = (int)a[1], .flags = a[2], .size = a[3]};
        if (a[2] & (CL_MEM_USE_HOST_PTR | CL_MEM_COPY_HOST_PTR))
            pattern(m->host = memory(a[3]), a[3], (uint32_t)a[4]);
        m->m = clCreateBuffer(ctx[a[1]], a[2], a[3], m->host, &e);
        if (a[2] & CL_MEM_COPY_HOST_PTR) {
            memset(m->host, 0xee, a[3]); /* it has been copied */
            free(m->host);
            m->host = NULL;
        }
    } else if (IS("sub")) { /* sub B parent origin size */
        struct mem *p = &mem[a[1]];
        cl_buffer_region r = {a[2], a[3]};
        mem[a[0]] = (struct mem){.ctx = p->ctx, .flags = p->flags, .size = a[3]};
        mem[a[0]].m = clCreateSubBuffer(p->m, 0, CL_BUFFER_CREATE_TYPE_REGION, &r, &e);
    } else if (IS("img")) { /* img I C flags type format w h d seed; format 0 RGBA8UI, 1 R32UI; 2D arrays have d layers, 1D arrays h */
        struct mem *m = &mem[a[0]];
        cl_image_format f = {a[4] ? CL_R : CL_RGBA, a[4] ? CL_UNSIGNED_INT32 : CL_UNSIGNED_INT8};
        cl_image_desc d = {.image_type = (cl_mem_object_type)a[3], .image_width = a[5]};
        if (a[3] == CL_MEM_OBJECT_IMAGE1D_ARRAY)
            d.image_array_size = a[6];
        else if (a[3] != CL_MEM_OBJECT_IMAGE1D)
            d.image_height = a[6];
        if (a[3] == CL_MEM_OBJECT_IMAGE3D)
            d.image_depth = a[7];
        if (a[3] == CL_MEM_OBJECT_IMAGE2D_ARRAY)
            d.image_array_size = a[7];
        *m = (struct mem){.ctx = (int)a[1], .image = 4, .flags = a[2], .size = a[5] * a[6] * a[7] * 4, .r = {a[5], a[6], a[7]}, .lines = a[3] == CL_MEM_OBJECT_IMAGE1D_ARRAY};
        if (a[2] & (CL_MEM_USE_HOST_PTR | CL_MEM_COPY_HOST_PTR))
            pattern(m->host = memory(m->size), m->size, (uint32_t)a[8]);
        m->m = clCreateImage(ctx[a[1]], a[2], &f, &d, m->host, &e);
    } else if (IS("imgb")) { /* imgb I B w */
        struct mem *p = &mem[a[1]];
        cl_image_format f = {CL_R, CL_UNSIGNED_INT32};
        cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE1D_BUFFER, .image_width = a[2], .buffer = p->m};
        mem[a[0]] = (struct mem){.ctx = p->ctx, .image = 4, .view = true, .flags = p->flags, .size = a[2] * 4, .r = {a[2], 1, 1}};
        mem[a[0]].m = clCreateImage(ctx[p->ctx], 0, &f, &d, NULL, &e);
    } else if (IS("fill")) { /* fill Q B off size pattern bytes */
        uint64_t p[16];
        for (size_t i = 0; i < 16; i++)
            p[i] = i ? a[4] + i - 1 : a[4] * 0x9e3779b97f4a7c15ull;
        e = clEnqueueFillBuffer(q, mem[a[1]].m, p, a[5], a[2], a[3], n, wl, ev);
    } else if (IS("copy")) /* copy Q S D so do n */
        e = clEnqueueCopyBuffer(q, mem[a[1]].m, mem[a[2]].m, a[3], a[4], a[5], n, wl, ev);
    else if (IS("crect")) { /* crect Q S D src3 dst3 region3 pitches4 */
        size_t s[3] = {a[3], a[4], a[5]}, d[3] = {a[6], a[7], a[8]}, r[3] = {a[9], a[10], a[11]};
        e = clEnqueueCopyBufferRect(q, mem[a[1]].m, mem[a[2]].m, s, d, r, a[12], a[13], a[14], a[15], n, wl, ev);
    } else if (IS("wr")) { /* wr Q B off size seed block */
        void *p = memory(a[3]);
        pattern(p, a[3], (uint32_t)a[4]);
        e = clEnqueueWriteBuffer(q, mem[a[1]].m, (cl_bool)a[5], a[2], a[3], p, n, wl, ev);
        if (a[5]) {
            memset(p, 0x77, a[3]);
            free(p);
        }
    } else if (IS("rd")) { /* rd Q B off size block R */
        void *p = memory(a[3]);
        memset(p, 0, a[3]);
        e = clEnqueueReadBuffer(q, mem[a[1]].m, (cl_bool)a[4], a[2], a[3], p, n, wl, ev);
        set_result(a[5], p, a[3], a[4]);
    } else if (IS("pass")) { /* pass Q A rows row pitch B off seed: from A to the application's memory, and what is there then to B */
        size_t o[3] = {0}, r[3] = {a[3], a[2], 1}, all = a[2] * a[4];
        void *p = memory(all);
        cl_event here;
        pattern(p, all, (uint32_t)a[7]);
        e = clEnqueueReadBufferRect(q, mem[a[1]].m, CL_FALSE, o, o, r, a[3], 0, a[4], 0, p, n, wl, &here);
        if (!e) {
            e = clEnqueueWriteBuffer(q, mem[a[5]].m, CL_FALSE, a[6], all, p, 1, &here, ev);
            clReleaseEvent(here);
        }
    } else if (IS("bring")) { /* bring Q A off size M: from A to a mapped region, which is unmapped at once */
        cl_event here;
        e = clEnqueueReadBuffer(q, mem[a[1]].m, CL_FALSE, a[2], a[3], map[a[4]].p, n, wl, &here);
        if (!e) {
            e = clEnqueueUnmapMemObject(q, mem[map[a[4]].mem].m, map[a[4]].p, 1, &here, ev);
            clReleaseEvent(here);
        }
    } else if (IS("into") || IS("from")) { /* into/from Q B off M moff rows row pitch block: between a buffer and a part of a mapped region */
        size_t o[3] = {0}, b[3] = {a[2], 0, 0}, r[3] = {a[6], a[5], 1};
        char *p = (char *)map[a[3]].p + a[4];
        cl_mem m = mem[a[1]].m;
        if (a[5] == 1)
            e = IS("into") ? clEnqueueReadBuffer(q, m, (cl_bool)a[8], a[2], a[6], p, n, wl, ev)
                           : clEnqueueWriteBuffer(q, m, (cl_bool)a[8], a[2], a[6], p, n, wl, ev);
        else
            e = IS("into") ? clEnqueueReadBufferRect(q, m, (cl_bool)a[8], b, o, r, a[6], 0, a[7], 0, p, n, wl, ev)
                           : clEnqueueWriteBufferRect(q, m, (cl_bool)a[8], b, o, r, a[6], 0, a[7], 0, p, n, wl, ev);
    } else if (IS("wrr") || IS("rdr")) { /* wrr/rdr Q B origin3 region3 pitches2 block seed/R; the host's side is packed */
        size_t o[3] = {a[2], a[3], a[4]}, h[3] = {0}, r[3] = {a[5], a[6], a[7]}, size = r[0] * r[1] * r[2];
        void *p = memory(size);
        if (IS("wrr")) {
            pattern(p, size, (uint32_t)a[11]);
            e = clEnqueueWriteBufferRect(q, mem[a[1]].m, (cl_bool)a[10], o, h, r, a[8], a[9], 0, 0, p, n, wl, ev);
        } else {
            memset(p, 0, size);
            e = clEnqueueReadBufferRect(q, mem[a[1]].m, (cl_bool)a[10], o, h, r, a[8], a[9], 0, 0, p, n, wl, ev);
            set_result(a[11], p, size, a[10]);
        }
    } else if (IS("imgwr") || IS("imgrd")) { /* imgwr/imgrd Q I origin3 region3 block seed/R */
        size_t o[3] = {a[2], a[3], a[4]}, r[3] = {a[5], a[6], a[7]}, size = r[0] * r[1] * r[2] * 4;
        void *p = memory(size);
        if (IS("imgwr")) {
            pattern(p, size, (uint32_t)a[9]);
            e = clEnqueueWriteImage(q, mem[a[1]].m, (cl_bool)a[8], o, r, 0, 0, p, n, wl, ev);
        } else {
            memset(p, 0, size);
            e = clEnqueueReadImage(q, mem[a[1]].m, (cl_bool)a[8], o, r, 0, 0, p, n, wl, ev);
            set_result(a[9], p, size, a[8]);
        }
    } else if (IS("imgfill")) { /* imgfill Q I origin3 region3 colour */
        size_t o[3] = {a[2], a[3], a[4]}, r[3] = {a[5], a[6], a[7]};
        cl_uint c[4] = {a[8] & 255, a[8] >> 8 & 255, a[8] >> 16 & 255, a[8] >> 24 & 255};
        e = clEnqueueFillImage(q, mem[a[1]].m, c, o, r, n, wl, ev);
    } else if (IS("imgcopy")) { /* imgcopy Q S D src3 dst3 region3 */
        size_t s[3] = {a[3], a[4], a[5]}, d[3] = {a[6], a[7], a[8]}, r[3] = {a[9], a[10], a[11]};
        e = clEnqueueCopyImage(q, mem[a[1]].m, mem[a[2]].m, s, d, r, n, wl, ev);
    } else if (IS("i2b") || IS("b2i")) { /* i2b Q I B origin3 region3 off; b2i likewise */
        size_t o[3] = {a[3], a[4], a[5]}, r[3] = {a[6], a[7], a[8]};
        e = IS("i2b") ? clEnqueueCopyImageToBuffer(q, mem[a[1]].m, mem[a[2]].m, o, r, a[9], n, wl, ev)
                      : clEnqueueCopyBufferToImage(q, mem[a[2]].m, mem[a[1]].m, a[9], o, r, n, wl, ev);
    } else if (IS("map")) { /* map Q B M flags off size block */
        struct map *m = &map[a[2]];
        *m = (struct map){.size = a[5], .rows = 1, .slices = 1, .mem = (int)a[1]};
        m->p = clEnqueueMapBuffer(q, mem[a[1]].m, (cl_bool)a[6], a[3], a[4], a[5], n, wl, ev, &e);
        if (mem[a[1]].host && !e && (char *)m->p != mem[a[1]].host + a[4])
            complain(l, "not the application's memory", 0);
    } else if (IS("imap")) { /* imap Q I M flags origin3 region3 block */
        struct map *m = &map[a[2]];
        size_t o[3] = {a[4], a[5], a[6]}, r[3] = {a[7], a[8], a[9]};
        *m = (struct map){.size = r[0] * 4, .rows = r[1], .slices = r[2], .mem = (int)a[1], .image = true};
        m->p = clEnqueueMapImage(q, mem[a[1]].m, (cl_bool)a[10], a[3], o, r, &m->row, &m->slice, n, wl, ev, &e);
        if (mem[a[1]].lines) /* which are a slice apart */
            m->row = m->slice;
    } else if (IS("mw") && a[4]) { /* mw M seed 0 off n: n bytes of a buffer's region */
        for (size_t i = a[3]; i < a[3] + a[4]; i++)
            ((cl_uchar *)map[a[0]].p)[i] = (cl_uchar)(((cl_uchar *)map[a[0]].p)[i] * 3u + a[1]);
    } else if (IS("mw")) { /* mw M seed invalidated: through the pointer */
        EACH_ROW(&map[a[0]], row)
            for (size_t i = 0; i < map[a[0]].size / 4; i++)
                ((cl_uint *)row)[i] = (a[2] ? (cl_uint)i : ((cl_uint *)row)[i]) * 3u + (cl_uint)a[1];
    } else if (IS("mr")) { /* mr M R */
        uint64_t h = FNV;
        EACH_ROW(&map[a[0]], row) h = fnv(row, map[a[0]].size, h);
        result[a[1]] = (struct result){.hash = h, .used = true};
    } else if (IS("unmap")) /* unmap Q M */
        e = clEnqueueUnmapMemObject(q, mem[map[a[1]].mem].m, map[a[1]].p, n, wl, ev);
    else if (IS("prog")) { /* prog P C kind multiplier */
        char o[64];
        snprintf(o, sizeof o, a[3] ? "-DMUL=%lluu" : "", (unsigned long long)a[3]);
        e = a[2] == 2 ? link_program(&prog[a[0]], (int)a[1]) : build(&prog[a[0]], (int)a[1], a[2] ? image_source : source, o);
    } else if (IS("progbin")) /* progbin P C from */
        e = from_binary(&prog[a[0]], (int)a[1], prog[a[2]]);
    else if (IS("rebuild")) { /* rebuild P multiplier */
        char o[64];
        snprintf(o, sizeof o, "-DMUL=%lluu", (unsigned long long)a[1]);
        e = clBuildProgram(prog[a[0]], 1, &dev, o, NULL, NULL);
    } else if (IS("kern")) { /* kern K P type */
        kern[a[0]] = clCreateKernel(prog[a[1]], kernels[a[2]].name, &e);
        kern_type[a[0]] = (int)a[2];
    } else if (IS("clone")) { /* clone K from */
        kern[a[0]] = clCloneKernel(kern[a[1]], &e);
        kern_type[a[0]] = kern_type[a[1]];
    } else if (IS("samp"))
        samp[a[0]] = clCreateSampler(ctx[a[1]], CL_FALSE, CL_ADDRESS_CLAMP_TO_EDGE, CL_FILTER_NEAREST, &e);
    else if (IS("args")) /* args K values… */
        e = set_args(kern[a[0]], kern_type[a[0]], a + 1);
    else if (IS("run")) { /* run Q K dims global3 local */
        size_t g[3] = {a[3], a[4], a[5]}, lo[3] = {a[6], 1, 1};
        e = clEnqueueNDRangeKernel(q, kern[a[1]], (cl_uint)a[2], NULL, g, a[6] ? lo : NULL, n, wl, ev);
    } else if (IS("user")) { /* user C > E */
        got = clCreateUserEvent(ctx[a[0]], &e);
        event[out].user = true;
    } else if (IS("setuser")) /* setuser E error */
        e = clSetUserEventStatus(event[a[0]].e, a[1] ? -(cl_int)a[1] : CL_COMPLETE);
    else if (IS("marker"))
        e = clEnqueueMarkerWithWaitList(q, n, wl, ev);
    else if (IS("barr"))
        e = clEnqueueBarrierWithWaitList(q, n, wl, ev);
    else if (IS("migr"))
        e = clEnqueueMigrateMemObjects(q, 1, &mem[a[1]].m, a[2], n, wl, ev);
    else if (IS("flush"))
        e = clFlush(q);
    else if (IS("finish"))
        e = clFinish(q);
    else if (IS("wait"))
        e = clWaitForEvents(n, w);
    else if (IS("cb")) { /* cb number type < E */
        cb[a[0]].event = waits[0] + 1;
        e = clSetEventCallback(w[0], (cl_int)a[1], on_event, &cb[a[0]]);
    } else if (IS("info")) /* info R */
        result[a[0]] = (struct result){.hash = info(), .used = true, .device = true};
    else if (IS("relmem")) {
        e = clReleaseMemObject(mem[a[0]].m);
        mem[a[0]].m = NULL;
    } else if (IS("relkern")) {
        e = clReleaseKernel(kern[a[0]]);
        kern[a[0]] = NULL;
    } else if (IS("relprog")) {
        e = clReleaseProgram(prog[a[0]]);
        prog[a[0]] = NULL;
    } else if (IS("relsamp")) {
        e = clReleaseSampler(samp[a[0]]);
        samp[a[0]] = NULL;
    } else if (IS("relqueue")) {
        e = clReleaseCommandQueue(q);
        queue[a[0]] = NULL;
    } else if (IS("relevent")) {
        for (int i = 0; i < nw && !e; i++) {
            e = clReleaseEvent(w[i]);
            event[waits[i]].e = NULL;
        }
    } else if (IS("sleep"))
        usleep((useconds_t)a[0]);
    else if (IS("pause")) {
        pthread_mutex_lock(&out_lock);
        printf("paused %d\n", (int)a[0]);
        fflush(stdout);
        pthread_mutex_unlock(&out_lock);
        pthread_mutex_lock(&in_lock);
        while (!released[a[0] % MAX_PAUSE] && !in_end)
            pthread_cond_wait(&in_cond, &in_lock);
        pthread_mutex_unlock(&in_lock);
    } else {
        fprintf(stderr, "line %d: unknown operation %s\n", l->number, op);
        exit(2);
    }
    if (e)
        complain(l, "OpenCL error", e);
    if (out >= 0) {
        event[out].e = got;
        event[out].queue = event[out].user ? -1 : (int)a[0];
    }
}

static void *work(void *u) {
    int id = (int)(intptr_t)u;
    for (size_t i = 0; i < line_count; i++) {
        if (lines[i].thread < 0)
            pthread_barrier_wait(&meet);
        else if (lines[i].thread == id)
            run(&lines[i]);
    }
    return NULL;
}

/* content reads an object whatever the host may do with it, through a copy. */
static void content(int i) {
    struct mem *m = &mem[i];
    cl_int e;
    cl_command_queue q = clCreateCommandQueue(ctx[m->ctx], dev, 0, &e);
    void *p = memory(m->size);
    memset(p, 0, m->size);
    cl_mem c = clCreateBuffer(ctx[m->ctx], CL_MEM_READ_WRITE, m->size, NULL, &e);
    size_t o[3] = {0};
    if (m->image)
        e = clEnqueueCopyImageToBuffer(q, m->m, c, o, m->r, 0, 0, NULL, NULL);
    else
        e = clEnqueueCopyBuffer(q, m->m, c, 0, 0, m->size, 0, NULL, NULL);
    if (!e)
        e = clEnqueueReadBuffer(q, c, CL_TRUE, 0, m->size, p, 0, NULL, NULL);
    printf("memory %d: %016llx error %d\n", i, (unsigned long long)fnv(p, m->size, FNV), e);
    clReleaseMemObject(c);
    clReleaseCommandQueue(q);
    free(p);
}

static void profile(int i, cl_ulong *last) {
    static const cl_profiling_info what[] = {CL_PROFILING_COMMAND_QUEUED, CL_PROFILING_COMMAND_SUBMIT, CL_PROFILING_COMMAND_START, CL_PROFILING_COMMAND_END};
    cl_ulong t[4];
    for (int j = 0; j < 4; j++) {
        cl_int e = clGetEventProfilingInfo(event[i].e, what[j], sizeof t[j], &t[j], NULL);
        if (e) {
            printf("event %d: profiling error %d\n", i, e);
            return;
        }
        if (j && t[j] < t[j - 1])
            printf("event %d: profiling time %d goes back\n", i, j);
    }
    if (!(queue_props[event[i].queue] & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE) && t[2] < *last)
        printf("event %d: starts before its predecessor\n", i);
    *last = t[2];
}

static void report(void) {
    for (int i = 0; i < 64; i++)
        if (queue[i])
            clFlush(queue[i]);
    for (int i = 0; i < 64; i++) {
        cl_int e = queue[i] ? clFinish(queue[i]) : CL_SUCCESS;
        if (e)
            printf("queue %d: finish gives %d\n", i, e);
    }
    for (int i = 0; i < 8 * N; i++)
        while (event[i].e) { /* those of released queues too */
            cl_int st = 0, e = clGetEventInfo(event[i].e, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof st, &st, NULL);
            if (!e && st > 0) {
                clWaitForEvents(1, &event[i].e);
                continue;
            }
            printf("event %d: %d error %d\n", i, st, e);
            break;
        }
    for (int t = 0; t < 10000; t++) {
        bool all = true;
        for (int i = 0; i < N; i++)
            all = all && (!cb[i].event || cb[i].count > 0);
        if (all)
            break;
        usleep(1000);
    }
    for (int i = 0; i < N; i++)
        if (cb[i].event)
            printf("callback %d of event %d: %d times, status %d\n", i, cb[i].event - 1, cb[i].count, cb[i].status);
    cl_ulong last[64] = {0};
    for (int i = 0; i < 8 * N; i++)
        if (event[i].e && event[i].queue >= 0 && queue_props[event[i].queue] & CL_QUEUE_PROFILING_ENABLE) {
            cl_int st = 0;
            clGetEventInfo(event[i].e, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof st, &st, NULL);
            if (st == CL_COMPLETE)
                profile(i, &last[event[i].queue]);
        }
    for (int i = 0; i < N; i++)
        if (mem[i].m && !mem[i].view) /* PoCL 3.1 can't copy out of a view */
            content(i);
    for (int i = 0; i < 4 * N; i++)
        if (result[i].used)
            printf("%s %d: %016llx\n", result[i].device ? "device" : "result", i, (unsigned long long)(result[i].data ? fnv(result[i].data, result[i].size, FNV) : result[i].hash));
    puts("done");
    fflush(stdout);
}

int main(int argc, char **argv) {
    CLX_CHECK(argc == 2, "script FILE");
    FILE *f = fopen(argv[1], "r");
    CLX_CHECK(f, "cannot open %s", argv[1]);
    char b[1024];
    int number = 0, threads = 1;
    while (fgets(b, sizeof b, f)) {
        number++;
        b[strcspn(b, "\n")] = 0;
        if (!*b || *b == '#')
            continue;
        if (sscanf(b, "threads %d", &threads) == 1)
            continue;
        lines = realloc(lines, (line_count + 1) * sizeof *lines);
        char *rest = b;
        struct line l = {.number = number, .thread = -1};
        if (strcmp(b, "barrier"))
            l.thread = (int)strtol(b, &rest, 10);
        l.text = strdup(*rest == ' ' ? rest + 1 : rest);
        lines[line_count++] = l;
    }
    fclose(f);
    CLX_CHECK(threads >= 1 && threads <= MAX_THREADS, "%d threads", threads);
    dev = clx_device(0, NULL);
    pthread_barrier_init(&meet, NULL, (unsigned)threads);
    pthread_t in, t[MAX_THREADS];
    CLX_CHECK(!pthread_create(&in, NULL, reader, NULL), "no thread");
    for (int i = 0; i < threads; i++)
        CLX_CHECK(!pthread_create(&t[i], NULL, work, (void *)(intptr_t)i), "no thread");
    for (int i = 0; i < threads; i++)
        pthread_join(t[i], NULL);
    report();
    return 0;
}
