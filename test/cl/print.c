/* What kernels print, and where it goes: print redirect DIR | steps | full.
 *
 * A kernel prints lines "NUMBER text", counted from 0 on, so that whoever reads them sees what was lost or came twice. */
#include "clx.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>

static const char *src = "kernel void say(int from, int n, global int *out) {\n"
                         "    for (int i = 0; i < n; i++)\n"
                         "        printf(\"%d text\\n\", from + i);\n"
                         "    out[0] = from + n;\n"
                         "}\n";

static cl_context C;
static cl_command_queue Q;
static cl_kernel K;
static cl_mem B;
static int said;

static void open_all(void) {
    cl_platform_id p;
    cl_device_id d = clx_device(0, &p);
    cl_int e;
    C = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    CLX_OK(e);
    Q = clCreateCommandQueue(C, d, CL_QUEUE_PROFILING_ENABLE, &e);
    CLX_OK(e);
    cl_program prog = clCreateProgramWithSource(C, 1, &src, NULL, &e);
    CLX_OK(e);
    CLX_OK(clBuildProgram(prog, 0, NULL, "", NULL, NULL));
    K = clCreateKernel(prog, "say", &e);
    CLX_OK(e);
    B = clCreateBuffer(C, CL_MEM_READ_WRITE, 4, NULL, &e);
    CLX_OK(e);
    CLX_OK(clReleaseProgram(prog));
}

/* say enqueues a kernel that prints the next n lines. */
static void say(int n, cl_event *ev) {
    size_t one = 1;
    CLX_OK(clSetKernelArg(K, 0, sizeof said, &said));
    CLX_OK(clSetKernelArg(K, 1, sizeof n, &n));
    CLX_OK(clSetKernelArg(K, 2, sizeof B, &B));
    CLX_OK(clEnqueueNDRangeKernel(Q, K, 1, NULL, &one, &one, 0, NULL, ev));
    said += n;
}

/* ---- redirect: after each call that tells that a kernel is over, what it printed is where standard output is then */

static const char *dir;
static int files;

static const char *next_file(void) {
    static char name[4096];
    snprintf(name, sizeof name, "%s/%d", dir, files++);
    return name;
}

/* expect reads what has been written to a file since it was opened. */
static void expect(const char *how, const char *name, int from, int n) {
    char want[4096], got[4096] = "";
    int len = 0;
    for (int i = 0; i < n; i++)
        len += snprintf(want + len, sizeof want - (size_t)len, "%d text\n", from + i);
    want[len] = 0;
    int fd = open(name, O_RDONLY);
    CLX_CHECK(fd >= 0, "%s: %s", name, strerror(errno));
    ssize_t r = read(fd, got, sizeof got - 1);
    close(fd);
    CLX_CHECK(r == len && !strcmp(got, want), "%s: \"%s\" and not \"%s\"", how, got, want);
}

static void by_finish(void) {
    say(3, NULL);
    CLX_OK(clFinish(Q));
}

static void by_event(void) {
    cl_event ev;
    say(3, &ev);
    CLX_OK(clWaitForEvents(1, &ev));
    CLX_OK(clReleaseEvent(ev));
}

