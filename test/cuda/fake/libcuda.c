// A libcuda.so.1 that has no GPU and keeps the rules of NVIDIA's checkpoints. In an application
// a thread of its own takes the requests of cuCheckpointProcess functions, which other
// processes call: it really stops CUDA calls, really copies the memory out of the card and
// into another, and really closes the nodes. What breaks a rule is refused as the driver
// does, and noted in the file violations.
#include "fake.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

enum { OK = 0, INVALID = 1, NOMEM = 2, UNINIT = 3, NODEVICE = 100, BADDEVICE = 101, BADCONTEXT = 201, OS = 304, ILLEGAL = 401, NOTREADY = 600, NOTPERMITTED = 800, NOTSUPPORTED = 801, UNKNOWN = 999 };
enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum { OP_STATE, OP_LOCK, OP_CHECKPOINT, OP_RESTORE, OP_UNLOCK };
static const char *const ops[] = {"state", "lock", "checkpoint", "restore", "unlock"};

struct pair {
	unsigned char from[16], to[16];
};
struct request {
	int op, timeout, inited, npairs;
	struct pair pairs[MOST_CARDS];
};
struct reply {
	int code, state;
};

// ---- In the application.

#define MOST_ALLOCS 128
struct allocation {
	uint64_t at, size, offset;
	int card, managed; // card is -1 while it is checkpointed
	unsigned char uuid[16];
	void *copy;
};
static pthread_rwlock_t gate; // held for reading during CUDA calls, for writing while locked
static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;
static struct allocation allocs[MOST_ALLOCS];
static uint64_t nextAt = 0x7f2000000000;
static int inited, state, poisoned, nodes[MOST_CARDS + 2], current;
static unsigned char was[MOST_CARDS][16]; // GPUs that were shown at the checkpoint
static int nwas;

static void parseUUID(const char *text, unsigned char out[16]) {
	int n = 0;
	for (const char *p = text + 4; *p && n < 32; p++)
		if (isxdigit((unsigned char)*p)) {
			int v = isdigit((unsigned char)*p) ? *p - '0' : tolower(*p) - 'a' + 10;
			out[n / 2] = n % 2 ? out[n / 2] | v : v << 4;
			n++;
		}
}

static int cardOf(const struct config *c, const unsigned char uuid[16]) {
	for (int i = 0; i < c->cards; i++) {
		unsigned char u[16];
		parseUUID(c->card[i].uuid, u);
		if (!memcmp(u, uuid, 16))
			return i;
	}
	return -1;
}

static int openNode(const char *name) {
	char path[512];
	fakePath(path, sizeof path, "dev/%s", name);
	return open(path, O_RDWR);
}

static int openNodes(const struct config *c) {
	for (int i = 0; i < c->cards; i++) {
		char name[32];
		snprintf(name, sizeof name, "nvidia%d", i);
		if (nodes[i] < 0 && (nodes[i] = openNode(name)) < 0)
			return NODEVICE;
	}
	if (nodes[MOST_CARDS] < 0)
		nodes[MOST_CARDS] = openNode("nvidiactl");
	if (nodes[MOST_CARDS + 1] < 0)
		nodes[MOST_CARDS + 1] = openNode("nvidia-uvm");
	return OK;
}

static void closeNodes(int from) {
	for (int i = from; i < MOST_CARDS + 2; i++)
		if (nodes[i] >= 0) {
			close(nodes[i]);
			nodes[i] = -1;
		}
}

// take gives this process a part of a card's memory.
static int take(const struct config *c, int card, uint64_t size, uint64_t *offset) {
	struct part parts[MOST_PARTS];
	int fd = fakeParts(card, parts), free = -1, code = NOMEM;
	if (fd < 0)
		return UNKNOWN;
	uint64_t at = 0;
	for (int again = 1; again;) { // first fit
		again = 0;
		for (int i = 0; i < MOST_PARTS; i++) {
			if (!parts[i].used) {
				free = i;
				continue;
			}
			if (at < parts[i].offset + parts[i].size && parts[i].offset < at + size) {
				at = parts[i].offset + parts[i].size;
				again = 1;
			}
		}
	}
	if (free >= 0 && at + size <= c->card[card].bytes) {
		parts[free] = (struct part){getpid(), 1, fakeStart(getpid()), at, size};
		*offset = at;
		code = OK;
	}
	fakeSave(fd, parts);
	return code;
}

