/* Program and kernel cases. */
#include "conform.h"

static const char *two = "kernel void a_(global int *x) { x[0] = 1; }\n"
                         "kernel void b_(global int *x, const int y, local int *z, constant float4 *c) {\n"
                         "  z[get_local_id(0)] = y; barrier(CLK_LOCAL_MEM_FENCE); x[get_global_id(0)] = z[0] + (int)c[0].x; }\n";

static void CL_CALLBACK on_built(cl_program p, void *u) {
    (void)p;
    atomic_fetch_add((atomic_int *)u, 1);
}

CASE(program_source) {
    const char *parts[3] = {"kernel void f(global int *a) {", " a[0] = 42xxx", "; }"};
    size_t len[3] = {0, 9 + 1, 0};
    cl_program p;
    len[1] = strlen(" a[0] = 42");
    MK(p, clCreateProgramWithSource(C, 3, parts, len, &E));
    char src[256];
    size_t sz;
    OK(clGetProgramInfo(p, CL_PROGRAM_SOURCE, sizeof src, src, &sz));
    T(!strcmp(src, "kernel void f(global int *a) { a[0] = 42; }") && sz == strlen(src) + 1);
    cl_build_status st = 9;
    OK(clGetProgramBuildInfo(p, D, CL_PROGRAM_BUILD_STATUS, sizeof st, &st, NULL));
    T(st == CL_BUILD_NONE);
    ERRP(clCreateKernel(p, "f", &E), CL_INVALID_PROGRAM_EXECUTABLE);
    static atomic_int n;
    n = 0;
    OK(clBuildProgram(p, 0, NULL, "-DX=1", on_built, &n));
    T(wait_until(&n, 1, 20000));
    OK(clGetProgramBuildInfo(p, D, CL_PROGRAM_BUILD_STATUS, sizeof st, &st, NULL));
    T(st == CL_BUILD_SUCCESS);
    char opt[64];
    OK(clGetProgramBuildInfo(p, D, CL_PROGRAM_BUILD_OPTIONS, sizeof opt, opt, NULL));
    T(!strcmp(opt, "-DX=1"));
    cl_program_binary_type bt;
    OK(clGetProgramBuildInfo(p, D, CL_PROGRAM_BINARY_TYPE, sizeof bt, &bt, NULL));
    T(bt == CL_PROGRAM_BINARY_TYPE_EXECUTABLE);
    if (V >= 200) {
        size_t g = 1;
        OK(clGetProgramBuildInfo(p, D, CL_PROGRAM_BUILD_GLOBAL_VARIABLE_TOTAL_SIZE, sizeof g, &g, NULL));
    }
    ERR(clGetProgramBuildInfo(p, D, 0x7777, sizeof st, &st, NULL), CL_INVALID_VALUE);
    ERR(clGetProgramBuildInfo(p, BAD, CL_PROGRAM_BUILD_STATUS, sizeof st, &st, NULL), CL_INVALID_DEVICE);
    OK(clReleaseProgram(p));
    ERRP(clCreateProgramWithSource(C, 0, parts, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateProgramWithSource(C, 1, NULL, NULL, &E), CL_INVALID_VALUE);
    const char *nul[1] = {NULL};
    ERRP(clCreateProgramWithSource(C, 1, nul, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateProgramWithSource(BAD, 1, parts, NULL, &E), CL_INVALID_CONTEXT);
}

CASE(program_info) {
    cl_program p = build(two);
    cl_uint n;
    cl_context c;
    cl_device_id d;
    size_t k, sz;
    char names[64];
    OK(clGetProgramInfo(p, CL_PROGRAM_NUM_DEVICES, sizeof n, &n, NULL));
    OK(clGetProgramInfo(p, CL_PROGRAM_CONTEXT, sizeof c, &c, NULL));
    OK(clGetProgramInfo(p, CL_PROGRAM_DEVICES, sizeof d, &d, NULL));
    T(n == 1 && c == C && d == D);
    OK(clGetProgramInfo(p, CL_PROGRAM_NUM_KERNELS, sizeof k, &k, NULL));
    OK(clGetProgramInfo(p, CL_PROGRAM_KERNEL_NAMES, sizeof names, names, &sz));
    T(k == 2 && sz == strlen(names) + 1);
    T(!strcmp(names, "a_;b_") || !strcmp(names, "b_;a_"));
    ERR(clGetProgramInfo(p, CL_PROGRAM_KERNEL_NAMES, 2, names, NULL), CL_INVALID_VALUE);
    ERR(clGetProgramInfo(p, 0x7777, sizeof n, &n, NULL), CL_INVALID_VALUE);
    OK(clRetainProgram(p));
    OK(clGetProgramInfo(p, CL_PROGRAM_REFERENCE_COUNT, sizeof n, &n, NULL));
    T(n == 2);
    OK(clReleaseProgram(p));
    cl_kernel ks[4];
    OK(clCreateKernelsInProgram(p, 0, NULL, &n));
    T(n == 2);
    OK(clCreateKernelsInProgram(p, 4, ks, &n));
    ERR(clCreateKernelsInProgram(p, 1, ks + 2, NULL), CL_INVALID_VALUE);
    /* A program with kernels can't be built again. */
    ERR(clBuildProgram(p, 0, NULL, "", NULL, NULL), CL_INVALID_OPERATION);
    OK(clReleaseKernel(ks[0]));
    OK(clReleaseKernel(ks[1]));
    OK(clReleaseProgram(p));
    cl_program q;
    MK(q, clCreateProgramWithSource(C, 1, &two, NULL, &E));
    ERR(clGetProgramInfo(q, CL_PROGRAM_NUM_KERNELS, sizeof k, &k, NULL), CL_INVALID_PROGRAM_EXECUTABLE);
    OK(clReleaseProgram(q));
    ERR(clReleaseProgram(BAD), CL_INVALID_PROGRAM);
    ERR(clBuildProgram(BAD, 0, NULL, "", NULL, NULL), CL_INVALID_PROGRAM);
}

CASE(build_errors) {
    const char *bad = "kernel void f(global int *a) { a[0] = undeclared_thing; }";
    cl_program p;
    MK(p, clCreateProgramWithSource(C, 1, &bad, NULL, &E));
    ERR(clBuildProgram(p, 1, &D, "", NULL, NULL), CL_BUILD_PROGRAM_FAILURE);
    static char log[65536];
    size_t sz = 0;
    OK(clGetProgramBuildInfo(p, D, CL_PROGRAM_BUILD_LOG, sizeof log, log, &sz));
    T(sz > 1 && strstr(log, "undeclared_thing"));
    cl_build_status st;
    OK(clGetProgramBuildInfo(p, D, CL_PROGRAM_BUILD_STATUS, sizeof st, &st, NULL));
    T(st == CL_BUILD_ERROR);
    ERRP(clCreateKernel(p, "f", &E), CL_INVALID_PROGRAM_EXECUTABLE);
    static atomic_int n;
    n = 0;
    clBuildProgram(p, 1, &D, "", on_built, &n);
    T(wait_until(&n, 1, 20000));
    ERR(clBuildProgram(p, 1, &D, "-no-such-option", NULL, NULL), CL_INVALID_BUILD_OPTIONS);
    ERR(clBuildProgram(p, 0, &D, "", NULL, NULL), CL_INVALID_VALUE);
    ERR(clBuildProgram(p, 1, NULL, "", NULL, NULL), CL_INVALID_VALUE);
    ERR(clBuildProgram(p, 1, &D, "", NULL, &n), CL_INVALID_VALUE);
    OK(clReleaseProgram(p));
    /* The same program object may be built again with options that cure it. */
    const char *cond = "#ifndef OKAY\n#error not okay\n#endif\nkernel void f(global int *a) { a[0] = OKAY; }";
    MK(p, clCreateProgramWithSource(C, 1, &cond, NULL, &E));
    ERR(clBuildProgram(p, 1, &D, "", NULL, NULL), CL_BUILD_PROGRAM_FAILURE);
    OK(clBuildProgram(p, 1, &D, "-D OKAY=31", NULL, NULL));
    cl_kernel k;
    MK(k, clCreateKernel(p, "f", &E));
    cl_mem b = buffer(0, 4, NULL);
    int v = 0;
    arg_mem(k, 0, b);
    run1(k, 1);
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 31);
    OK(clReleaseKernel(k));
    OK(clReleaseProgram(p));
    OK(clReleaseMemObject(b));
}

CASE(build_options) {
    static const char *src = "kernel void f(global int *a) { a[0] = A + B; a[1] = S; }";
    cl_program p = build_opt(src, "-DA=3 -D B=4 -DS=3 -cl-mad-enable -cl-std=CL1.2 -w");
    cl_kernel k;
    MK(k, clCreateKernel(p, "f", &E));
    cl_mem b = buffer(0, 8, NULL);
    int v[2] = {0};
    arg_mem(k, 0, b);
    run1(k, 1);
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 8, v, 0, NULL, NULL));
    T(v[0] == 7);
    T(v[1] == 3);
    OK(clReleaseKernel(k));
    OK(clReleaseProgram(p));
    OK(clReleaseMemObject(b));
}

