/*
 * conform: conformance cases for the OpenCL 1.2 core and the mandatory part of 3.0.
 *
 *   conform [--list] [--isolate] [--device N] [--timeout S] [--virtual] [--profile NAME] [--known FILE] [CASE…]
 *
 * A profile names a vendor's runtime; FILE (known-native-failures.txt) lists checks that this runtime fails when the program
 * runs on it natively. Such a check is reported as "known" and does not fail the run. After a ! stands a call that the runtime
 * does not survive, and which is left out; a line with the text * skips its case. --virtual is for runs through gpuctl: nothing is left out there. --isolate runs each case in a process of its own.
 */
#include "conform.h"
#include <signal.h>
#include <sys/wait.h>

cl_platform_id P;
cl_device_id D;
cl_context C;
cl_command_queue Q;
cl_int E;
int V;
volatile int tline;
volatile unsigned tsteps;

static struct tcase *first, **last = &first;
static struct tcase *current;
static jmp_buf out;
static pthread_t runner;
static atomic_int failures, known;
static bool virtual;
static unsigned device_index, timeout = 60;

struct known_line {
    char name[64], text[256];
};
static struct known_line known_lines[512];
static int known_count;

void tcase_add(struct tcase *c) {
    *last = c;
    last = &c->next;
}

static bool is_known(const char *text) {
    for (int i = 0; i < known_count; i++)
        if (!strcmp(known_lines[i].name, current->name) && strcmp(known_lines[i].text, "*") && strstr(text, known_lines[i].text))
            return true;
    return false;
}

bool tskip(const char *text) {
    if (virtual)
        return false;
    for (int i = 0; i < known_count; i++)
        if (!strcmp(known_lines[i].name, current->name) && known_lines[i].text[0] == '!' && strstr(text, known_lines[i].text + 1)) {
            printf("  known %s: not run: %s\n", current->name, text);
            known++;
            return true;
        }
    return false;
}

static bool skipped(const struct tcase *c) {
    if (virtual)
        return false;
    for (int i = 0; i < known_count; i++)
        if (!strcmp(known_lines[i].name, c->name) && !strcmp(known_lines[i].text, "*"))
            return true;
    return false;
}

void tfail(const char *file, int line, const char *fmt, ...) {
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    const char *base = strrchr(file, '/');
    bool k = is_known(text);
    printf("  %s %s: %s:%d: %s\n", k ? "known" : "FAIL", current->name, base ? base + 1 : file, line, text);
    fflush(stdout);
    if (k)
        known++;
    else
        failures++;
}

void tstop(void) {
    if (!pthread_equal(pthread_self(), runner))
        pthread_exit(NULL);
    longjmp(out, 1);
}

void tnote(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    printf("  note %s: ", current->name);
    vprintf(fmt, ap);
    putchar('\n');
    va_end(ap);
}

static void load_known(const char *file, const char *profile) {
    FILE *f = fopen(file, "r");
    if (!f) {
        perror(file);
        exit(2);
    }
    char line[512], prof[64];
    while (fgets(line, sizeof line, f)) {
        int n = 0;
        struct known_line *k = &known_lines[known_count];
        if (line[0] == '#' || sscanf(line, "%63s %63s %n", prof, k->name, &n) < 2 || !n)
            continue;
        if (strncmp(prof, profile, strlen(prof)) || known_count + 1 == (int)(sizeof known_lines / sizeof *known_lines))
            continue;
        snprintf(k->text, sizeof k->text, "%s", line + n);
        k->text[strcspn(k->text, "\n")] = 0;
        known_count++;
    }
    fclose(f);
}

static void open_device(void) {
    char v[128] = "";
    D = clx_device(device_index, &P);
    OK(clGetDeviceInfo(D, CL_DEVICE_VERSION, sizeof v, v, NULL));
    int major = 0, minor = 0;
    sscanf(v, "OpenCL %d.%d", &major, &minor);
    V = major * 100 + minor * 10;
}

/* on_alarm ends a case that makes no progress. One that goes on may take as long as the machine needs. */
static void on_alarm(int s) {
    static unsigned seen;
    if (s == SIGALRM && tsteps != seen) {
        seen = tsteps;
        alarm(timeout);
        return;
    }
    char m[128];
    int n = snprintf(m, sizeof m, "  FAIL %s: %s at line %d\n", current->name, s == SIGALRM ? "stuck" : "signal", tline);
    if (write(1, m, (size_t)n) < 0)
        _exit(3);
    _exit(3);
}

static void run_case(struct tcase *c) {
    current = c;
    runner = pthread_self();
    C = NULL;
    Q = NULL;
    int before = failures;
    double t = clx_now();
    alarm(timeout);
    if (!setjmp(out)) {
        open_device();
        cl_context_properties props[] = {CL_CONTEXT_PLATFORM, (cl_context_properties)P, 0};
        MK(C, clCreateContext(props, 1, &D, NULL, NULL, &E));
        MK(Q, clCreateCommandQueue(C, D, 0, &E));
        c->run();
    }
    alarm(0);
    if (Q) {
        clFinish(Q);
        clReleaseCommandQueue(Q);
    }
    if (C)
        clReleaseContext(C);
    printf("%s %s (%.2fs)\n", failures == before ? "ok  " : "FAIL", c->name, clx_now() - t);
    fflush(stdout);
}