static void give(int card, uint64_t offset) {
	struct part parts[MOST_PARTS];
	int fd = fakeParts(card, parts);
	if (fd < 0)
		return;
	for (int i = 0; i < MOST_PARTS; i++)
		if (parts[i].used && parts[i].pid == getpid() && parts[i].offset == offset)
			parts[i].used = 0;
	fakeSave(fd, parts);
}

static int io(struct allocation *a, uint64_t off, void *buf, size_t n, int out) {
	for (size_t done = 0; done < n;) {
		ssize_t got = out ? pread(nodes[a->card], (char *)buf + done, n - done, a->offset + off + done)
				  : pwrite(nodes[a->card], (char *)buf + done, n - done, a->offset + off + done);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0) {
			if (out && got == 0) { // never written
				memset((char *)buf + done, 0, n - done);
				return OK;
			}
			return UNKNOWN;
		}
		done += got;
	}
	return OK;
}

static int doCheckpoint(const struct config *c) {
	nwas = c->cards;
	for (int i = 0; i < c->cards; i++)
		parseUUID(c->card[i].uuid, was[i]);
	for (int i = 0; i < MOST_ALLOCS; i++) {
		struct allocation *a = &allocs[i];
		if (!a->size)
			continue;
		if (a->managed) { // not supported; older drivers do not keep the process in a good state
			if (fakeSwitch("managed", "fails", getpid(), NULL, NULL, 0))
				state = FAILED;
			return NOTSUPPORTED;
		}
		if (c->card[a->card].mig)
			return NOMEM;
		if (!(a->copy = malloc(a->size)) || io(a, 0, a->copy, a->size, 1)) {
			state = FAILED;
			return NOMEM;
		}
		parseUUID(c->card[a->card].uuid, a->uuid);
	}
	for (int i = 0; i < MOST_ALLOCS; i++)
		if (allocs[i].size) {
			give(allocs[i].card, allocs[i].offset);
			allocs[i].card = -1;
		}
	closeNodes(c->keepfd ? 1 : 0);
	state = CHECKPOINTED;
	return OK;
}

static int newCard(const struct config *c, const struct request *r, const unsigned char uuid[16]) {
	for (int i = 0; i < r->npairs; i++)
		if (!memcmp(r->pairs[i].from, uuid, 16))
			return cardOf(c, r->pairs[i].to);
	return r->npairs ? -1 : cardOf(c, uuid);
}

static int checkPairs(const struct config *c, const struct request *r) {
	if (!r->npairs)
		return OK;
	for (int i = 0; i < nwas; i++) {
		int named = 0;
		for (int k = 0; k < r->npairs; k++)
			named += !memcmp(r->pairs[k].from, was[i], 16);
		if (named != 1) {
			fakeViolation("restore %d: a GPU that the driver shows is named in %d pairs", getpid(), named);
			return INVALID;
		}
	}
	for (int i = 0; i < r->npairs; i++) {
		if (cardOf(c, r->pairs[i].to) < 0) {
			fakeViolation("restore %d: a pair names a GPU that is not there", getpid());
			return INVALID;
		}
		for (int k = 0; k < i; k++)
			if (!memcmp(r->pairs[i].to, r->pairs[k].to, 16)) {
				fakeViolation("restore %d: two GPUs go to one", getpid());
				return INVALID;
			}
	}
	return OK;
}

static unsigned chipOf(const unsigned char uuid[16]) { // of a card that may be gone: its first bytes
	return uuid[0] << 8 | uuid[1];
}