CASE(program_binary) {
    cl_program p = build_opt("#ifndef K\n#define K 1\n#endif\nkernel void f(global int *a, int b) { a[get_global_id(0)] = b * K; }", "-DK=5");
    size_t n = 0;
    OK(clGetProgramInfo(p, CL_PROGRAM_BINARY_SIZES, sizeof n, &n, NULL));
    NEED(n > 0);
    unsigned char *bin = malloc(n), *none = NULL;
    OK(clGetProgramInfo(p, CL_PROGRAM_BINARIES, sizeof bin, &bin, NULL));
    if (!tskip("a NULL entry among the binaries"))
        OK(clGetProgramInfo(p, CL_PROGRAM_BINARIES, sizeof none, &none, NULL));
    OK(clReleaseProgram(p));
    cl_int st = 1;
    const unsigned char *cb = bin;
    cl_program q;
    MK(q, clCreateProgramWithBinary(C, 1, &D, &n, &cb, &st, &E));
    T(st == CL_SUCCESS);
    ERR(clCompileProgram(q, 1, &D, "", 0, NULL, NULL, NULL, NULL), CL_INVALID_OPERATION);
    OK(clBuildProgram(q, 1, &D, "", NULL, NULL));
    cl_kernel k;
    MK(k, clCreateKernel(q, "f", &E));
    cl_mem b = buffer(0, 16, NULL);
    int v[4] = {0};
    arg_mem(k, 0, b);
    arg_int(k, 1, 8);
    run1(k, 4);
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 16, v, 0, NULL, NULL));
    T(v[0] == 40 && v[3] == 40);
    char names[32];
    OK(clGetProgramInfo(q, CL_PROGRAM_KERNEL_NAMES, sizeof names, names, NULL));
    T(!strcmp(names, "f"));
    /* A binary of a program made from a binary. */
    size_t m = 0;
    OK(clGetProgramInfo(q, CL_PROGRAM_BINARY_SIZES, sizeof m, &m, NULL));
    T(m > 0);
    OK(clReleaseKernel(k));
    OK(clReleaseProgram(q));
    /* Damaged and empty ones. */
    unsigned char junk[64];
    fill_bytes(junk, sizeof junk, 1);
    size_t jn = sizeof junk, zero = 0;
    const unsigned char *jp = junk, *np = NULL;
    st = 0;
    ERRP(clCreateProgramWithBinary(C, 1, &D, &jn, &jp, &st, &E), CL_INVALID_BINARY);
    T(st == CL_INVALID_BINARY);
    st = 0;
    ERRP(clCreateProgramWithBinary(C, 1, &D, &zero, &jp, &st, &E), CL_INVALID_VALUE);
    T(st == CL_INVALID_VALUE);
    ERRP(clCreateProgramWithBinary(C, 1, &D, &jn, &np, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateProgramWithBinary(C, 0, &D, &jn, &jp, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateProgramWithBinary(C, 1, &D, NULL, &jp, NULL, &E), CL_INVALID_VALUE);
    OK(clReleaseMemObject(b));
    free(bin);
}

CASE(compile_link) {
    const char *hdr = "int twice(int x);\n#define ADD 100\n", *lib = "int twice(int x) { return x * 2; }",
               *mainsrc = "#include \"inc/my.h\"\nkernel void f(global int *a) { a[0] = twice(a[0]) + ADD; }";
    cl_program h, l, m;
    MK(h, clCreateProgramWithSource(C, 1, &hdr, NULL, &E));
    MK(l, clCreateProgramWithSource(C, 1, &lib, NULL, &E));
    MK(m, clCreateProgramWithSource(C, 1, &mainsrc, NULL, &E));
    const char *name = "inc/my.h";
    ERR(clCompileProgram(m, 1, &D, "", 0, NULL, NULL, NULL, NULL), CL_COMPILE_PROGRAM_FAILURE);
    ERR(clCompileProgram(m, 1, &D, "", 1, NULL, &name, NULL, NULL), CL_INVALID_VALUE);
    ERR(clCompileProgram(m, 1, &D, "", 0, &h, &name, NULL, NULL), CL_INVALID_VALUE);
    OK(clCompileProgram(m, 1, &D, "", 1, &h, &name, NULL, NULL));
    static atomic_int n;
    n = 0;
    OK(clCompileProgram(l, 0, NULL, "", 0, NULL, NULL, on_built, &n));
    T(wait_until(&n, 1, 20000));
    cl_program_binary_type bt;
    OK(clGetProgramBuildInfo(m, D, CL_PROGRAM_BINARY_TYPE, sizeof bt, &bt, NULL));
    T(bt == CL_PROGRAM_BINARY_TYPE_COMPILED_OBJECT);
    ERRP(clCreateKernel(m, "f", &E), CL_INVALID_PROGRAM_EXECUTABLE);
    cl_program in[2] = {m, l}, x;
    MK(x, clLinkProgram(C, 1, &D, "", 2, in, NULL, NULL, &E));
    OK(clGetProgramBuildInfo(x, D, CL_PROGRAM_BINARY_TYPE, sizeof bt, &bt, NULL));
    T(bt == CL_PROGRAM_BINARY_TYPE_EXECUTABLE);
    OK(clReleaseProgram(h));
    cl_kernel k;
    MK(k, clCreateKernel(x, "f", &E));
    int v = 21;
    cl_mem b = buffer(CL_MEM_COPY_HOST_PTR, 4, &v);
    arg_mem(k, 0, b);
    run1(k, 1);
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 142);
    OK(clReleaseKernel(k));
    OK(clReleaseProgram(x));
    /* A library, linked in a second step. */
    MK(x, clLinkProgram(C, 1, &D, "-create-library", 1, &l, NULL, NULL, &E));
    OK(clGetProgramBuildInfo(x, D, CL_PROGRAM_BINARY_TYPE, sizeof bt, &bt, NULL));
    T(bt == CL_PROGRAM_BINARY_TYPE_LIBRARY);
    cl_program in2[2] = {m, x}, y;
    MK(y, clLinkProgram(C, 0, NULL, "", 2, in2, NULL, NULL, &E));
    MK(k, clCreateKernel(y, "f", &E));
    arg_mem(k, 0, b);
    run1(k, 1);
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 384);
    OK(clReleaseKernel(k));
    OK(clReleaseProgram(y));
    OK(clReleaseProgram(x));
    /* Errors of the linker. */
    ERRP(clLinkProgram(C, 1, &D, "", 0, NULL, NULL, NULL, &E), CL_INVALID_VALUE);
    cl_program never;
    MK(never, clCreateProgramWithSource(C, 1, &lib, NULL, &E));
    ERRP(clLinkProgram(C, 1, &D, "", 1, &never, NULL, NULL, &E), CL_INVALID_OPERATION);
    OK(clReleaseProgram(never));
    E = 0;
    x = clLinkProgram(C, 1, &D, "", 1, &m, NULL, NULL, &E);
    T(E == CL_LINK_PROGRAM_FAILURE);
    if (x)
        OK(clReleaseProgram(x));
    OK(clReleaseProgram(l));
    OK(clReleaseProgram(m));
    OK(clReleaseMemObject(b));
}

