/* Platform, device, context, queue and event cases. */
#include "conform.h"

CASE(platform_info) {
    cl_uint n = 0;
    OK(clGetPlatformIDs(0, NULL, &n));
    T(n >= 1);
    ERR(clGetPlatformIDs(0, NULL, NULL), CL_INVALID_VALUE);
    cl_platform_id p;
    ERR(clGetPlatformIDs(0, &p, NULL), CL_INVALID_VALUE);
    static const cl_platform_info str[] = {CL_PLATFORM_PROFILE, CL_PLATFORM_VERSION, CL_PLATFORM_NAME,
                                           CL_PLATFORM_VENDOR, CL_PLATFORM_EXTENSIONS};
    for (size_t i = 0; i < sizeof str / sizeof *str; i++) {
        size_t sz = 0, sz2 = 0;
        static char buf[16384];
        OK(clGetPlatformInfo(P, str[i], 0, NULL, &sz));
        NEED(sz > 0 && sz < sizeof buf);
        memset(buf, 0x5a, sizeof buf);
        OK(clGetPlatformInfo(P, str[i], sz, buf, &sz2));
        T(sz == sz2 && strlen(buf) + 1 == sz && buf[sz] == 0x5a);
        if (sz > 1)
            ERR(clGetPlatformInfo(P, str[i], sz - 1, buf, NULL), CL_INVALID_VALUE);
    }
    char v[128];
    OK(clGetPlatformInfo(P, CL_PLATFORM_VERSION, sizeof v, v, NULL));
    T(!strncmp(v, "OpenCL ", 7));
    OK(clGetPlatformInfo(P, CL_PLATFORM_PROFILE, sizeof v, v, NULL));
    T(!strcmp(v, "FULL_PROFILE") || !strcmp(v, "EMBEDDED_PROFILE"));
    ERR(clGetPlatformInfo(P, 0x7777, sizeof v, v, NULL), CL_INVALID_VALUE);
    T(clGetExtensionFunctionAddressForPlatform(P, "clNoSuchFunctionKHR") == NULL);
    OK(clUnloadPlatformCompiler(P));
}

CASE(device_ids) {
    cl_uint n = 0, m = 0;
    OK(clGetDeviceIDs(P, CL_DEVICE_TYPE_ALL, 0, NULL, &n));
    T(n >= 1);
    cl_device_id d[64];
    OK(clGetDeviceIDs(P, CL_DEVICE_TYPE_ALL, 64, d, &m));
    T(n == m);
    cl_device_type t;
    OK(clGetDeviceInfo(d[0], CL_DEVICE_TYPE, sizeof t, &t, NULL));
    T(t & (CL_DEVICE_TYPE_CPU | CL_DEVICE_TYPE_GPU | CL_DEVICE_TYPE_ACCELERATOR));
    cl_device_id e[64];
    OK(clGetDeviceIDs(P, t & ~(cl_device_type)CL_DEVICE_TYPE_DEFAULT, 64, e, &m));
    T(m >= 1);
    OK(clGetDeviceIDs(P, CL_DEVICE_TYPE_DEFAULT, 1, e, &m));
    T(m == 1);
    if (!(t & CL_DEVICE_TYPE_CUSTOM))
        ERR(clGetDeviceIDs(P, CL_DEVICE_TYPE_CUSTOM, 64, e, &m), CL_DEVICE_NOT_FOUND);
    ERR(clGetDeviceIDs(P, CL_DEVICE_TYPE_ALL, 0, e, NULL), CL_INVALID_VALUE);
    ERR(clGetDeviceIDs(P, CL_DEVICE_TYPE_ALL, 0, NULL, NULL), CL_INVALID_VALUE);
    ERR(clGetDeviceIDs(P, 0x100000, 1, e, NULL), CL_INVALID_DEVICE_TYPE);
    OK(clRetainDevice(d[0]));
    OK(clReleaseDevice(d[0]));
    T(dev_uint(CL_DEVICE_REFERENCE_COUNT) == 1);
}

