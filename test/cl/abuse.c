/*
 * abuse: an application that does what it can to whoever serves it.
 *
 *   abuse scribble   writes random words over the memory that it shares with its executor
 *   abuse objects    makes as many objects of each kind as it gets, without giving one back
 *   abuse requests   posts requests without end, most of them wrong
 *   abuse print      has kernels print without end
 *
 * Each ends after some seconds, if nobody ends it before.
 */
#include "clx.h"
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>

static cl_device_id device;
static cl_context context;
static cl_command_queue queue;
static cl_kernel kernel;
static cl_mem buffer;
static double end;

static const char *source = "kernel void say(int n, global int *a) { for (int i = 0; i < n; i++) printf(\"%d of what nobody needs to know\\n\", i); a[0] = n; }";

static void launch(int n) {
    size_t one = 1;
    clSetKernelArg(kernel, 0, sizeof n, &n);
    clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, NULL, 0, NULL, NULL);
}

static uint64_t state;

static uint64_t any(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* busy goes on making calls, so that there is something to destroy. */
static void *busy(void *unused) {
    (void)unused;
    for (int v;;) {
        launch(0);
        clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, sizeof v, &v, 0, NULL, NULL);
    }
    return NULL;
}

static void scribble(void) {
    struct { uint32_t *at; size_t words; } memory[16];
    int n = 0;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    CLX_CHECK(maps, "no maps");
    while (n < 16 && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char mode[8];
        if (!strstr(line, "/memfd:") || sscanf(line, "%lx-%lx %7s", &from, &to, mode) != 3 || strcmp(mode, "rw-s"))
            continue;
        size_t size = to - from;
        memory[n].at = (uint32_t *)from;
        memory[n++].words = (size < 64u << 20 ? size : 64u << 20) / 4; /* pages of the rest would only fill the machine */
    }
    fclose(maps);
    CLX_CHECK(n, "nothing is shared");
    pthread_t t;
    pthread_create(&t, NULL, busy, NULL);
    while (clx_now() < end) {
        for (int i = 0; i < 64; i++) {
            uint64_t r = any();
            int m = (int)(r % (unsigned)n);
            size_t words = r & 0x100 ? memory[m].words : 1024; /* headers are small */
            memory[m].at[(r >> 16) % words] = r & 0x200 ? (uint32_t)any() : (uint32_t)(any() % 64);
        }
        usleep(1000);
    }
}

static void objects(void) {
    enum { EACH = 4000 };
    cl_int e;
    for (int i = 0; i < EACH && clx_now() < end; i++) {
        clCreateBuffer(context, CL_MEM_READ_WRITE, 1 + any() % 4096, NULL, &e);
        clCreateUserEvent(context, &e);
        clCreateSampler(context, CL_FALSE, CL_ADDRESS_CLAMP, CL_FILTER_NEAREST, &e);
        clCreateProgramWithSource(context, 1, &source, NULL, &e);
        clCreateKernel(NULL, "say", &e);
        cl_image_format f = {CL_RGBA, CL_UNSIGNED_INT8};
        cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 16, .image_height = 16};
        clCreateImage(context, CL_MEM_READ_WRITE, &f, &d, NULL, &e);
        if (i % 16 == 0)
            clCreateContext(NULL, 1, &device, NULL, NULL, &e);
        if (i % 64 == 0)
            clCreateCommandQueue(context, device, 0, &e);
    }
    clCreateBuffer(context, CL_MEM_READ_WRITE, (size_t)1 << 50, NULL, &e);
}

static void requests(void) {
    char b[64];
    while (clx_now() < end) {
        size_t huge = (size_t)any();
        launch(0);
        clEnqueueWriteBuffer(queue, buffer, CL_FALSE, huge, 4, b, 0, NULL, NULL);
        clEnqueueCopyBuffer(queue, buffer, buffer, 0, huge, huge, 0, NULL, NULL);
        clEnqueueNDRangeKernel(queue, kernel, 3, NULL, (size_t[]){huge, huge, huge}, NULL, 0, NULL, NULL);
        clSetKernelArg(kernel, (cl_uint)huge, 8, b);
        cl_int e;
        cl_program p = clCreateProgramWithBinary(context, 1, &device, &(size_t){sizeof b}, (const unsigned char *[]){(unsigned char *)b}, NULL, &e);
        if (p)
            clReleaseProgram(p);
    }
}

static void print(void) {
    int fd = open("/dev/null", O_WRONLY);
    dup2(fd, 1);
    while (clx_now() < end) {
        launch(20000);
        clFinish(queue);
    }
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } ways[] = {{"scribble", scribble}, {"objects", objects}, {"requests", requests}, {"print", print}};
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0}); /* it may well crash */
    alarm(30);
    state = (uint64_t)(clx_wall() * 1e6) | 1;
    for (size_t i = 0; argc == 2 && i < sizeof ways / sizeof *ways; i++) {
        if (strcmp(argv[1], ways[i].name))
            continue;
        cl_int e;
        device = clx_device(0, NULL);
        context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
        CLX_OK(e);
        queue = clCreateCommandQueue(context, device, 0, &e);
        CLX_OK(e);
        kernel = clCreateKernel(clx_build(context, device, source, ""), "say", &e);
        CLX_OK(e);
        buffer = clCreateBuffer(context, CL_MEM_READ_WRITE, 4096, NULL, &e);
        CLX_OK(e);
        CLX_OK(clSetKernelArg(kernel, 1, sizeof buffer, &buffer));
        launch(0);
        CLX_OK(clFinish(queue));
        fprintf(stderr, "at it\n");
        end = clx_now() + 5;
        ways[i].run();
        _exit(0); /* without giving anything back */
    }
    fprintf(stderr, "usage: abuse scribble|objects|requests|print\n");
    return 2;
}
