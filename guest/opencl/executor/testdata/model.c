/*
 * model: an OpenCL runtime for fuzzing. It has buffers and images and moves their bytes at once, in the caller's
 * thread; kernels do nothing. It compiles nothing: what a kernel's arguments are, its name says, one letter each.
 * Fast, always the same, and it aborts where a driver would overrun: on memory that begins in the arena
 * (GPUCTL_MODEL_ARENA, "begin size" in hexadecimal) and ends outside, and on objects that are no longer there.
 */
#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#define CL_USE_DEPRECATED_OPENCL_2_0_APIS
#include <CL/cl_icd.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind { PLATFORM = 0x6d6f6431, DEVICE, CONTEXT, QUEUE, MEM, SAMPLER, PROGRAM, KERNEL, EVENT };

struct _cl_platform_id {
	const cl_icd_dispatch *dispatch;
	enum kind kind;
	int refs;
	struct _cl_platform_id *up, *ctx; /* parent; context */
	unsigned char *bytes; /* of memory */
	size_t size, elem, w, h, d;
	cl_image_format format;
	char text[256]; /* name, options */
	cl_int status;
	unsigned args, set;
};
typedef struct _cl_platform_id obj;

enum { MAX_ALLOC = 1 << 20, MAX_LIVE = 1 << 16 };

static cl_icd_dispatch table;
static obj platform = {.dispatch = &table, .kind = PLATFORM}, device = {.dispatch = &table, .kind = DEVICE};
static uint64_t now;

/* Objects are not given back to malloc at once: a handle that is used too late must be seen. */
static obj *graves[4096];
static unsigned grave;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void die(const char *why)
{
	fprintf(stderr, "model: %s\n", why);
	abort();
}

static void check(const void *p, enum kind k)
{
	if (((const obj *)p)->kind != k)
		die("an object that is none of its kind, or no more");
}

static obj *make(enum kind k, obj *up, obj *ctx)
{
	obj *o = calloc(1, sizeof *o);
	if (!o)
		abort();
	o->dispatch = &table, o->kind = k, o->refs = 1, o->up = up, o->ctx = ctx;
	if (up)
		__atomic_add_fetch(&up->refs, 1, __ATOMIC_RELAXED);
	if (ctx && ctx != up)
		__atomic_add_fetch(&ctx->refs, 1, __ATOMIC_RELAXED);
	return o;
}

static cl_int drop(void *p, enum kind k)
{
	obj *o = p;
	check(o, k);
	if (o == &device || __atomic_sub_fetch(&o->refs, 1, __ATOMIC_ACQ_REL))
		return CL_SUCCESS;
	obj *up = o->up, *ctx = o->ctx;
	if (k == MEM && !(up && up->kind == MEM))
		free(o->bytes);
	o->kind = 0;
	pthread_mutex_lock(&lock);
	unsigned i = grave++ % 4096;
	free(graves[i]);
	graves[i] = o;
	pthread_mutex_unlock(&lock);
	if (up)
		drop(up, up->kind);
	if (ctx && ctx != up)
		drop(ctx, ctx->kind);
	return CL_SUCCESS;
}

#define REFS(Name, KIND, type) \
	static cl_int CL_API_CALL retain##Name(type o) { check(o, KIND); __atomic_add_fetch(&((obj *)o)->refs, 1, __ATOMIC_RELAXED); return CL_SUCCESS; } \
	static cl_int CL_API_CALL release##Name(type o) { return drop(o, KIND); }
REFS(Context, CONTEXT, cl_context)
REFS(Queue, QUEUE, cl_command_queue)
REFS(Mem, MEM, cl_mem)
REFS(Sampler, SAMPLER, cl_sampler)
REFS(Program, PROGRAM, cl_program)
REFS(Kernel, KERNEL, cl_kernel)
REFS(Event, EVENT, cl_event)
REFS(Device, DEVICE, cl_device_id)

#define ERR(e) do { if (err) *err = (e); return NULL; } while (0)
#define OK(o) do { if (err) *err = CL_SUCCESS; return (void *)(o); } while (0)

static cl_int put(const void *v, size_t n, size_t size, void *out, size_t *ret)
{
	if (ret)
		*ret = n;
	if (!out)
		return CL_SUCCESS;
	if (size < n)
		return CL_INVALID_VALUE;
	memcpy(out, v, n);
	return CL_SUCCESS;
}
#define PUT(type, v) do { type x_ = (v); return put(&x_, sizeof x_, size, out, ret); } while (0)
#define TEXT(s) return put((s), strlen(s) + 1, size, out, ret)
#define INFO cl_uint p, size_t size, void *out, size_t *ret