CASE(device_info) {
    static const struct {
        cl_device_info p;
        size_t size;
    } f[] = {
        {CL_DEVICE_TYPE, sizeof(cl_device_type)}, {CL_DEVICE_VENDOR_ID, 4}, {CL_DEVICE_MAX_COMPUTE_UNITS, 4},
        {CL_DEVICE_MAX_WORK_ITEM_DIMENSIONS, 4}, {CL_DEVICE_MAX_WORK_GROUP_SIZE, sizeof(size_t)},
        {CL_DEVICE_PREFERRED_VECTOR_WIDTH_CHAR, 4}, {CL_DEVICE_PREFERRED_VECTOR_WIDTH_INT, 4}, {CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT, 4},
        {CL_DEVICE_MAX_CLOCK_FREQUENCY, 4}, {CL_DEVICE_ADDRESS_BITS, 4}, {CL_DEVICE_MAX_MEM_ALLOC_SIZE, 8},
        {CL_DEVICE_IMAGE_SUPPORT, 4}, {CL_DEVICE_MAX_READ_IMAGE_ARGS, 4}, {CL_DEVICE_MAX_WRITE_IMAGE_ARGS, 4},
        {CL_DEVICE_IMAGE2D_MAX_WIDTH, sizeof(size_t)}, {CL_DEVICE_IMAGE2D_MAX_HEIGHT, sizeof(size_t)},
        {CL_DEVICE_IMAGE3D_MAX_WIDTH, sizeof(size_t)}, {CL_DEVICE_IMAGE_MAX_BUFFER_SIZE, sizeof(size_t)},
        {CL_DEVICE_IMAGE_MAX_ARRAY_SIZE, sizeof(size_t)}, {CL_DEVICE_MAX_SAMPLERS, 4}, {CL_DEVICE_MAX_PARAMETER_SIZE, sizeof(size_t)},
        {CL_DEVICE_MEM_BASE_ADDR_ALIGN, 4}, {CL_DEVICE_SINGLE_FP_CONFIG, 8}, {CL_DEVICE_DOUBLE_FP_CONFIG, 8},
        {CL_DEVICE_GLOBAL_MEM_CACHE_TYPE, 4}, {CL_DEVICE_GLOBAL_MEM_CACHELINE_SIZE, 4}, {CL_DEVICE_GLOBAL_MEM_CACHE_SIZE, 8},
        {CL_DEVICE_GLOBAL_MEM_SIZE, 8}, {CL_DEVICE_MAX_CONSTANT_BUFFER_SIZE, 8}, {CL_DEVICE_MAX_CONSTANT_ARGS, 4},
        {CL_DEVICE_LOCAL_MEM_TYPE, 4}, {CL_DEVICE_LOCAL_MEM_SIZE, 8}, {CL_DEVICE_ERROR_CORRECTION_SUPPORT, 4},
        {CL_DEVICE_HOST_UNIFIED_MEMORY, 4}, {CL_DEVICE_PROFILING_TIMER_RESOLUTION, sizeof(size_t)}, {CL_DEVICE_ENDIAN_LITTLE, 4},
        {CL_DEVICE_AVAILABLE, 4}, {CL_DEVICE_COMPILER_AVAILABLE, 4}, {CL_DEVICE_LINKER_AVAILABLE, 4},
        {CL_DEVICE_EXECUTION_CAPABILITIES, 8}, {CL_DEVICE_QUEUE_PROPERTIES, 8}, {CL_DEVICE_PLATFORM, sizeof(void *)},
        {CL_DEVICE_PRINTF_BUFFER_SIZE, sizeof(size_t)}, {CL_DEVICE_PREFERRED_INTEROP_USER_SYNC, 4}, {CL_DEVICE_PARENT_DEVICE, sizeof(void *)},
        {CL_DEVICE_PARTITION_MAX_SUB_DEVICES, 4}, {CL_DEVICE_PARTITION_AFFINITY_DOMAIN, 8}, {CL_DEVICE_REFERENCE_COUNT, 4},
    };
    for (size_t i = 0; i < sizeof f / sizeof *f; i++) {
        char b[64];
        size_t sz = 0;
        cl_int e = clGetDeviceInfo(D, f[i].p, sizeof b, b, &sz);
        if (e != CL_SUCCESS || sz != f[i].size)
            tfail(__FILE__, __LINE__, "device info 0x%x: error %d, size %zu, not %zu", f[i].p, e, sz, f[i].size);
        if (clGetDeviceInfo(D, f[i].p, 1, b, NULL) != CL_INVALID_VALUE)
            tfail(__FILE__, __LINE__, "device info 0x%x with a buffer too small is accepted", f[i].p);
    }
    static const cl_device_info str[] = {CL_DEVICE_NAME, CL_DEVICE_VENDOR, CL_DRIVER_VERSION, CL_DEVICE_PROFILE, CL_DEVICE_VERSION,
                                         CL_DEVICE_OPENCL_C_VERSION, CL_DEVICE_EXTENSIONS, CL_DEVICE_BUILT_IN_KERNELS};
    for (size_t i = 0; i < sizeof str / sizeof *str; i++) {
        static char s[16384];
        size_t sz = 0;
        OK(clGetDeviceInfo(D, str[i], sizeof s, s, &sz));
        T(sz >= 1 && s[sz - 1] == 0);
    }
    cl_platform_id p;
    OK(clGetDeviceInfo(D, CL_DEVICE_PLATFORM, sizeof p, &p, NULL));
    T(p == P);
    size_t items[16] = {0}, sz;
    OK(clGetDeviceInfo(D, CL_DEVICE_MAX_WORK_ITEM_SIZES, sizeof items, items, &sz));
    T(sz == dev_uint(CL_DEVICE_MAX_WORK_ITEM_DIMENSIONS) * sizeof(size_t) && items[0] >= 1);
    T(dev_ulong(CL_DEVICE_MAX_MEM_ALLOC_SIZE) <= dev_ulong(CL_DEVICE_GLOBAL_MEM_SIZE));
    T(dev_ulong(CL_DEVICE_LOCAL_MEM_SIZE) >= 1024);
    T(dev_bool(CL_DEVICE_AVAILABLE) && dev_bool(CL_DEVICE_COMPILER_AVAILABLE));
    char b[8];
    ERR(clGetDeviceInfo(D, 0x7777, sizeof b, b, NULL), CL_INVALID_VALUE);
    ERR(clGetDeviceInfo(BAD, CL_DEVICE_TYPE, sizeof b, b, NULL), CL_INVALID_DEVICE);
}

