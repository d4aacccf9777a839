/* Threads, processes, printf. */
#include "conform.h"
#include <sys/wait.h>

static const char *mix_src = "kernel void mix_(global uint *a, uint s) { size_t i = get_global_id(0); uint x = a[i] ^ s; for (int j = 0; j < 16; j++) "
                             "x = x * 1664525u + 1013904223u; a[i] = x; }";

static cl_uint mix(cl_uint x, cl_uint s) {
    x ^= s;
    for (int j = 0; j < 16; j++)
        x = x * 1664525u + 1013904223u;
    return x;
}

struct worker {
    int id;
    bool own_queue, own_context;
    atomic_int *bad;
};

static void *work(void *u) {
    struct worker *w = u;
    enum { N = 256, STEPS = 60 };
    cl_context c = C;
    cl_command_queue q = Q;
    cl_int e = 0;
    if (w->own_context) {
        c = clCreateContext(NULL, 1, &D, NULL, NULL, &e);
        if (e)
            goto failed;
    }
    if (w->own_queue || w->own_context)
        q = clCreateCommandQueue(c, D, 0, &e);
    cl_program p = clCreateProgramWithSource(c, 1, &mix_src, NULL, &e);
    e |= clBuildProgram(p, 0, NULL, "", NULL, NULL);
    cl_kernel k = clCreateKernel(p, "mix_", &e);
    cl_mem b = clCreateBuffer(c, CL_MEM_READ_WRITE, N * 4, NULL, &e);
    cl_uint v[N], want[N];
    for (cl_uint i = 0; i < N; i++)
        v[i] = want[i] = i * 7919u + (cl_uint)w->id;
    e |= clEnqueueWriteBuffer(q, b, CL_TRUE, 0, sizeof v, v, 0, NULL, NULL);
    e |= clSetKernelArg(k, 0, sizeof b, &b);
    size_t n = N;
    for (cl_uint s = 0; s < STEPS && !e; s++) {
        e |= clSetKernelArg(k, 1, sizeof s, &s);
        cl_event ev;
        e |= clEnqueueNDRangeKernel(q, k, 1, NULL, &n, NULL, 0, NULL, &ev);
        for (int i = 0; i < N; i++)
            want[i] = mix(want[i], s);
        if (s % 5 == 0)
            e |= clWaitForEvents(1, &ev);
        if (s % 7 == 0)
            e |= clFlush(q);
        clReleaseEvent(ev);
        if (s % 11 == 0) {
            cl_uint *m = clEnqueueMapBuffer(q, b, CL_TRUE, CL_MAP_READ, 0, sizeof v, 0, NULL, NULL, &e);
            if (!m || memcmp(m, want, sizeof v))
                w->bad[0]++;
            e |= clEnqueueUnmapMemObject(q, b, m, 0, NULL, NULL);
        }
    }
    e |= clEnqueueReadBuffer(q, b, CL_TRUE, 0, sizeof v, v, 0, NULL, NULL);
    if (e || memcmp(v, want, sizeof v))
        w->bad[0]++;
    clReleaseKernel(k);
    clReleaseProgram(p);
    clReleaseMemObject(b);
    if (w->own_queue || w->own_context)
        clReleaseCommandQueue(q);
    if (w->own_context)
        clReleaseContext(c);
    return NULL;
failed:
    atomic_fetch_add(w->bad, 1);
    return NULL;
}

static void threads(bool own_queue, bool own_context) {
    atomic_int bad = 0;
    pthread_t t[8];
    struct worker w[8];
    for (int i = 0; i < 8; i++) {
        w[i] = (struct worker){i, own_queue, own_context, &bad};
        NEED(!pthread_create(&t[i], NULL, work, &w[i]));
    }
    for (int i = 0; i < 8; i++)
        pthread_join(t[i], NULL);
    if (bad)
        tfail(__FILE__, __LINE__, "%d of 8 threads failed", (int)bad);
}

CASE(threads_shared_queue) { threads(false, false); }
CASE(threads_own_queues) { threads(true, false); }
CASE(threads_own_contexts) { threads(true, true); }

struct blocked {
    cl_event u;
    cl_mem b;
    cl_command_queue q;
    atomic_int done;
};
static void *block_on_user_event(void *v) {
    struct blocked *b = v;
    int x = 1;
    clEnqueueWriteBuffer(b->q, b->b, CL_TRUE, 0, 4, &x, 1, &b->u, NULL);
    b->done = 1;
    return NULL;
}

CASE(blocking_call_does_not_stall_others) {
    struct blocked b = {.b = buffer(0, 4, NULL), .q = queue(0)};
    MK(b.u, clCreateUserEvent(C, &E));
    pthread_t t;
    NEED(!pthread_create(&t, NULL, block_on_user_event, &b));
    sleep_ms(30);
    /* Another queue works on while that thread is blocked. */
    cl_mem m = buffer(0, 4, NULL);
    for (int i = 0; i < 50; i++) {
        int w = -1;
        OK(clEnqueueWriteBuffer(Q, m, CL_TRUE, 0, 4, &i, 0, NULL, NULL));
        OK(clEnqueueReadBuffer(Q, m, CL_TRUE, 0, 4, &w, 0, NULL, NULL));
        T(w == i);
    }
    T(b.done == 0);
    OK(clSetUserEventStatus(b.u, CL_COMPLETE));
    pthread_join(t, NULL);
    T(b.done == 1);
    OK(clReleaseEvent(b.u));
    OK(clReleaseMemObject(b.b));
    OK(clReleaseMemObject(m));
    OK(clReleaseCommandQueue(b.q));
}