static cl_int CL_API_CALL platform_info(cl_platform_id f, INFO)
{
	check(f, PLATFORM);
	switch (p) {
	case CL_PLATFORM_VERSION: TEXT("OpenCL 1.2 model");
	case CL_PLATFORM_NAME: TEXT("model");
	case CL_PLATFORM_VENDOR: TEXT("gpuctl");
	case CL_PLATFORM_PROFILE: TEXT("FULL_PROFILE");
	}
	TEXT("");
}

static cl_int CL_API_CALL device_ids(cl_platform_id f, cl_device_type t, cl_uint n, cl_device_id *d, cl_uint *count)
{
	(void)t;
	check(f, PLATFORM);
	if (count)
		*count = 1;
	if (n && d)
		d[0] = (cl_device_id)&device;
	return CL_SUCCESS;
}

static cl_int CL_API_CALL device_info(cl_device_id d, INFO)
{
	check(d, DEVICE);
	size_t three[3] = {256, 256, 256};
	switch (p) {
	case CL_DEVICE_PLATFORM: PUT(cl_platform_id, &platform);
	case CL_DEVICE_TYPE: PUT(cl_device_type, CL_DEVICE_TYPE_GPU);
	case CL_DEVICE_GLOBAL_MEM_SIZE: PUT(cl_ulong, 8 * MAX_ALLOC);
	case CL_DEVICE_MAX_MEM_ALLOC_SIZE: PUT(cl_ulong, MAX_ALLOC);
	case CL_DEVICE_LOCAL_MEM_SIZE: PUT(cl_ulong, 32 << 10);
	case CL_DEVICE_MAX_WORK_GROUP_SIZE: PUT(size_t, 256);
	case CL_DEVICE_MAX_WORK_ITEM_DIMENSIONS: PUT(cl_uint, 3);
	case CL_DEVICE_MAX_WORK_ITEM_SIZES: return put(three, sizeof three, size, out, ret);
	case CL_DEVICE_ADDRESS_BITS: PUT(cl_uint, 64);
	case CL_DEVICE_IMAGE_SUPPORT: case CL_DEVICE_AVAILABLE: case CL_DEVICE_COMPILER_AVAILABLE: PUT(cl_bool, CL_TRUE);
	case CL_DEVICE_MEM_BASE_ADDR_ALIGN: PUT(cl_uint, 1024);
	case CL_DEVICE_IMAGE2D_MAX_WIDTH: case CL_DEVICE_IMAGE2D_MAX_HEIGHT: PUT(size_t, 4096);
	case CL_DEVICE_HOST_UNIFIED_MEMORY: PUT(cl_bool, CL_FALSE);
	case CL_DEVICE_MAX_COMPUTE_UNITS: PUT(cl_uint, 1);
	case CL_DEVICE_NAME: case CL_DEVICE_VENDOR: case CL_DRIVER_VERSION: TEXT("model");
	case CL_DEVICE_VERSION: TEXT("OpenCL 1.2 model");
	case CL_DEVICE_OPENCL_C_VERSION: TEXT("OpenCL C 1.2 model");
	case CL_DEVICE_PROFILE: TEXT("FULL_PROFILE");
	case CL_DEVICE_EXTENSIONS: TEXT("");
	}
	return CL_INVALID_VALUE;
}

static cl_int CL_API_CALL sub_devices(cl_device_id d, const cl_device_partition_property *props, cl_uint n, cl_device_id *out, cl_uint *count)
{
	check(d, DEVICE);
	if (props[0] != CL_DEVICE_PARTITION_EQUALLY)
		return CL_INVALID_VALUE;
	if (count)
		*count = 2;
	for (cl_uint i = 0; out && i < n && i < 2; i++)
		out[i] = (cl_device_id)make(DEVICE, (obj *)d, NULL);
	return CL_SUCCESS;
}

static cl_context CL_API_CALL create_context(const cl_context_properties *props, cl_uint n, const cl_device_id *ds, void(CL_CALLBACK *f)(const char *, const void *, size_t, void *), void *u, cl_int *err)
{
	(void)props, (void)f, (void)u;
	for (cl_uint i = 0; i < n; i++)
		check(ds[i], DEVICE);
	OK(make(CONTEXT, n ? (obj *)ds[0] : NULL, NULL));
}

static cl_command_queue CL_API_CALL create_queue(cl_context c, cl_device_id d, cl_command_queue_properties props, cl_int *err)
{
	check(c, CONTEXT), check(d, DEVICE);
	if (props & ~(cl_command_queue_properties)3)
		ERR(CL_INVALID_VALUE);
	OK(make(QUEUE, (obj *)d, (obj *)c));
}

