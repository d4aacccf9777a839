/* The session: connecting, the request ring, reply slots, liveness, fork. PROTOCOL.md is the specification. */
#include "gx.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define TICK_MS 100
#define SPIN_MAX_NS 100000u
#define SPIN_MIN_NS 2000u
#define SPIN_FEW_NS 20000u
#define SPIN_TRY 16u /* waits, of which one spins for the most */
#define DEAD_NS 5000000000ull
#define SAY_NS 10000000000ull
#define MAX_REPLY (1ull << 30) /* bytes: no vendor says more */

struct session S = {.ring_fd = -1, .arena_fd = -1, .state_fd = -1, .lock_fd = -1, .sock = -1, .gen = 1};

static gx_lock connect_lock;
static bool said_connect, said_lost, said_suspended;
static struct { dev_t dev; ino_t ino; int fd; } mine[5]; /* descriptors to close in a child, if they are still the library's */
static _Atomic uint32_t forkmark_none = 1;
_Atomic uint32_t *gx_forkmark = &forkmark_none;

/* ---- small things */

uint64_t gx_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static long futex(_Atomic uint32_t *w, int op, uint32_t val, const struct timespec *t)
{
	int saved = errno;
	long r = syscall(SYS_futex, w, op, val, t, NULL, 0);
	long e = r < 0 ? -errno : r;
	errno = saved;
	return e;
}

int gx_futex_wait(_Atomic uint32_t *w, uint32_t seen, unsigned ms)
{
	struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
	long r = futex(w, FUTEX_WAIT, seen, &t);
	return r == -ETIMEDOUT || r == -EINTR; /* signals may come more often than once per ms */
}

void gx_futex_wake(_Atomic uint32_t *w, int n) { futex(w, FUTEX_WAKE, (uint32_t)n, NULL); }

void gx_lock_slow(gx_lock *l)
{
	for (int i = 0; i < 100; i++) {
		uint32_t free = 0;
		if (atomic_load_explicit(&l->w, memory_order_relaxed) == 0 &&
		    atomic_compare_exchange_strong_explicit(&l->w, &free, 1, memory_order_acquire, memory_order_relaxed))
			return;
		gx_pause();
	}
	while (atomic_exchange_explicit(&l->w, 2, memory_order_acquire) != 0)
		futex(&l->w, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, 2, NULL);
}

void gx_unlock_slow(gx_lock *l) { futex(&l->w, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL); }

void gx_say(const char *fmt, ...)
{
	if (getenv("GPUCTL_QUIET"))
		return;
	char line[400];
	int n = snprintf(line, sizeof line, "gpuctl: ");
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
	va_end(ap);
	size_t len = strlen(line);
	line[len++] = '\n';
	syscall(SYS_write, STDERR_FILENO, line, len); /* one write, so that lines of several threads do not mix; for the system call see output.c */
}

void gx_lost(const char *why)
{
	if (atomic_exchange(&S.lost, true))
		return;
	if (!said_lost) {
		said_lost = true;
		gx_say("the GPU session is lost: %s", why);
	}
	if (S.ring) /* those who wait for room or for a callback check again */
		gx_futex_wake(gx_word(GX_HDR_SPACE), 1 << 30), gx_futex_wake(gx_word(GX_HDR_CB_TAIL), 1 << 30);
}

/* ---- fork */

/* The kernel zeroes this page in a forked child, so a single load tells a child from its parent. So there is no
 * pthread_atfork handler, which would also run in applications that never use OpenCL again. */
