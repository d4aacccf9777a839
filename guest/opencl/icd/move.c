/* Bulk transfers. The executor assigns a lane to a transfer when its turn has come, and threads of this process move
 * the bytes chunk by chunk. These are the thread that waits in a blocking call, and movers, which work without a
 * call of the application. */
#include "gx.h"
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TICK_MS 100
#define STACK (256u << 10)
#define MOVERS_MAX 3
#define SHARED_MIN (8u << 20) /* blocking transfers from here on are shared with the movers */
#define BYPASS_MIN (8u << 20) /* what will not stay in the cache */

struct move {
	struct move *next;
	uint32_t word;
	bool write, waited; /* waited: a blocking call removes the transfer */
	bool reap; /* the data that it sends may not have arrived in the application's memory yet */
	struct layout l;
	uint64_t bytes;
};

static gx_lock lock;
static struct move *moves;
static _Atomic uint32_t nmoves; /* also the futex on which idle movers sleep */
static unsigned movers;
static struct lane { /* the work of this process in a lane */
	struct move *m;
	uint32_t run, next, done, inside;
	uint64_t pos, moved; /* moved: one bit for each chunk, beginning with chunk done */
} lanes[GX_LANE_COUNT];

void gx_moves_reset(void)
{
	lock = (gx_lock){0};
	moves = NULL;
	atomic_store(&nmoves, 0);
	movers = 0;
	memset(lanes, 0, sizeof lanes);
}

/* ---- copying */

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void copy_nt(uint8_t *d, const uint8_t *s, size_t n)
{
	size_t head = -(uintptr_t)d & 31;
	memcpy(d, s, head);
	d += head, s += head, n -= head;
	for (; n >= 128; d += 128, s += 128, n -= 128) {
		__m256i a = _mm256_loadu_si256((const __m256i *)(const void *)s), b = _mm256_loadu_si256((const __m256i *)(const void *)(s + 32));
		__m256i c = _mm256_loadu_si256((const __m256i *)(const void *)(s + 64)), e = _mm256_loadu_si256((const __m256i *)(const void *)(s + 96));
		_mm256_stream_si256((__m256i *)(void *)d, a);
		_mm256_stream_si256((__m256i *)(void *)(d + 32), b);
		_mm256_stream_si256((__m256i *)(void *)(d + 64), c);
		_mm256_stream_si256((__m256i *)(void *)(d + 96), e);
	}
	_mm_sfence();
	memcpy(d, s, n);
}
#endif

/* copy copies a piece. libc sees only a small copy, but the whole transfer may not stay in the cache. If bypass is
 * set, copy bypasses the cache. */
static void copy(uint8_t *d, const uint8_t *s, size_t n, bool bypass)
{
#if defined(__x86_64__)
	if (bypass && n >= 64 << 10 && __builtin_cpu_supports("avx2")) {
		copy_nt(d, s, n);
		return;
	}
#endif
	(void)bypass;
	memcpy(d, s, n);
}

/* cut returns the size in bytes of the chunk that begins at pos: a part of a row, rows of a slice, or slices. The
 * executor uses the same sizes. */
static uint64_t cut(const struct move *m, uint64_t pos)
{
	uint64_t row = m->l.width, slice = row * m->l.height, n;
	if (pos % row || row > GX_LANE_CHUNK) {
		n = row - pos % row;
		return n < GX_LANE_CHUNK ? n : GX_LANE_CHUNK;
	}
	if (pos % slice || slice > GX_LANE_CHUNK) {
		n = (slice - pos % slice) / row;
		return (n < GX_LANE_CHUNK / row ? n : GX_LANE_CHUNK / row) * row;
	}
	n = (m->bytes - pos) / slice;
	return (n < GX_LANE_CHUNK / slice ? n : GX_LANE_CHUNK / slice) * slice;
}

/* piece copies n bytes at pos of the transfer between the application's memory and the packed data at tight. */
static void piece(const struct move *m, uint64_t pos, uint64_t n, uint8_t *tight, bool bypass)
{
	uint64_t row = m->l.width, slice = row * m->l.height;
	while (n) {
		uint64_t x = pos % row, part = row - x < n ? row - x : n;
		if (m->l.row == row && (m->l.slice == slice || pos % slice + n <= slice))
			part = n; /* rows without gaps, in one slice or in slices without gaps */
		if (m->l.height == 1 && m->l.depth == 1)
			part = n;
		uint8_t *host = m->l.host + pos / slice * m->l.slice + pos % slice / row * m->l.row + x;
		if (m->write)
			copy(tight, host, part, bypass);
		else
			copy(host, tight, part, bypass);
		pos += part, tight += part, n -= part;
	}
}

/* ---- lanes */

