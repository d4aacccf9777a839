// hostile: what a kernel can do where a kernel is native code. On an OpenCL runtime for x86-64
// processors it makes system calls: who it is, whether it opens FILE, and whether it can signal PID.
// usage: hostile FILE PID
#include "clx.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *source =
    "long call(long nr, long a, long b, long c) {\n"
    "  long r;\n"
    "  __asm__ volatile(\"syscall\" : \"=a\"(r) : \"a\"(nr), \"D\"(a), \"S\"(b), \"d\"(c) : \"rcx\", \"r11\", \"memory\");\n"
    "  return r;\n"
    "}\n"
    "__kernel void hostile(__global const char *file, long pid, __global long *out) {\n"
    "  out[0] = call(102, 0, 0, 0);\n"            // getuid
    "  out[1] = call(2, (long)file, 0, 0);\n"     // open for reading
    "  out[2] = call(2, (long)file, 1, 0);\n"     // for writing
    "  out[3] = call(62, pid, 0, 0);\n"           // kill
    "  out[4] = call(101, 16, pid, 0);\n"         // ptrace
    "  out[5] = call(41, 2, 1, 0);\n"             // socket
    "}\n";

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "usage: hostile FILE PID\n");
		return 2;
	}
	cl_platform_id platform;
	cl_device_id device;
	cl_int e;
	if (clGetPlatformIDs(1, &platform, NULL) || clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL))
		return 1;
	cl_context c = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
	cl_command_queue q = clCreateCommandQueue(c, device, 0, &e);
	cl_program p = clCreateProgramWithSource(c, 1, &source, NULL, &e);
	if (clBuildProgram(p, 1, &device, "", NULL, NULL)) {
		printf("no native code\n"); // not a processor's runtime
		return 0;
	}
	cl_kernel k = clCreateKernel(p, "hostile", &e);
	cl_long out[6] = {0}, pid = atol(argv[2]);
	cl_mem file = clCreateBuffer(c, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, strlen(argv[1]) + 1, argv[1], &e);
	cl_mem result = clCreateBuffer(c, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, sizeof out, out, &e);
	size_t one = 1;
	if (clSetKernelArg(k, 0, sizeof file, &file) || clSetKernelArg(k, 1, sizeof pid, &pid) || clSetKernelArg(k, 2, sizeof result, &result) ||
	    clEnqueueNDRangeKernel(q, k, 1, NULL, &one, &one, 0, NULL, NULL) || clEnqueueReadBuffer(q, result, CL_TRUE, 0, sizeof out, out, 0, NULL, NULL))
		return 1;
	printf("uid %lld read %lld write %lld signal %lld ptrace %lld network %lld\n", (long long)out[0], (long long)out[1], (long long)out[2],
	       (long long)out[3], (long long)out[4], (long long)out[5]);
	return 0;
}
