/*
 * gpushim: an ICD that passes everything to PoCL and calls its devices GPUs.
 *
 * x264 takes GPUs only. With this library named in a vendors folder it runs natively on PoCL, so that the bench
 * compares the same work on both sides.
 *
 * With GPUSHIM_MEMORY=discrete in the environment its devices also behave like cards with memory of their own, so that
 * a machine without a GPU can test what only such cards do:
 *  - a buffer over memory of the host (CL_MEM_USE_HOST_PTR) is a copy of it and never sees later writes;
 *  - new memory is full of rubbish, as a card's is, and not of zeros;
 *  - a write of little data takes it when it is enqueued, and not when its turn has come, unless it is pinned;
 *  - such a buffer "pins" the host's pages as a driver does: a transfer from or to memory that was pinned uses the pages
 *    that were there then. If they have been taken away meanwhile, a card would move bytes that nobody sees any more;
 *    the shim says so and ends the process.
 *
 * With GPUSHIM_CLOCK=1 a kernel called gpushim_takes takes as many microseconds by the clock as its global size is, and
 * no processor: so a bench of schedulers has a card whose kernels take their time however busy the machine is.
 */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <CL/cl_icd.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

typedef cl_int(CL_API_CALL *platforms_fn)(cl_uint, cl_platform_id *, cl_uint *);

static cl_icd_dispatch vendor; /* PoCL's own functions */
static bool discrete;

static cl_int CL_API_CALL device_ids(cl_platform_id p, cl_device_type t, cl_uint n, cl_device_id *d, cl_uint *count)
{
	return vendor.clGetDeviceIDs(p, t == CL_DEVICE_TYPE_GPU ? CL_DEVICE_TYPE_ALL : t, n, d, count);
}

static cl_int CL_API_CALL device_info(cl_device_id d, cl_device_info param, size_t size, void *value, size_t *ret)
{
	cl_int e = vendor.clGetDeviceInfo(d, param, size, value, ret);
	if (!e && param == CL_DEVICE_TYPE && value)
		*(cl_device_type *)value = CL_DEVICE_TYPE_GPU;
	if (!e && discrete && param == CL_DEVICE_HOST_UNIFIED_MEMORY && value)
		*(cl_bool *)value = CL_FALSE;
	return e;
}

/* ---- memory of its own */

#define PAGE 4096u
#define RUBBISH 0xdb
#define EARLY (64u << 10) /* bytes that a write takes when it is enqueued; NVIDIA's driver does that with 1000, and not with 256 KiB */

/* A range of the host's memory that a live buffer pins. Its twin is a second mapping of the same pages that nobody uses: a page
 * that is taken away from the file leaves all mappings, and never comes back into this one. */
