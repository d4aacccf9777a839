/* The output of kernels.
 *
 * The executor writes it to a ring of bytes. This file writes it to the application's current standard output, so
 * that redirections work. No descriptor of the application leaves its process. */
#include "gx.h"
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RETRY_NS 200000
#define PATIENCE_MS 10

/* System calls by number: libc's functions are cancellation points, and a thread must not end in the middle. */
static long put(const void *p, size_t n)
{
	long r = syscall(SYS_write, STDOUT_FILENO, p, n);
	return r < 0 ? -errno : r;
}

/* writable reports whether a write of few bytes would not block. A write that fails at once does not block. */
static bool writable(unsigned ms)
{
	struct pollfd p = {.fd = STDOUT_FILENO, .events = POLLOUT};
	struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
	return syscall(SYS_ppoll, &p, 1, &t, NULL, 0) > 0;
}

static void rest(void)
{
	struct timespec t = {0, RETRY_NS};
	syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &t, NULL);
}

void gx_output_slow(bool all)
{
	int saved = errno;
	_Atomic uint32_t *taken = gx_word(GX_HDR_OUT_HEAD);
	uint32_t end = atomic_load(gx_word(GX_HDR_OUT_TAIL));
	while (atomic_exchange_explicit(&S.out_busy, 1, memory_order_acquire)) {
		/* Another thread is writing, and it writes this output, too. It may be waiting for a reader, and the
		 * reader may be this very thread. So if nothing can be written now, do not wait for that thread. */
		if (!all || (int32_t)(atomic_load(taken) - end) >= 0 || !writable(0))
			goto out;
		rest();
	}
	for (;;) {
		uint32_t head = atomic_load(taken), n = end - head, at = head % GX_OUT_SIZE;
		if ((int32_t)n <= 0)
			break;
		if (n > GX_OUT_SIZE) { /* this is not a correct executor, so nothing of this output can be trusted to be text */
			atomic_store(taken, end);
			break;
		}
		if (n > GX_OUT_SIZE - at)
			n = GX_OUT_SIZE - at;
		if (!all) {
			if (!writable(0))
				break;
			if (n > PIPE_BUF)
				n = PIPE_BUF;
		}
		long w = put(S.ring + GX_OUT_OFF + at, n);
		if (w == -EINTR)
			continue;
		if (w == -EAGAIN) { /* standard output is non-blocking: the rest is written by a later call */
			if (all && writable(PATIENCE_MS))
				continue;
			break;
		}
		/* Output that cannot be written is lost, as it would be if the runtime were in this process. */
		atomic_store(taken, head + (w > 0 ? (uint32_t)w : n));
		gx_futex_wake(taken, INT_MAX);
	}
	atomic_store_explicit(&S.out_busy, 0, memory_order_release);
out:
	errno = saved;
}

/* The remaining output of kernels that nobody waited for. A forked child leaves it to its parent. */
__attribute__((destructor)) static void last_words(void)
{
	if (atomic_load(gx_forkmark) == 1 && S.ring && atomic_load(&S.up))
		gx_output(true);
}
