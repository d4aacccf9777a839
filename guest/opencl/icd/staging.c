/* The client's part of the arena, and the transfers that use it. */
#include "gx.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SMALL_ALIGN 64u
#define PAGE 4096u
#define PATIENCE_NS 60000000000ull

/* ---- allocator: first fit over a sorted list of free extents. The list is short, because transfers end roughly in
 * order. */
static gx_lock alloc_lock;
static struct extent { uint64_t off, len; } *holes;
static uint32_t nholes, cap_holes;
static bool seeded;

static uint64_t rounded(uint64_t len)
{
	uint64_t a = len < PAGE ? SMALL_ALIGN : PAGE;
	return len ? (len + a - 1) & ~(a - 1) : a;
}

static bool reserve(uint32_t n)
{
	if (n <= cap_holes)
		return true;
	uint32_t cap = n + 64;
	struct extent *e = realloc(holes, cap * sizeof *e);
	if (!e)
		return false;
	holes = e;
	cap_holes = cap;
	return true;
}

static bool seed(void)
{
	if (seeded)
		return true;
	uint64_t from = gx_lanes_end();
	if (from >= S.arena_size || !reserve(1))
		return false;
	holes[0] = (struct extent){from, (S.arena_size - from) & ~(uint64_t)(PAGE - 1)};
	nholes = 1;
	return seeded = true;
}

/* window_end returns the end of the window. Behind it, the pages of freed memory are given back. */
static uint64_t window_end(void) { return gx_lanes_at() + GX_WINDOW; }

/* stage_alloc allocates room below a limit. It returns 0 if there is none. */
static uint64_t stage_alloc(uint64_t len, uint64_t below)
{
	uint64_t need = rounded(len), off = 0;
	if (need < len)
		return 0;
	gx_lock_take(&alloc_lock);
	for (uint32_t i = 0; seed() && i < nholes; i++) {
		struct extent *h = &holes[i];
		uint64_t skip = need < PAGE ? 0 : -h->off & (PAGE - 1); /* large blocks start on a page */
		if (h->off >= below)
			break;
		if (h->len < skip || h->len - skip < need || h->off + skip + need > below)
			continue;
		if (skip && h->len - skip > need) { /* the part before and the rest stay free */
			if (!reserve(nholes + 1))
				break;
			h = &holes[i];
			memmove(h + 2, h + 1, (nholes - i - 1) * sizeof *h);
			nholes++;
			h[1] = (struct extent){h->off + skip + need, h->len - skip - need};
			off = h->off + skip;
			h->len = skip;
		} else if (skip) {
			off = h->off + skip;
			h->len = skip;
		} else {
			off = h->off;
			h->off += need;
			h->len -= need;
			if (!h->len)
				memmove(h, h + 1, (--nholes - i) * sizeof *h);
		}
		break;
	}
	gx_lock_drop(&alloc_lock);
	return off;
}

uint64_t gx_stage_window(uint64_t len) { return stage_alloc(len, window_end()); }

void gx_stage_free(uint64_t off, uint64_t len)
{
	uint64_t n = rounded(len);
	gx_lock_take(&alloc_lock);
	if (n >= PAGE && off + n > window_end()) { /* before another thread can get it */
		int saved = errno;
		uint64_t from = off < window_end() ? window_end() : off;
		syscall(SYS_fallocate, S.arena_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from, (off_t)(off + n - from)); /* see output.c */
		errno = saved;
	}
	uint32_t lo = 0, hi = nholes;
	while (lo < hi) {
		uint32_t mid = (lo + hi) / 2;
		if (holes[mid].off < off)
			lo = mid + 1;
		else
			hi = mid;
	}
	bool left = lo > 0 && holes[lo - 1].off + holes[lo - 1].len == off;
	bool right = lo < nholes && off + n == holes[lo].off;
	if (left && right) {
		holes[lo - 1].len += n + holes[lo].len;
		memmove(&holes[lo], &holes[lo + 1], (--nholes - lo) * sizeof *holes);
	} else if (left)
		holes[lo - 1].len += n;
	else if (right) {
		holes[lo].off = off;
		holes[lo].len += n;
	} else if (reserve(nholes + 1)) {
		memmove(&holes[lo + 1], &holes[lo], (nholes++ - lo) * sizeof *holes);
		holes[lo] = (struct extent){off, n};
	} /* without memory for the list, the block is lost, but nothing is corrupted */
	gx_lock_drop(&alloc_lock);
}