static cl_mem CL_API_CALL create_buffer(cl_context c, cl_mem_flags flags, size_t n, void *host, cl_int *err)
{
	(void)flags, (void)host;
	check(c, CONTEXT);
	if (n == 0 || n > 16 * (size_t)MAX_ALLOC)
		ERR(CL_INVALID_BUFFER_SIZE);
	obj *o = make(MEM, NULL, (obj *)c);
	o->size = n;
	o->bytes = calloc(1, n);
	if (!o->bytes)
		abort();
	OK(o);
}

static cl_mem CL_API_CALL create_sub(cl_mem m, cl_mem_flags flags, cl_buffer_create_type t, const void *info, cl_int *err)
{
	(void)flags, (void)t;
	check(m, MEM);
	const cl_buffer_region *r = info;
	obj *up = (obj *)m;
	if (up->elem || (up->up && up->up->kind == MEM) || r->size == 0 || r->origin > up->size || r->size > up->size - r->origin)
		ERR(CL_INVALID_VALUE);
	if (r->origin % 128)
		ERR(CL_MISALIGNED_SUB_BUFFER_OFFSET);
	obj *o = make(MEM, up, up->ctx);
	o->size = r->size;
	o->bytes = up->bytes + r->origin;
	OK(o);
}

static cl_mem CL_API_CALL create_image(cl_context c, cl_mem_flags flags, const cl_image_format *f, const cl_image_desc *d, void *host, cl_int *err)
{
	(void)flags, (void)host;
	check(c, CONTEXT);
	size_t elem = f->image_channel_order == CL_RGBA ? 4 : f->image_channel_order == CL_R ? 1 : 0;
	if (f->image_channel_data_type == CL_FLOAT)
		elem *= 4;
	else if (f->image_channel_data_type != CL_UNORM_INT8)
		elem = 0;
	if (!elem)
		ERR(CL_IMAGE_FORMAT_NOT_SUPPORTED);
	size_t w = d->image_width, h = 1, z = 1;
	switch (d->image_type) {
	case CL_MEM_OBJECT_IMAGE1D: case CL_MEM_OBJECT_IMAGE1D_BUFFER: break;
	case CL_MEM_OBJECT_IMAGE1D_ARRAY: h = d->image_array_size; break;
	case CL_MEM_OBJECT_IMAGE2D: h = d->image_height; break;
	case CL_MEM_OBJECT_IMAGE2D_ARRAY: h = d->image_height, z = d->image_array_size; break;
	case CL_MEM_OBJECT_IMAGE3D: h = d->image_height, z = d->image_depth; break;
	default: ERR(CL_INVALID_IMAGE_DESCRIPTOR);
	}
	if (!w || !h || !z || w > 4096 || h > 4096 || z > 64 || w * h * z * elem > MAX_ALLOC)
		ERR(CL_INVALID_IMAGE_SIZE);
	obj *up = NULL;
	if (d->mem_object) {
		check(d->mem_object, MEM);
		up = (obj *)d->mem_object;
		if (up->elem ? d->image_type != CL_MEM_OBJECT_IMAGE2D || up->elem != elem || up->w != w || up->h != h || up->d != 1
			     : w * h * z * elem > up->size || d->image_row_pitch > w * elem)
			ERR(CL_INVALID_IMAGE_DESCRIPTOR);
	} else if (d->image_row_pitch || d->image_slice_pitch || d->image_type == CL_MEM_OBJECT_IMAGE1D_BUFFER)
		ERR(CL_INVALID_IMAGE_DESCRIPTOR);
	obj *o = make(MEM, up, (obj *)c);
	o->elem = elem, o->w = w, o->h = h, o->d = z, o->format = *f;
	o->size = w * h * z * elem;
	o->bytes = up ? up->bytes : calloc(1, o->size);
	OK(o);
}

static cl_int CL_API_CALL image_formats(cl_context c, cl_mem_flags flags, cl_mem_object_type t, cl_uint n, cl_image_format *f, cl_uint *count)
{
	(void)flags, (void)t;
	check(c, CONTEXT);
	if (count)
		*count = 1;
	if (n && f)
		*f = (cl_image_format){CL_RGBA, CL_UNORM_INT8};
	return CL_SUCCESS;
}

static cl_int CL_API_CALL image_info(cl_mem m, INFO)
{
	check(m, MEM);
	if (!((obj *)m)->elem)
		return CL_INVALID_MEM_OBJECT;
	if (p == CL_IMAGE_ELEMENT_SIZE)
		PUT(size_t, ((obj *)m)->elem);
	return CL_INVALID_VALUE;
}

