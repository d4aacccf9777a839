/* Shared by all files of the library: objects, the session, helpers. */
#ifndef GX_H
#define GX_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_0_APIS
#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#define CL_USE_DEPRECATED_OPENCL_2_0_APIS
#define CL_USE_DEPRECATED_OPENCL_2_1_APIS
#define CL_USE_DEPRECATED_OPENCL_2_2_APIS
#include <CL/cl.h>
#include <CL/cl_ext.h>
#include <CL/cl_icd.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include "wire_gen.h"

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define TRY(e) do { cl_int try_ = (e); if (unlikely(try_)) return try_; } while (0)

/* ---- locks: a thread spins on the word briefly, then sleeps on it. They are private to the process, so a forked
 * child may simply zero them. */
typedef struct { _Atomic uint32_t w; } gx_lock;
void gx_lock_slow(gx_lock *l);
void gx_unlock_slow(gx_lock *l);
static inline void gx_lock_take(gx_lock *l)
{
	uint32_t free = 0;
	if (unlikely(!atomic_compare_exchange_strong_explicit(&l->w, &free, 1, memory_order_acquire, memory_order_relaxed)))
		gx_lock_slow(l);
}
static inline void gx_lock_drop(gx_lock *l)
{
	if (unlikely(atomic_exchange_explicit(&l->w, 0, memory_order_release) == 2))
		gx_unlock_slow(l);
}

/* ---- objects */
enum gx_type { T_PLATFORM = 1, T_DEVICE, T_CONTEXT, T_QUEUE, T_MEM, T_SAMPLER, T_PROGRAM, T_KERNEL, T_EVENT, T_COUNT };
#define GX_OBJ_MAGIC 0x67780000u

/* obj is the first member of every handle. links counts everything that needs the object. refs counts only the
 * application's references, which are links, too. gen is the session that made the object: a fork or a reconnect
 * makes it stale. */
struct obj {
	const cl_icd_dispatch *dispatch; /* must be the first word, because the ICD loader reads it */
	uint32_t magic; /* GX_OBJ_MAGIC | type while alive */
	uint32_t gen;
	uint32_t id;
	_Atomic uint32_t refs, links;
	struct obj *next; /* free list */
};

struct param { uint32_t name, len; const void *data; };

struct _cl_platform_id { struct obj o; };

struct _cl_device_id {
	struct obj o;
	cl_device_id parent;
	struct param *params;
	uint32_t nparams;
	uint8_t *blob; /* memory that params point into */
	uint64_t base_align; /* bytes */
	uint64_t queue_props;
	uint64_t max_alloc, local_mem;
	uint32_t address_bits;
	bool images, root;
};

struct notify { struct notify *next; void *fn; void *user; };

struct _cl_context {
	struct obj o;
	cl_uint ndev;
	cl_device_id *devs;
	cl_context_properties *props;
	size_t nprops;
	struct notify *destructors;
	bool images;
};

struct _cl_command_queue {
	struct obj o;
	cl_context ctx;
	cl_device_id dev;
	cl_command_queue_properties props;
	cl_queue_properties *array;
	size_t narray;
	uint64_t serial; /* never reused, unlike the id */
};

struct map { /* one live mapping */
	struct map *next;
	void *ptr;
	uint64_t arena, arena_row, arena_slice;
	uint8_t *host; /* for CL_MEM_USE_HOST_PTR objects: the region in the application's memory */
	uint64_t host_row, host_slice;
	uint64_t width, height, depth; /* size of the region, in bytes, rows, slices */
	uint64_t at[3]; /* where it begins: an image's origin, or an offset in a buffer */
	cl_map_flags flags;
	uint32_t id;
};

