// Calls of functions that are found at run time, by their number of arguments. All of
// NVIDIA's that are used take integers and pointers and return an int.
#pragma once
#include <stddef.h>
#include <stdint.h>

void *gxLoad(const char *name, char *why, size_t len);
void *gxFind(void *lib, const char *name);
int gxCall(void *f, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d);
// The same for a pid or an index, which is an int, and a pointer.
int gxCallPid(void *f, int pid, void *args);
