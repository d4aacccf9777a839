#define _GNU_SOURCE
#include "trampolines.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

void *gxOpen(const char *path, char *why, size_t len) {
	static const char name[] = "clIcdGetPlatformIDsKHR";
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		const char *e = dlerror(); // of this thread: so it is read here
		snprintf(why, len, "%s", e ? e : "cannot be loaded");
		return NULL;
	}
	void *icd = NULL;
	void *(*address)(const char *) = (void *(*)(const char *))dlsym(lib, "clGetExtensionFunctionAddress");
	if (address)
		icd = address(name);
	if (!icd)
		icd = dlsym(lib, name);
	if (!icd) {
		snprintf(why, len, "no %s: not an OpenCL runtime", name);
		dlclose(lib);
	}
	return icd;
}

int gxUnbuffer(void) { return setvbuf(stdout, NULL, _IONBF, 0); }

int32_t gxPlatforms(void *icd, uint32_t n, uintptr_t *platforms, uint32_t *ret) {
	cl_int (*get)(cl_uint, cl_platform_id *, cl_uint *) = (cl_int(*)(cl_uint, cl_platform_id *, cl_uint *))icd;
	return get(n, (cl_platform_id *)platforms, ret);
}

int gxSerial;
static pthread_mutex_t serial = PTHREAD_MUTEX_INITIALIZER;

void gxLock(void) { pthread_mutex_lock(&serial); }
void gxUnlock(void) { pthread_mutex_unlock(&serial); }

// The tables of this process's runtimes. Entries are only added, so that
// gxVersion needs no lock.
enum { MAX_TABLES = 64 };
static struct {
	const cl_icd_dispatch *table;
	int version;
} tables[MAX_TABLES];
static int ntables, oldest = 30;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int32_t gxAdmit(uintptr_t platform, int version) {
	const cl_icd_dispatch *t = platform ? *(const cl_icd_dispatch *const *)platform : NULL;
	if (!t)
		return CL_INVALID_PLATFORM;
	int32_t err = CL_SUCCESS;
	pthread_mutex_lock(&lock);
	int n = ntables, i = 0;
	while (i < n && tables[i].table != t)
		i++;
	if (i == MAX_TABLES) {
		err = CL_OUT_OF_HOST_MEMORY;
	} else if (i == n) {
		tables[n].table = t;
		tables[n].version = version;
		if (version < oldest)
			__atomic_store_n(&oldest, version, __ATOMIC_RELAXED);
		__atomic_store_n(&ntables, n + 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&lock);
	return err;
}

int gxVersion(const cl_icd_dispatch *t) {
	int n = __atomic_load_n(&ntables, __ATOMIC_ACQUIRE);
	for (int i = 0; i < n; i++)
		if (tables[i].table == t)
			return tables[i].version;
	// A runtime with more tables than its platforms show: assume the least.
	return __atomic_load_n(&oldest, __ATOMIC_RELAXED);
}
