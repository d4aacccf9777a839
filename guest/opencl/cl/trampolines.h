// Calls through an object's dispatch table, one small function per OpenCL
// function. Handles travel as integers and the application's memory as bytes:
// through a void pointer cgo would search the whole Go object for pointers.
#ifndef GPUCTL_CL_TRAMPOLINES_H
#define GPUCTL_CL_TRAMPOLINES_H

#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_0_APIS
#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#define CL_USE_DEPRECATED_OPENCL_2_0_APIS
#define CL_USE_DEPRECATED_OPENCL_2_1_APIS
#define CL_USE_DEPRECATED_OPENCL_2_2_APIS
#include <CL/cl.h>
#include <CL/cl_icd.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(size_t) == 8 && sizeof(void *) == 8, "sizes are passed as uint64");

// gxOpen loads a library and returns its clIcdGetPlatformIDsKHR, or NULL and why.
void *gxOpen(const char *path, char *why, size_t len);
// gxUnbuffer has stdout keep nothing back.
int gxUnbuffer(void);
// gxPlatforms calls it.
int32_t gxPlatforms(void *icd, uint32_t n, uintptr_t *platforms, uint32_t *ret);
// gxAdmit notes the OpenCL version (12 for 1.2) that a platform's table serves:
// an old driver's table may end before the newer functions' slots.
int32_t gxAdmit(uintptr_t platform, int version);
// gxVersion is the version noted for a table.
int gxVersion(const cl_icd_dispatch *t);

#define VIA(version, obj, bad, fn) \
	const cl_icd_dispatch *t; \
	if (!(obj)) \
		FAIL(bad); \
	t = *(const cl_icd_dispatch *const *)(obj); \
	if (!t || ((version) > 10 && gxVersion(t) < (version)) || !t->fn) \
		FAIL(CL_INVALID_OPERATION)

// gxSerial is set for a runtime that is not safe to use from several threads;
// then gxEnter and gxLeave let one call through at a time, waits included.
extern int gxSerial;
void gxLock(void);
void gxUnlock(void);
static inline void gxEnter(void) {
	if (__builtin_expect(gxSerial, 0))
		gxLock();
}
static inline void gxLeave(void) {
	if (__builtin_expect(gxSerial, 0))
		gxUnlock();
}

#define CALL(type, call) \
	gxEnter(); \
	type result = call; \
	gxLeave(); \
	return result

#define STATUS(version, obj, bad, fn, ...) \
	VIA(version, obj, bad, fn); \
	CALL(int32_t, t->fn(__VA_ARGS__))

#define HANDLE(version, obj, bad, fn, ...) \
	VIA(version, obj, bad, fn); \
	CALL(uintptr_t, (uintptr_t)t->fn(__VA_ARGS__))

#define POINTER(version, obj, bad, fn, ...) \
	VIA(version, obj, bad, fn); \
	CALL(void *, t->fn(__VA_ARGS__))

#define FAIL(e) return (e)

static inline int32_t gxGetPlatformInfo(uintptr_t f, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(10, f, CL_INVALID_PLATFORM, clGetPlatformInfo, (cl_platform_id)f, param, size, value, ret);
}

static inline int32_t gxGetDeviceInfo(uintptr_t d, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(10, d, CL_INVALID_DEVICE, clGetDeviceInfo, (cl_device_id)d, param, size, value, ret);
}

static inline int32_t gxGetImageInfo(uintptr_t m, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(10, m, CL_INVALID_MEM_OBJECT, clGetImageInfo, (cl_mem)m, param, size, value, ret);
}

static inline int32_t gxGetProgramInfo(uintptr_t p, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(10, p, CL_INVALID_PROGRAM, clGetProgramInfo, (cl_program)p, param, size, value, ret);
}

static inline int32_t gxGetKernelInfo(uintptr_t k, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(10, k, CL_INVALID_KERNEL, clGetKernelInfo, (cl_kernel)k, param, size, value, ret);
}

static inline int32_t gxGetEventInfo(uintptr_t e, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(10, e, CL_INVALID_EVENT, clGetEventInfo, (cl_event)e, param, size, value, ret);
}

static inline int32_t gxGetEventProfilingInfo(uintptr_t e, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(10, e, CL_INVALID_EVENT, clGetEventProfilingInfo, (cl_event)e, param, size, value, ret);
}