CASE(device_info_v3) {
    if (V < 300)
        return tnote("device is OpenCL %d", V);
    static const struct {
        cl_device_info p;
        size_t size;
    } f[] = {{CL_DEVICE_NUMERIC_VERSION, 4}, {CL_DEVICE_SVM_CAPABILITIES, 8}, {CL_DEVICE_ATOMIC_MEMORY_CAPABILITIES, 8},
             {CL_DEVICE_ATOMIC_FENCE_CAPABILITIES, 8}, {CL_DEVICE_NON_UNIFORM_WORK_GROUP_SUPPORT, 4},
             {CL_DEVICE_WORK_GROUP_COLLECTIVE_FUNCTIONS_SUPPORT, 4}, {CL_DEVICE_GENERIC_ADDRESS_SPACE_SUPPORT, 4},
             {CL_DEVICE_DEVICE_ENQUEUE_CAPABILITIES, 8}, {CL_DEVICE_PIPE_SUPPORT, 4}, {CL_DEVICE_MAX_PIPE_ARGS, 4},
             {CL_DEVICE_PREFERRED_WORK_GROUP_SIZE_MULTIPLE, sizeof(size_t)}, {CL_DEVICE_MAX_NUM_SUB_GROUPS, 4},
             {CL_DEVICE_QUEUE_ON_DEVICE_PROPERTIES, 8}, {CL_DEVICE_MAX_ON_DEVICE_QUEUES, 4}, {CL_DEVICE_IMAGE_PITCH_ALIGNMENT, 4},
             {CL_DEVICE_MAX_READ_WRITE_IMAGE_ARGS, 4}, {CL_DEVICE_MAX_GLOBAL_VARIABLE_SIZE, sizeof(size_t)},
             {CL_DEVICE_PREFERRED_PLATFORM_ATOMIC_ALIGNMENT, 4}};
    for (size_t i = 0; i < sizeof f / sizeof *f; i++) {
        char b[64];
        size_t sz = 0;
        cl_int e = clGetDeviceInfo(D, f[i].p, sizeof b, b, &sz);
        if (e != CL_SUCCESS || sz != f[i].size)
            tfail(__FILE__, __LINE__, "device info 0x%x: error %d, size %zu, not %zu", f[i].p, e, sz, f[i].size);
    }
    static cl_name_version nv[256];
    size_t sz;
    OK(clGetDeviceInfo(D, CL_DEVICE_EXTENSIONS_WITH_VERSION, sizeof nv, nv, &sz));
    for (size_t i = 0; i < sz / sizeof *nv; i++)
        T(dev_ext(nv[i].name));
    OK(clGetDeviceInfo(D, CL_DEVICE_OPENCL_C_ALL_VERSIONS, sizeof nv, nv, &sz));
    T(sz >= sizeof *nv && !strcmp(nv[0].name, "OpenCL C"));
    OK(clGetDeviceInfo(D, CL_DEVICE_OPENCL_C_FEATURES, sizeof nv, nv, &sz));
    OK(clGetDeviceInfo(D, CL_DEVICE_ILS_WITH_VERSION, sizeof nv, nv, &sz));
    OK(clGetDeviceInfo(D, CL_DEVICE_BUILT_IN_KERNELS_WITH_VERSION, sizeof nv, nv, &sz));
    cl_version v = 0;
    OK(clGetPlatformInfo(P, CL_PLATFORM_NUMERIC_VERSION, sizeof v, &v, NULL));
    T(CL_VERSION_MAJOR(v) == 3);
    OK(clGetPlatformInfo(P, CL_PLATFORM_EXTENSIONS_WITH_VERSION, sizeof nv, nv, &sz));
    cl_ulong res = 1;
    OK(clGetPlatformInfo(P, CL_PLATFORM_HOST_TIMER_RESOLUTION, sizeof res, &res, NULL));
}

CASE(optional_refused) {
    if (V < 300)
        return tnote("device is OpenCL %d", V);
    cl_device_svm_capabilities svm = 0;
    OK(clGetDeviceInfo(D, CL_DEVICE_SVM_CAPABILITIES, sizeof svm, &svm, NULL));
    if (svm == 0) {
        T(clSVMAlloc(C, CL_MEM_READ_WRITE, 64, 0) == NULL);
        int x = 0;
        ERR(clEnqueueSVMMap(Q, CL_TRUE, CL_MAP_READ, &x, sizeof x, 0, NULL, NULL), CL_INVALID_OPERATION);
        ERR(clEnqueueSVMMemFill(Q, &x, &x, 4, 4, 0, NULL, NULL), CL_INVALID_OPERATION);
    }
    if (!dev_bool(CL_DEVICE_PIPE_SUPPORT))
        ERRP(clCreatePipe(C, 0, 4, 4, NULL, &E), CL_INVALID_OPERATION);
    char il[64];
    size_t n = 0;
    OK(clGetDeviceInfo(D, CL_DEVICE_IL_VERSION, sizeof il, il, &n));
    if (il[0] == 0)
        ERRP(clCreateProgramWithIL(C, "junkjunk", 8, &E), CL_INVALID_OPERATION);
}

CASE(on_device_queue_refused) {
    if (V < 300 || dev_ulong(CL_DEVICE_DEVICE_ENQUEUE_CAPABILITIES) & CL_DEVICE_QUEUE_SUPPORTED)
        return tnote("not for this device");
    cl_queue_properties p[] = {CL_QUEUE_PROPERTIES, CL_QUEUE_ON_DEVICE | CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, 0};
    ERRP(clCreateCommandQueueWithProperties(C, D, p, &E), CL_INVALID_QUEUE_PROPERTIES);
    ERR(clSetDefaultDeviceCommandQueue(C, D, Q), CL_INVALID_OPERATION);
}

CASE(sub_devices) {
    cl_uint max = dev_uint(CL_DEVICE_PARTITION_MAX_SUB_DEVICES);
    cl_device_partition_property props[16] = {0};
    size_t sz = 0;
    OK(clGetDeviceInfo(D, CL_DEVICE_PARTITION_PROPERTIES, sizeof props, props, &sz));
    cl_device_partition_property equally[] = {CL_DEVICE_PARTITION_EQUALLY, 1, 0};
    bool can = false;
    for (size_t i = 0; i < sz / sizeof *props; i++)
        can |= props[i] == CL_DEVICE_PARTITION_EQUALLY;
    if (!can || max < 1) {
        cl_int e = clCreateSubDevices(D, equally, 0, NULL, &(cl_uint){0});
        T(e == CL_INVALID_VALUE || e == CL_DEVICE_PARTITION_FAILED);
        return;
    }
    cl_uint n = 0;
    OK(clCreateSubDevices(D, equally, 0, NULL, &n));
    T(n == dev_uint(CL_DEVICE_MAX_COMPUTE_UNITS));
    cl_device_id d[256];
    NEED(n <= 256);
    OK(clCreateSubDevices(D, equally, n, d, NULL));
    cl_uint cu = 0, rc = 0;
    cl_device_id parent = NULL;
    OK(clGetDeviceInfo(d[0], CL_DEVICE_MAX_COMPUTE_UNITS, sizeof cu, &cu, NULL));
    OK(clGetDeviceInfo(d[0], CL_DEVICE_PARENT_DEVICE, sizeof parent, &parent, NULL));
    OK(clGetDeviceInfo(d[0], CL_DEVICE_REFERENCE_COUNT, sizeof rc, &rc, NULL));
    T(cu == 1 && parent == D && rc == 1);
    cl_context c;
    MK(c, clCreateContext(NULL, n, d, NULL, NULL, &E));
    cl_command_queue q;
    MK(q, clCreateCommandQueue(c, d[n - 1], 0, &E));
    cl_mem b;
    MK(b, clCreateBuffer(c, CL_MEM_READ_WRITE, 64, NULL, &E));
    int v[16], w[16];
    for (int i = 0; i < 16; i++)
        v[i] = i;
    OK(clEnqueueWriteBuffer(q, b, CL_TRUE, 0, 64, v, 0, NULL, NULL));
    OK(clEnqueueReadBuffer(q, b, CL_TRUE, 0, 64, w, 0, NULL, NULL));
    T(!memcmp(v, w, 64));
    OK(clReleaseMemObject(b));
    OK(clReleaseCommandQueue(q));
    OK(clReleaseContext(c));
    for (cl_uint i = 0; i < n; i++)
        OK(clReleaseDevice(d[i]));
}