static int doRestore(const struct config *c, const struct request *r) {
	if (poisoned)
		return OS;
	int code = checkPairs(c, r), transient = 0;
	for (int i = 0; i < c->cards; i++)
		transient |= c->card[i].transient;
	if (!code && transient && !r->inited)
		code = NOTPERMITTED;
	for (int i = 0; i < MOST_ALLOCS && !code; i++) {
		if (!allocs[i].size)
			continue;
		int card = newCard(c, r, allocs[i].uuid);
		if (card < 0)
			return BADDEVICE;
		unsigned char u[16];
		parseUUID(c->card[card].uuid, u);
		if (chipOf(u) != chipOf(allocs[i].uuid)) {
			fakeViolation("restore %d on another chip", getpid());
			return NOTSUPPORTED;
		}
	}
	if (code)
		return code;
	code = openNodes(c);
	for (int i = 0; i < MOST_ALLOCS && !code; i++) {
		struct allocation *a = &allocs[i];
		if (!a->size)
			continue;
		int card = newCard(c, r, a->uuid);
		if ((code = take(c, card, a->size, &a->offset)))
			break;
		a->card = card;
		code = io(a, 0, a->copy, a->size, 0);
	}
	if (code) { // what was done is not taken back, and never works again
		for (int i = 0; i < MOST_ALLOCS; i++)
			if (allocs[i].size && allocs[i].card >= 0) {
				give(allocs[i].card, allocs[i].offset);
				allocs[i].card = -1;
			}
		closeNodes(0);
		poisoned = 1;
		return code;
	}
	for (int i = 0; i < MOST_ALLOCS; i++)
		if (allocs[i].size) {
			free(allocs[i].copy);
			allocs[i].copy = NULL;
			current = allocs[i].card;
		}
	state = LOCKED;
	return OK;
}

static int serve(const struct request *r) {
	struct config c;
	int n = 0;
	char word[32] = "";
	if (fakeConfig(&c))
		return UNKNOWN;
	if (fakeSwitch("slow", ops[r->op], getpid(), &n, NULL, 0))
		usleep(n * 1000);
	if (fakeSwitch("fail", ops[r->op], getpid(), &n, word, sizeof word)) {
		if (!strcmp(word, "failed"))
			state = FAILED;
		return n;
	}
	static const int needs[] = {-1, RUNNING, LOCKED, CHECKPOINTED, LOCKED};
	if (r->op != OP_STATE && poisoned)
		return r->op == OP_RESTORE ? OS : ILLEGAL;
	if (r->op != OP_STATE && state != needs[r->op]) {
		fakeViolation("%s %d in state %d", ops[r->op], getpid(), state);
		return ILLEGAL;
	}
	switch (r->op) {
	case OP_LOCK: {
		struct timespec t;
		clock_gettime(CLOCK_REALTIME, &t);
		t.tv_sec += r->timeout / 1000;
		t.tv_nsec += r->timeout % 1000 * 1000000L;
		if (t.tv_nsec >= 1000000000L)
			t.tv_sec++, t.tv_nsec -= 1000000000L;
		if (r->timeout ? pthread_rwlock_timedwrlock(&gate, &t) : pthread_rwlock_wrlock(&gate))
			return NOTREADY;
		state = LOCKED;
		return OK;
	}
	case OP_CHECKPOINT:
		return doCheckpoint(&c);
	case OP_RESTORE:
		return doRestore(&c, r);
	case OP_UNLOCK:
		state = RUNNING;
		pthread_rwlock_unlock(&gate);
	}
	return OK;
}

static int procSocket(int pid, struct sockaddr_un *a, int *dir) {
	char path[512];
	fakePath(path, sizeof path, "procs");
	*dir = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	memset(a, 0, sizeof *a);
	a->sun_family = AF_UNIX;
	// The path itself if it is short enough: criu can bind that again.
	int n = snprintf(path, sizeof path, "%s/procs/%d", fakeDir(), pid);
	if (n < (int)sizeof a->sun_path)
		memcpy(a->sun_path, path, n + 1);
	else
		snprintf(a->sun_path, sizeof a->sun_path, "/proc/self/fd/%d/%d", *dir, pid);
	return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
}