__attribute__((constructor)) static void make_forkmark(void)
{
	long page = sysconf(_SC_PAGESIZE);
	void *p = mmap(NULL, (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return;
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
	if (madvise(p, (size_t)page, MADV_WIPEONFORK)) {
		munmap(p, (size_t)page);
		return;
	}
	gx_forkmark = p;
	atomic_store(gx_forkmark, 1);
}

static void own_fd(int i, int fd)
{
	struct stat st;
	mine[i].fd = -1;
	if (fd >= 0 && fstat(fd, &st) == 0) {
		mine[i].fd = fd;
		mine[i].dev = st.st_dev;
		mine[i].ino = st.st_ino;
	}
}

/* A daemon may have closed the library's descriptors, and its own files may have the same numbers now. */
static void close_own_fds(void)
{
	for (size_t i = 0; i < COUNT(mine); i++) {
		struct stat st;
		if (mine[i].fd >= 0 && fstat(mine[i].fd, &st) == 0 && st.st_dev == mine[i].dev && st.st_ino == mine[i].ino)
			close(mine[i].fd);
		mine[i].fd = -1;
	}
}

void gx_forked(void)
{
	uint32_t zero = 0;
	if (!atomic_compare_exchange_strong(gx_forkmark, &zero, 2)) {
		while (atomic_load(gx_forkmark) == 2)
			gx_pause();
		return;
	}
	/* The parent's threads do not exist in the child, so no thread has these locks. The child must not write to
	 * the parent's ring. The parent's arena stays mapped, because the application may still read regions that it
	 * had mapped. */
	connect_lock = (gx_lock){0};
	close_own_fds();
	if (S.ring)
		munmap(S.ring, GX_RING_MEM);
	uint32_t gen = atomic_load(&S.gen);
	memset(&S, 0, sizeof S);
	S.ring_fd = S.arena_fd = S.state_fd = S.lock_fd = S.sock = -1;
	atomic_store(&S.gen, gen + 1);
	said_connect = said_lost = said_suspended = false;
	gx_objects_reset();
	gx_staging_reset();
	gx_callbacks_reset();
	gx_devices_reset();
	atomic_store(gx_forkmark, 1);
}

/* ---- connecting */

static int read_all(int fd, void *buf, size_t n)
{
	for (size_t done = 0; done < n;) {
		ssize_t r = recv(fd, (char *)buf + done, n - done, 0);
		if (r < 0 && errno == EINTR)
			continue;
		if (r <= 0)
			return -1;
		done += (size_t)r;
	}
	return 0;
}

static int hello(int sock)
{
	uint8_t msg[64] = {0};
	uint32_t head[4] = {GX_HELLO_MAGIC, GX_VERSION, (uint32_t)getpid(), 0};
	memcpy(msg, head, sizeof head);
	const char *token = secure_getenv("GPUCTL_TOKEN");
	if (token)
		memcpy(msg + 16, token, strnlen(token, 48));
	ssize_t r;
	do
		r = send(sock, msg, sizeof msg, MSG_NOSIGNAL);
	while (r < 0 && errno == EINTR);
	return r == (ssize_t)sizeof msg ? 0 : -1;
}

/* given_up is called if the application cancels the thread that waits for a GPU: another one may ask for it. */
static void given_up(void *sock)
{
	close(*(int *)sock);
	gx_lock_drop(&connect_lock);
}

/* await_answer waits until the server answers: the application may have to wait until a GPU is free. cancel is whether
 * the thread may be cancelled meanwhile. */
static void await_answer(int sock, int cancel)
{
	struct pollfd p = {.fd = sock, .events = POLLIN};
	pthread_cleanup_push(given_up, &sock);
	pthread_setcancelstate(cancel, NULL);
	for (bool said = false;;) {
		int n = poll(&p, 1, 10000);
		if (n > 0)
			break;
		if (n == 0 && !said) {
			said = true;
			gx_say("still waiting for a GPU");
		}
	}
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
	pthread_cleanup_pop(0);
}

/* answer receives the server's first message and its descriptors. */
static int answer(int sock, uint32_t head[2], int fds[3], int cancel)
{
	struct iovec iov = {head, 8};
	union { struct cmsghdr h; char buf[CMSG_SPACE(3 * sizeof(int))]; } ctl;
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = ctl.buf, .msg_controllen = sizeof ctl.buf};
	ssize_t r;
	await_answer(sock, cancel);
	do
		r = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
	while (r < 0 && errno == EINTR);
	if (r <= 0)
		return -1;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
			size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
			memcpy(fds, CMSG_DATA(c), (n > 3 ? 3 : n) * sizeof(int));
		}
	return r < 8 ? read_all(sock, (uint8_t *)head + r, 8 - (size_t)r) : 0;
}