struct _cl_mem {
	struct obj o;
	cl_context ctx;
	cl_mem parent; /* for sub-buffers and images made from another object */
	cl_mem_object_type type;
	cl_mem_flags flags;
	uint64_t origin, size;
	uint8_t *host;
	cl_mem_properties *props;
	size_t nprops;
	struct map *maps;
	uint32_t nmaps;
	struct notify *destructors;
	_Atomic bool launched;
	/* images */
	cl_image_format format;
	uint64_t elem, width, height, depth, array, row, slice;
	uint64_t host_row, host_slice;
	cl_mem buffer_info; /* the answer to CL_IMAGE_BUFFER */
};

struct _cl_sampler {
	struct obj o;
	cl_context ctx;
	cl_bool normalized;
	cl_addressing_mode addressing;
	cl_filter_mode filter;
	cl_sampler_properties *props;
	size_t nprops;
};

struct _cl_program {
	struct obj o;
	cl_context ctx;
	cl_uint ndev;
	cl_device_id *devs;
	char *source;
	size_t nsource;
	_Atomic uint32_t kernels;
	uint64_t *told; /* sizes of the binaries that the application was given */
};

struct cached { struct cached *next; uint32_t dev, what, index; uint32_t len; uint8_t data[]; };

struct karg { uint32_t kind, flags; uint64_t size; bool set; };

struct _cl_kernel {
	struct obj o;
	cl_program prog;
	cl_context ctx;
	char *name;
	uint32_t nargs, unset;
	uint64_t local; /* bytes of local memory that the arguments ask for */
	struct karg *args;
	_Atomic(struct cached *) cache;
	_Atomic uint64_t shapes[8]; /* hashes of launches that the vendor's runtime has accepted */
	_Atomic uint32_t next_shape;
	_Atomic bool fresh; /* a memory object of an argument was not used by a launch yet */
};

struct _cl_event {
	struct obj o;
	cl_context ctx;
	cl_command_queue queue;
	cl_command_type type;
	_Atomic int32_t status; /* last known; final once <= 0 */
	_Atomic bool profiled;
	uint64_t times[5];
};

extern const cl_icd_dispatch gx_dispatch;
extern struct _cl_platform_id gx_platform;

void *gx_new(enum gx_type t, size_t size); /* zeroed, one reference, id taken; NULL without memory */
void gx_abandon(void *obj); /* creation failed: no release is posted */
void gx_recycle(struct obj *o, enum gx_type t);
uint32_t gx_id_take(void);
void gx_id_drop(uint32_t id);
void gx_link(void *obj);
void gx_unlink(void *obj);
bool gx_retain(void *obj);
bool gx_release_ref(void *obj);

/* ---- the session */
#define SPLIT_ALIGN 64
struct session {
	uint8_t *ring, *arena;
	uint64_t arena_size, split;
	uint64_t tail, head; /* head: the last value read */
	bool urgent; /* the request being written ends a nap of the reader */
	int ring_fd, arena_fd, state_fd, lock_fd, sock;
	_Atomic uint32_t gen;
	_Atomic bool up, lost;
	gx_lock lock; /* for writing to the ring */
	gx_lock misc; /* for lists that belong to objects */
	_Atomic uint64_t slots[GX_SLOT_COUNT / 64]; /* taken */
	_Atomic uint32_t npending;
	_Atomic uint32_t spin_ns;
	_Atomic uint32_t out_busy; /* a thread writes what kernels printed */
	bool can_spin;
};
extern struct session S;
extern _Atomic uint32_t *gx_forkmark; /* in a page that the kernel zeroes in a forked child */

void gx_forked(void);
cl_int gx_connect(void); /* CL_SUCCESS once a session exists */
void gx_say(const char *fmt, ...) __attribute__((format(printf, 1, 2))); /* one line on standard error, unless GPUCTL_QUIET */
void gx_lost(const char *why);

/* gx_enter is the first call of every entry point. It detects that this process is a forked child. */
static inline void gx_enter(void)
{
	if (unlikely(atomic_load_explicit(gx_forkmark, memory_order_acquire) != 1))
		gx_forked();
}
static inline bool gx_ok(const void *h, enum gx_type t)
{
	const struct obj *o = h;
	gx_enter();
	return likely(o && o->magic == (GX_OBJ_MAGIC | t) && o->gen == atomic_load_explicit(&S.gen, memory_order_relaxed));
}
bool gx_device_ok(cl_device_id d);