static _Atomic uint32_t *lane_word(uint32_t i, uint32_t field) { return gx_word(GX_LANE_OFF + (uint64_t)i * GX_LANE_SIZE + field); }
static uint64_t lane_u64(uint32_t i, uint32_t field) { return atomic_load(gx_word64(GX_LANE_OFF + (uint64_t)i * GX_LANE_SIZE + field)); }

uint64_t gx_lanes_at(void) { return (S.split + GX_LANE_CHUNK - 1) & ~(uint64_t)(GX_LANE_CHUNK - 1); }
uint64_t gx_lanes_end(void) { return gx_lanes_at() + (uint64_t)GX_LANE_COUNT * GX_LANE_CHUNKS * GX_LANE_CHUNK; }

/* claim finds a chunk to move in a lane. The executor writes a lane's run before its other words, and its state
 * last. So if the run is the same before and after, the values read in between belong to that run. */
static bool claim(uint32_t i, struct lane *l, uint64_t *pos, uint64_t *n, uint8_t **tight)
{
	uint32_t run = atomic_load(lane_word(i, GX_LANE_RUN)), state = atomic_load(lane_word(i, GX_LANE_STATE));
	if (state == GX_LANE_LEFT && !l->inside) {
		atomic_store(lane_word(i, GX_LANE_STATE), GX_LANE_FREE);
		return false;
	}
	if (state != GX_LANE_STREAM && state != GX_LANE_DIRECT)
		return false;
	uint32_t word = atomic_load(lane_word(i, GX_LANE_WORD)), limit = atomic_load(lane_word(i, GX_LANE_LIMIT));
	uint64_t from = lane_u64(i, GX_LANE_FROM), at = lane_u64(i, GX_LANE_DIRECT_AT);
	if (atomic_load(lane_word(i, GX_LANE_RUN)) != run)
		return false; /* the bell will ring for the new run */
	if (run != l->run) {
		if (l->inside)
			return false;
		struct move *m = moves;
		while (m && m->word != word)
			m = m->next;
		*l = (struct lane){.m = m, .run = run, .pos = from};
	}
	const struct move *m = l->m;
	if (!m || l->pos >= m->bytes || l->next >= limit || l->next - l->done >= GX_LANE_AHEAD)
		return false;
	*pos = l->pos;
	*n = cut(m, l->pos);
	uint64_t off = gx_lanes_at() + ((uint64_t)i * GX_LANE_CHUNKS + l->next % GX_LANE_CHUNKS) * GX_LANE_CHUNK;
	if (state == GX_LANE_DIRECT) {
		if (at > S.arena_size || m->bytes > S.arena_size - at)
			return false;
		off = at + *pos;
	}
	if (off > S.arena_size || *n > S.arena_size - off)
		return false;
	*tight = S.arena + off;
	l->pos += *n;
	l->next++;
	l->inside++;
	return true;
}

/* work moves one chunk of any lane. It returns false if there is none to move. */
static bool work(void)
{
	for (uint32_t i = 0; i < GX_LANE_COUNT; i++) {
		struct lane *l = &lanes[i];
		uint64_t pos, n;
		uint8_t *tight;
		gx_lock_take(&lock);
		bool ok = claim(i, l, &pos, &n, &tight);
		const struct move *m = l->m;
		uint32_t chunk = l->next - 1;
		gx_lock_drop(&lock);
		if (!ok)
			continue;
		if (m->reap)
			gx_reap();
		bool direct = tight < S.arena + gx_lanes_at() || tight >= S.arena + gx_lanes_end();
		piece(m, pos, n, tight, m->bytes >= BYPASS_MIN && (direct || !m->write));
		gx_lock_take(&lock);
		l->moved |= 1ull << (chunk - l->done);
		uint32_t before = l->done;
		for (; l->moved & 1; l->moved >>= 1)
			l->done++;
		if (l->done != before)
			atomic_store(lane_word(i, GX_LANE_DONE), l->done);
		l->inside--;
		bool wake = l->done != before;
		gx_lock_drop(&lock);
		if (wake)
			gx_futex_wake(lane_word(i, GX_LANE_DONE), INT_MAX);
		return true;
	}
	return false;
}

/* take_out removes a transfer, unless a thread is still moving its bytes. The caller has the lock. */
static bool take_out(struct move **at)
{
	struct move *m = *at;
	for (uint32_t i = 0; i < GX_LANE_COUNT; i++)
		if (lanes[i].m == m && lanes[i].inside)
			return false;
	for (uint32_t i = 0; i < GX_LANE_COUNT; i++)
		if (lanes[i].m == m)
			lanes[i].m = NULL;
	*at = m->next;
	gx_word_drop(m->word);
	atomic_fetch_sub(&nmoves, 1);
	free(m);
	return true;
}