bool gx_in_arena(const void *p, uint64_t len, uint64_t *off)
{
	uintptr_t a = (uintptr_t)p, base = (uintptr_t)S.arena;
	if (!base || a < base || a - base >= S.arena_size || S.arena_size - (a - base) < len)
		return false;
	*off = a - base;
	return true;
}

/* ---- copying */

static void rows(uint8_t *d, uint64_t drow, uint64_t dslice, const uint8_t *s, uint64_t srow, uint64_t sslice, uint64_t w, uint64_t h, uint64_t depth)
{
	for (uint64_t z = 0; z < depth; z++) {
		uint8_t *dz = d + z * dslice;
		const uint8_t *sz = s + z * sslice;
		if ((h == 1 || (drow == w && srow == w)))
			memcpy(dz, sz, w * h);
		else
			for (uint64_t y = 0; y < h; y++)
				memcpy(dz + y * drow, sz + y * srow, w);
	}
}

void gx_pack(uint8_t *tight, const struct layout *l)
{
	rows(tight, l->width, l->width * l->height, l->host, l->row, l->slice, l->width, l->height, l->depth);
}

void gx_unpack(const struct layout *l, const uint8_t *tight)
{
	rows(l->host, l->row, l->slice, tight, l->width, l->width * l->height, l->width, l->height, l->depth);
}

struct layout gx_map_layout(const struct map *m)
{
	return m->host ? (struct layout){m->host, m->host_row, m->host_slice, m->width, m->height, m->depth}
		       : (struct layout){m->ptr, m->arena_row, m->arena_slice, m->width, m->height, m->depth};
}

void gx_map_in(const struct map *m)
{
	rows(m->host, m->host_row, m->host_slice, S.arena + m->arena, m->arena_row, m->arena_slice, m->width, m->height, m->depth);
}

void gx_map_out(const struct map *m)
{
	rows(S.arena + m->arena, m->arena_row, m->arena_slice, m->host, m->host_row, m->host_slice, m->width, m->height, m->depth);
}

/* ---- transfers in progress, oldest first */
struct pend {
	struct pend *next;
	uint64_t serial; /* grows along the list, and is never used again */
	uint32_t word; /* 0: a mapping, which is complete when its event is */
	bool read, there; /* there: the executor reads to where the application wants it, so nothing is left to copy */
	struct layout to;
	uint64_t off, len;
	cl_mem mem;
	bool last; /* of a map: the application has released the object, which lives until this has ended */
	struct map map;
	cl_event ev;
};
static gx_lock pend_lock;
static struct pend *first, **last = &first, *spare;
static uint32_t words[GX_PEND_COUNT / 32];
static uint32_t word_hint;

static uint32_t word_take(void)
{
	for (uint32_t i = 0; i < COUNT(words); i++) {
		uint32_t w = (word_hint + i) % COUNT(words), used = words[w] | (w == 0);
		if (~used) {
			uint32_t bit = (uint32_t)__builtin_ctz(~used);
			words[w] |= 1u << bit;
			word_hint = w;
			atomic_store(gx_word(GX_PEND_OFF + 4 * (w * 32 + bit)), GX_PEND_BUSY);
			return w * 32 + bit;
		}
	}
	return 0;
}

static void word_drop(uint32_t word)
{
	atomic_store(gx_word(GX_PEND_OFF + 4 * word), GX_PEND_FREE);
	words[word / 32] &= ~(1u << (word % 32));
}