/* The socket on which gpuguest serves all applications of a VM. */
#ifndef GX_VM_SOCKET
#define GX_VM_SOCKET "/run/gpuctl-guest/app.sock"
#endif

static int dial(const char **why)
{
	const char *path = secure_getenv("GPUCTL_SOCKET");
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	bool said = path && *path;
	if (!said)
		path = GX_VM_SOCKET;
	if (strlen(path) >= sizeof a.sun_path) {
		*why = "GPUCTL_SOCKET is too long";
		return -1;
	}
	strcpy(a.sun_path, path);
	int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (sock < 0) {
		*why = strerror(errno);
		return -1;
	}
	int r;
	do
		r = connect(sock, (struct sockaddr *)&a, sizeof a);
	while (r < 0 && errno == EINTR);
	if (r < 0) {
		*why = strerror(errno);
		if (!said && (errno == ENOENT || errno == ENOTDIR))
			*why = "GPUCTL_SOCKET is not set; start the program with `gpuctl run`";
		close(sock);
		return -1;
	}
	return sock;
}

static cl_int map_session(int fds[3])
{
	struct stat st;
	if (fstat(fds[0], &st) || st.st_size < GX_RING_MEM)
		return CL_DEVICE_NOT_AVAILABLE;
	uint8_t *ring = mmap(NULL, GX_RING_MEM, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	if (ring == MAP_FAILED)
		return CL_OUT_OF_HOST_MEMORY;
	uint32_t magic, version;
	uint64_t size, arena, split;
	memcpy(&magic, ring + GX_HDR_MAGIC, 4);
	memcpy(&version, ring + GX_HDR_VERSION, 4);
	memcpy(&size, ring + GX_HDR_RING_SIZE, 8);
	memcpy(&arena, ring + GX_HDR_ARENA_SIZE, 8);
	memcpy(&split, ring + GX_HDR_ARENA_SPLIT, 8);
	uint8_t *mem = MAP_FAILED;
	if (magic == GX_MAGIC && version == GX_VERSION && size == GX_RING_SIZE && split <= arena && arena && !fstat(fds[1], &st) && (uint64_t)st.st_size >= arena)
		mem = mmap(NULL, arena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fds[1], 0);
	if (mem == MAP_FAILED) {
		munmap(ring, GX_RING_MEM);
		return CL_DEVICE_NOT_AVAILABLE;
	}
	madvise(mem, arena, MADV_DONTDUMP);
	S.ring = ring;
	S.arena = mem;
	S.arena_size = arena;
	S.split = split;
	S.ring_fd = fds[0];
	S.arena_fd = fds[1];
	S.state_fd = fds[2];
	/* A lock belongs to an open file description. With a description of its own, the library reliably sees the
	 * executor's lock. */
	char self[40];
	snprintf(self, sizeof self, "/proc/self/fd/%d", fds[0]);
	S.lock_fd = open(self, O_RDWR | O_CLOEXEC);
	S.tail = atomic_load(gx_word64(GX_HDR_TAIL));
	S.head = atomic_load(gx_word64(GX_HDR_HEAD));
	S.can_spin = sysconf(_SC_NPROCESSORS_ONLN) > 1;
	atomic_store(&S.spin_ns, SPIN_MAX_NS);
	return CL_SUCCESS;
}

/* connect_locked connects. cancel is whether the application may cancel the thread while it waits. */
static cl_int connect_locked(int cancel)
{
	const char *why = "the server hung up";
	char text[256] = "";
	uint32_t head[2] = {0, 0};
	int fds[3] = {-1, -1, -1};
	cl_int err = CL_DEVICE_NOT_AVAILABLE;
	int sock = dial(&why);
	if (sock < 0)
		goto fail;
	if (hello(sock) || answer(sock, head, fds, cancel))
		goto fail;
	if (head[1]) {
		size_t n = head[1] < sizeof text - 1 ? head[1] : sizeof text - 1;
		if (read_all(sock, text, n))
			goto fail;
		text[n] = 0;
	}
	if (head[0]) {
		err = (cl_int)head[0] < 0 ? (cl_int)head[0] : CL_DEVICE_NOT_AVAILABLE;
		why = text[0] ? text : "refused";
		goto fail;
	}
	if (fds[2] < 0) {
		why = "the server sent no memory";
		goto fail;
	}
	err = map_session(fds);
	if (err) {
		why = "the server's memory cannot be used (another version?)";
		goto fail;
	}
	S.sock = sock;
	own_fd(0, sock), own_fd(1, fds[0]), own_fd(2, fds[1]), own_fd(3, fds[2]), own_fd(4, S.lock_fd);
	struct gx_reply r;
	struct gx_session_info m = {0};
	atomic_store(&S.up, true); /* calls can be sent now; other threads still wait for connect_lock */
	err = call_session_info(&m, &r);
	if (!err) {
		err = gx_devices_load(&r);
		gx_reply_free(&r);
	}
	if (err) {
		gx_lost("it did not describe its devices");
		atomic_store(&S.up, false);
	}
	return err;
fail:
	for (int i = 0; i < 3; i++)
		if (fds[i] >= 0)
			close(fds[i]);
	if (sock >= 0)
		close(sock);
	if (!said_connect) {
		said_connect = true;
		gx_say("no GPU: %s", why);
	}
	return err;
}

static _Atomic bool ready;
static _Atomic uint32_t ready_gen;

cl_int gx_connect(void)
{
	gx_enter();
	uint32_t gen = atomic_load(&S.gen);
	if (likely(atomic_load_explicit(&ready, memory_order_acquire) && atomic_load(&ready_gen) == gen))
		return atomic_load(&S.lost) ? CL_DEVICE_NOT_AVAILABLE : CL_SUCCESS;
	int cancel;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	gx_lock_take(&connect_lock);
	cl_int err = CL_SUCCESS;
	if (atomic_load(&S.lost))
		err = CL_DEVICE_NOT_AVAILABLE;
	else if (!atomic_load(&ready) || atomic_load(&ready_gen) != gen) {
		err = connect_locked(cancel);
		if (!err) {
			atomic_store(&ready_gen, gen);
			atomic_store(&ready, true);
		}
	}
	gx_lock_drop(&connect_lock);
	pthread_setcancelstate(cancel, NULL);
	return err;
}

/* ---- liveness */

bool gx_alive(struct alive *a)
{
	if (atomic_load(&S.lost) || !S.ring)
		return false;
	gx_output(false); /* a kernel may be waiting for room for its output */
	uint32_t state = atomic_load(gx_word(GX_HDR_STATE));
	uint64_t now = gx_now();
	if (state == GX_STATE_LOST) {
		gx_lost("its executor ended");
		return false;
	}
	if (state == GX_STATE_SUSPENDED) {
		a->since = 0;
		if (!a->suspended)
			a->suspended = now;
		else if (now - a->suspended > SAY_NS && !said_suspended) {
			said_suspended = true;
			gx_say("this session is suspended; waiting until it is resumed");
		}
		return true;
	}
	a->suspended = 0;
	struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = GX_LOCK_EXECUTOR, .l_len = 1};
	int fd = S.lock_fd >= 0 ? S.lock_fd : S.ring_fd;
	int saved = errno;
	int r = fcntl(fd, F_OFD_GETLK, &l);
	errno = saved;
	if (r < 0 || l.l_type != F_UNLCK) { /* the executor has the lock, or that is unknown */
		a->since = 0;
		return true;
	}
	if (!a->since)
		a->since = now;
	else if (now - a->since > DEAD_NS) {
		gx_lost("nobody owns it");
		return false;
	}
	return true;
}