static void *requests(void *listener) {
	for (int l = (int)(intptr_t)listener;;) {
		int fd = accept4(l, NULL, NULL, SOCK_CLOEXEC);
		if (fd < 0)
			continue;
		struct request r;
		struct reply a = {0};
		if (recv(fd, &r, sizeof r, 0) == sizeof r) {
			a.code = serve(&r);
			a.state = state;
			send(fd, &a, sizeof a, MSG_NOSIGNAL);
		}
		close(fd);
	}
	return NULL;
}

static int startProcess(void) {
	struct config c;
	if (fakeConfig(&c) || !c.cards)
		return NODEVICE;
	for (int i = 0; i < MOST_CARDS + 2; i++)
		nodes[i] = -1;
	pthread_rwlockattr_t attr;
	pthread_rwlockattr_init(&attr);
	pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
	pthread_rwlock_init(&gate, &attr);
	int code = openNodes(&c);
	if (code)
		return code;
	struct sockaddr_un a;
	int dir, l = procSocket(getpid(), &a, &dir);
	unlink(a.sun_path);
	if (l < 0 || bind(l, (struct sockaddr *)&a, sizeof a) || listen(l, 16))
		return OS;
	chmod(a.sun_path, 0666);
	close(dir);
	pthread_t t;
	pthread_create(&t, NULL, requests, (void *)(intptr_t)l);
	inited = getpid(); // not a child's after a fork
	return OK;
}

#define ENTER()                                                                                                       \
	if (inited != getpid())                                                                                        \
		return UNINIT;                                                                                         \
	pthread_rwlock_rdlock(&gate)
#define LEAVE(code)                                                                                                   \
	do {                                                                                                           \
		int ret_ = (code);                                                                                     \
		pthread_rwlock_unlock(&gate);                                                                          \
		return ret_;                                                                                           \
	} while (0)

static struct allocation *find(uint64_t at, uint64_t n, uint64_t *off) {
	for (int i = 0; i < MOST_ALLOCS; i++)
		if (allocs[i].size && at >= allocs[i].at && n <= allocs[i].size && at - allocs[i].at <= allocs[i].size - n) {
			*off = at - allocs[i].at;
			return &allocs[i];
		}
	return NULL;
}

EXPORT int cuInit(unsigned flags) {
	(void)flags;
	static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
	pthread_mutex_lock(&once);
	int code = inited == getpid() ? OK : startProcess();
	pthread_mutex_unlock(&once);
	return code;
}

EXPORT int cuDriverGetVersion(int *v) {
	struct config c;
	if (fakeConfig(&c))
		return UNKNOWN;
	*v = c.cuda;
	return OK;
}

EXPORT int cuGetErrorName(int code, const char **name) {
	static const struct {
		int code;
		const char *name;
	} names[] = {{0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"}, {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"}, {304, "CUDA_ERROR_OPERATING_SYSTEM"}, {401, "CUDA_ERROR_ILLEGAL_STATE"}, {600, "CUDA_ERROR_NOT_READY"}, {800, "CUDA_ERROR_NOT_PERMITTED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"}, {999, "CUDA_ERROR_UNKNOWN"}};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (names[i].code == code) {
			*name = names[i].name;
			return OK;
		}
	*name = NULL;
	return INVALID;
}

EXPORT int cuDeviceGetCount(int *n) {
	struct config c;
	ENTER();
	*n = fakeConfig(&c) ? 0 : c.cards;
	LEAVE(OK);
}

EXPORT int cuDeviceGet(int *dev, int i) {
	struct config c;
	ENTER();
	*dev = i;
	LEAVE(fakeConfig(&c) || i < 0 || i >= c.cards ? BADDEVICE : OK);
}

// After a move the process keeps its number of the GPU, and has the new one's UUID.
EXPORT int cuDeviceGetUuid(unsigned char uuid[16], int dev) {
	struct config c;
	ENTER();
	if (fakeConfig(&c) || dev < 0 || dev >= c.cards)
		LEAVE(BADDEVICE);
	parseUUID(c.card[dev].uuid, uuid);
	LEAVE(OK);
}

EXPORT int cuDevicePrimaryCtxRetain(void **ctx, int dev) {
	ENTER();
	*ctx = (void *)(intptr_t)(dev + 1);
	LEAVE(OK);
}