CASE(compiled_binary) {
    /* A compiled object travels as a binary too, and is linked afterwards. */
    const char *src = "kernel void f(global int *a) { a[0] = 77; }";
    cl_program p, q, x;
    MK(p, clCreateProgramWithSource(C, 1, &src, NULL, &E));
    OK(clCompileProgram(p, 1, &D, "", 0, NULL, NULL, NULL, NULL));
    size_t n;
    OK(clGetProgramInfo(p, CL_PROGRAM_BINARY_SIZES, sizeof n, &n, NULL));
    NEED(n > 0);
    unsigned char *bin = malloc(n);
    OK(clGetProgramInfo(p, CL_PROGRAM_BINARIES, sizeof bin, &bin, NULL));
    OK(clReleaseProgram(p));
    const unsigned char *cb = bin;
    MK(q, clCreateProgramWithBinary(C, 1, &D, &n, &cb, NULL, &E));
    cl_program_binary_type bt;
    OK(clGetProgramBuildInfo(q, D, CL_PROGRAM_BINARY_TYPE, sizeof bt, &bt, NULL));
    T(bt == CL_PROGRAM_BINARY_TYPE_COMPILED_OBJECT);
    MK(x, clLinkProgram(C, 1, &D, "", 1, &q, NULL, NULL, &E));
    cl_kernel k;
    MK(k, clCreateKernel(x, "f", &E));
    cl_mem b = buffer(0, 4, NULL);
    int v = 0;
    arg_mem(k, 0, b);
    run1(k, 1);
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 77);
    OK(clReleaseKernel(k));
    OK(clReleaseProgram(q));
    OK(clReleaseProgram(x));
    OK(clReleaseMemObject(b));
    free(bin);
}