static cl_sampler CL_API_CALL create_sampler(cl_context c, cl_bool n, cl_addressing_mode a, cl_filter_mode f, cl_int *err)
{
	(void)n, (void)a, (void)f;
	check(c, CONTEXT);
	OK(make(SAMPLER, NULL, (obj *)c));
}

static cl_program CL_API_CALL create_source(cl_context c, cl_uint n, const char **s, const size_t *len, cl_int *err)
{
	(void)n, (void)s, (void)len;
	check(c, CONTEXT);
	OK(make(PROGRAM, NULL, (obj *)c));
}

static cl_int build(cl_program p, cl_uint n, const cl_device_id *ds, const char *options)
{
	obj *o = (obj *)p;
	check(o, PROGRAM);
	for (cl_uint i = 0; i < n; i++)
		check(ds[i], DEVICE);
	snprintf(o->text, sizeof o->text, "%s", options ? options : "");
	o->status = strstr(o->text, "-bad") ? CL_BUILD_ERROR : CL_BUILD_SUCCESS;
	return o->status ? CL_BUILD_PROGRAM_FAILURE : CL_SUCCESS;
}

static cl_int CL_API_CALL build_program(cl_program p, cl_uint n, const cl_device_id *ds, const char *options, void(CL_CALLBACK *f)(cl_program, void *), void *u)
{
	(void)f, (void)u;
	return build(p, n, ds, options);
}

static cl_int CL_API_CALL compile_program(cl_program p, cl_uint n, const cl_device_id *ds, const char *options, cl_uint nh, const cl_program *hs, const char **names, void(CL_CALLBACK *f)(cl_program, void *), void *u)
{
	(void)f, (void)u, (void)names;
	for (cl_uint i = 0; i < nh; i++)
		check(hs[i], PROGRAM);
	return build(p, n, ds, options) ? CL_COMPILE_PROGRAM_FAILURE : CL_SUCCESS;
}

static cl_program CL_API_CALL link_program(cl_context c, cl_uint n, const cl_device_id *ds, const char *options, cl_uint ni, const cl_program *in, void(CL_CALLBACK *f)(cl_program, void *), void *u, cl_int *err)
{
	(void)f, (void)u;
	check(c, CONTEXT);
	for (cl_uint i = 0; i < ni; i++)
		check(in[i], PROGRAM);
	obj *o = make(PROGRAM, NULL, (obj *)c);
	build((cl_program)o, n, ds, options);
	OK(o);
}

static cl_int CL_API_CALL build_info(cl_program q, cl_device_id d, INFO)
{
	obj *o = (obj *)q;
	check(o, PROGRAM), check(d, DEVICE);
	switch (p) {
	case CL_PROGRAM_BUILD_STATUS: PUT(cl_build_status, o->status);
	case CL_PROGRAM_BUILD_OPTIONS: TEXT(o->text);
	case CL_PROGRAM_BUILD_LOG: TEXT("log");
	case CL_PROGRAM_BINARY_TYPE: PUT(cl_program_binary_type, CL_PROGRAM_BINARY_TYPE_EXECUTABLE);
	}
	return CL_INVALID_VALUE;
}

static cl_int CL_API_CALL program_info(cl_program q, INFO)
{
	check(q, PROGRAM);
	switch (p) {
	case CL_PROGRAM_NUM_KERNELS: PUT(size_t, 1);
	case CL_PROGRAM_KERNEL_NAMES: TEXT("mp");
	case CL_PROGRAM_NUM_DEVICES: PUT(cl_uint, 1);
	}
	return CL_INVALID_VALUE;
}

/* m memory, l local, i image, s sampler, p four bytes */
static cl_kernel CL_API_CALL create_kernel(cl_program p, const char *name, cl_int *err)
{
	check(p, PROGRAM);
	if (strlen(name) > 8 || strspn(name, "mlisp") != strlen(name))
		ERR(CL_INVALID_KERNEL_NAME);
	obj *o = make(KERNEL, (obj *)p, NULL);
	strcpy(o->text, name);
	o->args = (unsigned)strlen(name);
	OK(o);
}

static cl_int CL_API_CALL kernel_info(cl_kernel k, INFO)
{
	check(k, KERNEL);
	switch (p) {
	case CL_KERNEL_FUNCTION_NAME: TEXT(((obj *)k)->text);
	case CL_KERNEL_NUM_ARGS: PUT(cl_uint, ((obj *)k)->args);
	case CL_KERNEL_ATTRIBUTES: TEXT("");
	}
	return CL_INVALID_VALUE;
}