struct pin {
	cl_mem mem;
	uintptr_t from, pages;
	char *twin;
	struct pin *next;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pin *pins;

static const uint64_t present = 1ull << 63;

static int pagemap = -1;

/* open_pagemap does so once. The file belongs to root while the process is not dumpable, which executors are not. */
static void open_pagemap(void)
{
	int before = prctl(PR_GET_DUMPABLE);
	prctl(PR_SET_DUMPABLE, 1);
	pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	prctl(PR_SET_DUMPABLE, before);
	if (pagemap < 0) {
		perror("gpushim: /proc/self/pagemap, without which pins can't be watched");
		abort();
	}
}

/* look reads what the kernel says of each page of a range. */
static bool look(const char *from, uintptr_t pages, uint64_t *out)
{
	return pread(pagemap, out, pages * 8, (off_t)((uintptr_t)from / PAGE * 8)) == (ssize_t)(pages * 8);
}

static void CL_CALLBACK unpin(cl_mem m, void *unused)
{
	(void)unused;
	pthread_mutex_lock(&lock);
	for (struct pin **p = &pins; *p; p = &(*p)->next)
		if ((*p)->mem == m) {
			struct pin *old = *p;
			*p = old->next;
			munmap(old->twin, old->pages * PAGE);
			free(old);
			break;
		}
	pthread_mutex_unlock(&lock);
}

static void pin(cl_mem m, void *host, size_t size)
{
	struct pin *p = calloc(1, sizeof *p);
	if (!p || !size) {
		free(p);
		return;
	}
	p->mem = m;
	p->from = (uintptr_t)host & ~(uintptr_t)(PAGE - 1);
	p->pages = ((uintptr_t)host + size - p->from + PAGE - 1) / PAGE;
	p->twin = mremap((void *)p->from, 0, p->pages * PAGE, MREMAP_MAYMOVE);
	if (p->twin == MAP_FAILED) { /* not of a file: its pages stay */
		free(p);
		return;
	}
	for (uintptr_t i = 0; i < p->pages; i++)
		__atomic_fetch_add((uint32_t *)(p->twin + i * PAGE), 0, __ATOMIC_RELAXED);
	pthread_mutex_lock(&lock);
	p->next = pins;
	pins = p;
	pthread_mutex_unlock(&lock);
	vendor.clSetMemObjectDestructorCallback(m, unpin, NULL);
}

/* check ends the process if a transfer would use pages that are no longer where they were when they were pinned. */
static void check(const void *host, size_t size)
{
	if (!size)
		return;
	pthread_mutex_lock(&lock);
	for (struct pin *p = pins; p; p = p->next) {
		uintptr_t from = (uintptr_t)host & ~(uintptr_t)(PAGE - 1), end = (uintptr_t)host + size, limit = p->from + p->pages * PAGE;
		if (from < p->from)
			from = p->from;
		if (end > limit)
			end = limit;
		if (from >= end)
			continue;
		uintptr_t n = (end - from + PAGE - 1) / PAGE;
		uint64_t *now = calloc(n, 8);
		if (!now || !look(p->twin + (from - p->from), n, now)) {
			perror("gpushim: pages of a pin");
			abort();
		}
		for (uintptr_t i = 0; i < n; i++)
			if (!(now[i] & present)) {
				fprintf(stderr, "gpushim: transfer of %zu bytes at %p: page %zu was pinned and has been taken away since\n",
					size, host, (size_t)i);
				abort();
			}
		free(now);
	}
	pthread_mutex_unlock(&lock);
}

static bool is_pinned(const void *host, size_t size)
{
	bool found = false;
	pthread_mutex_lock(&lock);
	for (struct pin *p = pins; p && !found; p = p->next)
		found = (uintptr_t)host < p->from + p->pages * PAGE && (uintptr_t)host + size > p->from;
	pthread_mutex_unlock(&lock);
	return found;
}

static cl_mem CL_API_CALL create_buffer(cl_context c, cl_mem_flags flags, size_t size, void *host, cl_int *err)
{
	if (flags & CL_MEM_USE_HOST_PTR && host) {
		flags = (flags & ~(cl_mem_flags)(CL_MEM_USE_HOST_PTR | CL_MEM_ALLOC_HOST_PTR)) | CL_MEM_COPY_HOST_PTR;
		cl_mem m = vendor.clCreateBuffer(c, flags, size, host, err);
		if (m)
			pin(m, host, size);
		return m;
	}
	void *rubbish = flags & CL_MEM_COPY_HOST_PTR || !size ? NULL : malloc(size);
	if (!rubbish)
		return vendor.clCreateBuffer(c, flags, size, host, err);
	cl_mem m = vendor.clCreateBuffer(c, flags | CL_MEM_COPY_HOST_PTR, size, memset(rubbish, RUBBISH, size), err);
	free(rubbish);
	return m;
}

static void *CL_API_CALL map_buffer(cl_command_queue q, cl_mem m, cl_bool block, cl_map_flags flags, size_t off, size_t n, cl_uint nw,
				    const cl_event *w, cl_event *ev, cl_int *err)
{
	pthread_mutex_lock(&lock);
	for (struct pin *p = pins; p; p = p->next)
		if (p->mem == m) {
			fprintf(stderr, "gpushim: map of a buffer over the host's memory, which this device does not compute in\n");
			abort();
		}
	pthread_mutex_unlock(&lock);
	return vendor.clEnqueueMapBuffer(q, m, block, flags, off, n, nw, w, ev, err);
}

static cl_int CL_API_CALL read_buffer(cl_command_queue q, cl_mem m, cl_bool block, size_t off, size_t n, void *p, cl_uint nw,
				      const cl_event *w, cl_event *ev)
{
	check(p, n);
	return vendor.clEnqueueReadBuffer(q, m, block, off, n, p, nw, w, ev);
}

/* take copies what a write takes when it is enqueued; NULL: nothing. */
static void *take(cl_bool block, const void *p, size_t n)
{
	if (block || !n || n > EARLY || is_pinned(p, n))
		return NULL;
	void *copy = malloc(n);
	return copy ? memcpy(copy, p, n) : NULL;
}

static void CL_CALLBACK drop(cl_event e, cl_int status, void *copy)
{
	(void)e, (void)status;
	free(copy);
}

/* taken has a copy freed when the command that writes it has ended. */
static cl_int taken(cl_int err, void *copy, cl_event *ev, bool own)
{
	if (err)
		free(copy);
	else if (copy)
		vendor.clSetEventCallback(*ev, CL_COMPLETE, drop, copy);
	if (!err && own)
		vendor.clReleaseEvent(*ev);
	return err;
}

static cl_int CL_API_CALL write_buffer(cl_command_queue q, cl_mem m, cl_bool block, size_t off, size_t n, const void *p, cl_uint nw,
				       const cl_event *w, cl_event *ev)
{
	cl_event own = NULL, *to = ev ? ev : &own;
	check(p, n);
	void *copy = take(block, p, n);
	return taken(vendor.clEnqueueWriteBuffer(q, m, block, off, n, copy ? copy : p, nw, w, to), copy, to, !ev);
}

static size_t image_bytes(cl_mem m, const size_t *region, size_t row, size_t slice)
{
	size_t elem = 0;
	vendor.clGetImageInfo(m, CL_IMAGE_ELEMENT_SIZE, sizeof elem, &elem, NULL);
	if (!row)
		row = region[0] * elem;
	if (!slice)
		slice = row * region[1];
	return slice * (region[2] - 1) + row * (region[1] - 1) + region[0] * elem;
}

static cl_int CL_API_CALL read_image(cl_command_queue q, cl_mem m, cl_bool block, const size_t *o, const size_t *r, size_t row, size_t slice,
				     void *p, cl_uint nw, const cl_event *w, cl_event *ev)
{
	check(p, image_bytes(m, r, row, slice));
	return vendor.clEnqueueReadImage(q, m, block, o, r, row, slice, p, nw, w, ev);
}

static cl_int CL_API_CALL write_image(cl_command_queue q, cl_mem m, cl_bool block, const size_t *o, const size_t *r, size_t row,
				      size_t slice, const void *p, cl_uint nw, const cl_event *w, cl_event *ev)
{
	cl_event own = NULL, *to = ev ? ev : &own;
	size_t n = image_bytes(m, r, row, slice);
	check(p, n);
	void *copy = take(block, p, n);
	return taken(vendor.clEnqueueWriteImage(q, m, block, o, r, row, slice, copy ? copy : p, nw, w, to), copy, to, !ev);
}

/* ---- kernels that take their time */

static void CL_CALLBACK takes(void *arg)
{
	size_t us;
	memcpy(&us, arg, sizeof us);
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	uint64_t ns = (uint64_t)t.tv_nsec + us % 1000000 * 1000;
	t.tv_sec += (time_t)(us / 1000000 + ns / 1000000000);
	t.tv_nsec = (long)(ns % 1000000000);
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL))
		;
}