CASE(kernel_info) {
    cl_program p = build_opt(two, "-cl-kernel-arg-info");
    cl_kernel k;
    MK(k, clCreateKernel(p, "b_", &E));
    char name[32];
    cl_uint n, rc;
    cl_context c;
    cl_program pp;
    OK(clGetKernelInfo(k, CL_KERNEL_FUNCTION_NAME, sizeof name, name, NULL));
    OK(clGetKernelInfo(k, CL_KERNEL_NUM_ARGS, sizeof n, &n, NULL));
    OK(clGetKernelInfo(k, CL_KERNEL_CONTEXT, sizeof c, &c, NULL));
    OK(clGetKernelInfo(k, CL_KERNEL_PROGRAM, sizeof pp, &pp, NULL));
    OK(clGetKernelInfo(k, CL_KERNEL_REFERENCE_COUNT, sizeof rc, &rc, NULL));
    OK(clGetKernelInfo(k, CL_KERNEL_ATTRIBUTES, 0, NULL, &(size_t){0}));
    T(!strcmp(name, "b_") && n == 4 && c == C && pp == p && rc == 1);
    ERR(clGetKernelInfo(k, 0x7777, sizeof n, &n, NULL), CL_INVALID_VALUE);
    static const struct {
        const char *type, *name;
        cl_kernel_arg_address_qualifier addr;
        cl_kernel_arg_type_qualifier tq;
    } want[4] = {{"int*", "x", CL_KERNEL_ARG_ADDRESS_GLOBAL, 0},
                 {"int", "y", CL_KERNEL_ARG_ADDRESS_PRIVATE, 0},
                 {"int*", "z", CL_KERNEL_ARG_ADDRESS_LOCAL, 0},
                 {"float4*", "c", CL_KERNEL_ARG_ADDRESS_CONSTANT, CL_KERNEL_ARG_TYPE_CONST}};
    for (cl_uint i = 0; i < 4; i++) {
        char t[32], nm[32];
        cl_kernel_arg_address_qualifier a;
        cl_kernel_arg_access_qualifier ac;
        cl_kernel_arg_type_qualifier tq;
        OK(clGetKernelArgInfo(k, i, CL_KERNEL_ARG_TYPE_NAME, sizeof t, t, NULL));
        OK(clGetKernelArgInfo(k, i, CL_KERNEL_ARG_NAME, sizeof nm, nm, NULL));
        OK(clGetKernelArgInfo(k, i, CL_KERNEL_ARG_ADDRESS_QUALIFIER, sizeof a, &a, NULL));
        OK(clGetKernelArgInfo(k, i, CL_KERNEL_ARG_ACCESS_QUALIFIER, sizeof ac, &ac, NULL));
        OK(clGetKernelArgInfo(k, i, CL_KERNEL_ARG_TYPE_QUALIFIER, sizeof tq, &tq, NULL));
        if (strcmp(t, want[i].type) || strcmp(nm, want[i].name) || a != want[i].addr || tq != want[i].tq || ac != CL_KERNEL_ARG_ACCESS_NONE)
            tfail(__FILE__, __LINE__, "argument %u is %s %s, address 0x%x, access 0x%x, qualifiers 0x%x", i, t, nm, a, ac, (unsigned)tq);
    }
    char t[8];
    ERR(clGetKernelArgInfo(k, 4, CL_KERNEL_ARG_NAME, sizeof t, t, NULL), CL_INVALID_ARG_INDEX);
    ERR(clGetKernelArgInfo(k, 0, 0x7777, sizeof t, t, NULL), CL_INVALID_VALUE);
    ERRP(clCreateKernel(p, "nope", &E), CL_INVALID_KERNEL_NAME);
    ERRP(clCreateKernel(p, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateKernel(BAD, "b_", &E), CL_INVALID_PROGRAM);
    /* The kernel keeps its program. */
    OK(clReleaseProgram(p));
    OK(clGetKernelInfo(k, CL_KERNEL_PROGRAM, sizeof pp, &pp, NULL));
    T(pp == p);
    OK(clReleaseKernel(k));
}

CASE(kernel_work_group_info) {
    cl_program p = build("kernel __attribute__((reqd_work_group_size(8, 2, 1))) void r(global int *a) { local int l[64]; l[get_local_id(0)] = a[get_global_id(0)]; "
                         "barrier(CLK_LOCAL_MEM_FENCE); a[get_global_id(0)] = l[a[0] & 63]; }\nkernel void f(global int *a) { a[0] = 1; }");
    cl_kernel r, f;
    MK(r, clCreateKernel(p, "r", &E));
    MK(f, clCreateKernel(p, "f", &E));
    size_t wg, c[3], mult, sz;
    cl_ulong lm, pm;
    OK(clGetKernelWorkGroupInfo(f, D, CL_KERNEL_WORK_GROUP_SIZE, sizeof wg, &wg, &sz));
    T(wg >= 1 && wg <= dev_size(CL_DEVICE_MAX_WORK_GROUP_SIZE) && sz == sizeof wg);
    OK(clGetKernelWorkGroupInfo(f, NULL, CL_KERNEL_WORK_GROUP_SIZE, sizeof wg, &wg, NULL));
    OK(clGetKernelWorkGroupInfo(r, D, CL_KERNEL_COMPILE_WORK_GROUP_SIZE, sizeof c, c, NULL));
    T(c[0] == 8 && c[1] == 2 && c[2] == 1);
    OK(clGetKernelWorkGroupInfo(f, D, CL_KERNEL_COMPILE_WORK_GROUP_SIZE, sizeof c, c, NULL));
    T(c[0] == 0 && c[1] == 0 && c[2] == 0);
    OK(clGetKernelWorkGroupInfo(r, D, CL_KERNEL_LOCAL_MEM_SIZE, sizeof lm, &lm, NULL));
    T(lm >= 256);
    OK(clGetKernelWorkGroupInfo(f, D, CL_KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE, sizeof mult, &mult, NULL));
    OK(clGetKernelWorkGroupInfo(f, D, CL_KERNEL_PRIVATE_MEM_SIZE, sizeof pm, &pm, NULL));
    T(mult >= 1);
    ERR(clGetKernelWorkGroupInfo(f, D, 0x7777, sizeof wg, &wg, NULL), CL_INVALID_VALUE);
    ERR(clGetKernelWorkGroupInfo(f, D, CL_KERNEL_WORK_GROUP_SIZE, 1, &wg, NULL), CL_INVALID_VALUE);
    ERR(clGetKernelWorkGroupInfo(f, D, CL_KERNEL_GLOBAL_WORK_SIZE, sizeof c, c, NULL), CL_INVALID_VALUE);
    ERR(clGetKernelWorkGroupInfo(BAD, D, CL_KERNEL_WORK_GROUP_SIZE, sizeof wg, &wg, NULL), CL_INVALID_KERNEL);
    cl_mem b = buffer(0, 4096, NULL);
    arg_mem(r, 0, b);
    size_t g[2] = {16, 4}, l[2] = {8, 2}, l2[2] = {4, 2};
    OK(clEnqueueNDRangeKernel(Q, r, 2, NULL, g, l, 0, NULL, NULL));
    ERR(clEnqueueNDRangeKernel(Q, r, 2, NULL, g, l2, 0, NULL, NULL), CL_INVALID_WORK_GROUP_SIZE);
    OK(clFinish(Q));
    OK(clReleaseMemObject(b));
    OK(clReleaseKernel(r));
    OK(clReleaseKernel(f));
    OK(clReleaseProgram(p));
}

CASE(kernel_args) {
    cl_program p = build("typedef struct { int a; char b; } S;\nkernel void f(global int *o, int i, float4 v, local int *l, S s, constant int *c) {"
                         " l[get_local_id(0)] = i; o[0] = l[0] + (int)v.z + s.a + s.b + c[1]; }");
    cl_kernel k;
    MK(k, clCreateKernel(p, "f", &E));
    int cv[2] = {5, 1000}, out = 0;
    cl_mem o = buffer(0, 4, NULL), c = buffer(CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, 8, cv);
    float v[4] = {1, 2, 30, 4};
    struct {
        int a;
        char b;
    } s = {200, 7};
    size_t n = 1;
    ERR(clEnqueueNDRangeKernel(Q, k, 1, NULL, &n, NULL, 0, NULL, NULL), CL_INVALID_KERNEL_ARGS);
    int i = 1;
    arg_mem(k, 0, o);
    arg_int(k, 1, i);
    i = 99; /* taken by value */
    OK(clSetKernelArg(k, 2, sizeof v, v));
    OK(clSetKernelArg(k, 3, 64, NULL));
    OK(clSetKernelArg(k, 4, sizeof s, &s));
    ERR(clEnqueueNDRangeKernel(Q, k, 1, NULL, &n, NULL, 0, NULL, NULL), CL_INVALID_KERNEL_ARGS);
    arg_mem(k, 5, c);
    run1(k, 1);
    OK(clEnqueueReadBuffer(Q, o, CL_TRUE, 0, 4, &out, 0, NULL, NULL));
    T(out == 1 + 30 + 200 + 7 + 1000);
    ERR(clSetKernelArg(k, 6, 4, &i), CL_INVALID_ARG_INDEX);
    ERR(clSetKernelArg(k, 1, 8, v), CL_INVALID_ARG_SIZE);
    ERR(clSetKernelArg(k, 1, 2, v), CL_INVALID_ARG_SIZE);
    ERR(clSetKernelArg(k, 1, 4, NULL), CL_INVALID_ARG_VALUE);
    ERR(clSetKernelArg(k, 0, 4, &o), CL_INVALID_ARG_SIZE);
    ERR(clSetKernelArg(k, 3, 0, NULL), CL_INVALID_ARG_SIZE);
    ERR(clSetKernelArg(k, 3, 4, &i), CL_INVALID_ARG_VALUE);
    ERR(clSetKernelArg(BAD, 0, 4, &i), CL_INVALID_KERNEL);
    cl_mem none = NULL;
    OK(clSetKernelArg(k, 5, sizeof none, &none)); /* a NULL buffer is a NULL pointer */
    OK(clReleaseMemObject(o));
    OK(clReleaseMemObject(c));
    OK(clReleaseKernel(k));
    OK(clReleaseProgram(p));
}

CASE(null_buffer_arg) {
    cl_kernel k = kernel1("kernel void f(global int *o, global int *p) { o[0] = p == 0 ? 11 : 22; }", "f");
    cl_mem o = buffer(0, 4, NULL), none = NULL;
    int v = 0;
    arg_mem(k, 0, o);
    OK(clSetKernelArg(k, 1, sizeof none, &none));
    run1(k, 1);
    OK(clEnqueueReadBuffer(Q, o, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 11);
    OK(clSetKernelArg(k, 1, sizeof none, NULL));
    run1(k, 1);
    OK(clReleaseMemObject(o));
    OK(clReleaseKernel(k));
}

CASE(work_groups) {
    cl_kernel k = kernel1("kernel void f(global uint *a) { size_t g = get_global_id(0) - get_global_offset(0) + get_global_size(0) * "
                          "((get_global_id(1) - get_global_offset(1)) + get_global_size(1) * (get_global_id(2) - get_global_offset(2)));\n"
                          "a[g] = (uint)(get_local_size(0) * 1000000 + get_group_id(1) * 10000 + get_local_id(2) * 100 + get_global_id(0)); }",
                          "f");
    enum { X = 8, Y = 6, Z = 4 };
    static cl_uint a[X * Y * Z];
    cl_mem b = buffer(0, sizeof a, NULL);
    arg_mem(k, 0, b);
    size_t g[3] = {X, Y, Z}, l[3] = {4, 3, 2}, o[3] = {10, 20, 30};
    OK(clEnqueueNDRangeKernel(Q, k, 3, o, g, l, 0, NULL, NULL));
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, sizeof a, a, 0, NULL, NULL));
    for (size_t z = 0; z < Z; z++)
        for (size_t y = 0; y < Y; y++)
            for (size_t x = 0; x < X; x++)
                T(a[x + X * (y + Y * z)] == 4 * 1000000 + y / 3 * 10000 + z % 2 * 100 + x + 10);
    size_t max = dev_size(CL_DEVICE_MAX_WORK_GROUP_SIZE), big = max * 2, zero = 0, odd = 10, four = 4, lz = 0;
    ERR(clEnqueueNDRangeKernel(Q, k, 0, NULL, g, NULL, 0, NULL, NULL), CL_INVALID_WORK_DIMENSION);
    ERR(clEnqueueNDRangeKernel(Q, k, 4, NULL, g, NULL, 0, NULL, NULL), CL_INVALID_WORK_DIMENSION);
    ERR2(clEnqueueNDRangeKernel(Q, k, 1, NULL, &big, &big, 0, NULL, NULL), CL_INVALID_WORK_GROUP_SIZE, CL_INVALID_WORK_ITEM_SIZE);
    size_t items[3];
    OK(clGetDeviceInfo(D, CL_DEVICE_MAX_WORK_ITEM_SIZES, sizeof items, items, NULL));
    size_t gi = items[0] * 4, li = items[0] * 2;
    ERR2(clEnqueueNDRangeKernel(Q, k, 1, NULL, &gi, &li, 0, NULL, NULL), CL_INVALID_WORK_ITEM_SIZE, CL_INVALID_WORK_GROUP_SIZE);
    ERR(clEnqueueNDRangeKernel(Q, k, 1, NULL, &four, &lz, 0, NULL, NULL), CL_INVALID_WORK_GROUP_SIZE);
    if (V < 200)
        ERR(clEnqueueNDRangeKernel(Q, k, 1, NULL, &odd, &four, 0, NULL, NULL), CL_INVALID_WORK_GROUP_SIZE);
    if (V < 210)
        ERR(clEnqueueNDRangeKernel(Q, k, 1, NULL, &zero, NULL, 0, NULL, NULL), CL_INVALID_GLOBAL_WORK_SIZE);
    ERR(clEnqueueNDRangeKernel(Q, BAD, 1, NULL, &four, NULL, 0, NULL, NULL), CL_INVALID_KERNEL);
    ERR(clEnqueueNDRangeKernel(BAD, k, 1, NULL, &four, NULL, 0, NULL, NULL), CL_INVALID_COMMAND_QUEUE);
    OK(clFinish(Q));
    OK(clReleaseMemObject(b));
    OK(clReleaseKernel(k));
}