static struct pend *pend_new(void)
{
	struct pend *p = spare;
	if (p)
		spare = p->next;
	else
		p = malloc(sizeof *p);
	if (p)
		memset(p, 0, sizeof *p);
	return p;
}

static void pend_link(struct pend *p)
{
	static uint64_t serial;
	p->serial = ++serial;
	*last = p;
	last = &p->next;
	atomic_fetch_add(&S.npending, 1);
}

/* pend_cut removes *at from the list and keeps it for reuse. */
static void pend_cut(struct pend **at)
{
	struct pend *p = *at;
	*at = p->next;
	if (!*at)
		last = at;
	p->next = spare;
	spare = p;
	atomic_fetch_sub(&S.npending, 1);
}

/* gx_word_wait allocates a completion word. If all are taken, it waits for one. */
cl_int gx_word_wait(uint32_t *word)
{
	struct alive alive = {0};
	uint64_t start = 0;
	for (;;) {
		gx_lock_take(&pend_lock);
		*word = word_take();
		gx_lock_drop(&pend_lock);
		if (*word)
			return CL_SUCCESS;
		/* 8191 transfers are in progress, as far as is known: an empty list of events makes the executor say what has ended */
		call_wait_events(&(struct gx_wait_events){0}, NULL);
		gx_reap_slow(~0u);
		struct timespec t = {0, 200000};
		nanosleep(&t, NULL);
		if (!start)
			start = gx_now();
		if (gx_now() - start > PATIENCE_NS || !gx_alive(&alive))
			return CL_OUT_OF_RESOURCES;
	}
}

void gx_word_drop(uint32_t word)
{
	gx_lock_take(&pend_lock);
	word_drop(word);
	gx_lock_drop(&pend_lock);
}

/* len 0: the executor reads to where the application wants it. */
cl_int gx_pend_add(const struct layout *read, uint64_t off, uint64_t len, uint32_t *word)
{
	TRY(gx_word_wait(word));
	gx_lock_take(&pend_lock);
	struct pend *p = pend_new();
	if (p) {
		p->word = *word;
		if ((p->read = read != NULL))
			p->to = *read;
		p->there = !len;
		p->off = off;
		p->len = len;
		pend_link(p);
	} else
		word_drop(*word);
	gx_lock_drop(&pend_lock);
	return p ? CL_SUCCESS : CL_OUT_OF_HOST_MEMORY;
}

bool gx_pend_reads(const struct layout *l, bool copied)
{
	bool found = false;
	if (!atomic_load(&S.npending))
		return false;
	gx_lock_take(&pend_lock);
	for (struct pend *p = first; p && !found; p = p->next)
		found = (p->read || !p->word) && !(copied && p->there) && gx_layouts_meet(&p->to, l);
	gx_lock_drop(&pend_lock);
	return found;
}

bool gx_pend_brings(const struct layout *l)
{
	bool found = false;
	if (!atomic_load(&S.npending))
		return false;
	gx_lock_take(&pend_lock);
	for (struct pend *p = first; p && !found; p = p->next)
		found = p->word && p->read && gx_layouts_meet(&p->to, l);
	gx_lock_drop(&pend_lock);
	return found;
}

void gx_pend_cancel(uint32_t word)
{
	uint64_t off = 0, len = 0;
	gx_lock_take(&pend_lock);
	for (struct pend **at = &first; *at; at = &(*at)->next)
		if ((*at)->word == word) {
			off = (*at)->off;
			len = (*at)->len;
			word_drop(word);
			pend_cut(at);
			break;
		}
	gx_lock_drop(&pend_lock);
	if (off)
		gx_stage_free(off, len);
}

