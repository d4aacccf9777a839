/*
 * replies: a fuzz target for all that the library takes from its executor, which may be hostile. The library runs
 * whole, with its ring and arena; where it would sleep for a reply, the fuzzer's next bytes are the reply. With
 * AddressSanitizer, and the arena ends at a page that nobody may touch. build.sh builds it with libFuzzer, and with REPLAY as a
 * program that plays files, each twice.
 */
#include "../../gx.h"
#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum { ARENA = 16 << 20, SPLIT = 8 << 20 };

static const uint8_t *in;
static size_t left;
static unsigned waits;

const char *__asan_default_options(void) { return "allocator_may_return_null=1:detect_leaks=0"; }

static size_t take(void *to, size_t n)
{
	n = n < left ? n : left;
	memcpy(to, in, n);
	in += n, left -= n;
	return n;
}

/* The first reply, if the fuzzer wants a session that works: one device with images. */
static const uint32_t info[] = {0, 0, 1, 0, 1, 3, CL_DEVICE_IMAGE_SUPPORT, 4, 1, 0, CL_DEVICE_MAX_MEM_ALLOC_SIZE, 8, 1 << 20, 0,
	CL_DEVICE_NAME, 2, 'd', 0};
static bool canned;

static void reply(uint32_t slot)
{
	uint8_t *s = S.ring + GX_SLOT_OFF + (size_t)slot * GX_SLOT_SIZE;
	struct { uint8_t err, more; uint16_t len; } h = {0, 0, 0};
	int32_t err = 0;
	uint32_t len, token = 0;
	uint64_t total;
	if (canned) {
		canned = false;
		len = sizeof info;
		memcpy(s + GX_SLOT_DATA, info, sizeof info);
		total = len;
	} else {
		if (!take(&h, sizeof h))
			h.err = 0xc0; /* the rest fails, so that every run ends */
		err = h.err > 0xb0 ? -(int32_t)(h.err & 0x3f) - 1 : 0;
		len = h.len % 512;
		if (h.more == 0xff)
			len = h.len; /* what does not fit */
		total = len;
		if (h.more & 1)
			take(&total, 8), token = 7;
		if (total < 1ull << 47) /* more than that malloc refuses, and less may not take the machine's memory */
			total %= 1 << 20;
		memset(s + GX_SLOT_DATA, 0, 64);
		take(s + GX_SLOT_DATA, len < GX_SLOT_SIZE - GX_SLOT_DATA ? len : GX_SLOT_SIZE - GX_SLOT_DATA);
	}
	memcpy(s + GX_SLOT_ERR, &err, 4);
	memcpy(s + GX_SLOT_LEN, &len, 4);
	memcpy(s + GX_SLOT_TOKEN, &token, 4);
	memcpy(s + GX_SLOT_TOTAL, &total, 8);
	atomic_store(gx_slot_word(slot, GX_SLOT_STATE), GX_SLOT_DONE);
}

/* The library sleeps by futex alone. */
long __wrap_syscall(long nr, _Atomic uint32_t *w, int op, uint32_t val, ...)
{
	(void)val;
	if (nr != SYS_futex)
		abort();
	uintptr_t at = (uintptr_t)w - (uintptr_t)S.ring - GX_SLOT_OFF;
	if ((op & 127) == FUTEX_WAKE)
		return 0;
	atomic_store(gx_word64(GX_HDR_HEAD), S.tail); /* all is read */
	for (uint32_t i = 1; i < 64; i++) /* a run has fewer transfers */
		if (atomic_load(gx_word(GX_PEND_OFF + 4 * i)) == GX_PEND_BUSY)
			atomic_store(gx_word(GX_PEND_OFF + 4 * i), GX_PEND_DONE);
	if (at < (uintptr_t)GX_SLOT_COUNT * GX_SLOT_SIZE) {
		reply((uint32_t)(at / GX_SLOT_SIZE));
		return 0;
	}
	if (++waits < 100) /* for a transfer, which is over */
		return 0;
	errno = ETIMEDOUT;
	atomic_store(&S.lost, true); /* for what never comes */
	return -1;
}

cl_int __wrap_gx_connect(void) { return atomic_load(&S.lost) ? CL_DEVICE_NOT_AVAILABLE : CL_SUCCESS; }

/* Callbacks come by a thread that sleeps on the ring: not here. */
int __wrap_pthread_create(void *t, const void *a, void *(*f)(void *), void *u)
{
	(void)t, (void)a, (void)f, (void)u;
	return EAGAIN;
}

static void inside(const void *p, size_t n)
{
	uintptr_t at = (uintptr_t)p - (uintptr_t)S.arena;
	if (p && (at >= ARENA || n > ARENA - at)) {
		fprintf(stderr, "a pointer outside of the arena: %td, %zu bytes\n", (const uint8_t *)p - S.arena, n);
		abort();
	}
}