static void CL_CALLBACK ctx_gone(cl_context c, void *u) {
    (void)c;
    atomic_fetch_add((atomic_int *)u, 1);
}

CASE(context) {
    cl_uint rc, nd;
    OK(clGetContextInfo(C, CL_CONTEXT_REFERENCE_COUNT, sizeof rc, &rc, NULL));
    OK(clRetainContext(C));
    cl_uint rc2;
    OK(clGetContextInfo(C, CL_CONTEXT_REFERENCE_COUNT, sizeof rc2, &rc2, NULL));
    T(rc2 == rc + 1);
    OK(clReleaseContext(C));
    OK(clGetContextInfo(C, CL_CONTEXT_NUM_DEVICES, sizeof nd, &nd, NULL));
    T(nd == 1);
    cl_device_id d;
    size_t sz;
    OK(clGetContextInfo(C, CL_CONTEXT_DEVICES, sizeof d, &d, &sz));
    T(d == D && sz == sizeof d);
    cl_context_properties pr[8];
    OK(clGetContextInfo(C, CL_CONTEXT_PROPERTIES, sizeof pr, pr, &sz));
    T(sz == 3 * sizeof *pr && pr[0] == CL_CONTEXT_PLATFORM && pr[1] == (cl_context_properties)P && pr[2] == 0);
    ERR(clGetContextInfo(C, 0x7777, sizeof d, &d, NULL), CL_INVALID_VALUE);
    ERR(clGetContextInfo(C, CL_CONTEXT_DEVICES, 1, &d, NULL), CL_INVALID_VALUE);
    ERRP(clCreateContext(NULL, 0, &D, NULL, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateContext(NULL, 1, NULL, NULL, NULL, &E), CL_INVALID_VALUE);
    ERRP(clCreateContext(NULL, 1, &D, NULL, &rc, &E), CL_INVALID_VALUE);
    cl_context_properties badp[] = {0x7777, 1, 0};
    ERRP(clCreateContext(badp, 1, &D, NULL, NULL, &E), CL_INVALID_PROPERTY);
    cl_context_properties twice[] = {CL_CONTEXT_PLATFORM, (cl_context_properties)P, CL_CONTEXT_PLATFORM, (cl_context_properties)P, 0};
    ERRP(clCreateContext(twice, 1, &D, NULL, NULL, &E), CL_INVALID_PROPERTY);
    cl_context_properties plat[] = {CL_CONTEXT_PLATFORM, (cl_context_properties)P, 0};
    cl_context c;
    MK(c, clCreateContextFromType(plat, CL_DEVICE_TYPE_ALL, NULL, NULL, &E));
    OK(clReleaseContext(c));
    ERRP(clCreateContextFromType(plat, CL_DEVICE_TYPE_CUSTOM, NULL, NULL, &E), CL_DEVICE_NOT_FOUND);
    ERR(clRetainContext(BAD), CL_INVALID_CONTEXT);
    ERR(clReleaseContext(BAD), CL_INVALID_CONTEXT);
}

CASE(context_destructor) {
    if (V < 300)
        return tnote("device is OpenCL %d", V);
    static atomic_int n;
    n = 0;
    cl_context c;
    MK(c, clCreateContext(NULL, 1, &D, NULL, NULL, &E));
    OK(clSetContextDestructorCallback(c, ctx_gone, &n));
    ERR(clSetContextDestructorCallback(c, NULL, NULL), CL_INVALID_VALUE);
    cl_mem b;
    MK(b, clCreateBuffer(c, 0, 16, NULL, &E));
    OK(clReleaseContext(c));
    T(n == 0);
    OK(clReleaseMemObject(b));
    T(wait_until(&n, 1, 2000));
}

CASE(several_contexts) {
    cl_context c[8];
    cl_mem b[8];
    cl_command_queue q[8];
    for (int i = 0; i < 8; i++) {
        MK(c[i], clCreateContext(NULL, 1, &D, NULL, NULL, &E));
        MK(q[i], clCreateCommandQueue(c[i], D, 0, &E));
        MK(b[i], clCreateBuffer(c[i], CL_MEM_READ_WRITE, 4, NULL, &E));
        OK(clEnqueueWriteBuffer(q[i], b[i], CL_TRUE, 0, 4, &i, 0, NULL, NULL));
    }
    int v;
    ERR(clEnqueueReadBuffer(q[0], b[1], CL_TRUE, 0, 4, &v, 0, NULL, NULL), CL_INVALID_CONTEXT);
    ERR(clEnqueueCopyBuffer(q[0], b[0], b[1], 0, 0, 4, 0, NULL, NULL), CL_INVALID_CONTEXT);
    cl_event u;
    MK(u, clCreateUserEvent(c[1], &E));
    ERR(clEnqueueReadBuffer(q[0], b[0], CL_TRUE, 0, 4, &v, 1, &u, NULL), CL_INVALID_CONTEXT);
    OK(clReleaseEvent(u));
    for (int i = 0; i < 8; i++) {
        OK(clEnqueueReadBuffer(q[i], b[i], CL_TRUE, 0, 4, &v, 0, NULL, NULL));
        T(v == i);
        OK(clReleaseMemObject(b[i]));
        OK(clReleaseCommandQueue(q[i]));
        OK(clReleaseContext(c[i]));
    }
}

CASE(queues) {
    cl_command_queue q = queue(CL_QUEUE_PROFILING_ENABLE);
    cl_command_queue_properties p;
    cl_context c;
    cl_device_id d;
    cl_uint rc;
    OK(clGetCommandQueueInfo(q, CL_QUEUE_PROPERTIES, sizeof p, &p, NULL));
    T(p == CL_QUEUE_PROFILING_ENABLE);
    OK(clGetCommandQueueInfo(q, CL_QUEUE_CONTEXT, sizeof c, &c, NULL));
    OK(clGetCommandQueueInfo(q, CL_QUEUE_DEVICE, sizeof d, &d, NULL));
    T(c == C && d == D);
    OK(clRetainCommandQueue(q));
    OK(clGetCommandQueueInfo(q, CL_QUEUE_REFERENCE_COUNT, sizeof rc, &rc, NULL));
    T(rc == 2);
    OK(clReleaseCommandQueue(q));
    ERR(clGetCommandQueueInfo(q, 0x7777, sizeof p, &p, NULL), CL_INVALID_VALUE);
    ERR(clGetCommandQueueInfo(q, CL_QUEUE_PROPERTIES, 1, &p, NULL), CL_INVALID_VALUE);
    ERR(clFlush(BAD), CL_INVALID_COMMAND_QUEUE);
    ERR(clFinish(BAD), CL_INVALID_COMMAND_QUEUE);
    OK(clFlush(q));
    OK(clFinish(q));
    OK(clReleaseCommandQueue(q));
    ERRP(clCreateCommandQueue(C, D, 1u << 20, &E), CL_INVALID_VALUE);
    ERRP(clCreateCommandQueue(BAD, D, 0, &E), CL_INVALID_CONTEXT);
    ERRP(clCreateCommandQueue(C, BAD, 0, &E), CL_INVALID_DEVICE);
    if (V >= 200) {
        cl_queue_properties props[] = {CL_QUEUE_PROPERTIES, CL_QUEUE_PROFILING_ENABLE, 0};
        MK(q, clCreateCommandQueueWithProperties(C, D, props, &E));
        OK(clGetCommandQueueInfo(q, CL_QUEUE_PROPERTIES, sizeof p, &p, NULL));
        T(p == CL_QUEUE_PROFILING_ENABLE);
        if (V >= 300) {
            cl_queue_properties back[8];
            size_t sz;
            OK(clGetCommandQueueInfo(q, CL_QUEUE_PROPERTIES_ARRAY, sizeof back, back, &sz));
            T(sz == sizeof props && !memcmp(back, props, sz));
        }
        OK(clReleaseCommandQueue(q));
        cl_queue_properties badp[] = {0x7777, 1, 0};
        ERRP(clCreateCommandQueueWithProperties(C, D, badp, &E), CL_INVALID_VALUE);
    }
}

static const char *chain_src = "kernel void chain(global int *a, int m) { size_t i = get_global_id(0); a[i] = a[i] * 3 + m; }";

CASE(out_of_order) {
    if (!(dev_ulong(CL_DEVICE_QUEUE_PROPERTIES) & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE)) {
        ERRP(clCreateCommandQueue(C, D, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, &E), CL_INVALID_QUEUE_PROPERTIES);
        return;
    }
    cl_command_queue q = queue(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
    cl_kernel k = kernel1(chain_src, "chain");
    enum { N = 64, STEPS = 40 };
    int a[N], want[N];
    for (int i = 0; i < N; i++)
        a[i] = want[i] = i;
    cl_mem b = buffer(CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, sizeof a, a);
    arg_mem(k, 0, b);
    cl_event prev = NULL;
    size_t n = N;
    for (int s = 0; s < STEPS; s++) {
        cl_event ev;
        arg_int(k, 1, s); /* arguments are taken when the command is enqueued */
        OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &n, NULL, prev != NULL, prev ? &prev : NULL, &ev));
        if (prev)
            OK(clReleaseEvent(prev));
        prev = ev;
        for (int i = 0; i < N; i++)
            want[i] = want[i] * 3 + s;
    }
    OK(clEnqueueReadBuffer(q, b, CL_TRUE, 0, sizeof a, a, 1, &prev, NULL));
    T(!memcmp(a, want, sizeof a));
    OK(clReleaseEvent(prev));
    /* A barrier orders what has no wait list. */
    for (int s = 0; s < 10; s++) {
        arg_int(k, 1, s);
        OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &n, NULL, 0, NULL, NULL));
        OK(clEnqueueBarrierWithWaitList(q, 0, NULL, NULL));
        for (int i = 0; i < N; i++)
            want[i] = want[i] * 3 + s;
    }
    OK(clEnqueueReadBuffer(q, b, CL_TRUE, 0, sizeof a, a, 0, NULL, NULL));
    T(!memcmp(a, want, sizeof a));
    cl_event m;
    OK(clEnqueueMarkerWithWaitList(q, 0, NULL, &m));
    OK(clWaitForEvents(1, &m));
    T(status(m) == CL_COMPLETE);
    OK(clReleaseEvent(m));
    OK(clReleaseMemObject(b));
    OK(clReleaseKernel(k));
    OK(clReleaseCommandQueue(q));
}

