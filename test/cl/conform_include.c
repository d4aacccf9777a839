/* Conformance: files that programs include. */
#include "conform.h"
#include <sys/stat.h>
#include <unistd.h>

static char dir[64], old[4096];

static void put(const char *name, const char *text) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    NEED(f);
    fputs(text, f);
    fclose(f);
}

/* The application's folder, in which it also is. Nobody else may read it. */
static void begin(void) {
    snprintf(dir, sizeof dir, "/tmp/conform.XXXXXX");
    NEED(mkdtemp(dir));
    NEED(getcwd(old, sizeof old) && !chdir(dir) && !mkdir("sub", 0700) && !mkdir("sub/deep", 0700));
    put("here.h", "#define V 41\n");
    put("sub/other.h", "#pragma once\n  #  include \"deep/leaf.h\"\n");
    put("sub/deep/leaf.h", "#include <up.h>\n");
    put("sub/up.h", "#include \"../here.h\"\n#undef V\n#define V 42");
}

static void end(void) {
    static const char *const names[] = {"sub/deep/leaf.h", "sub/deep", "sub/other.h", "sub/up.h", "sub", "here.h"};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        remove(names[i]);
    NEED(!chdir(old));
    rmdir(dir);
}

static cl_program from(const char *includes) {
    char text[256];
    snprintf(text, sizeof text, "%s\nkernel void f(global int *a) { a[0] = V; }", includes);
    const char *src = text;
    cl_program p = clCreateProgramWithSource(C, 1, &src, NULL, &E);
    OK(E);
    return p;
}

static int value(cl_program p) {
    cl_kernel k = clCreateKernel(p, "f", &E);
    OK(E);
    int v = 0;
    cl_mem b = clCreateBuffer(C, CL_MEM_READ_WRITE, 4, NULL, &E);
    OK(E);
    OK(clSetKernelArg(k, 0, sizeof b, &b));
    OK(clEnqueueTask(Q, k, 0, NULL, NULL));
    OK(clEnqueueReadBuffer(Q, b, CL_TRUE, 0, 4, &v, 0, NULL, NULL));
    OK(clReleaseKernel(k));
    OK(clReleaseMemObject(b));
    return v;
}

CASE(included_files) {
    begin();
    char absolute[128];
    snprintf(absolute, sizeof absolute, "-I %s/sub -DX=1", dir);
    struct { const char *includes, *options; int v; } all[] = {
        {"#include \"here.h\"", "", 41},
        {"#include \"sub/up.h\"", "", 42},
        {"#include <here.h>", "-I .", 41},
        {"#include \"other.h\"\n#include \"other.h\"", "-Isub", 42},
        {"#if 1\n#include <other.h>\n#else\n#include \"not_there.h\"\n#endif", absolute, 42},
        {"#include \"../here.h\"", absolute, 41},
    };
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) {
        cl_program p = from(all[i].includes);
        OK(clBuildProgram(p, 0, NULL, all[i].options, NULL, NULL));
        int v = value(p);
        if (v != all[i].v)
            tfail(__FILE__, __LINE__, "%s with \"%s\" is %d, not %d", all[i].includes, all[i].options, v, all[i].v);
        char told[256] = "";
        OK(clGetProgramBuildInfo(p, D, CL_PROGRAM_BUILD_OPTIONS, sizeof told, told, NULL));
        if (strcmp(told, all[i].options))
            tfail(__FILE__, __LINE__, "options are \"%s\", not \"%s\"", told, all[i].options);
        OK(clReleaseProgram(p));
    }
    cl_program p = from("#include \"not_there.h\"");
    ERR(clBuildProgram(p, 0, NULL, "-Isub", NULL, NULL), CL_BUILD_PROGRAM_FAILURE);
    OK(clReleaseProgram(p));
    end();
}