static cl_int CL_API_CALL arg_info(cl_kernel k, cl_uint i, INFO)
{
	obj *o = (obj *)k;
	check(o, KERNEL);
	if (i >= o->args)
		return CL_INVALID_ARG_INDEX;
	char c = o->text[i];
	switch (p) {
	case CL_KERNEL_ARG_ADDRESS_QUALIFIER:
		PUT(cl_kernel_arg_address_qualifier, c == 'm' || c == 'i' ? CL_KERNEL_ARG_ADDRESS_GLOBAL : c == 'l' ? CL_KERNEL_ARG_ADDRESS_LOCAL : CL_KERNEL_ARG_ADDRESS_PRIVATE);
	case CL_KERNEL_ARG_ACCESS_QUALIFIER:
		PUT(cl_kernel_arg_access_qualifier, c == 'i' ? CL_KERNEL_ARG_ACCESS_WRITE_ONLY : CL_KERNEL_ARG_ACCESS_NONE);
	case CL_KERNEL_ARG_TYPE_QUALIFIER: PUT(cl_kernel_arg_type_qualifier, 0);
	case CL_KERNEL_ARG_TYPE_NAME: TEXT(c == 'm' || c == 'l' ? "uint*" : c == 'i' ? "image2d_t" : c == 's' ? "sampler_t" : "uint");
	case CL_KERNEL_ARG_NAME: TEXT("a");
	}
	return CL_INVALID_VALUE;
}

static cl_int CL_API_CALL wg_info(cl_kernel k, cl_device_id d, INFO)
{
	check(k, KERNEL);
	if (d)
		check(d, DEVICE);
	if (p == CL_KERNEL_WORK_GROUP_SIZE || p == CL_KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE)
		PUT(size_t, 256);
	if (p == CL_KERNEL_LOCAL_MEM_SIZE || p == CL_KERNEL_PRIVATE_MEM_SIZE)
		PUT(cl_ulong, 0);
	return CL_INVALID_VALUE;
}

/* A driver takes eight bytes for a handle: ours must be one. */
static cl_int CL_API_CALL set_arg(cl_kernel k, cl_uint i, size_t n, const void *v)
{
	obj *o = (obj *)k, *h = NULL;
	check(o, KERNEL);
	if (i >= o->args)
		return CL_INVALID_ARG_INDEX;
	switch (o->text[i]) {
	case 'm': case 'i': case 's':
		if (n != 8)
			return CL_INVALID_ARG_SIZE;
		if (v)
			memcpy(&h, v, 8);
		if (h)
			check(h, o->text[i] == 's' ? SAMPLER : MEM);
		break;
	case 'l':
		if (!n || v)
			return CL_INVALID_ARG_SIZE;
		break;
	default:
		if (n != 4 || !v)
			return CL_INVALID_ARG_SIZE;
	}
	o->set |= 1u << i;
	return CL_SUCCESS;
}

/* ---- commands */

#define WAIT cl_uint nw, const cl_event *ws, cl_event *ev
#define BEGIN check(q, QUEUE); for (cl_uint i_ = 0; i_ < nw; i_++) check(ws[i_], EVENT)

static cl_int done(cl_command_queue q, cl_event *ev)
{
	if (ev)
		*ev = (cl_event)make(EVENT, NULL, ((obj *)q)->ctx);
	return CL_SUCCESS;
}

static void host(const void *p, size_t n)
{
	const char *s = getenv("GPUCTL_MODEL_ARENA");
	unsigned long arena_begin, arena_size;
	if (!s || sscanf(s, "%lx %lx", &arena_begin, &arena_size) != 2)
		abort();
	uintptr_t at = (uintptr_t)p - arena_begin;
	if (at < arena_size && n > arena_size - at)
		die("memory that ends behind the arena");
}

static int inside(const obj *m, size_t off, size_t n) { return n && off <= m->size && n <= m->size - off; }

static cl_int CL_API_CALL read_buffer(cl_command_queue q, cl_mem m, cl_bool b, size_t off, size_t n, void *p, WAIT)
{
	(void)b;
	BEGIN;
	check(m, MEM);
	if (!inside((obj *)m, off, n) || !p)
		return CL_INVALID_VALUE;
	host(p, n);
	memcpy(p, ((obj *)m)->bytes + off, n);
	return done(q, ev);
}

static cl_int CL_API_CALL write_buffer(cl_command_queue q, cl_mem m, cl_bool b, size_t off, size_t n, const void *p, WAIT)
{
	(void)b;
	BEGIN;
	check(m, MEM);
	if (!inside((obj *)m, off, n) || !p)
		return CL_INVALID_VALUE;
	host(p, n);
	memcpy(((obj *)m)->bytes + off, p, n);
	return done(q, ev);
}