cl_int gx_pend_map(cl_mem mem, const struct map *m, cl_event ev)
{
	gx_lock_take(&pend_lock);
	struct pend *p = pend_new();
	if (p) {
		p->mem = mem;
		p->map = *m;
		p->to = gx_map_layout(m);
		p->ev = ev;
		gx_link(ev);
		pend_link(p);
	}
	gx_lock_drop(&pend_lock);
	return p ? CL_SUCCESS : CL_OUT_OF_HOST_MEMORY;
}

bool gx_pend_forget(cl_mem mem, uint32_t map)
{
	bool found = false;
	if (!atomic_load(&S.npending))
		return false;
	cl_event drop = NULL;
	do {
		drop = NULL;
		gx_lock_take(&pend_lock);
		for (struct pend **at = &first; *at && !drop; at = *at ? &(*at)->next : at)
			if (!(*at)->word && (*at)->mem == mem && (*at)->map.id == map) {
				drop = (*at)->ev;
				pend_cut(at);
				break;
			}
		gx_lock_drop(&pend_lock);
		if (drop) {
			found = true;
			gx_unlink(drop);
		}
	} while (drop);
	return found;
}

/* gx_pend_outlast lets an object that the application has released live until its maps have ended, as commands do that use
 * an object: what they bring is for memory of the application, which it may read, or send with other commands. It reports
 * whether there are any. A callback looks after them, because the application may make no call any more. */
bool gx_pend_outlast(cl_mem mem)
{
	bool found = false;
	if (!atomic_load(&S.npending))
		return false;
	for (;;) {
		cl_event ev = NULL;
		gx_lock_take(&pend_lock);
		for (struct pend *p = first; p && !ev; p = p->next)
			if (!p->word && p->mem == mem && !p->last) {
				if (!found)
					gx_link(mem);
				found = p->last = true;
				gx_link(mem);
				gx_link(ev = p->ev);
			}
		gx_lock_drop(&pend_lock);
		if (!ev)
			break;
		uint32_t token = gx_cb_add(CBK_MAP, ev, NULL, NULL, CL_COMPLETE);
		if (token && post_event_callback(&(struct gx_event_callback){.event = ev->o.id, .type = CL_COMPLETE, .callback = token}))
			gx_cb_drop(token);
		gx_unlink(ev);
	}
	if (found)
		gx_unlink(mem);
	return found;
}

/* ---- maps of regions in the arena that may not have run yet */
static struct awaited {
	struct awaited *next;
	cl_command_queue q; /* NULL: it was released */
	cl_mem mem;
	uint32_t map;
	uint64_t serial;
	struct layout to;
	cl_event ev; /* NULL: the application has none, and nobody asks */
} *awaited;
static _Atomic uint32_t nawaited;
static _Atomic uint64_t map_serial;

cl_int gx_map_await(cl_command_queue q, cl_mem mem, const struct map *m, cl_event ev)
{
	struct awaited *a = malloc(sizeof *a);
	if (!a)
		return CL_OUT_OF_HOST_MEMORY;
	if (ev)
		gx_link(ev);
	gx_lock_take(&pend_lock);
	*a = (struct awaited){.next = awaited, .q = q, .mem = mem, .map = m->id, .serial = atomic_fetch_add(&map_serial, 1) + 1, .to = gx_map_layout(m), .ev = ev};
	awaited = a;
	atomic_fetch_add(&nawaited, 1);
	gx_lock_drop(&pend_lock);
	return CL_SUCCESS;
}

uint64_t gx_map_stamp(void) { return atomic_load(&nawaited) ? atomic_load(&map_serial) : 0; }

/* what says which maps are known to have run: those that an event says so of, and those of an object, one of them if map
 * is not 0, or of a queue up to a stamp. */
struct what { cl_mem mem; uint32_t map; cl_command_queue q; uint64_t stamp; };