/* ---- the ring */

static bool ring_room(uint64_t need)
{
	if (likely(S.tail + need - S.head <= GX_RING_SIZE))
		return true;
	struct alive a = {0};
	for (;;) {
		S.head = atomic_load_explicit(gx_word64(GX_HDR_HEAD), memory_order_acquire);
		if (S.tail + need - S.head <= GX_RING_SIZE)
			return true;
		atomic_store(gx_word(GX_HDR_SPACE), 1);
		S.head = atomic_load(gx_word64(GX_HDR_HEAD));
		if (S.tail + need - S.head <= GX_RING_SIZE)
			return true;
		if (gx_futex_wait(gx_word(GX_HDR_SPACE), 1, TICK_MS) && !gx_alive(&a))
			return false;
		if (atomic_load(&S.lost))
			return false;
	}
}

static void put_header(uint8_t *p, uint32_t len, uint32_t op, uint32_t slot)
{
	uint16_t w[2] = {(uint16_t)op, (uint16_t)slot};
	memcpy(p, &len, 4);
	memcpy(p + 4, w, 4);
}

uint8_t *gx_begin(uint32_t op, uint32_t slot, size_t payload, cl_int *err)
{
	size_t len = GX_ALIGN8(payload + 8);
	if (unlikely(len > GX_MAX_REQUEST || payload > GX_MAX_REQUEST)) {
		*err = CL_OUT_OF_RESOURCES;
		return NULL;
	}
	gx_lock_take(&S.lock);
	if (unlikely(!atomic_load_explicit(&S.up, memory_order_relaxed) || atomic_load_explicit(&S.lost, memory_order_relaxed)))
		goto lost;
	uint64_t at = S.tail % GX_RING_SIZE;
	if (unlikely(at + len > GX_RING_SIZE)) {
		uint64_t pad = GX_RING_SIZE - at; /* never 0, and a multiple of 8, so there is room for a header */
		if (!ring_room(pad + len))
			goto lost;
		put_header(S.ring + GX_RING_OFF + at, (uint32_t)pad, GX_PAD, GX_NO_SLOT);
		S.tail += pad;
		at = 0;
	} else if (unlikely(!ring_room(len)))
		goto lost;
	uint8_t *p = S.ring + GX_RING_OFF + at;
	put_header(p, (uint32_t)len, op, slot);
	S.urgent = slot != GX_NO_SLOT || op == GX_FLUSH || op == GX_SET_USER_EVENT;
	S.tail += len;
	return p + 8;
lost:
	gx_lock_drop(&S.lock);
	*err = gx_lost_error(op);
	return NULL;
}

