/*
 * il: PoCL with an intermediate language, which no runtime of the project's machines has. Its text is OpenCL C; a constant's
 * value is a macro of its builds. With REFUSE_WAITS in the environment, it waits for nothing and says so; with
 * REFUSE_MARKERS, it takes no marker;
 * with FAIL_READS, images are not read, which only the events tell.
 */
#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <CL/cl_icd.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PROGRAMS = 256, CONSTANTS = 4 };

static cl_icd_dispatch vendor; /* PoCL's own functions */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { cl_program p; unsigned value[CONSTANTS]; char set[CONSTANTS]; } programs[PROGRAMS];

static int find(cl_program p)
{
	int i = 0;
	while (i < PROGRAMS && programs[i].p != p)
		i++;
	return i;
}

static cl_int CL_API_CALL device_info(cl_device_id d, cl_device_info param, size_t size, void *value, size_t *ret)
{
	static const char il[] = "SPIR-V_1.2";
	if (param != CL_DEVICE_IL_VERSION)
		return vendor.clGetDeviceInfo(d, param, size, value, ret);
	if (value && size < sizeof il)
		return CL_INVALID_VALUE;
	if (value)
		memcpy(value, il, sizeof il);
	if (ret)
		*ret = sizeof il;
	return CL_SUCCESS;
}

/* A new program may lie where an earlier one lay, which may be known to the runtime of an earlier test only. */
static cl_program CL_API_CALL with_source(cl_context c, cl_uint n, const char **text, const size_t *lengths, cl_int *err)
{
	cl_program p = vendor.clCreateProgramWithSource(c, n, text, lengths, err);
	pthread_mutex_lock(&lock);
	int i = find(p);
	if (p && i < PROGRAMS)
		memset(&programs[i], 0, sizeof programs[i]);
	pthread_mutex_unlock(&lock);
	return p;
}

static cl_program CL_API_CALL with_il(cl_context c, const void *il, size_t n, cl_int *err)
{
	const char *text = il;
	cl_program p = with_source(c, 1, &text, &n, err);
	pthread_mutex_lock(&lock);
	int i = find(NULL);
	if (p && i < PROGRAMS)
		programs[i].p = p;
	pthread_mutex_unlock(&lock);
	return p;
}

static cl_int CL_API_CALL constant(cl_program p, cl_uint id, size_t n, const void *value)
{
	cl_int err = CL_INVALID_SPEC_ID;
	pthread_mutex_lock(&lock);
	int i = find(p);
	if (i == PROGRAMS)
		err = CL_INVALID_PROGRAM;
	else if (id < CONSTANTS && n == sizeof(unsigned)) {
		memcpy(&programs[i].value[id], value, n);
		programs[i].set[id] = 1;
		err = CL_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return err;
}

static const char *with_constants(cl_program p, const char *options, char *out, size_t room)
{
	size_t at = (size_t)snprintf(out, room, "%s", options ? options : "");
	pthread_mutex_lock(&lock);
	int i = find(p);
	for (int k = 0; i < PROGRAMS && k < CONSTANTS; k++)
		if (programs[i].set[k])
			at += (size_t)snprintf(out + at, room - at, " -DCONSTANT%d=%u", k, programs[i].value[k]);
	pthread_mutex_unlock(&lock);
	return out;
}

static cl_int CL_API_CALL build(cl_program p, cl_uint n, const cl_device_id *ds, const char *options, void(CL_CALLBACK *f)(cl_program, void *), void *u)
{
	char all[1024];
	return vendor.clBuildProgram(p, n, ds, with_constants(p, options, all, sizeof all), f, u);
}

static cl_int CL_API_CALL compile(cl_program p, cl_uint n, const cl_device_id *ds, const char *options, cl_uint nh, const cl_program *hs, const char **names,
	void(CL_CALLBACK *f)(cl_program, void *), void *u)
{
	char all[1024];
	return vendor.clCompileProgram(p, n, ds, with_constants(p, options, all, sizeof all), nh, hs, names, f, u);
}

static cl_int CL_API_CALL finish(cl_command_queue q)
{
	return getenv("REFUSE_WAITS") ? CL_OUT_OF_RESOURCES : vendor.clFinish(q);
}

static cl_int CL_API_CALL wait_events(cl_uint n, const cl_event *e)
{
	return getenv("REFUSE_WAITS") ? CL_OUT_OF_RESOURCES : vendor.clWaitForEvents(n, e);
}

static cl_int CL_API_CALL marker(cl_command_queue q, cl_uint n, const cl_event *wait, cl_event *e)
{
	return getenv("REFUSE_MARKERS") ? CL_OUT_OF_RESOURCES : vendor.clEnqueueMarkerWithWaitList(q, n, wait, e);
}

static cl_int CL_API_CALL read_image(cl_command_queue q, cl_mem m, cl_bool blocking, const size_t *origin, const size_t *region, size_t row, size_t slice, void *p, cl_uint n,
	const cl_event *wait, cl_event *e)
{
	cl_context c;
	cl_int err;
	if (!getenv("FAIL_READS"))
		return vendor.clEnqueueReadImage(q, m, blocking, origin, region, row, slice, p, n, wait, e);
	vendor.clGetCommandQueueInfo(q, CL_QUEUE_CONTEXT, sizeof c, &c, NULL);
	cl_event fails = vendor.clCreateUserEvent(c, &err);
	err = vendor.clEnqueueReadImage(q, m, CL_FALSE, origin, region, row, slice, p, 1, &fails, e);
	vendor.clSetUserEventStatus(fails, -5);
	vendor.clReleaseEvent(fails);
	return err;
}

static void *(*pocl(void))(const char *)
{
	void *lib = dlopen("libpocl.so.2", RTLD_NOW | RTLD_LOCAL);
	return lib ? (void *(*)(const char *))dlsym(lib, "clGetExtensionFunctionAddress") : NULL;
}

static cl_int CL_API_CALL platform_ids(cl_uint n, cl_platform_id *p, cl_uint *count)
{
	typedef cl_int(CL_API_CALL * get_fn)(cl_uint, cl_platform_id *, cl_uint *);
	void *(*address)(const char *) = pocl();
	get_fn get = address ? (get_fn)address("clIcdGetPlatformIDsKHR") : NULL;
	cl_int err = get ? get(n, p, count) : CL_PLATFORM_NOT_FOUND_KHR;
	if (err || !p || !n || vendor.clGetDeviceInfo)
		return err;
	cl_icd_dispatch *table = *(cl_icd_dispatch **)(void *)p[0];
	uintptr_t from = (uintptr_t)table & ~(uintptr_t)4095;
	vendor = *table;
	mprotect((void *)from, (uintptr_t)table + sizeof *table - from, PROT_READ | PROT_WRITE);
	table->clGetDeviceInfo = device_info;
	table->clCreateProgramWithSource = with_source;
	table->clCreateProgramWithIL = with_il;
	table->clSetProgramSpecializationConstant = constant;
	table->clBuildProgram = build;
	table->clFinish = finish;
	table->clWaitForEvents = wait_events;
	table->clEnqueueReadImage = read_image;
	table->clEnqueueMarkerWithWaitList = marker;
	table->clCompileProgram = compile;
	return err;
}

__attribute__((visibility("default"))) CL_API_ENTRY void *CL_API_CALL clGetExtensionFunctionAddress(const char *name)
{
	void *(*address)(const char *) = pocl();
	return !strcmp(name, "clIcdGetPlatformIDsKHR") ? (void *)platform_ids : address ? address(name) : NULL;
}