CASE(local_memory_atomics) {
    cl_kernel k = kernel1("kernel void f(global int *h, global const uint *v, local int *l) { size_t i = get_local_id(0);\n"
                          "if (i < 16) l[i] = 0; barrier(CLK_LOCAL_MEM_FENCE); atomic_inc(&l[v[get_global_id(0)] & 15]); barrier(CLK_LOCAL_MEM_FENCE);\n"
                          "if (i < 16) atomic_add(&h[i], l[i]); }",
                          "f");
    enum { N = 4096 };
    static cl_uint v[N];
    int h[16] = {0}, want[16] = {0};
    fill_bytes(v, sizeof v, 12);
    for (int i = 0; i < N; i++)
        want[v[i] & 15]++;
    cl_mem a = buffer(CL_MEM_COPY_HOST_PTR, sizeof h, h), b = buffer(CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, sizeof v, v);
    arg_mem(k, 0, a);
    arg_mem(k, 1, b);
    OK(clSetKernelArg(k, 2, 64, NULL));
    size_t g = N, l = 64;
    OK(clEnqueueNDRangeKernel(Q, k, 1, NULL, &g, &l, 0, NULL, NULL));
    OK(clEnqueueReadBuffer(Q, a, CL_TRUE, 0, sizeof h, h, 0, NULL, NULL));
    T(!memcmp(h, want, sizeof h));
    /* More local memory than there is. */
    OK(clSetKernelArg(k, 2, (size_t)dev_ulong(CL_DEVICE_LOCAL_MEM_SIZE) * 2, NULL));
    if (!tskip("too much local memory"))
        T(clEnqueueNDRangeKernel(Q, k, 1, NULL, &g, &l, 0, NULL, NULL) != CL_SUCCESS);
    OK(clReleaseMemObject(a));
    OK(clReleaseMemObject(b));
    OK(clReleaseKernel(k));
}