static void cut_awaited(const struct what *w)
{
	struct awaited *gone = NULL;
	gx_lock_take(&pend_lock);
	for (struct awaited **at = &awaited, *a; (a = *at);) {
		bool known = (a->ev && atomic_load(&a->ev->status) <= CL_COMPLETE) || (w->mem && a->mem == w->mem && (!w->map || a->map == w->map)) ||
			(w->q && a->q == w->q && a->serial <= w->stamp);
		if (!known) {
			at = &a->next;
			continue;
		}
		*at = a->next;
		a->next = gone;
		gone = a;
		atomic_fetch_sub(&nawaited, 1);
	}
	gx_lock_drop(&pend_lock);
	for (struct awaited *next; gone; gone = next) {
		next = gone->next;
		if (gone->ev)
			gx_unlink(gone->ev);
		free(gone);
	}
}

void gx_map_known(cl_mem mem, uint32_t map)
{
	if (atomic_load(&nawaited))
		cut_awaited(&(struct what){.mem = mem, .map = map});
}

void gx_maps_ran(cl_command_queue q, uint64_t stamp)
{
	if (stamp && atomic_load(&nawaited))
		cut_awaited(&(struct what){.q = q, .stamp = stamp});
}

void gx_maps_orphan(cl_command_queue q)
{
	if (!atomic_load(&nawaited))
		return;
	gx_lock_take(&pend_lock);
	for (struct awaited *a = awaited; a; a = a->next)
		if (a->q == q)
			a->q = NULL;
	gx_lock_drop(&pend_lock);
}

bool gx_map_comes(const struct layout *l)
{
	for (uint64_t asked = UINT64_MAX; atomic_load(&nawaited);) { /* the newest comes first */
		struct awaited *a;
		cl_event ev = NULL;
		int32_t st;
		gx_lock_take(&pend_lock);
		for (a = awaited; a && (a->serial >= asked || !gx_layouts_meet(&a->to, l)); a = a->next)
			;
		if (a && (ev = a->ev)) {
			gx_link(ev);
			asked = a->serial;
		}
		gx_lock_drop(&pend_lock);
		if (!a)
			return false;
		bool comes = !ev || gx_event_poll(ev, &st) || st > CL_COMPLETE;
		if (ev)
			gx_unlink(ev);
		if (comes)
			return true;
	}
	return false;
}

/* ask_maps asks which maps have ended. Their events keep the answers. The caller has no lock, as the executor may not
 * answer for long, and other threads are to go on meanwhile. */
static void ask_maps(void)
{
	cl_event evs[32];
	uint64_t asked = 0;
	unsigned n;
	do {
		n = 0;
		gx_lock_take(&pend_lock);
		for (struct pend *p = first; p && n < COUNT(evs); p = p->next)
			if (!p->word && p->serial > asked && atomic_load(&p->ev->status) > CL_COMPLETE) {
				gx_link(evs[n++] = p->ev); /* the map may be taken out of the list meanwhile */
				asked = p->serial;
			}
		gx_lock_drop(&pend_lock);
		for (unsigned i = 0; i < n; i++) {
			int32_t st;
			gx_event_poll(evs[i], &st);
			gx_unlink(evs[i]);
		}
	} while (n == COUNT(evs));
}

/* arrived reports whether the data of a read or a map is in the arena, as far as is known. */
static bool arrived(const struct pend *p)
{
	if (p->word)
		return atomic_load_explicit(gx_word(GX_PEND_OFF + 4 * p->word), memory_order_acquire) != GX_PEND_BUSY;
	return atomic_load(&p->ev->status) <= CL_COMPLETE;
}

/* overtakes reports whether data that has arrived has to wait for older data for the same memory, which has arrived
 * since it was looked at, or may have: asked says that the maps were asked after the data was seen to have arrived. The
 * caller has the lock. */
static bool overtakes(const struct pend *p, bool asked)
{
	for (struct pend *o = first; o != p; o = o->next)
		if ((o->read || !o->word) && gx_layouts_meet(&o->to, &p->to) && ((!o->word && !asked) || arrived(o)))
			return true;
	return false;
}

/* write_nothing keeps a map that has failed from being written when it is unmapped: what the application has is older than
 * the object. */