EXPORT int cuCtxSetCurrent(void *ctx) {
	ENTER();
	current = (int)(intptr_t)ctx - 1;
	LEAVE(OK);
}

static int allocate(uint64_t *at, size_t size, int managed) {
	struct config c;
	if (fakeConfig(&c) || current < 0 || current >= c.cards || !size)
		return BADCONTEXT;
	pthread_mutex_lock(&table);
	int code = NOMEM;
	for (int i = 0; i < MOST_ALLOCS; i++)
		if (!allocs[i].size) {
			struct allocation a = {.at = nextAt, .size = size, .card = current, .managed = managed};
			if (!(code = take(&c, current, size, &a.offset))) {
				allocs[i] = a;
				*at = a.at;
				nextAt += (size + 0x1fffff) & ~0x1fffffULL;
			}
			break;
		}
	pthread_mutex_unlock(&table);
	return code;
}

EXPORT int cuMemAlloc_v2(uint64_t *at, size_t size) {
	ENTER();
	LEAVE(allocate(at, size, 0));
}

EXPORT int cuMemAllocManaged(uint64_t *at, size_t size, unsigned flags) {
	(void)flags;
	ENTER();
	LEAVE(allocate(at, size, 1));
}

EXPORT int cuMemFree_v2(uint64_t at) {
	uint64_t off;
	ENTER();
	pthread_mutex_lock(&table);
	struct allocation *a = find(at, 1, &off);
	int code = a && !off ? OK : INVALID;
	if (!code) {
		give(a->card, a->offset);
		a->size = 0;
	}
	pthread_mutex_unlock(&table);
	LEAVE(code);
}

EXPORT int cuMemcpyHtoD_v2(uint64_t at, const void *src, size_t n) {
	uint64_t off;
	ENTER();
	struct allocation *a = find(at, n, &off);
	LEAVE(a ? io(a, off, (void *)src, n, 0) : INVALID);
}

EXPORT int cuMemcpyDtoH_v2(void *dst, uint64_t at, size_t n) {
	uint64_t off;
	ENTER();
	struct allocation *a = find(at, n, &off);
	LEAVE(a ? io(a, off, dst, n, 1) : INVALID);
}

EXPORT int cuMemsetD32_v2(uint64_t at, unsigned v, size_t n) {
	uint64_t off;
	ENTER();
	struct allocation *a = find(at, n * 4, &off);
	int code = a ? OK : INVALID;
	unsigned buf[1024];
	for (int i = 0; i < 1024; i++)
		buf[i] = v;
	for (size_t done = 0; done < n && !code;) {
		size_t now = n - done < 1024 ? n - done : 1024;
		code = io(a, off + done * 4, buf, now * 4, 0);
		done += now;
	}
	LEAVE(code);
}

EXPORT int cuModuleLoadData(void **mod, const void *image) {
	ENTER();
	*mod = (void *)image;
	LEAVE(OK);
}

EXPORT int cuModuleGetFunction(void **f, void *mod, const char *name) {
	(void)mod;
	ENTER();
	*f = (void *)name;
	LEAVE(strcmp(name, "mix") ? 500 : OK);
}

