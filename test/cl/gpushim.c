/*
 * gpushim: an ICD that passes everything to PoCL and calls its devices GPUs.
 *
 * x264 takes GPUs only. With this library named in a vendors folder it runs natively on PoCL, so that the bench
 * compares the same work on both sides.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl_icd.h>
#include <dlfcn.h>
#include <string.h>

typedef cl_int(CL_API_CALL *platforms_fn)(cl_uint, cl_platform_id *, cl_uint *);

static cl_icd_dispatch vendor, ours;

static cl_int CL_API_CALL device_ids(cl_platform_id p, cl_device_type t, cl_uint n, cl_device_id *d, cl_uint *count)
{
	return vendor.clGetDeviceIDs(p, t == CL_DEVICE_TYPE_GPU ? CL_DEVICE_TYPE_ALL : t, n, d, count);
}

static cl_int CL_API_CALL device_info(cl_device_id d, cl_device_info param, size_t size, void *value, size_t *ret)
{
	cl_int e = vendor.clGetDeviceInfo(d, param, size, value, ret);
	if (!e && param == CL_DEVICE_TYPE && value)
		*(cl_device_type *)value = CL_DEVICE_TYPE_GPU;
	return e;
}

/* Every object begins with its dispatch table: platform and devices get ours. */
static void patch(cl_platform_id p)
{
	cl_icd_dispatch **table = (cl_icd_dispatch **)(void *)p;
	if (*table == &ours)
		return;
	vendor = ours = **table;
	ours.clGetDeviceIDs = device_ids;
	ours.clGetDeviceInfo = device_info;
	*table = &ours;
	cl_device_id d[8];
	cl_uint n = 0;
	if (vendor.clGetDeviceIDs(p, CL_DEVICE_TYPE_ALL, 8, d, &n) == CL_SUCCESS)
		for (cl_uint i = 0; i < n && i < 8; i++)
			*(cl_icd_dispatch **)(void *)d[i] = &ours;
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