CASE(deprecated_barriers) {
    cl_event m;
    OK(clEnqueueBarrier(Q));
    OK(clEnqueueMarker(Q, &m));
    OK(clFinish(Q));
    T(status(m) == CL_COMPLETE);
    OK(clReleaseEvent(m));
}

CASE(deprecated_wait_for_events) {
    cl_event m;
    OK(clEnqueueMarker(Q, &m));
    OK(clEnqueueWaitForEvents(Q, 1, &m));
    OK(clFinish(Q));
    OK(clReleaseEvent(m));
}

CASE(event_info) {
    cl_mem b = buffer(CL_MEM_READ_WRITE, 64, NULL);
    int z[16] = {1, 2, 3};
    cl_event ev;
    OK(clEnqueueWriteBuffer(Q, b, CL_FALSE, 0, 64, z, 0, NULL, &ev));
    OK(clWaitForEvents(1, &ev));
    cl_command_queue q;
    cl_context c;
    cl_command_type t;
    cl_uint rc;
    OK(clGetEventInfo(ev, CL_EVENT_COMMAND_QUEUE, sizeof q, &q, NULL));
    OK(clGetEventInfo(ev, CL_EVENT_CONTEXT, sizeof c, &c, NULL));
    OK(clGetEventInfo(ev, CL_EVENT_COMMAND_TYPE, sizeof t, &t, NULL));
    T(q == Q && c == C && t == CL_COMMAND_WRITE_BUFFER && status(ev) == CL_COMPLETE);
    OK(clRetainEvent(ev));
    OK(clGetEventInfo(ev, CL_EVENT_REFERENCE_COUNT, sizeof rc, &rc, NULL));
    T(rc >= 2);
    OK(clReleaseEvent(ev));
    ERR(clGetEventInfo(ev, 0x7777, sizeof q, &q, NULL), CL_INVALID_VALUE);
    cl_ulong u;
    ERR(clGetEventProfilingInfo(ev, CL_PROFILING_COMMAND_START, sizeof u, &u, NULL), CL_PROFILING_INFO_NOT_AVAILABLE);
    OK(clReleaseEvent(ev));
    ERR(clWaitForEvents(0, NULL), CL_INVALID_VALUE);
    cl_event none = NULL;
    ERR(clWaitForEvents(1, &none), CL_INVALID_EVENT);
    ERR(clEnqueueMarkerWithWaitList(Q, 1, NULL, NULL), CL_INVALID_EVENT_WAIT_LIST);
    ERR(clEnqueueMarkerWithWaitList(Q, 1, &none, NULL), CL_INVALID_EVENT_WAIT_LIST);
    ERR(clEnqueueWriteBuffer(Q, b, CL_FALSE, 0, 64, z, 1, NULL, NULL), CL_INVALID_EVENT_WAIT_LIST);
    ERR(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 64, z, 1, &none, NULL), CL_INVALID_EVENT_WAIT_LIST);
    OK(clReleaseMemObject(b));
}