CASE(refcounts) {
    cl_mem m = buffer(0, 4, NULL);
    cl_kernel k = kernel1("kernel void f(global int *a) { a[0] = 1; }", "f");
    cl_uint a, b;
    /* An argument does not count as a reference. */
    arg_mem(k, 0, m);
    T(refs_mem(m) == 1);
    OK(clRetainKernel(k));
    OK(clGetKernelInfo(k, CL_KERNEL_REFERENCE_COUNT, sizeof a, &a, NULL));
    OK(clReleaseKernel(k));
    OK(clGetKernelInfo(k, CL_KERNEL_REFERENCE_COUNT, sizeof b, &b, NULL));
    T(a == 2 && b == 1);
    OK(clReleaseKernel(k));
    OK(clReleaseMemObject(m));
    ERR(clReleaseEvent(BAD), CL_INVALID_EVENT);
    ERR(clReleaseKernel(BAD), CL_INVALID_KERNEL);
    ERR(clReleaseCommandQueue(BAD), CL_INVALID_COMMAND_QUEUE);
    ERR(clReleaseDevice(BAD), CL_INVALID_DEVICE);
}

/* child runs a small job of its own; 0 when it is right. */
static int job(void) {
    cl_platform_id p;
    cl_device_id d;
    cl_int e;
    if (clGetPlatformIDs(1, &p, NULL) || clGetDeviceIDs(p, CL_DEVICE_TYPE_ALL, 1, &d, NULL))
        return 11;
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    if (e)
        return 12;
    cl_command_queue q = clCreateCommandQueue(c, d, 0, &e);
    const char *src = "kernel void f(global int *a) { a[0] += 2; }";
    cl_program pr = clCreateProgramWithSource(c, 1, &src, NULL, &e);
    if (e || clBuildProgram(pr, 0, NULL, "", NULL, NULL))
        return 13;
    cl_kernel k = clCreateKernel(pr, "f", &e);
    int v = 40;
    cl_mem b = clCreateBuffer(c, CL_MEM_COPY_HOST_PTR, 4, &v, &e);
    size_t n = 1;
    if (e || clSetKernelArg(k, 0, sizeof b, &b) || clEnqueueNDRangeKernel(q, k, 1, NULL, &n, NULL, 0, NULL, NULL) ||
        clEnqueueReadBuffer(q, b, CL_TRUE, 0, 4, &v, 0, NULL, NULL))
        return 14;
    return v == 42 ? 0 : 15;
}

CASE(exit_without_releasing) {
    /* A fresh process, by exec, that ends with live objects and pending work. */
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    NEED(n > 0);
    exe[n] = 0;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        setenv("CONFORM_JOB", "1", 1);
        execl(exe, exe, (char *)NULL);
        _exit(99);
    }
    int st = -1;
    waitpid(pid, &st, 0);
    T(WIFEXITED(st) && WEXITSTATUS(st) == 0);
}

__attribute__((constructor)) static void job_main(void) {
    if (getenv("CONFORM_JOB"))
        exit(job());
}

CASE(fork_child_exits) {
    /* The child touches nothing; the parent's session is not disturbed. */
    int v = 3, w = 0;
    cl_mem b = buffer(CL_MEM_COPY_HOST_PTR, 4, &v);
    fflush(stdout);
    for (int i = 0; i < 5; i++) {
        pid_t pid = fork();
        if (pid == 0)
            _exit(0);
        int st;
        waitpid(pid, &st, 0);
        T(st == 0);
        OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &w, 0, NULL, NULL));
        T(w == 3);
    }
    OK(clReleaseMemObject(b));
}

CASE(fork_child_uses_opencl) {
    /* Beyond the specification: the child gets a session of its own. */
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(30);
        _exit(job());
    }
    int st = -1;
    waitpid(pid, &st, 0);
    if (!(WIFEXITED(st) && WEXITSTATUS(st) == 0))
        tfail(__FILE__, __LINE__, "the child ends with status 0x%x", st);
    int v = 3, w = 0;
    cl_mem b = buffer(CL_MEM_COPY_HOST_PTR, 4, &v);
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &w, 0, NULL, NULL));
    T(w == 3);
    OK(clReleaseMemObject(b));
}

CASE(kernel_printf) {
    int fd[2], keep = dup(1);
    NEED(keep >= 0 && !pipe(fd));
    cl_kernel k = kernel1("kernel void f(int v) { printf(\"item %d value %d\\n\", (int)get_global_id(0), v); }", "f");
    arg_int(k, 0, 1234);
    fflush(stdout);
    dup2(fd[1], 1);
    run1(k, 1);
    fflush(stdout);
    dup2(keep, 1);
    char t[256] = "";
    close(fd[1]);
    ssize_t n = read(fd[0], t, sizeof t - 1);
    T(n > 0 && strstr(t, "item 0 value 1234"));
    close(fd[0]);
    close(keep);
    OK(clReleaseKernel(k));
}