static cl_int CL_API_CALL ndrange(cl_command_queue q, cl_kernel k, cl_uint dims, const size_t *off, const size_t *glob, const size_t *loc,
                                  cl_uint nw, const cl_event *w, cl_event *ev)
{
	char name[32];
	if (!dims || !glob || vendor.clGetKernelInfo(k, CL_KERNEL_FUNCTION_NAME, sizeof name, name, NULL) || strcmp(name, "gpushim_takes"))
		return vendor.clEnqueueNDRangeKernel(q, k, dims, off, glob, loc, nw, w, ev);
	size_t us = glob[0];
	return vendor.clEnqueueNativeKernel(q, takes, &us, sizeof us, 0, NULL, NULL, nw, w, ev);
}

/* Every object begins with the address of its dispatch table; PoCL's objects share one. */
static void patch(cl_platform_id p)
{
	static bool done;
	cl_icd_dispatch *table = *(cl_icd_dispatch **)(void *)p;
	if (done)
		return;
	done = true;
	const char *memory = getenv("GPUSHIM_MEMORY");
	discrete = memory && !strcmp(memory, "discrete");
	vendor = *table;
	uintptr_t from = (uintptr_t)table & ~(uintptr_t)(PAGE - 1);
	mprotect((void *)from, (uintptr_t)table + sizeof *table - from, PROT_READ | PROT_WRITE);
	table->clGetDeviceIDs = device_ids;
	table->clGetDeviceInfo = device_info;
	const char *by_clock = getenv("GPUSHIM_CLOCK");
	if (by_clock && !strcmp(by_clock, "1"))
		table->clEnqueueNDRangeKernel = ndrange;
	if (!discrete)
		return;
	open_pagemap();
	table->clCreateBuffer = create_buffer;
	table->clEnqueueMapBuffer = map_buffer;
	table->clEnqueueReadBuffer = read_buffer;
	table->clEnqueueWriteBuffer = write_buffer;
	table->clEnqueueReadImage = read_image;
	table->clEnqueueWriteImage = write_image;
}

static void *pocl(void)
{
	return dlopen("libpocl.so.2", RTLD_NOW | RTLD_LOCAL);
}

static cl_int CL_API_CALL platform_ids(cl_uint n, cl_platform_id *p, cl_uint *count)
{
	void *lib = pocl();
	if (!lib)
		return CL_PLATFORM_NOT_FOUND_KHR;
	void *(*address)(const char *) = (void *(*)(const char *))dlsym(lib, "clGetExtensionFunctionAddress");
	platforms_fn get = address ? (platforms_fn)address("clIcdGetPlatformIDsKHR") : NULL;
	if (!get)
		return CL_PLATFORM_NOT_FOUND_KHR;
	cl_int e = get(n, p, count);
	if (!e && p && n)
		patch(p[0]);
	return e;
}

__attribute__((visibility("default"))) CL_API_ENTRY void *CL_API_CALL clGetExtensionFunctionAddress(const char *name)
{
	if (!strcmp(name, "clIcdGetPlatformIDsKHR"))
		return (void *)platform_ids;
	void *lib = pocl();
	void *(*address)(const char *) = lib ? (void *(*)(const char *))dlsym(lib, "clGetExtensionFunctionAddress") : NULL;
	return address ? address(name) : NULL;
}