static void open_session(void)
{
	if (!S.ring) {
		S.ring = mmap(NULL, GX_RING_MEM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		S.arena = mmap(NULL, ARENA + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (S.ring == MAP_FAILED || S.arena == MAP_FAILED || mprotect(S.arena + ARENA, 4096, PROT_NONE))
			abort();
	}
	S.arena_size = ARENA, S.split = SPLIT;
	S.tail = S.head = 0;
	atomic_store(gx_word64(GX_HDR_HEAD), 0);
	atomic_store(gx_word(GX_HDR_STATE), GX_STATE_RUNNING);
	for (size_t i = 0; i < COUNT(S.slots); i++)
		atomic_store(&S.slots[i], 0);
	memset(S.ring + GX_PEND_OFF, 0, 4 * GX_PEND_COUNT);
	atomic_store(&S.lost, false);
	S.can_spin = false;
	gx_objects_reset();
	gx_staging_reset();
	gx_callbacks_reset();
	gx_devices_reset();
	atomic_store(&S.up, true);
}

#define CALL(f, ...) (gx_dispatch.f(__VA_ARGS__))
#define DROP(f, o) do { if (o) CALL(f, o); } while (0)

/* ask has an info call say how much there is, then takes just that. */
#define ASK(f, ...) do { \
	size_t n_ = 0; \
	if (CALL(f, __VA_ARGS__, 0, NULL, &n_) == CL_SUCCESS && n_ && n_ < 1 << 20) { \
		void *v_ = malloc(n_); \
		CALL(f, __VA_ARGS__, n_, v_, NULL); \
		free(v_); \
	} \
} while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 2)
		return 0;
	in = data + 1, left = size - 1;
	canned = data[0] & 1;
	waits = 0;
	open_session();

	struct gx_reply r;
	struct gx_session_info si = {0};
	if (call_session_info(&si, &r))
		return 0;
	cl_int err = gx_devices_load(&r);
	gx_reply_free(&r);
	if (err)
		return 0;
	cl_platform_id platform = &gx_platform;
	cl_device_id d = NULL, sub[4] = {0};
	cl_uint n = 0;
	ASK(clGetPlatformInfo, platform, CL_PLATFORM_NAME);
	if (CALL(clGetDeviceIDs, platform, CL_DEVICE_TYPE_ALL, 1, &d, &n) || !d)
		return 0;
	static const cl_device_info asked[] = {CL_DEVICE_NAME, CL_DEVICE_EXTENSIONS, CL_DEVICE_MAX_WORK_ITEM_SIZES, CL_DEVICE_MAX_MEM_ALLOC_SIZE, CL_DEVICE_TYPE, CL_DEVICE_PARENT_DEVICE, CL_DEVICE_REFERENCE_COUNT};
	for (size_t i = 0; i < COUNT(asked); i++)
		ASK(clGetDeviceInfo, d, asked[i]);
	cl_device_partition_property equally[] = {CL_DEVICE_PARTITION_EQUALLY, 1, 0};
	if (data[0] & 2 && CALL(clCreateSubDevices, d, equally, 4, sub, &n) == CL_SUCCESS)
		for (cl_uint i = 0; i < 4; i++)
			if (sub[i]) {
				ASK(clGetDeviceInfo, sub[i], CL_DEVICE_NAME);
				CALL(clReleaseDevice, sub[i]);
			}

	cl_context ctx = CALL(clCreateContext, NULL, 1, &d, NULL, NULL, &err);
	cl_command_queue q = ctx ? CALL(clCreateCommandQueue, ctx, d, CL_QUEUE_PROFILING_ENABLE, &err) : NULL;
	if (!q) {
		DROP(clReleaseContext, ctx);
		return 0;
	}
	uint8_t *user = malloc(8192);
	cl_event ev = NULL;
	if (data[0] & 4) { /* memory */
		cl_mem b = CALL(clCreateBuffer, ctx, CL_MEM_READ_WRITE, 8192, NULL, &err);
		cl_buffer_region br = {0, 1024};
		cl_mem s = b ? CALL(clCreateSubBuffer, b, CL_MEM_READ_WRITE, CL_BUFFER_CREATE_TYPE_REGION, &br, &err) : NULL;
		if (b) {
			ASK(clGetMemObjectInfo, b, CL_MEM_SIZE);
			void *p = CALL(clEnqueueMapBuffer, q, b, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 64, 1000, 0, NULL, NULL, &err);
			inside(p, 1000);
			if (p) {
				memset(p, 1, 1000);
				CALL(clEnqueueUnmapMemObject, q, b, p, 0, NULL, NULL);
			}
			CALL(clEnqueueReadBuffer, q, b, CL_TRUE, 0, 8192, user, 0, NULL, &ev);
			CALL(clEnqueueWriteBuffer, q, b, CL_FALSE, 0, 8192, user, 0, NULL, NULL);
			size_t zero[3] = {0}, box[3] = {16, 4, 2};
			CALL(clEnqueueReadBufferRect, q, b, CL_TRUE, zero, zero, box, 0, 0, 0, 0, user, 0, NULL, NULL);
		}
		cl_image_format f = {CL_RGBA, CL_UNORM_INT8};
		cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 8, .image_height = 4};
		cl_mem i = CALL(clCreateImage, ctx, CL_MEM_READ_WRITE, &f, &desc, NULL, &err);
		if (i) {
			size_t zero[3] = {0}, box[3] = {8, 4, 1}, row = 0, slice = 0;
			CALL(clEnqueueReadImage, q, i, CL_TRUE, zero, box, 0, 0, user, 0, NULL, NULL);
			uint8_t *p = CALL(clEnqueueMapImage, q, i, CL_TRUE, CL_MAP_WRITE, zero, box, &row, &slice, 0, NULL, NULL, &err);
			if (p) {
				inside(p, 32);
				inside(p + 3 * row, 32);
				CALL(clEnqueueUnmapMemObject, q, i, p, 0, NULL, NULL);
			}
			ASK(clGetImageInfo, i, CL_IMAGE_ROW_PITCH);
		}
		cl_image_format fs[8];
		CALL(clGetSupportedImageFormats, ctx, CL_MEM_READ_WRITE, CL_MEM_OBJECT_IMAGE2D, 8, fs, &n);
		DROP(clReleaseMemObject, s);
		DROP(clReleaseMemObject, b);
		DROP(clReleaseMemObject, i);
	}
	if (data[0] & 8) { /* programs */
		const char *src = "kernel void f(global int *p) {}";
		cl_program p = CALL(clCreateProgramWithSource, ctx, 1, &src, NULL, &err);
		if (p) {
			CALL(clBuildProgram, p, 1, &d, "-w", NULL, NULL);
			ASK(clGetProgramBuildInfo, p, d, CL_PROGRAM_BUILD_LOG);
			ASK(clGetProgramInfo, p, CL_PROGRAM_KERNEL_NAMES);
			size_t len = 0;
			if (CALL(clGetProgramInfo, p, CL_PROGRAM_BINARY_SIZES, sizeof len, &len, NULL) == CL_SUCCESS && len && len < 1 << 20) {
				unsigned char *bin = malloc(len);
				CALL(clGetProgramInfo, p, CL_PROGRAM_BINARIES, sizeof bin, &bin, NULL);
				free(bin);
			}
			cl_kernel ks[4] = {0}, k = CALL(clCreateKernel, p, "f", &err);
			if (k) {
				ASK(clGetKernelInfo, k, CL_KERNEL_FUNCTION_NAME);
				ASK(clGetKernelInfo, k, CL_KERNEL_ATTRIBUTES);
				ASK(clGetKernelArgInfo, k, 0, CL_KERNEL_ARG_NAME);
				ASK(clGetKernelWorkGroupInfo, k, d, CL_KERNEL_COMPILE_WORK_GROUP_SIZE);
				cl_mem none = NULL;
				CALL(clSetKernelArg, k, 0, sizeof none, &none);
				size_t glob = 64;
				CALL(clEnqueueNDRangeKernel, q, k, 1, NULL, &glob, NULL, 0, NULL, NULL);
				CALL(clReleaseKernel, k);
			}
			if (CALL(clCreateKernelsInProgram, p, 4, ks, &n) == CL_SUCCESS)
				for (cl_uint i = 0; i < 4; i++)
					DROP(clReleaseKernel, ks[i]);
			CALL(clReleaseProgram, p);
		}
	}
	if (ev) {
		ASK(clGetEventInfo, ev, CL_EVENT_COMMAND_EXECUTION_STATUS);
		ASK(clGetEventProfilingInfo, ev, CL_PROFILING_COMMAND_END);
		CALL(clReleaseEvent, ev);
	}
	CALL(clFinish, q);
	CALL(clReleaseCommandQueue, q);
	CALL(clReleaseContext, ctx);
	free(user);
	return 0;
}

#ifdef REPLAY
int main(int argc, char **argv)
{
	static uint8_t b[1 << 20];
	for (int i = 2; i < 2 * argc; i++) {
		FILE *f = fopen(argv[i / 2], "rb");
		if (!f)
			return 2;
		size_t n = fread(b, 1, sizeof b, f);
		fclose(f);
		LLVMFuzzerTestOneInput(b, n);
	}
	return 0;
}
#endif