CASE(event_command_types) {
    cl_mem a = buffer(0, 256, NULL), b = buffer(0, 256, NULL);
    cl_kernel k = kernel1("kernel void f(global int *a) { a[get_global_id(0)]++; }", "f");
    arg_mem(k, 0, a);
    cl_event ev[12];
    cl_command_type want[12] = {CL_COMMAND_NDRANGE_KERNEL, CL_COMMAND_TASK, CL_COMMAND_READ_BUFFER, CL_COMMAND_WRITE_BUFFER,
                                CL_COMMAND_COPY_BUFFER, CL_COMMAND_READ_BUFFER_RECT, CL_COMMAND_WRITE_BUFFER_RECT,
                                CL_COMMAND_COPY_BUFFER_RECT, CL_COMMAND_FILL_BUFFER, CL_COMMAND_MAP_BUFFER,
                                CL_COMMAND_UNMAP_MEM_OBJECT, CL_COMMAND_MARKER};
    int z[64] = {0}, one = 1;
    size_t n = 4, o[3] = {0}, r[3] = {16, 2, 1};
    OK(clEnqueueNDRangeKernel(Q, k, 1, NULL, &n, NULL, 0, NULL, &ev[0]));
    OK(clEnqueueTask(Q, k, 0, NULL, &ev[1]));
    OK(clEnqueueReadBuffer(Q, a, CL_FALSE, 0, 256, z, 0, NULL, &ev[2]));
    OK(clEnqueueWriteBuffer(Q, a, CL_FALSE, 0, 256, z, 0, NULL, &ev[3]));
    OK(clEnqueueCopyBuffer(Q, a, b, 0, 0, 256, 0, NULL, &ev[4]));
    OK(clEnqueueReadBufferRect(Q, a, CL_FALSE, o, o, r, 16, 0, 16, 0, z, 0, NULL, &ev[5]));
    OK(clEnqueueWriteBufferRect(Q, a, CL_FALSE, o, o, r, 16, 0, 16, 0, z, 0, NULL, &ev[6]));
    OK(clEnqueueCopyBufferRect(Q, a, b, o, o, r, 16, 0, 16, 0, 0, NULL, &ev[7]));
    OK(clEnqueueFillBuffer(Q, a, &one, 4, 0, 256, 0, NULL, &ev[8]));
    void *p;
    MK(p, clEnqueueMapBuffer(Q, a, CL_FALSE, CL_MAP_READ, 0, 256, 0, NULL, &ev[9], &E));
    OK(clEnqueueUnmapMemObject(Q, a, p, 0, NULL, &ev[10]));
    OK(clEnqueueMarkerWithWaitList(Q, 0, NULL, &ev[11]));
    OK(clFinish(Q));
    for (int i = 0; i < 12; i++) {
        cl_command_type t;
        OK(clGetEventInfo(ev[i], CL_EVENT_COMMAND_TYPE, sizeof t, &t, NULL));
        if (t != want[i])
            tfail(__FILE__, __LINE__, "command type of event %d is 0x%x, not 0x%x", i, t, want[i]);
        T(status(ev[i]) == CL_COMPLETE);
        OK(clReleaseEvent(ev[i]));
    }
    OK(clReleaseKernel(k));
    OK(clReleaseMemObject(a));
    OK(clReleaseMemObject(b));
}

CASE(user_event) {
    cl_event u, ev;
    MK(u, clCreateUserEvent(C, &E));
    T(status(u) == CL_SUBMITTED);
    cl_command_type t;
    cl_command_queue q = (void *)1;
    OK(clGetEventInfo(u, CL_EVENT_COMMAND_TYPE, sizeof t, &t, NULL));
    OK(clGetEventInfo(u, CL_EVENT_COMMAND_QUEUE, sizeof q, &q, NULL));
    T(t == CL_COMMAND_USER && q == NULL);
    cl_mem b = buffer(0, 64, NULL);
    int v[16], w[16];
    for (int i = 0; i < 16; i++)
        v[i] = i + 1, w[i] = 0;
    OK(clEnqueueWriteBuffer(Q, b, CL_TRUE, 0, 64, w, 0, NULL, NULL));
    /* Commands wait behind the event; the application goes on. */
    OK(clEnqueueWriteBuffer(Q, b, CL_FALSE, 0, 64, v, 1, &u, NULL));
    OK(clEnqueueReadBuffer(Q, b, CL_FALSE, 0, 64, w, 0, NULL, &ev));
    OK(clFlush(Q));
    sleep_ms(20);
    T(status(ev) != CL_COMPLETE && w[0] == 0);
    ERR(clSetUserEventStatus(u, CL_RUNNING), CL_INVALID_VALUE);
    OK(clSetUserEventStatus(u, CL_COMPLETE));
    ERR(clSetUserEventStatus(u, CL_COMPLETE), CL_INVALID_OPERATION);
    OK(clWaitForEvents(1, &ev));
    T(!memcmp(v, w, 64) && status(u) == CL_COMPLETE);
    ERR(clSetUserEventStatus(ev, CL_COMPLETE), CL_INVALID_EVENT);
    OK(clReleaseEvent(ev));
    OK(clReleaseEvent(u));
    OK(clReleaseMemObject(b));
    ERRP(clCreateUserEvent(BAD, &E), CL_INVALID_CONTEXT);
}