struct gx_reply { uint8_t *data; uint64_t len; uint8_t small[512]; };
static inline void gx_reply_free(struct gx_reply *r) { if (r->data != r->small) free(r->data); }
static inline uint64_t gx_u64(const struct gx_reply *r, size_t i)
{
	uint64_t v = 0;
	if (r->len >= 8 * i + 8) memcpy(&v, r->data + 8 * i, 8);
	return v;
}

uint8_t *gx_begin(uint32_t op, uint32_t slot, size_t payload, cl_int *err); /* locks the ring; NULL and *err on failure */
void gx_commit(void);
cl_int gx_slot_take(uint32_t *slot);
void gx_slot_drop(uint32_t slot);
cl_int gx_wait(uint32_t op, uint32_t slot, struct gx_reply *r); /* waits, frees the slot */
struct alive { uint64_t since, suspended; };
bool gx_alive(struct alive *a); /* call it after 100 ms without progress; false: the session is lost */
void gx_flush_doorbell(void);
static inline cl_int gx_lost_error(uint32_t op)
{
	return op == GX_CREATE_CONTEXT || op == GX_SESSION_INFO || op == GX_CREATE_SUB_DEVICES ? CL_DEVICE_NOT_AVAILABLE : CL_OUT_OF_RESOURCES;
}

/* post_x(m) sends without waiting, call_x(m, reply or NULL) waits for the error and, if a reply is given and the error
 * is CL_SUCCESS, its data, which the caller frees. */