/* sweep removes the transfers that are complete. */
static void sweep(void)
{
	bool lost = atomic_load(&S.lost);
	gx_lock_take(&lock);
	for (struct move **at = &moves; *at;) {
		bool over = lost || atomic_load(gx_word(GX_PEND_OFF + 4 * (*at)->word)) != GX_PEND_BUSY;
		if ((*at)->waited || !over || !take_out(at))
			at = &(*at)->next;
	}
	gx_lock_drop(&lock);
}

static void *run(void *arg)
{
	(void)arg;
	struct alive alive = {0};
	for (;;) {
		uint32_t seen = atomic_load(gx_word(GX_HDR_BELL));
		if (work())
			continue;
		sweep();
		if (!atomic_load(&nmoves))
			gx_futex_wait(&nmoves, 0, 60000);
		else if (gx_futex_wait(gx_word(GX_HDR_BELL), seen, TICK_MS))
			gx_alive(&alive);
	}
	return NULL;
}

/* start creates the movers. One is enough for progress; more are for speed. The caller has the lock. */
static bool start(void)
{
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	unsigned want = cpus <= 2 ? 1 : cpus <= 8 ? 2 : MOVERS_MAX;
	pthread_attr_t attr;
	sigset_t all, old;
	if (movers)
		return true;
	if (pthread_attr_init(&attr))
		return false;
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, STACK);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	for (pthread_t t; movers < want && !pthread_create(&t, &attr, run, NULL);)
		movers++;
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
	return movers;
}

/* ---- transfers */

/* gx_move_add registers a transfer. The caller then sends the request, with the word. */
cl_int gx_move_add(const struct layout *l, bool write, bool reap, bool blocking, uint32_t *word)
{
	uint64_t bytes = gx_layout_bytes(l);
	struct move *m = malloc(sizeof *m);
	if (!m)
		return CL_OUT_OF_HOST_MEMORY;
	cl_int err = gx_word_wait(word);
	if (err) {
		free(m);
		return err;
	}
	gx_lock_take(&lock);
	if ((!blocking || bytes >= SHARED_MIN) && !start() && !blocking) {
		gx_lock_drop(&lock);
		gx_word_drop(*word);
		free(m);
		return CL_OUT_OF_HOST_MEMORY;
	}
	*m = (struct move){.next = moves, .word = *word, .write = write, .waited = blocking, .reap = reap, .l = *l, .bytes = bytes};
	moves = m;
	atomic_fetch_add(&nmoves, 1);
	gx_lock_drop(&lock);
	if (!blocking || bytes >= SHARED_MIN)
		gx_futex_wake(&nmoves, INT_MAX);
	return CL_SUCCESS;
}

static bool uses(const struct layout *l, bool writes)
{
	bool found = false;
	if (!atomic_load(&nmoves))
		return false;
	gx_lock_take(&lock);
	for (struct move *m = moves; m && !found; m = m->next)
		found = (writes || !m->write) && atomic_load(gx_word(GX_PEND_OFF + 4 * m->word)) == GX_PEND_BUSY && gx_layouts_meet(&m->l, l);
	gx_lock_drop(&lock);
	return found;
}

bool gx_move_reads(const struct layout *l) { return uses(l, false); }
bool gx_move_uses(const struct layout *l) { return uses(l, true); }

/* gx_move_drop removes a transfer whose call has ended, or whose request was never sent. */
void gx_move_drop(uint32_t word)
{
	for (;;) {
		bool gone = true;
		gx_lock_take(&lock);
		for (struct move **at = &moves; *at; at = &(*at)->next)
			if ((*at)->word == word) {
				gone = take_out(at);
				break;
			}
		gx_lock_drop(&lock);
		if (gone)
			return;
		gx_pause(); /* a mover is finishing its chunk */
	}
}

/* gx_move_wait helps to move a blocking transfer that was sent with slot, and waits for its reply. */
cl_int gx_move_wait(uint32_t op, uint32_t slot, uint32_t word)
{
	_Atomic uint32_t *state = gx_slot_word(slot, GX_SLOT_STATE), *bell = gx_slot_word(slot, GX_SLOT_BELL);
	struct alive alive = {0};
	cl_int err = CL_SUCCESS;
	for (;;) {
		uint32_t seen = atomic_load(bell);
		if (atomic_load(state) == GX_SLOT_DONE)
			break;
		if (work())
			continue;
		bool again = false;
		for (int i = 0; S.can_spin && i < 2000 && !again; i++) {
			again = atomic_load_explicit(bell, memory_order_acquire) != seen;
			gx_pause();
		}
		if (!again && ((gx_futex_wait(bell, seen, TICK_MS) && !gx_alive(&alive)) || atomic_load(&S.lost))) {
			if (atomic_load(state) == GX_SLOT_DONE)
				break;
			err = gx_lost_error(op); /* the slot stays taken, because a late executor may still write to it */
			break;
		}
	}
	if (!err)
		err = gx_wait(op, slot, NULL);
	gx_move_drop(word);
	return err;
}
