// cudaloop: a CUDA program whose every result is known. Each round a kernel changes an array
// on the GPU, and the same is computed on the host. It runs with NVIDIA's driver and with the
// fake; the kernel is PTX, so no compiler is needed.
//
//	cudaloop [--gpu N] [--mib N] [--words N] [--pause US] [--rounds N] [--fork] [--managed] [--workers N] [--idle] [--say N]
//
// It prints "ready PID", works until its standard input ends or has a line, or for --rounds,
// compares, and prints "ok ROUNDS SUM" or "bad ROUNDS SUM EXPECTED". --mib is how much
// more memory it has, filled with a pattern that is compared, too. With --fork a child that
// does not exec keeps the descriptors; --workers starts that many more processes like itself and
// ends well if all do. With --idle it uses no CUDA. With --say it prints
// "round R" every N rounds.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
			  ".visible .entry mix(.param .u64 p, .param .u32 n, .param .u32 round)\n{\n"
			  ".reg .pred %p<2>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<5>;\n"
			  "ld.param.u64 %rd1, [p];\nld.param.u32 %r1, [n];\nld.param.u32 %r2, [round];\n"
			  "mov.u32 %r3, %ctaid.x;\nmov.u32 %r4, %ntid.x;\nmov.u32 %r5, %tid.x;\n"
			  "mad.lo.s32 %r6, %r3, %r4, %r5;\nsetp.ge.u32 %p1, %r6, %r1;\n@%p1 bra DONE;\n"
			  "cvta.to.global.u64 %rd2, %rd1;\nmul.wide.u32 %rd3, %r6, 4;\nadd.s64 %rd4, %rd2, %rd3;\n"
			  "ld.global.u32 %r7, [%rd4];\nmul.lo.u32 %r7, %r7, 1664525;\nadd.u32 %r7, %r7, 1013904223;\n"
			  "add.u32 %r7, %r7, %r2;\nadd.u32 %r7, %r7, %r6;\nst.global.u32 [%rd4], %r7;\nDONE:\nret;\n}\n";

static void *lib;

static void check(int code, const char *what) {
	if (code) {
		printf("error %s %d\n", what, code);
		fflush(stdout);
		exit(1);
	}
}

static void *sym(const char *name) {
	void *f = dlsym(lib, name);
	if (!f) {
		printf("error %s missing\n", name);
		exit(1);
	}
	return f;
}
#define CU(name, ...) check(((int (*)())sym(#name))(__VA_ARGS__), #name)

static long number(int argc, char **argv, const char *name, long other) {
	for (int i = 1; i + 1 < argc; i++)
		if (!strcmp(argv[i], name))
			return atol(argv[i + 1]);
	return other;
}

static int has(int argc, char **argv, const char *name) {
	for (int i = 1; i < argc; i++)
		if (!strcmp(argv[i], name))
			return 1;
	return 0;
}

static int told(int ms) {
	struct pollfd p = {.fd = 0, .events = POLLIN};
	return poll(&p, 1, ms) > 0;
}

// rest keeps a child alive until its parent ends.
static void rest(void) {
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;)
		pause();
}

// workers starts processes like this one, and passes on the end of the input.
static int workers(int n, char **argv) {
	int in[64], ok = 1;
	pid_t pid[64];
	for (int i = 0; i < n && i < 64; i++) {
		int p[2];
		if (pipe2(p, 02000000) || (pid[i] = fork()) < 0) // O_CLOEXEC
			return 1;
		if (!pid[i]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			dup2(p[0], 0);
			char *args[64];
			int k = 0;
			for (int j = 0; argv[j] && k < 60; j++)
				if (!strcmp(argv[j], "--workers"))
					j++;
				else
					args[k++] = argv[j];
			args[k] = NULL;
			execv("/proc/self/exe", args);
			_exit(1);
		}
		close(p[0]);
		in[i] = p[1];
	}
	while (!told(-1))
		;
	for (int i = 0; i < n; i++) {
		int status = 0;
		close(in[i]);
		waitpid(pid[i], &status, 0);
		ok &= status == 0;
	}
	printf(ok ? "ok\n" : "bad\n");
	return !ok;
}