static void *set_later(void *u) {
    sleep_ms(50);
    clSetUserEventStatus(u, CL_COMPLETE);
    return NULL;
}

CASE(user_event_from_thread) {
    cl_event u;
    MK(u, clCreateUserEvent(C, &E));
    cl_mem b = buffer(0, 4, NULL);
    int v = 7, w = 0;
    OK(clEnqueueWriteBuffer(Q, b, CL_FALSE, 0, 4, &v, 1, &u, NULL));
    pthread_t t;
    NEED(!pthread_create(&t, NULL, set_later, u));
    /* A blocking call that depends on an event that another thread sets. */
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &w, 0, NULL, NULL));
    T(w == 7);
    pthread_join(t, NULL);
    OK(clReleaseEvent(u));
    OK(clReleaseMemObject(b));
}

CASE(user_event_negative) {
    cl_event u, a, b;
    cl_command_queue q = queue(0);
    MK(u, clCreateUserEvent(C, &E));
    cl_mem m = buffer(0, 4, NULL);
    int v = 7;
    OK(clEnqueueWriteBuffer(q, m, CL_FALSE, 0, 4, &v, 1, &u, &a));
    OK(clEnqueueMarkerWithWaitList(q, 1, &a, &b));
    OK(clSetUserEventStatus(u, -1234));
    ERR(clWaitForEvents(1, &a), CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
    ERR(clWaitForEvents(1, &u), CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
    ERR(clWaitForEvents(1, &b), CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
    T(status(u) == -1234);
    T(status(a) < 0);
    T(status(b) < 0);
    OK(clReleaseEvent(a));
    OK(clReleaseEvent(b));
    OK(clReleaseEvent(u));
    OK(clReleaseMemObject(m));
    OK(clReleaseCommandQueue(q));
}

struct cb {
    atomic_int n, submitted, running, complete, error, last;
};
static void CL_CALLBACK on_event(cl_event e, cl_int s, void *u) {
    struct cb *c = u;
    (void)e;
    if (s == CL_SUBMITTED)
        c->submitted++;
    else if (s == CL_RUNNING)
        c->running++;
    else if (s == CL_COMPLETE)
        c->complete++;
    else if (s < 0)
        c->error++;
    c->last = s;
    c->n++;
}

CASE(event_callbacks) {
    static struct cb c;
    memset(&c, 0, sizeof c);
    cl_event u, ev;
    MK(u, clCreateUserEvent(C, &E));
    cl_mem b = buffer(0, 4, NULL);
    int v = 3;
    OK(clEnqueueWriteBuffer(Q, b, CL_FALSE, 0, 4, &v, 1, &u, &ev));
    OK(clSetEventCallback(ev, CL_SUBMITTED, on_event, &c));
    OK(clSetEventCallback(ev, CL_RUNNING, on_event, &c));
    OK(clSetEventCallback(ev, CL_COMPLETE, on_event, &c));
    OK(clSetEventCallback(ev, CL_COMPLETE, on_event, &c));
    ERR(clSetEventCallback(ev, CL_QUEUED, on_event, &c), CL_INVALID_VALUE);
    ERR(clSetEventCallback(ev, 77, on_event, &c), CL_INVALID_VALUE);
    ERR(clSetEventCallback(ev, CL_COMPLETE, NULL, &c), CL_INVALID_VALUE);
    ERR(clSetEventCallback(BAD, CL_COMPLETE, on_event, &c), CL_INVALID_EVENT);
    T(c.complete == 0);
    OK(clSetUserEventStatus(u, CL_COMPLETE));
    OK(clFinish(Q));
    T(wait_until(&c.complete, 2, 3000));
    T(wait_until(&c.n, 4, 3000));
    T(c.error == 0);
    /* Registered after completion: called nevertheless. */
    OK(clSetEventCallback(ev, CL_COMPLETE, on_event, &c));
    T(wait_until(&c.complete, 3, 3000));
    /* On a user event. */
    cl_event w;
    MK(w, clCreateUserEvent(C, &E));
    OK(clSetEventCallback(w, CL_COMPLETE, on_event, &c));
    OK(clSetUserEventStatus(w, CL_COMPLETE));
    T(wait_until(&c.complete, 4, 3000));
    OK(clReleaseEvent(w));
    MK(w, clCreateUserEvent(C, &E));
    OK(clSetEventCallback(w, CL_COMPLETE, on_event, &c));
    OK(clSetUserEventStatus(w, -5));
    T(wait_until(&c.error, 1, 3000));
    T(c.last == -5);
    OK(clReleaseEvent(w));
    OK(clReleaseEvent(ev));
    OK(clReleaseEvent(u));
    OK(clReleaseMemObject(b));
}

static void CL_CALLBACK chain_cb(cl_event e, cl_int s, void *u) {
    (void)e;
    clSetUserEventStatus((cl_event)u, s == CL_COMPLETE ? CL_COMPLETE : -1);
}

CASE(callback_drives_user_event) {
    /* A callback releases the next command: the classical host-side pipeline. */
    cl_mem b = buffer(0, 4, NULL);
    int zero = 0, v = 0;
    OK(clEnqueueWriteBuffer(Q, b, CL_TRUE, 0, 4, &zero, 0, NULL, NULL));
    cl_kernel k = kernel1("kernel void inc(global int *a) { a[0]++; }", "inc");
    arg_mem(k, 0, b);
    size_t n = 1;
    cl_event u[16], ev[17];
    OK(clEnqueueNDRangeKernel(Q, k, 1, NULL, &n, NULL, 0, NULL, &ev[0]));
    for (int i = 0; i < 16; i++) {
        MK(u[i], clCreateUserEvent(C, &E));
        OK(clSetEventCallback(ev[i], CL_COMPLETE, chain_cb, u[i]));
        OK(clEnqueueNDRangeKernel(Q, k, 1, NULL, &n, NULL, 1, &u[i], &ev[i + 1]));
    }
    OK(clFlush(Q));
    OK(clWaitForEvents(1, &ev[16]));
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    T(v == 17);
    for (int i = 0; i < 16; i++)
        OK(clReleaseEvent(u[i]));
    for (int i = 0; i < 17; i++)
        OK(clReleaseEvent(ev[i]));
    OK(clReleaseKernel(k));
    OK(clReleaseMemObject(b));
}

CASE(profiling) {
    cl_command_queue q = queue(CL_QUEUE_PROFILING_ENABLE);
    cl_kernel k = kernel1("kernel void f(global int *a) { int s = 0; for (int i = 0; i < 10000; i++) s += a[i & 15] ^ i; a[0] = s; }", "f");
    int z[16] = {1};
    cl_mem b = buffer(CL_MEM_COPY_HOST_PTR, sizeof z, z);
    arg_mem(k, 0, b);
    size_t n = 1;
    cl_ulong prev_end = 0;
    for (int i = 0; i < 20; i++) {
        cl_event ev;
        if (i & 1)
            OK(clEnqueueReadBuffer(q, b, CL_FALSE, 0, sizeof z, z, 0, NULL, &ev));
        else
            OK(clEnqueueNDRangeKernel(q, k, 1, NULL, &n, NULL, 0, NULL, &ev));
        OK(clWaitForEvents(1, &ev));
        cl_ulong a, s, st, e;
        size_t sz;
        OK(clGetEventProfilingInfo(ev, CL_PROFILING_COMMAND_QUEUED, sizeof a, &a, &sz));
        T(sz == sizeof a);
        OK(clGetEventProfilingInfo(ev, CL_PROFILING_COMMAND_SUBMIT, sizeof s, &s, NULL));
        OK(clGetEventProfilingInfo(ev, CL_PROFILING_COMMAND_START, sizeof st, &st, NULL));
        OK(clGetEventProfilingInfo(ev, CL_PROFILING_COMMAND_END, sizeof e, &e, NULL));
        if (V >= 200) {
            cl_ulong c;
            OK(clGetEventProfilingInfo(ev, CL_PROFILING_COMMAND_COMPLETE, sizeof c, &c, NULL));
            T(c >= e);
        }
        T(a <= s && s <= st && st <= e);
        T(st >= prev_end);
        prev_end = e;
        ERR(clGetEventProfilingInfo(ev, 0x7777, sizeof a, &a, NULL), CL_INVALID_VALUE);
        ERR(clGetEventProfilingInfo(ev, CL_PROFILING_COMMAND_END, 4, &a, NULL), CL_INVALID_VALUE);
        OK(clReleaseEvent(ev));
    }
    cl_event u;
    cl_ulong t;
    MK(u, clCreateUserEvent(C, &E));
    ERR(clGetEventProfilingInfo(u, CL_PROFILING_COMMAND_START, sizeof t, &t, NULL), CL_PROFILING_INFO_NOT_AVAILABLE);
    OK(clSetUserEventStatus(u, CL_COMPLETE));
    OK(clReleaseEvent(u));
    OK(clReleaseMemObject(b));
    OK(clReleaseKernel(k));
    OK(clReleaseCommandQueue(q));
}

CASE(wait_across_queues) {
    cl_command_queue q[4];
    cl_kernel k = kernel1(chain_src, "chain");
    int v = 1, want = 1;
    cl_mem b = buffer(CL_MEM_COPY_HOST_PTR, 4, &v);
    arg_mem(k, 0, b);
    for (int i = 0; i < 4; i++)
        q[i] = queue(0);
    cl_event prev = NULL;
    size_t n = 1;
    for (int i = 0; i < 40; i++) {
        cl_event ev;
        arg_int(k, 1, i);
        OK(clEnqueueNDRangeKernel(q[i % 4], k, 1, NULL, &n, NULL, prev != NULL, prev ? &prev : NULL, &ev));
        OK(clFlush(q[i % 4]));
        if (prev)
            OK(clReleaseEvent(prev));
        prev = ev;
        want = want * 3 + i;
    }
    OK(clEnqueueReadBuffer(q[2], b, CL_TRUE, 0, 4, &v, 1, &prev, NULL));
    T(v == want);
    OK(clReleaseEvent(prev));
    for (int i = 0; i < 4; i++)
        OK(clReleaseCommandQueue(q[i]));
    OK(clReleaseMemObject(b));
    OK(clReleaseKernel(k));
}

CASE(queue_release_while_busy) {
    /* Releasing a queue flushes it; the event outlives it. */
    cl_command_queue q = queue(0);
    int v = 9, w = 0;
    cl_mem b = buffer(0, 4, NULL);
    cl_event ev;
    OK(clEnqueueWriteBuffer(q, b, CL_FALSE, 0, 4, &v, 0, NULL, &ev));
    OK(clReleaseCommandQueue(q));
    OK(clWaitForEvents(1, &ev));
    OK(clReleaseEvent(ev));
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &w, 0, NULL, NULL));
    T(w == 9);
    OK(clReleaseMemObject(b));
}

CASE(device_timers) {
    if (V < 210)
        return tnote("device is OpenCL %d", V);
    cl_ulong res = 0;
    if (clGetPlatformInfo(P, CL_PLATFORM_HOST_TIMER_RESOLUTION, sizeof res, &res, NULL) != CL_SUCCESS || !res) {
        cl_ulong d, h;
        ERR(clGetDeviceAndHostTimer(D, &d, &h), CL_INVALID_OPERATION);
        return;
    }
    cl_ulong d1, h1, d2, h2, h;
    OK(clGetDeviceAndHostTimer(D, &d1, &h1));
    sleep_ms(2);
    OK(clGetDeviceAndHostTimer(D, &d2, &h2));
    OK(clGetHostTimer(D, &h));
    T(d2 > d1 && h2 > h1 && h >= h2);
}