/* The last byte that a rectangle reaches, or 0 if it is none. */
static size_t reach(const size_t *o, const size_t *r, size_t row, size_t slice)
{
	__uint128_t most = (__uint128_t)1 << 40;
	if (!r[0] || !r[1] || !r[2])
		return 0;
	if (!row)
		row = r[0];
	if (!slice)
		slice = row * r[1];
	__uint128_t end = ((__uint128_t)o[2] + r[2] - 1) * slice + ((__uint128_t)o[1] + r[1] - 1) * row + o[0] + r[0];
	return row < r[0] || end > most ? 0 : (size_t)end;
}

static cl_int rect(cl_command_queue q, cl_mem m, const size_t *bo, const size_t *ho, const size_t *r, size_t br, size_t bs, size_t hr, size_t hs, unsigned char *p, int out, cl_event *ev)
{
	obj *o = (obj *)m;
	check(o, MEM);
	size_t b = reach(bo, r, br, bs), h = reach(ho, r, hr, hs);
	if (!b || !h || b > o->size || !p)
		return CL_INVALID_VALUE;
	host(p, h);
	if (!br)
		br = r[0];
	if (!bs)
		bs = br * r[1];
	if (!hr)
		hr = r[0];
	if (!hs)
		hs = hr * r[1];
	for (size_t z = 0; z < r[2]; z++)
		for (size_t y = 0; y < r[1]; y++) {
			unsigned char *x = o->bytes + (bo[2] + z) * bs + (bo[1] + y) * br + bo[0];
			unsigned char *u = p + (ho[2] + z) * hs + (ho[1] + y) * hr + ho[0];
			if (out)
				memcpy(u, x, r[0]);
			else
				memcpy(x, u, r[0]);
		}
	return done(q, ev);
}

static cl_int CL_API_CALL read_rect(cl_command_queue q, cl_mem m, cl_bool b, const size_t *bo, const size_t *ho, const size_t *r, size_t br, size_t bs, size_t hr, size_t hs, void *p, WAIT)
{
	(void)b;
	BEGIN;
	return rect(q, m, bo, ho, r, br, bs, hr, hs, p, 1, ev);
}

static cl_int CL_API_CALL write_rect(cl_command_queue q, cl_mem m, cl_bool b, const size_t *bo, const size_t *ho, const size_t *r, size_t br, size_t bs, size_t hr, size_t hs, const void *p, WAIT)
{
	(void)b;
	BEGIN;
	return rect(q, m, bo, ho, r, br, bs, hr, hs, (void *)(uintptr_t)p, 0, ev);
}

static cl_int CL_API_CALL copy_buffer(cl_command_queue q, cl_mem s, cl_mem d, size_t so, size_t to, size_t n, WAIT)
{
	BEGIN;
	check(s, MEM), check(d, MEM);
	if (!inside((obj *)s, so, n) || !inside((obj *)d, to, n))
		return CL_INVALID_VALUE;
	memmove(((obj *)d)->bytes + to, ((obj *)s)->bytes + so, n);
	return done(q, ev);
}

static cl_int CL_API_CALL copy_rect(cl_command_queue q, cl_mem s, cl_mem d, const size_t *so, const size_t *to, const size_t *r, size_t sr, size_t ss, size_t dr, size_t ds, WAIT)
{
	BEGIN;
	check(s, MEM), check(d, MEM);
	size_t a = reach(so, r, sr, ss), b = reach(to, r, dr, ds);
	if (!a || !b || a > ((obj *)s)->size || b > ((obj *)d)->size)
		return CL_INVALID_VALUE;
	return done(q, ev);
}

static cl_int CL_API_CALL fill_buffer(cl_command_queue q, cl_mem m, const void *pat, size_t np, size_t off, size_t n, WAIT)
{
	BEGIN;
	check(m, MEM);
	if (!inside((obj *)m, off, n) || !np || np > 128 || np & (np - 1) || off % np || n % np)
		return CL_INVALID_VALUE;
	for (size_t i = 0; i < n; i += np)
		memcpy(((obj *)m)->bytes + off + i, pat, np);
	return done(q, ev);
}

static int in_image(const obj *m, const size_t *o, const size_t *r)
{
	return m->elem && r[0] && r[1] && r[2] && o[0] <= m->w && r[0] <= m->w - o[0] && o[1] <= m->h && r[1] <= m->h - o[1] && o[2] <= m->d && r[2] <= m->d - o[2];
}