void gx_commit(void)
{
	atomic_store(gx_word64(GX_HDR_TAIL), S.tail);
	_Atomic uint32_t *sleep = gx_word(GX_HDR_SLEEP);
	bool wake = atomic_load(sleep) == 1 && atomic_exchange(sleep, 0) == 1;
	_Atomic uint32_t *nap = gx_word(GX_HDR_NAP);
	bool urgent = S.urgent, rouse = urgent && atomic_load(nap) == 1 && atomic_exchange(nap, 0) == 1;
	gx_lock_drop(&S.lock);
	if (wake)
		gx_futex_wake(sleep, 1);
	if (rouse)
		gx_futex_wake(nap, 1);
	if (urgent) /* for an application that flushes and never waits */
		gx_output(false);
}

/* ---- reply slots */

cl_int gx_slot_take(uint32_t *slot)
{
	static _Thread_local uint32_t hint;
	if (unlikely(!atomic_load(&S.up)))
		return CL_OUT_OF_RESOURCES;
	struct alive a = {0};
	for (unsigned round = 0;; round++) {
		for (uint32_t i = 0; i < COUNT(S.slots); i++) {
			uint32_t w = (hint + i) % COUNT(S.slots);
			uint64_t taken = atomic_load_explicit(&S.slots[w], memory_order_relaxed);
			while (~taken) {
				uint64_t bit = ~taken & (taken + 1);
				if (atomic_compare_exchange_weak(&S.slots[w], &taken, taken | bit)) {
					hint = w;
					*slot = w * 64 + (uint32_t)__builtin_ctzll(bit);
					atomic_store_explicit(gx_slot_word(*slot, GX_SLOT_STATE), GX_SLOT_PENDING, memory_order_relaxed);
					return CL_SUCCESS;
				}
			}
		}
		struct timespec t = {0, 1000000}; /* 256 threads are already waiting */
		nanosleep(&t, NULL);
		if (round % TICK_MS == 99 && !gx_alive(&a))
			return CL_OUT_OF_RESOURCES;
	}
}