static inline int32_t gxGetKernelArgInfo(uintptr_t k, uint32_t idx, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(12, k, CL_INVALID_KERNEL, clGetKernelArgInfo, (cl_kernel)k, idx, param, size, value, ret);
}

static inline int32_t gxGetKernelWorkGroupInfo(uintptr_t k, uintptr_t d, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(10, k, CL_INVALID_KERNEL, clGetKernelWorkGroupInfo, (cl_kernel)k, (cl_device_id)d, param, size, value, ret);
}

static inline int32_t gxGetProgramBuildInfo(uintptr_t p, uintptr_t d, uint32_t param, size_t size, uint8_t *value, size_t *ret) {
	STATUS(10, p, CL_INVALID_PROGRAM, clGetProgramBuildInfo, (cl_program)p, (cl_device_id)d, param, size, value, ret);
}

static inline int32_t gxGetKernelSubGroupInfo(uintptr_t k, uintptr_t d, uint32_t param, size_t nin, const uint8_t *in, size_t size, uint8_t *value, size_t *ret) {
	STATUS(21, k, CL_INVALID_KERNEL, clGetKernelSubGroupInfo, (cl_kernel)k, (cl_device_id)d, param, nin, in, size, value, ret);
}

static inline int32_t gxGetKernelSubGroupInfoKHR(uintptr_t k, uintptr_t d, uint32_t param, size_t nin, const uint8_t *in, size_t size, uint8_t *value, size_t *ret) {
	STATUS(20, k, CL_INVALID_KERNEL, clGetKernelSubGroupInfoKHR, (cl_kernel)k, (cl_device_id)d, param, nin, in, size, value, ret);
}

static inline int32_t gxRetainContext(uintptr_t c) {
	STATUS(10, c, CL_INVALID_CONTEXT, clRetainContext, (cl_context)c);
}

static inline int32_t gxReleaseContext(uintptr_t c) {
	STATUS(10, c, CL_INVALID_CONTEXT, clReleaseContext, (cl_context)c);
}

static inline int32_t gxReleaseCommandQueue(uintptr_t q) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clReleaseCommandQueue, (cl_command_queue)q);
}

static inline int32_t gxReleaseMemObject(uintptr_t m) {
	STATUS(10, m, CL_INVALID_MEM_OBJECT, clReleaseMemObject, (cl_mem)m);
}

static inline int32_t gxReleaseSampler(uintptr_t s) {
	STATUS(10, s, CL_INVALID_SAMPLER, clReleaseSampler, (cl_sampler)s);
}

static inline int32_t gxRetainProgram(uintptr_t p) {
	STATUS(10, p, CL_INVALID_PROGRAM, clRetainProgram, (cl_program)p);
}

static inline int32_t gxReleaseProgram(uintptr_t p) {
	STATUS(10, p, CL_INVALID_PROGRAM, clReleaseProgram, (cl_program)p);
}

static inline int32_t gxReleaseKernel(uintptr_t k) {
	STATUS(10, k, CL_INVALID_KERNEL, clReleaseKernel, (cl_kernel)k);
}

static inline int32_t gxRetainEvent(uintptr_t e) {
	STATUS(10, e, CL_INVALID_EVENT, clRetainEvent, (cl_event)e);
}

static inline int32_t gxReleaseEvent(uintptr_t e) {
	STATUS(10, e, CL_INVALID_EVENT, clReleaseEvent, (cl_event)e);
}

static inline int32_t gxReleaseDevice(uintptr_t d) {
	STATUS(12, d, CL_INVALID_DEVICE, clReleaseDevice, (cl_device_id)d);
}

static inline int32_t gxGetDeviceIDs(uintptr_t f, uint64_t type, uint32_t n, uintptr_t *devs, uint32_t *ret) {
	STATUS(10, f, CL_INVALID_PLATFORM, clGetDeviceIDs, (cl_platform_id)f, type, n, (cl_device_id *)devs, ret);
}

static inline int32_t gxCreateSubDevices(uintptr_t d, const uint64_t *props, uint32_t n, uintptr_t *devs, uint32_t *ret) {
	STATUS(12, d, CL_INVALID_DEVICE, clCreateSubDevices, (cl_device_id)d, (const cl_device_partition_property *)props, n, (cl_device_id *)devs, ret);
}

static inline int32_t gxGetSupportedImageFormats(uintptr_t c, uint64_t flags, uint32_t type, uint32_t n, uint8_t *formats, uint32_t *ret) {
	STATUS(10, c, CL_INVALID_CONTEXT, clGetSupportedImageFormats, (cl_context)c, flags, type, n, (cl_image_format *)formats, ret);
}