static cl_int image(cl_command_queue q, cl_mem m, const size_t *o, const size_t *r, size_t row, size_t slice, unsigned char *p, int out, cl_event *ev)
{
	obj *x = (obj *)m;
	check(x, MEM);
	if (!in_image(x, o, r) || !p)
		return CL_INVALID_VALUE;
	if (!row)
		row = r[0] * x->elem;
	if (!slice)
		slice = row * r[1];
	if (row < r[0] * x->elem || row > 1 << 20 || slice < row * r[1] || slice > 1 << 24)
		return CL_INVALID_VALUE;
	host(p, slice * (r[2] - 1) + row * (r[1] - 1) + r[0] * x->elem);
	for (size_t z = 0; z < r[2]; z++)
		for (size_t y = 0; y < r[1]; y++) {
			unsigned char *a = x->bytes + (((o[2] + z) * x->h + o[1] + y) * x->w + o[0]) * x->elem;
			unsigned char *b = p + z * slice + y * row;
			if (out)
				memcpy(b, a, r[0] * x->elem);
			else
				memcpy(a, b, r[0] * x->elem);
		}
	return done(q, ev);
}

static cl_int CL_API_CALL read_image(cl_command_queue q, cl_mem m, cl_bool b, const size_t *o, const size_t *r, size_t row, size_t slice, void *p, WAIT)
{
	(void)b;
	BEGIN;
	return image(q, m, o, r, row, slice, p, 1, ev);
}

static cl_int CL_API_CALL write_image(cl_command_queue q, cl_mem m, cl_bool b, const size_t *o, const size_t *r, size_t row, size_t slice, const void *p, WAIT)
{
	(void)b;
	BEGIN;
	return image(q, m, o, r, row, slice, (void *)(uintptr_t)p, 0, ev);
}

static cl_int CL_API_CALL copy_image(cl_command_queue q, cl_mem s, cl_mem d, const size_t *so, const size_t *to, const size_t *r, WAIT)
{
	BEGIN;
	check(s, MEM), check(d, MEM);
	return in_image((obj *)s, so, r) && in_image((obj *)d, to, r) ? done(q, ev) : CL_INVALID_VALUE;
}

static cl_int CL_API_CALL fill_image(cl_command_queue q, cl_mem m, const void *color, const size_t *o, const size_t *r, WAIT)
{
	BEGIN;
	unsigned char c[16];
	memcpy(c, color, sizeof c);
	check(m, MEM);
	return in_image((obj *)m, o, r) ? done(q, ev) : CL_INVALID_VALUE;
}

static cl_int CL_API_CALL image_to_buffer(cl_command_queue q, cl_mem s, cl_mem d, const size_t *o, const size_t *r, size_t off, WAIT)
{
	BEGIN;
	check(s, MEM), check(d, MEM);
	obj *i = (obj *)s;
	return in_image(i, o, r) && inside((obj *)d, off, r[0] * r[1] * r[2] * i->elem) ? done(q, ev) : CL_INVALID_VALUE;
}

static cl_int CL_API_CALL buffer_to_image(cl_command_queue q, cl_mem s, cl_mem d, size_t off, const size_t *o, const size_t *r, WAIT)
{
	BEGIN;
	check(s, MEM), check(d, MEM);
	obj *i = (obj *)d;
	return in_image(i, o, r) && inside((obj *)s, off, r[0] * r[1] * r[2] * i->elem) ? done(q, ev) : CL_INVALID_VALUE;
}

static void *CL_API_CALL map_buffer(cl_command_queue q, cl_mem m, cl_bool b, cl_map_flags f, size_t off, size_t n, WAIT, cl_int *err)
{
	(void)b, (void)f;
	BEGIN;
	check(m, MEM);
	if (!inside((obj *)m, off, n))
		ERR(CL_INVALID_VALUE);
	done(q, ev);
	OK(((obj *)m)->bytes + off);
}

static cl_int CL_API_CALL unmap(cl_command_queue q, cl_mem m, void *p, WAIT)
{
	(void)p;
	BEGIN;
	check(m, MEM);
	return done(q, ev);
}

static cl_int CL_API_CALL migrate(cl_command_queue q, cl_uint n, const cl_mem *ms, cl_mem_migration_flags f, WAIT)
{
	BEGIN;
	for (cl_uint i = 0; i < n; i++)
		check(ms[i], MEM);
	return f > 3 ? CL_INVALID_VALUE : done(q, ev);
}

static cl_int CL_API_CALL marker(cl_command_queue q, WAIT)
{
	BEGIN;
	return done(q, ev);
}

static cl_int CL_API_CALL ndrange(cl_command_queue q, cl_kernel k, cl_uint dims, const size_t *off, const size_t *glob, const size_t *loc, WAIT)
{
	(void)off;
	BEGIN;
	obj *o = (obj *)k;
	check(o, KERNEL);
	if (o->set != (1u << o->args) - 1)
		return CL_INVALID_KERNEL_ARGS;
	if (!dims || dims > 3)
		return CL_INVALID_WORK_DIMENSION;
	for (cl_uint i = 0; i < dims; i++) {
		if (loc && (!loc[i] || loc[i] > 256))
			return CL_INVALID_WORK_GROUP_SIZE;
		if (!glob[i])
			return CL_INVALID_GLOBAL_WORK_SIZE;
	}
	return done(q, ev);
}