static void write_nothing(cl_mem mem, uint32_t map)
{
	gx_lock_take(&S.misc);
	for (struct map *m = mem->maps; m; m = m->next)
		if (m->id == map)
			m->flags &= ~(cl_map_flags)(CL_MAP_WRITE | CL_MAP_WRITE_INVALIDATE_REGION);
	gx_lock_drop(&S.misc);
}

void gx_reap_slow(unsigned max)
{
	struct { uint64_t off, len; } done[32];
	cl_event evs[32];
	cl_mem mems[32];
	uint64_t held = 0; /* the serial of what had arrived before the maps were asked */
	bool again;
	do {
		unsigned n = 0, nev = 0, busy = 0;
		bool lost = atomic_load(&S.lost);
		again = false;
		if (max == ~0u && !lost) /* others look at no maps */
			ask_maps();
		gx_lock_take(&pend_lock);
		for (struct pend **at = &first; *at;) {
			struct pend *p = *at;
			if (n == COUNT(done) || nev == COUNT(evs)) {
				again = true;
				break;
			}
			if (busy >= max)
				break;
			if (p->word) {
				uint32_t w = atomic_load_explicit(gx_word(GX_PEND_OFF + 4 * p->word), memory_order_acquire);
				if (w == GX_PEND_BUSY && !lost) {
					busy++;
					at = &p->next;
					continue;
				}
				if (busy && p->read && overtakes(p, p->serial == held)) {
					held = p->serial;
					again = max == ~0u;
					break;
				}
				if (w == GX_PEND_DONE && p->read && !p->there)
					gx_unpack(&p->to, S.arena + p->off);
				done[n].off = p->off;
				done[n++].len = p->len;
				if (w != GX_PEND_BUSY)
					word_drop(p->word);
			} else {
				int32_t st = atomic_load(&p->ev->status);
				if (max != ~0u || (!lost && st > CL_COMPLETE)) {
					busy++;
					at = &p->next;
					continue;
				}
				if (busy && overtakes(p, p->serial == held)) {
					held = p->serial;
					again = true;
					break;
				}
				if (!lost && st == CL_COMPLETE)
					gx_map_in(&p->map);
				else if (!lost)
					write_nothing(p->mem, p->map.id);
				mems[nev] = p->last ? p->mem : NULL;
				evs[nev++] = p->ev;
			}
			pend_cut(at);
		}
		gx_lock_drop(&pend_lock);
		for (unsigned i = 0; i < n; i++)
			if (done[i].len)
				gx_stage_free(done[i].off, done[i].len);
		for (unsigned i = 0; i < nev; i++) {
			gx_unlink(evs[i]);
			if (mems[i])
				gx_unlink(mems[i]);
		}
	} while (again);
}

/* gx_stage_wait allocates room of any size. If there is none, it waits for transfers in progress. */
cl_int gx_stage_wait(uint64_t len, uint64_t *off)
{
	struct alive alive = {0};
	uint64_t start = 0;
	while (!(*off = stage_alloc(len, UINT64_MAX))) {
		if (!start)
			start = gx_now();
		uint32_t before = atomic_load(&S.npending);
		if (!before || len > S.arena_size - S.split || gx_now() - start > PATIENCE_NS || !gx_alive(&alive))
			return CL_OUT_OF_HOST_MEMORY;
		call_wait_events(&(struct gx_wait_events){0}, NULL); /* nobody may have flushed them */
		gx_reap_slow(~0u);
		if (atomic_load(&S.npending) == before) {
			struct timespec t = {0, 500000};
			nanosleep(&t, NULL);
		}
	}
	return CL_SUCCESS;
}

void gx_staging_reset(void)
{
	alloc_lock = pend_lock = (gx_lock){0};
	nholes = 0;
	seeded = false;
	first = NULL;
	last = &first;
	memset(words, 0, sizeof words);
	awaited = NULL;
	atomic_store(&nawaited, 0);
	gx_moves_reset();
}