void gx_slot_drop(uint32_t slot)
{
	atomic_store_explicit(gx_slot_word(slot, GX_SLOT_STATE), GX_SLOT_FREE, memory_order_relaxed);
	atomic_fetch_and(&S.slots[slot / 64], ~(1ull << (slot % 64)));
}

static bool spin_until(_Atomic uint32_t *state, uint64_t end)
{
	do
		for (int i = 0; i < 32; i++) {
			if (atomic_load_explicit(state, memory_order_acquire) == GX_SLOT_DONE)
				return true;
			gx_pause();
		}
	while (gx_now() < end);
	return false;
}

/* spin_done polls the slot for as long as polling has helped before. Now and then it polls for the maximum time, in
 * case conditions have changed. Polling occupies a processor that the thread that is to reply may need. */
static bool spin_done(_Atomic uint32_t *state)
{
	static _Thread_local uint32_t tries;
	uint32_t budget = atomic_load_explicit(&S.spin_ns, memory_order_relaxed);
	uint32_t spin = ++tries % SPIN_TRY ? budget : SPIN_MAX_NS;
	bool done = spin_until(state, gx_now() + spin);
	uint32_t next = !done ? budget / 2 : 2 * budget > spin ? 2 * budget : spin;
	if (next < SPIN_MIN_NS)
		next = SPIN_MIN_NS;
	if (next > SPIN_MAX_NS)
		next = SPIN_MAX_NS;
	if (next != budget)
		atomic_store_explicit(&S.spin_ns, next, memory_order_relaxed);
	return done;
}

/* completes reports whether a reply can tell the application that a command is complete. The output of the command's
 * kernel must be written by then. GX_EVENT_STATUS is not in the list, because the library itself also requests it
 * in the middle of transfers; clGetEventInfo writes the output itself. */
static bool completes(uint32_t op)
{
	switch (op) {
	case GX_FINISH: case GX_WAIT_EVENTS: case GX_EVENT_PROFILING:
	case GX_READ_BUFFER: case GX_READ_BUFFER_RECT: case GX_READ_IMAGE:
	case GX_WRITE_BUFFER: case GX_WRITE_BUFFER_RECT: case GX_WRITE_IMAGE:
	case GX_MAP_BUFFER: case GX_MAP_IMAGE:
		return true;
	}
	return false;
}

#define PACED_MIN_NS 1200000u /* shorter waits are not paced */
#define PACED_MAX_NS 100000000u
#define EARLY_NS 150000u /* what it takes to be woken, and more than a timer is late */

/* pace is what a thread has measured about its waits of one kind. */
struct pace {
	uint64_t last; /* ns that the last wait took */
	uint32_t rest; /* waits that are not paced, after one that was polled without success */
};

/* A wait for the device is expected to take as long as the last one. The thread sleeps for most of that time and
 * polls only near the end, because waking a thread takes as long as a short kernel. At most an eighth of the wait is
 * polled. */
static bool paced(_Atomic uint32_t *state, struct pace *p, uint64_t begin)
{
	uint64_t early = p->last / 32 > EARLY_NS ? p->last / 32 : EARLY_NS, nap = p->last - early;
	if (spin_until(state, begin + SPIN_FEW_NS)) /* it was shorter this time */
		return true;
	uint32_t pending = GX_SLOT_PENDING;
	if (!atomic_compare_exchange_strong(state, &pending, GX_SLOT_ASLEEP))
		return true; /* only a reply changes the state from pending */
	uint32_t asleep = GX_SLOT_ASLEEP;
	if (futex(state, FUTEX_WAIT, asleep, &(struct timespec){0, (long)nap}) != -ETIMEDOUT)
		return atomic_load_explicit(state, memory_order_acquire) == GX_SLOT_DONE;
	if (!atomic_compare_exchange_strong(state, &asleep, GX_SLOT_PENDING))
		return asleep == GX_SLOT_DONE;
	if (spin_until(state, begin + p->last + early))
		return true;
	p->rest = SPIN_TRY;
	return false;
}