static void by_read(void) {
    int v = 0;
    say(3, NULL);
    CLX_OK(clEnqueueReadBuffer(Q, B, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    CLX_CHECK(v == said, "%d and not %d", v, said);
}

static void by_map(void) {
    cl_int e;
    say(3, NULL);
    int *p = clEnqueueMapBuffer(Q, B, CL_TRUE, CL_MAP_READ, 0, 4, 0, NULL, NULL, &e);
    CLX_OK(e);
    CLX_CHECK(*p == said, "%d and not %d", *p, said);
    CLX_OK(clEnqueueUnmapMemObject(Q, B, p, 0, NULL, NULL));
}

static void by_status(void) {
    cl_event ev;
    cl_int st;
    say(3, &ev);
    CLX_OK(clFlush(Q));
    do
        CLX_OK(clGetEventInfo(ev, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof st, &st, NULL));
    while (st > CL_COMPLETE);
    CLX_CHECK(st == CL_COMPLETE, "status %d", st);
    CLX_OK(clReleaseEvent(ev));
}

static void by_profile(void) {
    cl_event ev;
    cl_ulong t;
    cl_int e;
    say(3, &ev);
    CLX_OK(clFlush(Q));
    while ((e = clGetEventProfilingInfo(ev, CL_PROFILING_COMMAND_END, sizeof t, &t, NULL)) == CL_PROFILING_INFO_NOT_AVAILABLE)
        ;
    CLX_OK(e);
    CLX_OK(clReleaseEvent(ev));
}

static void CL_CALLBACK over(cl_event ev, cl_int st, void *u) {
    (void)ev, (void)st;
    sem_post(u);
}

static void by_callback(void) {
    cl_event ev;
    sem_t done;
    sem_init(&done, 0, 0);
    say(3, &ev);
    CLX_OK(clSetEventCallback(ev, CL_COMPLETE, over, &done));
    CLX_OK(clFlush(Q));
    while (sem_wait(&done))
        ;
    CLX_OK(clReleaseEvent(ev));
}

static int redirect(void) {
    static const struct {
        const char *how;
        void (*run)(void);
    } ways[] = {{"clFinish", by_finish},        {"clWaitForEvents", by_event},         {"a blocking read", by_read},
                {"a blocking map", by_map},     {"CL_COMPLETE", by_status},            {"profiling information", by_profile},
                {"an event's callback", by_callback}};
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        char name[4096];
        int from = said;
        strcpy(name, next_file());
        CLX_CHECK(freopen(name, "w", stdout), "freopen %s: %s", name, strerror(errno));
        ways[i].run();
        expect(ways[i].how, name, from, 3);
        from = said;
        strcpy(name, next_file());
        int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        CLX_CHECK(fd >= 0 && dup2(fd, 1) == 1, "dup2 %s: %s", name, strerror(errno));
        close(fd);
        ways[i].run();
        expect(ways[i].how, name, from, 3);
        CLX_OK(clFinish(Q));
    }
    /* Nothing to write to is no reason to stop. */
    close(1);
    by_finish();
    fprintf(stderr, "redirected\n");
    return 0;
}

/* ---- full: a pipe that is full, and that this very program empties */

static int full(void) {
    enum { LINES = 400000 };
    int fd[2];
    CLX_CHECK(!pipe2(fd, O_NONBLOCK) && dup2(fd[1], 1) == 1, "pipe: %s", strerror(errno));
    cl_event ev;
    say(LINES, &ev);
    CLX_OK(clFlush(Q));
    char b[1 << 16];
    size_t have = 0;
    cl_int st = CL_QUEUED;
    for (int next = 0; next < LINES;) {
        ssize_t n = read(fd[0], b + have, sizeof b - 1 - have);
        if (n < 0) { /* empty */
            CLX_CHECK(errno == EAGAIN, "read: %s", strerror(errno));
            CLX_OK(clGetEventInfo(ev, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof st, &st, NULL));
            continue;
        }
        have += (size_t)n;
        b[have] = 0;
        char *line = b;
        for (char *end; (end = strchr(line, '\n')); line = end + 1, next++)
            CLX_CHECK(atoi(line) == next && strstr(line, " text\n"), "line %d is \"%.20s\"", next, line);
        have -= (size_t)(line - b);
        memmove(b, line, have);
    }
    CLX_OK(clWaitForEvents(1, &ev));
    CLX_CHECK(!have && read(fd[0], b, 1) < 0, "there is more");
    fprintf(stderr, "all lines\n");
    return 0;
}

/* ---- steps: a line "N" of standard input has a kernel print N lines and waits for it, "-N" only enqueues it; "." waits */

static int steps(void) {
    char line[64];
    fprintf(stderr, "ready\n");
    while (fgets(line, sizeof line, stdin)) {
        int n = atoi(line);
        if (n)
            say(abs(n), NULL);
        if (n < 0)
            CLX_OK(clFlush(Q));
        else
            CLX_OK(clFinish(Q));
        fprintf(stderr, "said %d\n", said);
    }
    CLX_OK(clFinish(Q));
    return 0;
}

int main(int argc, char **argv) {
    CLX_CHECK(argc > 1, "usage: print redirect DIR | full | steps");
    open_all();
    if (!strcmp(argv[1], "redirect")) {
        CLX_CHECK(argc > 2, "usage: print redirect DIR");
        dir = argv[2];
        return redirect();
    }
    return !strcmp(argv[1], "full") ? full() : steps();
}