/* An include is written in many ways, and leads through links and folders that nobody may read any more. */
CASE(included_files_written_otherwise) {
    begin();
    NEED(!mkdir("inc", 0700) && !symlink("sub/deep", "link"));
    put("sub/next.h", "#include_next <next.h>\n");
    put("inc/next.h", "#define V 43");
    put("sub/bom.h", "\xef\xbb\xbf#include \"up.h\"\n");
    put("sub/below.h", "#define V 44\n");
    put("sub/deep/link.h", "#include \"../below.h\"\n");
    put("below.h", "#define V 45\n");
    struct { const char *includes, *options; int v; } all[] = {
        {"#include <next.h>", "-Isub -Iinc", 43},
        {"#include \"sub/bom.h\"", "", 42},
        {"/* first */ # /* second */ include /* third */ \"here.h\"", "", 41},
        {"#include \\\n\"here.h\"", "", 41},
        {"#import \"here.h\"", "", 41},
        {"#if __has_include(\"here.h\")\n#define V 46\n#else\n#define V 47\n#endif", "", 46},
        {"#include <link.h>", "-Ilink", 44},
        {"#include \"link/link.h\"", "", 44},
    };
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) {
        cl_program p = from(all[i].includes);
        cl_int err = clBuildProgram(p, 0, NULL, all[i].options, NULL, NULL);
        int v = err ? 0 : value(p);
        if (err || v != all[i].v)
            tfail(__FILE__, __LINE__, "%s with \"%s\" gives %d, is %d, not %d", all[i].includes, all[i].options, err, v, all[i].v);
        OK(clReleaseProgram(p));
    }
    const char *name = "name.h", *text = "#include <up.h>\n";
    cl_program h = clCreateProgramWithSource(C, 1, &text, NULL, &E), p = from("#include \"name.h\"");
    OK(E);
    OK(clCompileProgram(p, 0, NULL, "-Isub", 1, &h, &name, NULL, NULL));
    cl_program x = clLinkProgram(C, 0, NULL, NULL, 1, &p, NULL, NULL, &E);
    OK(E);
    T(value(x) == 42);
    OK(clReleaseProgram(x));
    OK(clReleaseProgram(p));
    OK(clReleaseProgram(h));

    NEED(!chdir("sub/deep"));
    p = from("#include \"../../below.h\""); /* nothing of it is below the working folder */
    OK(clBuildProgram(p, 0, NULL, "", NULL, NULL));
    T(value(p) == 45);
    OK(clReleaseProgram(p));
    NEED(!chmod("..", 0));
    p = from("#include \"here.h\"\n#define V W");
    FILE *f = fopen("here.h", "w");
    NEED(f && fputs("#define W 48\n", f) >= 0 && !fclose(f));
    OK(clBuildProgram(p, 0, NULL, "-I.", NULL, NULL));
    T(value(p) == 48);
    OK(clReleaseProgram(p));
    NEED(!remove("here.h") && !chmod("..", 0700));
    NEED(!chdir(dir) && !mkdir("my \"dir\"", 0700) && !chdir("my \"dir\""));
    p = from("#include \"../below.h\"");
    OK(clBuildProgram(p, 0, NULL, "-I .", NULL, NULL));
    T(value(p) == 45);
    OK(clReleaseProgram(p));
    NEED(!chdir(dir));
    static const char *const names[] = {"my \"dir\"", "inc/next.h", "inc", "link", "sub/next.h", "sub/bom.h", "sub/below.h", "sub/deep/link.h", "below.h"};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        remove(names[i]);
    end();
}

/* What a program had included when it was built is in its binary. A later build sees the files as they are then. */
CASE(included_files_change) {
    begin();
    cl_program p = from("#include \"other.h\"\n#include \"name.h\"\n#define V (W + 1)");
    const char *name = "name.h", *text = "#undef V\n#define W 6\n";
    cl_program h = clCreateProgramWithSource(C, 1, &text, NULL, &E);
    OK(E);
    OK(clCompileProgram(p, 0, NULL, "-I sub", 1, &h, &name, NULL, NULL));
    cl_program x = clLinkProgram(C, 0, NULL, NULL, 1, &p, NULL, NULL, &E);
    OK(E);
    T(value(x) == 7);
    OK(clReleaseProgram(x));
    OK(clReleaseProgram(h));
    OK(clReleaseProgram(p));

    p = from("#include \"here.h\"");
    OK(clBuildProgram(p, 0, NULL, NULL, NULL, NULL));
    T(value(p) == 41);
    size_t n;
    OK(clGetProgramInfo(p, CL_PROGRAM_BINARY_SIZES, sizeof n, &n, NULL));
    NEED(n > 0);
    unsigned char *bin = malloc(n);
    OK(clGetProgramInfo(p, CL_PROGRAM_BINARIES, sizeof bin, &bin, NULL));
    put("here.h", "#define V 43\n");
    const unsigned char *cb = bin;
    static const char *const options[] = {NULL, "-Isub"};
    for (unsigned i = 0; i < sizeof options / sizeof *options; i++) {
        x = clCreateProgramWithBinary(C, 1, &D, &n, &cb, NULL, &E);
        OK(E);
        OK(clBuildProgram(x, 0, NULL, options[i], NULL, NULL));
        T(value(x) == 41);
        OK(clReleaseProgram(x));
    }
    OK(clBuildProgram(p, 0, NULL, NULL, NULL, NULL));
    T(value(p) == 43);
    OK(clReleaseProgram(p));
    free(bin);
    end();
}