static bool wait_state(_Atomic uint32_t *state, struct pace *p, uint64_t begin)
{
	bool known = p && p->last > PACED_MIN_NS && p->last < PACED_MAX_NS;
	if (known && p->rest)
		p->rest--;
	else if (S.can_spin && (known ? paced(state, p, begin) : spin_done(state)))
		return true;
	struct alive a = {0};
	uint32_t pending = GX_SLOT_PENDING;
	if (!atomic_compare_exchange_strong(state, &pending, GX_SLOT_ASLEEP) && pending == GX_SLOT_DONE)
		return true;
	while (atomic_load_explicit(state, memory_order_acquire) != GX_SLOT_DONE) {
		if (gx_futex_wait(state, GX_SLOT_ASLEEP, TICK_MS) && !gx_alive(&a))
			return atomic_load(state) == GX_SLOT_DONE;
		gx_output(false);
		if (atomic_load(&S.lost))
			return atomic_load(state) == GX_SLOT_DONE;
	}
	return true;
}

/* wait_done returns false when the session is lost. */
static bool wait_done(uint32_t op, uint32_t slot)
{
	static _Thread_local struct pace commands, transfers;
	struct pace *p = !completes(op) ? NULL : op == GX_WAIT_EVENTS || op == GX_FINISH ? &commands : &transfers;
	uint64_t begin = p ? gx_now() : 0;
	bool done = wait_state(gx_slot_word(slot, GX_SLOT_STATE), p, begin);
	if (p)
		p->last = gx_now() - begin;
	return done;
}

static cl_int take_reply(uint32_t op, uint32_t slot, struct gx_reply *r)
{
	if (!wait_done(op, slot))
		return gx_lost_error(op); /* the slot stays taken: a late executor may still write to it */
	const uint8_t *s = S.ring + GX_SLOT_OFF + (uint64_t)slot * GX_SLOT_SIZE;
	cl_int err;
	uint32_t len, token;
	uint64_t total;
	memcpy(&err, s + GX_SLOT_ERR, 4);
	memcpy(&len, s + GX_SLOT_LEN, 4);
	memcpy(&token, s + GX_SLOT_TOKEN, 4);
	memcpy(&total, s + GX_SLOT_TOTAL, 8);
	if (len > GX_SLOT_SIZE - GX_SLOT_DATA)
		len = GX_SLOT_SIZE - GX_SLOT_DATA;
	if (total < len)
		total = len;
	if (total > MAX_REPLY && !err)
		err = CL_OUT_OF_RESOURCES;
	if (!r || err) {
		gx_slot_drop(slot);
		if (token && total > len) { /* the rest is not needed */
			struct gx_fetch drop = {.token = token, .offset = ~0ull};
			post_fetch(&drop);
		}
		return err;
	}
	r->len = total;
	r->data = r->small;
	if (total > sizeof r->small && !(r->data = malloc(total))) {
		gx_slot_drop(slot);
		return CL_OUT_OF_HOST_MEMORY;
	}
	memcpy(r->data, s + GX_SLOT_DATA, len);
	gx_slot_drop(slot);
	for (uint64_t have = len; have < total;) {
		struct gx_fetch f = {.token = token, .offset = have};
		uint32_t n = 0, fs;
		err = gx_slot_take(&fs);
		if (!err && (err = send_fetch(fs, &f)))
			gx_slot_drop(fs);
		if (!err && !wait_done(GX_FETCH, fs))
			err = CL_OUT_OF_RESOURCES;
		else if (!err) {
			s = S.ring + GX_SLOT_OFF + (uint64_t)fs * GX_SLOT_SIZE;
			memcpy(&err, s + GX_SLOT_ERR, 4);
			memcpy(&n, s + GX_SLOT_LEN, 4);
			if (n > GX_SLOT_SIZE - GX_SLOT_DATA || n > total - have || (!err && !n))
				err = CL_OUT_OF_RESOURCES;
			if (!err)
				memcpy(r->data + have, s + GX_SLOT_DATA, n);
			gx_slot_drop(fs);
		}
		if (err) {
			gx_reply_free(r);
			return err;
		}
		have += n;
	}
	return CL_SUCCESS;
}

cl_int gx_wait(uint32_t op, uint32_t slot, struct gx_reply *r)
{
	cl_int err = take_reply(op, slot, r);
	gx_output(completes(op));
	return err;
}