// The one kernel is cudaloop's "mix"; a line "slow kernel - MS" makes it take long.
EXPORT int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **params, void **extra) {
	(void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
	uint64_t at = *(uint64_t *)params[0], off;
	uint32_t n = *(uint32_t *)params[1], round = *(uint32_t *)params[2];
	int ms = 0;
	ENTER();
	struct allocation *a = find(at, (uint64_t)n * 4, &off);
	uint32_t *words = a ? malloc((size_t)n * 4) : NULL;
	int code = !a ? INVALID : !words ? NOMEM : io(a, off, words, (size_t)n * 4, 1);
	if (fakeSwitch("slow", "kernel", getpid(), &ms, NULL, 0))
		usleep(ms * 1000);
	for (uint32_t i = 0; i < n && !code; i++)
		words[i] = words[i] * 1664525u + 1013904223u + round + i;
	if (!code)
		code = io(a, off, words, (size_t)n * 4, 0);
	free(words);
	LEAVE(code);
}

EXPORT int cuCtxSynchronize(void) {
	ENTER();
	LEAVE(OK);
}

// ---- In a process that asks.

static int permitted(int pid) {
	char path[64], line[256];
	struct stat st;
	snprintf(path, sizeof path, "/proc/%d", pid);
	if (stat(path, &st))
		return 0;
	FILE *f = fopen("/proc/self/status", "re");
	unsigned long long caps = 0;
	while (f && fgets(line, sizeof line, f))
		sscanf(line, "CapEff: %llx", &caps);
	if (f)
		fclose(f);
	return caps >> 19 & 1 || st.st_uid == geteuid();
}

static int request(int pid, struct request *r, struct reply *a) {
	const char *op = ops[r->op];
	if (!fakeDir())
		return NODEVICE;
	if (fakeSwitch("hang", op, pid, NULL, NULL, 0))
		for (;;)
			pause();
	if (fakeOnce("die-%s-%s", op, "before"))
		raise(SIGKILL);
	if (!permitted(pid))
		return OS;
	struct sockaddr_un addr;
	int dir, fd = procSocket(pid, &addr, &dir), code = OS;
	r->inited = inited == getpid();
	// A pid that is no CUDA process's, a thread's among them, has no socket.
	if (fd >= 0 && !connect(fd, (struct sockaddr *)&addr, sizeof addr) && send(fd, r, sizeof *r, MSG_NOSIGNAL) == sizeof *r) {
		if (fakeOnce("die-%s-%s", op, "during"))
			raise(SIGKILL);
		if (recv(fd, a, sizeof *a, 0) == sizeof *a)
			code = a->code;
	}
	close(fd);
	close(dir);
	if (fakeOnce("die-%s-%s", op, "after"))
		raise(SIGKILL);
	return code;
}

static int zeroFrom(const unsigned char *args, int from, const char *op) {
	for (int i = from; args && i < 64; i++)
		if (args[i]) {
			fakeViolation("%s: byte %d of the arguments is reserved and not zero", op, i);
			return INVALID;
		}
	return OK;
}

EXPORT int cuCheckpointProcessGetState(int pid, int *out) {
	struct request r = {.op = OP_STATE};
	struct reply a = {0};
	int code = request(pid, &r, &a);
	if (!code)
		*out = a.state;
	return code;
}

EXPORT int cuCheckpointProcessLock(int pid, void *args) {
	struct request r = {.op = OP_LOCK, .timeout = args ? *(int *)args : 0};
	struct reply a = {0};
	int code = zeroFrom(args, 4, "lock");
	return code ? code : request(pid, &r, &a);
}

EXPORT int cuCheckpointProcessCheckpoint(int pid, void *args) {
	struct request r = {.op = OP_CHECKPOINT};
	struct reply a = {0};
	int code = zeroFrom(args, 0, "checkpoint");
	return code ? code : request(pid, &r, &a);
}

EXPORT int cuCheckpointProcessUnlock(int pid, void *args) {
	struct request r = {.op = OP_UNLOCK};
	struct reply a = {0};
	int code = zeroFrom(args, 0, "unlock");
	return code ? code : request(pid, &r, &a);
}

// The arguments differ by version: 12.8 has no pairs, 13.0 a pointer and a count, 13.3 the
// same with a pointer for other storage after them, which is not served here.
EXPORT int cuCheckpointProcessRestore(int pid, void *args) {
	struct config c;
	struct request r = {.op = OP_RESTORE};
	struct reply a = {0};
	if (fakeConfig(&c))
		return UNKNOWN;
	int code = zeroFrom(args, c.cuda >= 13000 ? 12 : 0, "restore");
	if (code)
		return code;
	if (args && c.cuda >= 13000) {
		struct pair *pairs = *(struct pair **)args;
		unsigned n = *(unsigned *)((char *)args + 8);
		if (n > MOST_CARDS || (n && !pairs)) {
			fakeViolation("restore %d: %u pairs", pid, n);
			return INVALID;
		}
		r.npairs = n;
		if (n)
			memcpy(r.pairs, pairs, n * sizeof *pairs);
	}
	return request(pid, &r, &a);
}