int main(int argc, char **argv) {
    const char *file = NULL, *profile = "";
    bool isolate = false, list = false;
    int i = 1;
    for (; i < argc && !strncmp(argv[i], "--", 2); i++) {
        if (!strcmp(argv[i], "--list"))
            list = true;
        else if (!strcmp(argv[i], "--isolate"))
            isolate = true;
        else if (!strcmp(argv[i], "--device") && i + 1 < argc)
            device_index = (unsigned)atoi(argv[++i]);
        else if (!strcmp(argv[i], "--profile") && i + 1 < argc)
            profile = argv[++i];
        else if (!strcmp(argv[i], "--known") && i + 1 < argc)
            file = argv[++i];
        else if (!strcmp(argv[i], "--virtual"))
            virtual = true;
        else if (!strcmp(argv[i], "--timeout") && i + 1 < argc)
            timeout = (unsigned)atoi(argv[++i]);
        else {
            fprintf(stderr, "usage: conform [--list] [--isolate] [--device N] [--timeout S] [--virtual] [--profile NAME] [--known FILE] [CASE...]\n");
            return 2;
        }
    }
    if (file)
        load_known(file, profile);
    struct sigaction sa = {.sa_handler = on_alarm};
    sigaction(SIGALRM, &sa, NULL);
    sigaction(SIGSEGV, &sa, NULL);
    sigaction(SIGABRT, &sa, NULL);
    int ran = 0, bad = 0, skip = 0;
    for (struct tcase *c = first; c; c = c->next) {
        if (list) {
            puts(c->name);
            continue;
        }
        bool want = i == argc;
        for (int j = i; j < argc; j++)
            want |= !strcmp(argv[j], c->name);
        if (!want)
            continue;
        if (skipped(c)) {
            printf("skip %s: in the list of known native failures of %s\n", c->name, profile);
            skip++;
            continue;
        }
        ran++;
        int before = failures;
        if (!isolate) {
            run_case(c);
            bad += failures != before;
            continue;
        }
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            run_case(c);
            fflush(stdout);
            exit(failures ? 1 : 0);
        }
        int st = 0;
        waitpid(pid, &st, 0);
        if (st != 0) {
            if (WIFSIGNALED(st))
                printf("FAIL %s: signal %d\n", c->name, WTERMSIG(st));
            else if (WEXITSTATUS(st) != 1)
                printf("FAIL %s: exit status %d\n", c->name, WEXITSTATUS(st));
            bad++;
        }
    }
    if (list)
        return 0;
    printf("%d cases, %d failed, %d skipped", ran, bad, skip);
    if (!isolate)
        printf(", %d known deviations", (int)known);
    putchar('\n');
    if (ran == 0 && skip == 0)
        fprintf(stderr, "no such case\n");
    return bad || ran + skip == 0;
}

cl_program build_opt(const char *src, const char *opt) {
    cl_program p;
    MK(p, clCreateProgramWithSource(C, 1, &src, NULL, &E));
    OK(clBuildProgram(p, 1, &D, opt, NULL, NULL));
    return p;
}

cl_program build(const char *src) { return build_opt(src, ""); }

cl_kernel kernel1(const char *src, const char *name) {
    cl_program p = build(src);
    cl_kernel k;
    MK(k, clCreateKernel(p, name, &E));
    OK(clReleaseProgram(p));
    return k;
}

cl_mem buffer(cl_mem_flags f, size_t size, void *host) {
    cl_mem m;
    MK(m, clCreateBuffer(C, f, size, host, &E));
    return m;
}

cl_command_queue queue(cl_command_queue_properties p) {
    cl_command_queue q;
    MK(q, clCreateCommandQueue(C, D, p, &E));
    return q;
}

void arg_mem(cl_kernel k, cl_uint i, cl_mem m) { OK(clSetKernelArg(k, i, sizeof m, &m)); }
void arg_int(cl_kernel k, cl_uint i, cl_int v) { OK(clSetKernelArg(k, i, sizeof v, &v)); }

void run1(cl_kernel k, size_t n) {
    OK(clEnqueueNDRangeKernel(Q, k, 1, NULL, &n, NULL, 0, NULL, NULL));
    OK(clFinish(Q));
}

cl_uint refs_mem(cl_mem m) {
    cl_uint n = 0;
    OK(clGetMemObjectInfo(m, CL_MEM_REFERENCE_COUNT, sizeof n, &n, NULL));
    return n;
}

cl_int status(cl_event e) {
    cl_int s = 99;
    OK(clGetEventInfo(e, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof s, &s, NULL));
    return s;
}

bool dev_bool(cl_device_info i) {
    cl_bool v = 0;
    OK(clGetDeviceInfo(D, i, sizeof v, &v, NULL));
    return v;
}
size_t dev_size(cl_device_info i) {
    size_t v = 0;
    OK(clGetDeviceInfo(D, i, sizeof v, &v, NULL));
    return v;
}
cl_uint dev_uint(cl_device_info i) {
    cl_uint v = 0;
    OK(clGetDeviceInfo(D, i, sizeof v, &v, NULL));
    return v;
}
cl_ulong dev_ulong(cl_device_info i) {
    cl_ulong v = 0;
    OK(clGetDeviceInfo(D, i, sizeof v, &v, NULL));
    return v;
}
bool dev_ext(const char *name) {
    static char s[16384];
    OK(clGetDeviceInfo(D, CL_DEVICE_EXTENSIONS, sizeof s, s, NULL));
    return strstr(s, name) != NULL;
}

void fill_bytes(void *p, size_t n, unsigned seed) {
    unsigned char *b = p;
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        b[i] = (unsigned char)(seed >> 24);
    }
}

void sleep_ms(int ms) {
    struct timespec t = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&t, NULL);
}

bool wait_until(atomic_int *v, int want, int ms) {
    for (int i = 0; i < ms; i++) {
        if (atomic_load(v) == want)
            return true;
        sleep_ms(1);
    }
    return atomic_load(v) == want;
}
