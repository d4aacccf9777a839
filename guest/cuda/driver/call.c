#define _GNU_SOURCE
#include "call.h"

#include <dlfcn.h>
#include <stdio.h>

void *gxLoad(const char *name, char *why, size_t len) {
	void *lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		const char *e = dlerror(); // of this thread: so it is read here
		snprintf(why, len, "%s", e ? e : "cannot be loaded");
	}
	return lib;
}

void *gxFind(void *lib, const char *name) { return dlsym(lib, name); }

int gxCall(void *f, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d) {
	return ((int (*)(uintptr_t, uintptr_t, uintptr_t, uintptr_t))f)(a, b, c, d);
}

int gxCallPid(void *f, int pid, void *args) { return ((int (*)(int, void *))f)(pid, args); }