int main(int argc, char **argv) {
	setvbuf(stdout, NULL, _IOLBF, 0);
	long n = number(argc, argv, "--workers", 0);
	if (n > 0)
		return workers(n, argv);
	if (has(argc, argv, "--idle")) {
		printf("ready %d\n", getpid());
		while (!told(-1))
			;
		return 0;
	}
	uint32_t words = number(argc, argv, "--words", 4096), round = 0;
	uint64_t extra = (uint64_t)number(argc, argv, "--mib", 0) << 20, at = 0, more = 0;
	long say = number(argc, argv, "--say", 0);
	long us = number(argc, argv, "--pause", 1000), rounds = number(argc, argv, "--rounds", 0);
	if (!(lib = dlopen("libcuda.so.1", RTLD_NOW))) {
		printf("error %s\n", dlerror());
		return 1;
	}
	int dev = 0;
	void *ctx, *mod, *f;
	CU(cuInit, 0);
	CU(cuDeviceGet, &dev, (int)number(argc, argv, "--gpu", 0));
	CU(cuDevicePrimaryCtxRetain, &ctx, dev);
	CU(cuCtxSetCurrent, ctx);
	CU(cuModuleLoadData, &mod, ptx);
	CU(cuModuleGetFunction, &f, mod, "mix");
	uint32_t *host = malloc(words * 4UL), *back = malloc(words * 4UL);
	for (uint32_t i = 0; i < words; i++)
		host[i] = i * 2654435761u;
	if (has(argc, argv, "--managed"))
		CU(cuMemAllocManaged, &at, (size_t)words * 4, 1u);
	else
		CU(cuMemAlloc_v2, &at, (size_t)words * 4);
	CU(cuMemcpyHtoD_v2, at, host, (size_t)words * 4);
	if (extra) {
		CU(cuMemAlloc_v2, &more, (size_t)extra);
		CU(cuMemsetD32_v2, more, 0x5a17c0deu, (size_t)(extra / 4));
		CU(cuCtxSynchronize);
	}
	if (has(argc, argv, "--fork") && !fork())
		rest();
	printf("ready %d\n", getpid());
	while (rounds ? round < rounds : !told(0)) {
		void *params[] = {&at, &words, &round};
		CU(cuLaunchKernel, f, (words + 255) / 256, 1u, 1u, 256u, 1u, 1u, 0u, (void *)0, params, (void *)0);
		CU(cuCtxSynchronize);
		for (uint32_t i = 0; i < words; i++)
			host[i] = host[i] * 1664525u + 1013904223u + round + i;
		round++;
		if (say && round % say == 0)
			printf("round %u\n", round);
		if (us)
			usleep(us);
	}
	CU(cuMemcpyDtoH_v2, back, at, (size_t)words * 4);
	uint32_t sum = 0, want = 0;
	int ok = 1;
	for (uint32_t i = 0; i < words; i++)
		sum = sum * 31 + back[i], want = want * 31 + host[i], ok &= back[i] == host[i];
	enum { CHUNK = 1 << 22 };
	uint32_t *piece = malloc(CHUNK);
	for (uint64_t off = 0; off < extra; off += CHUNK) {
		size_t now = extra - off < CHUNK ? extra - off : CHUNK;
		CU(cuMemcpyDtoH_v2, piece, more + off, now);
		for (size_t i = 0; i < now / 4; i++)
			ok &= piece[i] == 0x5a17c0deu;
	}
	if (ok)
		printf("ok %u %08x\n", round, sum);
	else
		printf("bad %u %08x %08x\n", round, sum, want);
	fflush(stdout);
	_exit(!ok);
}