CASE(clone_kernel) {
    if (V < 210)
        return tnote("device is OpenCL %d", V);
    cl_kernel k = kernel1("kernel void f(global int *a, int b, local int *l) { l[0] = b; a[0] += l[0]; }", "f"), c;
    int v = 0;
    cl_mem m = buffer(CL_MEM_COPY_HOST_PTR, 4, &v);
    arg_mem(k, 0, m);
    arg_int(k, 1, 10);
    OK(clSetKernelArg(k, 2, 16, NULL));
    MK(c, clCloneKernel(k, &E));
    arg_int(k, 1, 1000); /* the clone has its own arguments */
    run1(c, 1);
    OK(clEnqueueReadBuffer(Q, m, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 10);
    OK(clReleaseKernel(k));
    arg_int(c, 1, 5);
    run1(c, 1);
    OK(clEnqueueReadBuffer(Q, m, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 15);
    char name[8];
    OK(clGetKernelInfo(c, CL_KERNEL_FUNCTION_NAME, sizeof name, name, NULL));
    T(!strcmp(name, "f"));
    OK(clReleaseKernel(c));
    ERRP(clCloneKernel(BAD, &E), CL_INVALID_KERNEL);
    OK(clReleaseMemObject(m));
}

CASE(release_order) {
    /* Everything may be released in any order once it is referenced elsewhere. */
    cl_context c;
    MK(c, clCreateContext(NULL, 1, &D, NULL, NULL, &E));
    cl_command_queue q;
    MK(q, clCreateCommandQueue(c, D, 0, &E));
    const char *src = "kernel void f(global int *a) { a[0] = 9; }";
    cl_program p;
    MK(p, clCreateProgramWithSource(c, 1, &src, NULL, &E));
    OK(clBuildProgram(p, 0, NULL, NULL, NULL, NULL));
    cl_kernel k;
    MK(k, clCreateKernel(p, "f", &E));
    cl_mem m;
    MK(m, clCreateBuffer(c, 0, 4, NULL, &E));
    OK(clReleaseProgram(p));
    OK(clReleaseContext(c));
    arg_mem(k, 0, m);
    size_t n = 1;
    int v = 0;
    OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &n, NULL, 0, NULL, NULL));
    OK(clReleaseKernel(k));
    OK(clEnqueueReadBuffer(q, m, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 9);
    OK(clReleaseMemObject(m));
    OK(clReleaseCommandQueue(q));
}

CASE(invalid_native_and_il) {
    cl_device_exec_capabilities cap;
    OK(clGetDeviceInfo(D, CL_DEVICE_EXECUTION_CAPABILITIES, sizeof cap, &cap, NULL));
    T(cap & CL_EXEC_KERNEL);
    if (!(cap & CL_EXEC_NATIVE_KERNEL)) {
        void(CL_CALLBACK * fn)(void *) = (void (*)(void *))(void *)free;
        ERR(clEnqueueNativeKernel(Q, fn, NULL, 0, 0, NULL, NULL, 0, NULL, NULL), CL_INVALID_OPERATION);
    }
    ERRP(clCreateProgramWithBuiltInKernels(C, 1, &D, "no_such_kernel", &E), CL_INVALID_VALUE);
}

CASE(program_scope_and_types) {
    cl_kernel k = kernel1("constant int tab[4] = {2, 3, 5, 7};\n"
                          "kernel void f(global long *o, uchar a, short b, ulong c, uint2 d, char16 e) {\n"
                          "o[0] = a + b; o[1] = (long)c; o[2] = d.x + d.y; o[3] = e.s0 + e.sf + tab[2]; }",
                          "f");
    cl_long o[4] = {0};
    cl_mem m = buffer(0, sizeof o, NULL);
    cl_uchar a = 250;
    cl_short b = -300;
    cl_ulong c = 1ull << 60;
    cl_uint d[2] = {1u << 30, 7};
    cl_char e[16] = {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 100};
    arg_mem(k, 0, m);
    OK(clSetKernelArg(k, 1, sizeof a, &a));
    OK(clSetKernelArg(k, 2, sizeof b, &b));
    OK(clSetKernelArg(k, 3, sizeof c, &c));
    OK(clSetKernelArg(k, 4, sizeof d, d));
    OK(clSetKernelArg(k, 5, sizeof e, e));
    run1(k, 1);
    OK(clEnqueueReadBuffer(Q, m, CL_TRUE, 0, sizeof o, o, 0, NULL, NULL));
    T(o[0] == -50 && o[1] == 1ll << 60 && o[2] == (1ll << 30) + 7 && o[3] == 106);
    OK(clReleaseMemObject(m));
    OK(clReleaseKernel(k));
}

CASE(many_programs) {
    for (int i = 0; i < 12; i++) {
        char src[128];
        int v = 0;
        snprintf(src, sizeof src, "kernel void f(global int *a) { a[0] = %d; }", i);
        cl_kernel k = kernel1(src, "f");
        cl_mem m = buffer(0, 4, NULL);
        arg_mem(k, 0, m);
        run1(k, 1);
        OK(clEnqueueReadBuffer(Q, m, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
        T(v == i);
        OK(clReleaseMemObject(m));
        OK(clReleaseKernel(k));
    }
}

static cl_build_status build_status(cl_program p, cl_device_id d) {
    cl_build_status st = 99;
    OK(clGetProgramBuildInfo(p, d, CL_PROGRAM_BUILD_STATUS, sizeof st, &st, NULL));
    return st;
}

static cl_program_binary_type binary_type(cl_program p, cl_device_id d) {
    cl_program_binary_type t = 99;
    OK(clGetProgramBuildInfo(p, d, CL_PROGRAM_BINARY_TYPE, sizeof t, &t, NULL));
    return t;
}

CASE(build_options_are_the_applications) {
    /* Arguments are described where the application asks for that, and only there. Both kernels do the same. */
    static const char *src = "kernel void f(global int *a, ulong b, read_only image2d_t i, sampler_t s, local int *l, constant int *c) { a[0] = (int)b; }";
    cl_program without = build_opt(src, ""), with = build_opt(src, "-cl-kernel-arg-info");
    cl_kernel k, w;
    MK(k, clCreateKernel(without, "f", &E));
    MK(w, clCreateKernel(with, "f", &E));
    char name[16], opt[64];
    for (cl_uint i = 0; i < 6; i++)
        ERR(clGetKernelArgInfo(k, i, CL_KERNEL_ARG_NAME, sizeof name, name, NULL), CL_KERNEL_ARG_INFO_NOT_AVAILABLE);
    OK(clGetKernelArgInfo(w, 1, CL_KERNEL_ARG_NAME, sizeof name, name, NULL));
    T(!strcmp(name, "b"));
    OK(clGetProgramBuildInfo(without, D, CL_PROGRAM_BUILD_OPTIONS, sizeof opt, opt, NULL));
    T(!opt[0]);
    /* Types are known all the same. */
    cl_mem m = buffer(0, 4, NULL);
    cl_ulong v = 7;
    arg_mem(k, 0, m);
    OK(clSetKernelArg(k, 1, sizeof v, &v));
    ERR(clSetKernelArg(k, 1, 4, &v), CL_INVALID_ARG_SIZE);
    ERR(clSetKernelArg(k, 4, 4, &v), CL_INVALID_ARG_VALUE);
    OK(clSetKernelArg(k, 4, 16, NULL));
    arg_mem(k, 5, m);
    OK(clReleaseMemObject(m));
    OK(clReleaseKernel(k));
    OK(clReleaseKernel(w));
    OK(clReleaseProgram(without));
    OK(clReleaseProgram(with));
}

CASE(linked_kernel_arguments) {
    const char *src = "kernel void f(global int *a, ulong b) { a[0] = (int)b; }";
    cl_program p, x;
    MK(p, clCreateProgramWithSource(C, 1, &src, NULL, &E));
    OK(clCompileProgram(p, 1, &D, "", 0, NULL, NULL, NULL, NULL));
    MK(x, clLinkProgram(C, 1, &D, "", 1, &p, NULL, NULL, &E));
    cl_kernel k;
    MK(k, clCreateKernel(x, "f", &E));
    cl_mem m = buffer(0, 4, NULL);
    cl_ulong b = 77;
    int v = 0;
    arg_mem(k, 0, m);
    OK(clSetKernelArg(k, 1, sizeof b, &b));
    run1(k, 1);
    OK(clEnqueueReadBuffer(Q, m, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 77);
    OK(clReleaseMemObject(m));
    OK(clReleaseKernel(k));
    OK(clReleaseProgram(x));
    OK(clReleaseProgram(p));
}

CASE(build_counts_for_sub_devices) {
    cl_uint units = dev_uint(CL_DEVICE_MAX_COMPUTE_UNITS);
    cl_device_partition_property how[] = {CL_DEVICE_PARTITION_BY_COUNTS, 1, 1, CL_DEVICE_PARTITION_BY_COUNTS_LIST_END, 0};
    cl_device_id ds[3] = {NULL, NULL, D};
    if (units < 2 || clCreateSubDevices(D, how, 2, ds, NULL))
        return tnote("no sub-devices");
    cl_context c;
    MK(c, clCreateContext(NULL, 3, ds, NULL, NULL, &E));
    const char *src = "kernel void f(global int *a) { a[0] = 5; }";
    for (int from = 0; from < 3; from += 2) {
        cl_program p;
        MK(p, clCreateProgramWithSource(c, 1, &src, NULL, &E));
        for (int i = 0; i < 3; i++)
            T(build_status(p, ds[i]) == CL_BUILD_NONE);
        OK(clBuildProgram(p, 1, &ds[from], "-DX", NULL, NULL));
        for (int i = 0; i < 3; i++) {
            T(build_status(p, ds[i]) == CL_BUILD_SUCCESS);
            T(binary_type(p, ds[i]) == CL_PROGRAM_BINARY_TYPE_EXECUTABLE);
        }
        cl_command_queue q;
        cl_kernel k;
        cl_mem m;
        int v = 0;
        size_t one = 1;
        MK(k, clCreateKernel(p, "f", &E));
        MK(q, clCreateCommandQueue(c, ds[1], 0, &E));
        MK(m, clCreateBuffer(c, 0, 4, NULL, &E));
        arg_mem(k, 0, m);
        OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &one, NULL, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(q, m, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
        T(v == 5);
        OK(clReleaseMemObject(m));
        OK(clReleaseCommandQueue(q));
        OK(clReleaseKernel(k));
        OK(clReleaseProgram(p));
    }
    OK(clReleaseContext(c));
    OK(clReleaseDevice(ds[0]));
    OK(clReleaseDevice(ds[1]));
}

struct linked {
    atomic_int n;
    cl_program p;
};

static void CL_CALLBACK on_linked(cl_program p, void *u) {
    struct linked *l = u;
    l->p = p;
    atomic_fetch_add(&l->n, 1);
}

CASE(link_in_progress) {
    /* Long enough that a query comes while the linker is at work, as a rule. */
    static char src[1 << 16];
    size_t at = 0;
    for (int i = 0; i < 40; i++)
        at += (size_t)snprintf(src + at, sizeof src - at, "kernel void f%d(global float *a) { a[get_global_id(0)] = sin(a[%d]) * cos(a[%d]) + pow(a[0], %d.5f); }\n", i, i, i + 1, i);
    const char *s = src;
    cl_program p, x;
    MK(p, clCreateProgramWithSource(C, 1, &s, NULL, &E));
    OK(clCompileProgram(p, 1, &D, "", 0, NULL, NULL, NULL, NULL));
    static struct linked l;
    l.n = 0;
    MK(x, clLinkProgram(C, 1, &D, "", 1, &p, on_linked, &l, &E));
    cl_build_status st = build_status(x, D);
    T(st == CL_BUILD_IN_PROGRESS || st == CL_BUILD_SUCCESS);
    T(wait_until(&l.n, 1, 20000));
    T(l.p == x && build_status(x, D) == CL_BUILD_SUCCESS);
    OK(clReleaseProgram(x));
    OK(clReleaseProgram(p));
}

CASE(release_while_building) {
    /* The build's callback has the last reference. */
    static const char *src = "kernel void f(global float *a) { a[0] = sin(a[1]) + pow(a[2], a[3]); }";
    for (int i = 0; i < 8; i++) {
        cl_program p;
        static atomic_int n;
        n = 0;
        char opt[32];
        snprintf(opt, sizeof opt, "-DX=%d", i);
        MK(p, clCreateProgramWithSource(C, 1, &src, NULL, &E));
        OK(clRetainProgram(p));
        OK(clBuildProgram(p, 0, NULL, opt, on_built, &n));
        OK(clReleaseProgram(p));
        OK(clReleaseProgram(p));
        T(wait_until(&n, 1, 20000));
    }
}

static void CL_CALLBACK on_program_end(cl_program p, void *u) { (void)p, (void)u; }

CASE(program_release_callback) {
    if (V < 220)
        return tnote("device is OpenCL %d", V);
    cl_program p = build("kernel void f(global int *a) { a[0] = 5; }");
    ERR(clSetProgramReleaseCallback(BAD, on_program_end, NULL), CL_INVALID_PROGRAM);
    cl_bool ctors = CL_TRUE;
    OK(clGetProgramInfo(p, CL_PROGRAM_SCOPE_GLOBAL_CTORS_PRESENT, sizeof ctors, &ctors, NULL));
    if (!ctors)
        ERR(clSetProgramReleaseCallback(p, on_program_end, NULL), CL_INVALID_OPERATION);
    OK(clReleaseProgram(p));
}
