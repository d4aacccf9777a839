/* Runner of the conformance cases: see conform.c. */
#ifndef CONFORM_H
#define CONFORM_H
#include "clx.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>

struct tcase {
    const char *name;
    void (*run)(void);
    struct tcase *next;
};
void tcase_add(struct tcase *c);
void tfail(const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void tstop(void) __attribute__((noreturn)); /* ends the case, from its own thread */
bool tskip(const char *text); /* the runtime does not survive this check */
void tnote(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* What every case starts with: a context and an in-order queue of its own. */
extern cl_platform_id P;
extern cl_device_id D;
extern cl_context C;
extern cl_command_queue Q;
extern cl_int E; /* errcode_ret of the last call */
extern int V;    /* version of the device, 120 or 300 */
extern volatile int tline;       /* where the case is, for the message of one that does not end */
extern volatile unsigned tsteps; /* how many checks it has made */

#define CASE(n)                                                                                                        \
    static void n(void);                                                                                               \
    __attribute__((constructor)) static void n##_register(void) {                                                      \
        static struct tcase c = {#n, n, NULL};                                                                         \
        tcase_add(&c);                                                                                                 \
    }                                                                                                                  \
    static void n(void)

/* T: a condition. NEED: one that the rest of the case depends on. */
#define T(c)                                                                                                           \
    do {                                                                                                               \
        if (!(c))                                                                                                      \
            tfail(__FILE__, __LINE__, "%s", #c);                                                                       \
    } while (0)
#define NEED(c)                                                                                                        \
    do {                                                                                                               \
        if (!(c)) {                                                                                                    \
            tfail(__FILE__, __LINE__, "%s", #c);                                                                       \
            tstop();                                                                                                   \
        }                                                                                                              \
    } while (0)
/* OK: a call that must succeed. ERR: a call and the error it must give. */
#define OK(e)                                                                                                          \
    do {                                                                                                               \
        tsteps++, tline = __LINE__;                                                                                    \
        cl_int e_ = (e);                                                                                               \
        if (e_ != CL_SUCCESS) {                                                                                        \
            tfail(__FILE__, __LINE__, "%s gives %d", #e, e_);                                                          \
            tstop();                                                                                                   \
        }                                                                                                              \
    } while (0)
#define ERR(e, want)                                                                                                   \
    do {                                                                                                               \
        tsteps++, tline = __LINE__;                                                                                    \
        if (tskip(#e))                                                                                                 \
            break;                                                                                                     \
        cl_int e_ = (e);                                                                                               \
        if (e_ != (want))                                                                                              \
            tfail(__FILE__, __LINE__, "%s gives %d, not %s", #e, e_, #want);                                           \
    } while (0)
#define ERR2(e, want, alt)                                                                                             \
    do {                                                                                                               \
        tsteps++, tline = __LINE__;                                                                                    \
        if (tskip(#e))                                                                                                 \
            break;                                                                                                     \
        cl_int e_ = (e);                                                                                               \
        if (e_ != (want) && e_ != (alt))                                                                               \
            tfail(__FILE__, __LINE__, "%s gives %d, not %s or %s", #e, e_, #want, #alt);                               \
    } while (0)
/* MK: a constructor that must succeed (its last argument is &E). ERRP: one that must fail. */
#define MK(var, call)                                                                                                  \
    do {                                                                                                               \
        tsteps++, tline = __LINE__;                                                                                    \
        E = 1;                                                                                                         \
        var = call;                                                                                                    \
        if (E != CL_SUCCESS || !(var)) {                                                                               \
            tfail(__FILE__, __LINE__, "%s gives %d", #call, E);                                                        \
            tstop();                                                                                                   \
        }                                                                                                              \
    } while (0)
#define ERRP(call, want)                                                                                               \
    do {                                                                                                               \
        tsteps++, tline = __LINE__;                                                                                    \
        if (tskip(#call))                                                                                              \
            break;                                                                                                     \
        E = 1;                                                                                                         \
        void *p_ = (void *)(call);                                                                                     \
        if (E != (want) || p_)                                                                                         \
            tfail(__FILE__, __LINE__, "%s gives %d%s, not %s", #call, E, p_ ? " and an object" : "", #want);                                         \
    } while (0)

cl_program build(const char *src);
cl_program build_opt(const char *src, const char *opt);
cl_kernel kernel1(const char *src, const char *name); /* builds, makes the kernel, drops the program */
cl_mem buffer(cl_mem_flags f, size_t size, void *host);
cl_command_queue queue(cl_command_queue_properties p);
void arg_mem(cl_kernel k, cl_uint i, cl_mem m);
void arg_int(cl_kernel k, cl_uint i, cl_int v);
void run1(cl_kernel k, size_t n); /* one dimension, then clFinish */
cl_uint refs_mem(cl_mem m);
cl_int status(cl_event e);
bool dev_bool(cl_device_info i);
size_t dev_size(cl_device_info i);
cl_uint dev_uint(cl_device_info i);
cl_ulong dev_ulong(cl_device_info i);
bool dev_ext(const char *name);
void fill_bytes(void *p, size_t n, unsigned seed);
void sleep_ms(int ms);
bool wait_until(atomic_int *v, int want, int ms);
#define BAD ((void *)0) /* the only invalid handle that the specification lets one try */
#endif