static inline int32_t gxBuildProgram(uintptr_t p, uint32_t n, const uintptr_t *devs, const char *options) {
	STATUS(10, p, CL_INVALID_PROGRAM, clBuildProgram, (cl_program)p, n, (const cl_device_id *)devs, options, NULL, NULL);
}

static inline int32_t gxSetProgramSpecializationConstant(uintptr_t p, uint32_t id, size_t size, const uint8_t *value) {
	STATUS(22, p, CL_INVALID_PROGRAM, clSetProgramSpecializationConstant, (cl_program)p, id, size, value);
}

static inline int32_t gxSetKernelArg(uintptr_t k, uint32_t idx, size_t size, const uint8_t *value) {
	STATUS(10, k, CL_INVALID_KERNEL, clSetKernelArg, (cl_kernel)k, idx, size, value);
}

static inline int32_t gxFlush(uintptr_t q) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clFlush, (cl_command_queue)q);
}

static inline int32_t gxFinish(uintptr_t q) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clFinish, (cl_command_queue)q);
}

static inline int32_t gxEnqueueNDRangeKernel(uintptr_t q, uintptr_t k, uint32_t dims, const size_t *off, const size_t *glob, const size_t *loc, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueNDRangeKernel, (cl_command_queue)q, (cl_kernel)k, dims, off, glob, loc, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueReadBuffer(uintptr_t q, uintptr_t m, uint32_t blocking, size_t off, size_t size, uint8_t *ptr, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueReadBuffer, (cl_command_queue)q, (cl_mem)m, blocking, off, size, ptr, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueWriteBuffer(uintptr_t q, uintptr_t m, uint32_t blocking, size_t off, size_t size, const uint8_t *ptr, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueWriteBuffer, (cl_command_queue)q, (cl_mem)m, blocking, off, size, ptr, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueReadBufferRect(uintptr_t q, uintptr_t m, uint32_t blocking, const size_t *borigin, const size_t *horigin, const size_t *region, size_t brow, size_t bslice, size_t hrow, size_t hslice, uint8_t *ptr, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(11, q, CL_INVALID_COMMAND_QUEUE, clEnqueueReadBufferRect, (cl_command_queue)q, (cl_mem)m, blocking, borigin, horigin, region, brow, bslice, hrow, hslice, ptr, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueWriteBufferRect(uintptr_t q, uintptr_t m, uint32_t blocking, const size_t *borigin, const size_t *horigin, const size_t *region, size_t brow, size_t bslice, size_t hrow, size_t hslice, const uint8_t *ptr, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(11, q, CL_INVALID_COMMAND_QUEUE, clEnqueueWriteBufferRect, (cl_command_queue)q, (cl_mem)m, blocking, borigin, horigin, region, brow, bslice, hrow, hslice, ptr, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueCopyBuffer(uintptr_t q, uintptr_t src, uintptr_t dst, size_t soff, size_t doff, size_t size, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueCopyBuffer, (cl_command_queue)q, (cl_mem)src, (cl_mem)dst, soff, doff, size, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueCopyBufferRect(uintptr_t q, uintptr_t src, uintptr_t dst, const size_t *sorigin, const size_t *dorigin, const size_t *region, size_t srow, size_t sslice, size_t drow, size_t dslice, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(11, q, CL_INVALID_COMMAND_QUEUE, clEnqueueCopyBufferRect, (cl_command_queue)q, (cl_mem)src, (cl_mem)dst, sorigin, dorigin, region, srow, sslice, drow, dslice, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueFillBuffer(uintptr_t q, uintptr_t m, const uint8_t *pattern, size_t psize, size_t off, size_t size, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(12, q, CL_INVALID_COMMAND_QUEUE, clEnqueueFillBuffer, (cl_command_queue)q, (cl_mem)m, pattern, psize, off, size, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueReadImage(uintptr_t q, uintptr_t m, uint32_t blocking, const size_t *origin, const size_t *region, size_t row, size_t slice, uint8_t *ptr, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueReadImage, (cl_command_queue)q, (cl_mem)m, blocking, origin, region, row, slice, ptr, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueWriteImage(uintptr_t q, uintptr_t m, uint32_t blocking, const size_t *origin, const size_t *region, size_t row, size_t slice, const uint8_t *ptr, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueWriteImage, (cl_command_queue)q, (cl_mem)m, blocking, origin, region, row, slice, ptr, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueCopyImage(uintptr_t q, uintptr_t src, uintptr_t dst, const size_t *sorigin, const size_t *dorigin, const size_t *region, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueCopyImage, (cl_command_queue)q, (cl_mem)src, (cl_mem)dst, sorigin, dorigin, region, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueFillImage(uintptr_t q, uintptr_t m, const uint8_t *color, const size_t *origin, const size_t *region, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(12, q, CL_INVALID_COMMAND_QUEUE, clEnqueueFillImage, (cl_command_queue)q, (cl_mem)m, color, origin, region, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueCopyImageToBuffer(uintptr_t q, uintptr_t src, uintptr_t dst, const size_t *origin, const size_t *region, size_t off, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueCopyImageToBuffer, (cl_command_queue)q, (cl_mem)src, (cl_mem)dst, origin, region, off, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueCopyBufferToImage(uintptr_t q, uintptr_t src, uintptr_t dst, size_t off, const size_t *origin, const size_t *region, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueCopyBufferToImage, (cl_command_queue)q, (cl_mem)src, (cl_mem)dst, off, origin, region, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueUnmapMemObject(uintptr_t q, uintptr_t m, uint8_t *ptr, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueUnmapMemObject, (cl_command_queue)q, (cl_mem)m, ptr, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueMigrateMemObjects(uintptr_t q, uint32_t n, const uintptr_t *mems, uint64_t flags, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(12, q, CL_INVALID_COMMAND_QUEUE, clEnqueueMigrateMemObjects, (cl_command_queue)q, n, (const cl_mem *)mems, flags, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueMarkerWithWaitList(uintptr_t q, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(12, q, CL_INVALID_COMMAND_QUEUE, clEnqueueMarkerWithWaitList, (cl_command_queue)q, nwait, (const cl_event *)wait, (cl_event *)ev);
}

static inline int32_t gxEnqueueBarrierWithWaitList(uintptr_t q, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev) {
	STATUS(12, q, CL_INVALID_COMMAND_QUEUE, clEnqueueBarrierWithWaitList, (cl_command_queue)q, nwait, (const cl_event *)wait, (cl_event *)ev);
}

// gxGetProgramBinaries fills all with the binaries, one behind the other; lens says how long each is.
static inline int32_t gxGetProgramBinaries(uintptr_t p, uint32_t n, const size_t *lens, unsigned char *all) {
	VIA(10, p, CL_INVALID_PROGRAM, clGetProgramInfo);
	unsigned char **each = calloc(n, sizeof *each);
	if (!each)
		return CL_OUT_OF_HOST_MEMORY;
	for (uint32_t i = 0; i < n; all += lens[i++])
		each[i] = lens[i] ? all : NULL;
	cl_int err = t->clGetProgramInfo((cl_program)p, CL_PROGRAM_BINARIES, n * sizeof *each, each, NULL);
	free(each);
	return err;
}

static inline int32_t gxWaitForEvents(uint32_t n, const uintptr_t *events) {
	if (!n)
		return CL_INVALID_VALUE;
	STATUS(10, events[0], CL_INVALID_EVENT, clWaitForEvents, n, (const cl_event *)events);
}

// gxCompileProgram takes the headers' names one behind the other, each ended by NUL.
static inline int32_t gxCompileProgram(uintptr_t p, uint32_t n, const uintptr_t *devs, const char *options, uint32_t nheaders, const uintptr_t *headers, const char *names) {
	VIA(12, p, CL_INVALID_PROGRAM, clCompileProgram);
	const char **each = NULL;
	if (nheaders && !(each = calloc(nheaders, sizeof *each)))
		return CL_OUT_OF_HOST_MEMORY;
	for (uint32_t i = 0; i < nheaders; i++, names += strlen(names) + 1)
		each[i] = names;
	cl_int err = t->clCompileProgram((cl_program)p, n, (const cl_device_id *)devs, options, nheaders, nheaders ? (const cl_program *)headers : NULL, each, NULL, NULL);
	free(each);
	return err;
}

#undef FAIL
#define FAIL(e) do { *err = (e); return 0; } while (0)

static inline uintptr_t gxCreateCommandQueue(uintptr_t c, uintptr_t d, uint64_t props, int32_t *err) {
	HANDLE(10, c, CL_INVALID_CONTEXT, clCreateCommandQueue, (cl_context)c, (cl_device_id)d, props, err);
}

static inline uintptr_t gxCreateBuffer(uintptr_t c, uint64_t flags, size_t size, uint8_t *host, int32_t *err) {
	HANDLE(10, c, CL_INVALID_CONTEXT, clCreateBuffer, (cl_context)c, flags, size, host, err);
}

static inline uintptr_t gxCreateSampler(uintptr_t c, uint32_t normalized, uint32_t addressing, uint32_t filter, int32_t *err) {
	HANDLE(10, c, CL_INVALID_CONTEXT, clCreateSampler, (cl_context)c, normalized, addressing, filter, err);
}

static inline uintptr_t gxCreateImage(uintptr_t c, uint64_t flags, const uint8_t *format, const uint8_t *desc, uint8_t *host, int32_t *err) {
	HANDLE(12, c, CL_INVALID_CONTEXT, clCreateImage, (cl_context)c, flags, (const cl_image_format *)format, (const cl_image_desc *)desc, host, err);
}

static inline uintptr_t gxCreateProgramWithIL(uintptr_t c, const uint8_t *il, size_t len, int32_t *err) {
	HANDLE(21, c, CL_INVALID_CONTEXT, clCreateProgramWithIL, (cl_context)c, il, len, err);
}

static inline uintptr_t gxCreateKernel(uintptr_t p, const char *name, int32_t *err) {
	HANDLE(10, p, CL_INVALID_PROGRAM, clCreateKernel, (cl_program)p, name, err);
}

static inline uintptr_t gxCreateContext(uintptr_t f, uint32_t n, const uintptr_t *devs, int32_t *err) {
	const cl_context_properties props[] = {CL_CONTEXT_PLATFORM, (cl_context_properties)f, 0};
	HANDLE(10, f, CL_INVALID_PLATFORM, clCreateContext, props, n, (const cl_device_id *)devs, NULL, NULL, err);
}

static inline uintptr_t gxCreateSubBuffer(uintptr_t m, uint64_t flags, size_t origin, size_t size, int32_t *err) {
	const cl_buffer_region region = {origin, size};
	HANDLE(11, m, CL_INVALID_MEM_OBJECT, clCreateSubBuffer, (cl_mem)m, flags, CL_BUFFER_CREATE_TYPE_REGION, &region, err);
}

static inline uintptr_t gxCreateProgramWithSource(uintptr_t c, const char *src, size_t len, int32_t *err) {
	if (!len) // a length of 0 means that NUL ends the string
		src = "";
	HANDLE(10, c, CL_INVALID_CONTEXT, clCreateProgramWithSource, (cl_context)c, 1, &src, &len, err);
}

// gxCreateProgramWithBinary takes the binaries one behind the other.
static inline uintptr_t gxCreateProgramWithBinary(uintptr_t c, uint32_t n, const uintptr_t *devs, const size_t *lens, const unsigned char *all, int32_t *status, int32_t *err) {
	VIA(10, c, CL_INVALID_CONTEXT, clCreateProgramWithBinary);
	const unsigned char **each = calloc(n ? n : 1, sizeof *each);
	if (!each)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	for (uint32_t i = 0; i < n; all += lens[i++])
		each[i] = all;
	cl_program p = t->clCreateProgramWithBinary((cl_context)c, n, (const cl_device_id *)devs, lens, each, status, err);
	free(each);
	return (uintptr_t)p;
}

static inline uintptr_t gxLinkProgram(uintptr_t c, uint32_t n, const uintptr_t *devs, const char *options, uint32_t nin, const uintptr_t *in, int32_t *err) {
	HANDLE(12, c, CL_INVALID_CONTEXT, clLinkProgram, (cl_context)c, n, (const cl_device_id *)devs, options, nin, (const cl_program *)in, NULL, NULL, err);
}

static inline void *gxEnqueueMapBuffer(uintptr_t q, uintptr_t m, uint32_t blocking, uint64_t flags, size_t off, size_t size, uint32_t nwait, const uintptr_t *wait, uintptr_t *ev, int32_t *err) {
	POINTER(10, q, CL_INVALID_COMMAND_QUEUE, clEnqueueMapBuffer, (cl_command_queue)q, (cl_mem)m, blocking, flags, off, size, nwait, (const cl_event *)wait, (cl_event *)ev, err);
}

#undef FAIL
#undef VIA
#undef STATUS
#undef HANDLE
#undef POINTER

#endif