#define GX_SEND(name, NAME) \
	static inline cl_int send_##name(uint32_t slot, const struct gx_##name *m) \
	{ \
		cl_int err = CL_SUCCESS; \
		uint8_t *p = gx_begin(NAME, slot, gx_size_##name(m), &err); \
		if (unlikely(!p)) return err; \
		gx_put_##name(p, m); \
		gx_commit(); \
		return CL_SUCCESS; \
	} \
	static inline cl_int post_##name(const struct gx_##name *m) { return send_##name(GX_NO_SLOT, m); } \
	static inline cl_int call_##name(const struct gx_##name *m, struct gx_reply *r) \
	{ \
		uint32_t slot; \
		TRY(gx_slot_take(&slot)); \
		cl_int err = send_##name(slot, m); \
		if (unlikely(err)) { gx_slot_drop(slot); return err; } \
		return gx_wait(NAME, slot, r); \
	}
GX_OPERATIONS(GX_SEND)

static inline _Atomic uint32_t *gx_word(uint64_t off) { return (_Atomic uint32_t *)(void *)(S.ring + off); }
static inline _Atomic uint64_t *gx_word64(uint64_t off) { return (_Atomic uint64_t *)(void *)(S.ring + off); }
static inline _Atomic uint32_t *gx_slot_word(uint32_t slot, uint32_t field)
{
	return gx_word(GX_SLOT_OFF + (uint64_t)slot * GX_SLOT_SIZE + field);
}

/* ---- output.c: the output of kernels. gx_output writes it to standard output. If all is true, it writes everything
 * that is there before it returns; otherwise it writes only what it can write without waiting. */
void gx_output_slow(bool all);
static inline void gx_output(bool all)
{
	if (unlikely(atomic_load_explicit(gx_word(GX_HDR_OUT_TAIL), memory_order_relaxed) !=
		     atomic_load_explicit(gx_word(GX_HDR_OUT_HEAD), memory_order_relaxed)))
		gx_output_slow(all);
}

int gx_futex_wait(_Atomic uint32_t *w, uint32_t seen, unsigned ms); /* shared between processes; 0: woken or changed; 1: timeout or signal, so check whether the executor lives */
void gx_futex_wake(_Atomic uint32_t *w, int n);
uint64_t gx_now(void); /* ns */
static inline void gx_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

/* ---- staging.c: the client's part of the arena, and transfers in progress */
struct layout { uint8_t *host; uint64_t row, slice; uint64_t width, height, depth; }; /* bytes, rows, slices */
uint64_t gx_stage_window(uint64_t len); /* arena offset in the window, 0 when there is no room */
void gx_stage_free(uint64_t off, uint64_t len);
bool gx_in_arena(const void *p, uint64_t len, uint64_t *off);
void gx_pack(uint8_t *tight, const struct layout *l);
void gx_unpack(const struct layout *l, const uint8_t *tight);
static inline uint64_t gx_layout_bytes(const struct layout *l) { return l->width * l->height * l->depth; }
cl_int gx_pend_add(const struct layout *read, uint64_t off, uint64_t len, uint32_t *word); /* read NULL: only free the memory when done; len 0: there is none to free */
void gx_pend_cancel(uint32_t word); /* the request was never sent */
cl_int gx_pend_map(cl_mem mem, const struct map *m, cl_event ev);
bool gx_pend_forget(cl_mem mem, uint32_t map); /* reports whether it was not complete */
bool gx_pend_outlast(cl_mem mem);
/* Maps of regions in the arena. Nothing is copied there, but until a map has run, the content is older. */
cl_int gx_map_await(cl_command_queue q, cl_mem mem, const struct map *m, cl_event ev); /* ev NULL: the application has none */
bool gx_map_comes(const struct layout *l); /* a map that has not run, as far as is known, brings content to this memory */
void gx_map_known(cl_mem mem, uint32_t map); /* nobody asks for it any more; map 0: all of mem */
uint64_t gx_map_stamp(void);
void gx_maps_ran(cl_command_queue q, uint64_t stamp); /* those that the queue had at the time of the stamp */
void gx_maps_orphan(cl_command_queue q); /* the queue is no more */
struct layout gx_map_layout(const struct map *m); /* where the application sees it */
void gx_map_in(const struct map *m);
void gx_map_out(const struct map *m);
bool gx_content_apart(uint64_t size); /* whether an object's first content of that size is written after the object is created */
cl_int gx_content(cl_mem m, const void *host, size_t row, size_t slice);
cl_int gx_stage_wait(uint64_t len, uint64_t *off); /* not only in the window; waits for transfers in progress */
bool gx_pend_reads(const struct layout *l, bool copied); /* a transfer or a map in progress reads into this memory; copied: and its data is still to be copied there */
bool gx_pend_brings(const struct layout *l); /* a transfer in progress, other than a map, reads into this memory */
static inline bool gx_layouts_meet(const struct layout *a, const struct layout *b)
{
	const uint8_t *a1 = a->host + (a->depth - 1) * a->slice + (a->height - 1) * a->row + a->width;
	const uint8_t *b1 = b->host + (b->depth - 1) * b->slice + (b->height - 1) * b->row + b->width;
	return a->host < b1 && b->host < a1;
}
cl_int gx_word_wait(uint32_t *word);
void gx_word_drop(uint32_t word);
void gx_reap_slow(unsigned max);
void gx_staging_reset(void);
/* gx_reap copies data that has arrived. Every call that can tell the application that a command is complete calls
 * gx_reap before it returns. */
static inline void gx_reap(void)
{
	if (unlikely(atomic_load_explicit(&S.npending, memory_order_acquire)))
		gx_reap_slow(~0u);
}

/* ---- move.c: bulk transfers */
void gx_moves_reset(void);
uint64_t gx_lanes_at(void); /* arena offset of the lanes' memory */
uint64_t gx_lanes_end(void);
cl_int gx_move_add(const struct layout *l, bool write, bool reap, bool blocking, uint32_t *word);
bool gx_move_reads(const struct layout *l); /* a transfer in progress reads into this memory */
bool gx_move_uses(const struct layout *l); /* or sends it */
void gx_move_drop(uint32_t word);
cl_int gx_move_wait(uint32_t op, uint32_t slot, uint32_t word);

/* ---- callbacks.c */
enum gx_cb { CBK_EVENT = 1, CBK_BUILD, CBK_MEM, CBK_MAP };
uint32_t gx_cb_add(enum gx_cb kind, void *obj, void *fn, void *user, int32_t type); /* token, 0 on failure */
void gx_cb_drop(uint32_t token);
void gx_cb_local(uint32_t token, int32_t status); /* deliver without the executor */
void gx_callbacks_reset(void);
bool gx_notify_push(struct notify **list, void *fn, void *user);

/* ---- helpers */
cl_int gx_info(const void *src, size_t len, size_t cap, void *dst, size_t *ret);
#define INFO(type, val) do { type v_ = (val); return gx_info(&v_, sizeof v_, size, value, size_ret); } while (0)
#define INFO_ARGS size_t size, void *value, size_t *size_ret
cl_int gx_reply_info(struct gx_reply *r, size_t cap, void *dst, size_t *ret); /* frees r */
#define FAIL(e) do { if (errcode_ret) *errcode_ret = (e); return NULL; } while (0)
#define DONE(h) do { if (errcode_ret) *errcode_ret = CL_SUCCESS; return (h); } while (0)
void gx_devices_reset(void);
void gx_objects_reset(void);
cl_int gx_devices_load(struct gx_reply *r);
cl_int gx_device_param(cl_device_id d, uint32_t name, const void **data, size_t *len);
bool gx_ctx_has(cl_context c, cl_device_id d);

/* destroy functions, called when the last link is gone */
void gx_device_destroy(struct obj *o);
void gx_context_destroy(struct obj *o);
void gx_queue_destroy(struct obj *o);
void gx_mem_destroy(struct obj *o);
void gx_sampler_destroy(struct obj *o);
void gx_program_destroy(struct obj *o);

/* gx_files are files that a program includes: include.c. n is 0 if there are none. */
struct gx_files { uint32_t n, nnames; cl_program *programs; uint32_t *ids; char *names; };
cl_int gx_files_find(cl_program p, const char *options, cl_uint nheaders, const cl_program *headers, struct gx_files *f);
void gx_files_drop(struct gx_files *f);
void gx_kernel_destroy(struct obj *o);
void gx_event_destroy(struct obj *o);

/* ---- commands */
struct cmd { /* the state that all enqueue calls share */
	cl_command_queue q;
	uint32_t *wait, nwait;
	uint32_t hidden[16], nhidden; /* markers that replace parts of very long wait lists */
	cl_event ev;
	uint32_t id;
	uint64_t maps; /* stamp of those before it */
	uint32_t inline_wait[64];
};
cl_int gx_cmd_check(struct cmd *c, cl_command_queue q, cl_uint n, const cl_event *list);
cl_int gx_cmd_event(struct cmd *c, cl_command_type type, bool wanted);
cl_int gx_cmd_end(struct cmd *c, cl_int err, cl_event *out, bool complete);
cl_event gx_event_new(cl_context ctx, cl_command_queue q, cl_command_type type);
cl_int gx_event_poll(cl_event e, int32_t *status);
cl_int gx_mem_flags(cl_mem_flags f);
cl_int gx_mem_inherit(cl_mem parent, cl_mem_flags *flags, bool host_flags);
cl_int gx_mem_for_queue(cl_mem m, cl_command_queue q, bool image);
static inline cl_mem gx_root(cl_mem m) { while (m->parent) m = m->parent; return m; }
bool gx_overlap(uint64_t a, uint64_t b, uint64_t size);
cl_int gx_rect_check(const size_t *origin, const size_t *region, uint64_t *row, uint64_t *slice, uint64_t size);
cl_int gx_img_region(cl_mem m, const size_t *origin, const size_t *region);
#endif