static cl_int CL_API_CALL flush(cl_command_queue q)
{
	check(q, QUEUE);
	return CL_SUCCESS;
}

static cl_int CL_API_CALL wait_events(cl_uint n, const cl_event *es)
{
	for (cl_uint i = 0; i < n; i++)
		check(es[i], EVENT);
	return CL_SUCCESS;
}

static cl_int CL_API_CALL event_info(cl_event e, INFO)
{
	check(e, EVENT);
	if (p == CL_EVENT_COMMAND_EXECUTION_STATUS)
		PUT(cl_int, CL_COMPLETE);
	return CL_INVALID_VALUE;
}

static cl_int CL_API_CALL event_times(cl_event e, INFO)
{
	(void)p;
	check(e, EVENT);
	PUT(cl_ulong, __atomic_add_fetch(&now, 1, __ATOMIC_RELAXED));
}

static cl_int CL_API_CALL platform_ids(cl_uint n, cl_platform_id *p, cl_uint *count)
{
	table = (cl_icd_dispatch){
		.clGetPlatformInfo = platform_info, .clGetDeviceIDs = device_ids, .clGetDeviceInfo = device_info,
		.clCreateSubDevices = sub_devices, .clRetainDevice = retainDevice, .clReleaseDevice = releaseDevice,
		.clCreateContext = create_context, .clRetainContext = retainContext, .clReleaseContext = releaseContext,
		.clCreateCommandQueue = create_queue, .clRetainCommandQueue = retainQueue, .clReleaseCommandQueue = releaseQueue,
		.clCreateBuffer = create_buffer, .clCreateSubBuffer = create_sub, .clCreateImage = create_image,
		.clRetainMemObject = retainMem, .clReleaseMemObject = releaseMem, .clGetImageInfo = image_info,
		.clGetSupportedImageFormats = image_formats,
		.clCreateSampler = create_sampler, .clRetainSampler = retainSampler, .clReleaseSampler = releaseSampler,
		.clCreateProgramWithSource = create_source, .clRetainProgram = retainProgram, .clReleaseProgram = releaseProgram,
		.clBuildProgram = build_program, .clCompileProgram = compile_program, .clLinkProgram = link_program,
		.clGetProgramInfo = program_info, .clGetProgramBuildInfo = build_info,
		.clCreateKernel = create_kernel, .clRetainKernel = retainKernel, .clReleaseKernel = releaseKernel,
		.clGetKernelInfo = kernel_info, .clGetKernelArgInfo = arg_info, .clGetKernelWorkGroupInfo = wg_info, .clSetKernelArg = set_arg,
		.clRetainEvent = retainEvent, .clReleaseEvent = releaseEvent, .clWaitForEvents = wait_events,
		.clGetEventInfo = event_info, .clGetEventProfilingInfo = event_times,
		.clFlush = flush, .clFinish = flush,
		.clEnqueueReadBuffer = read_buffer, .clEnqueueWriteBuffer = write_buffer, .clEnqueueReadBufferRect = read_rect,
		.clEnqueueWriteBufferRect = write_rect, .clEnqueueCopyBuffer = copy_buffer, .clEnqueueCopyBufferRect = copy_rect,
		.clEnqueueFillBuffer = fill_buffer, .clEnqueueReadImage = read_image, .clEnqueueWriteImage = write_image,
		.clEnqueueCopyImage = copy_image, .clEnqueueFillImage = fill_image, .clEnqueueCopyImageToBuffer = image_to_buffer,
		.clEnqueueCopyBufferToImage = buffer_to_image, .clEnqueueMapBuffer = map_buffer, .clEnqueueUnmapMemObject = unmap,
		.clEnqueueMigrateMemObjects = migrate, .clEnqueueMarkerWithWaitList = marker, .clEnqueueBarrierWithWaitList = marker,
		.clEnqueueNDRangeKernel = ndrange,
	};
	device.refs = platform.refs = 1;
	if (count)
		*count = 1;
	if (n && p)
		p[0] = &platform;
	return CL_SUCCESS;
}

__attribute__((visibility("default"))) void *CL_API_CALL clGetExtensionFunctionAddress(const char *name)
{
	return strcmp(name, "clIcdGetPlatformIDsKHR") ? NULL : (void *)platform_ids;
}
