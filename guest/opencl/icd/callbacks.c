/* The application's callbacks.
 *
 * OpenCL callbacks must run even if the application makes no call, so they need a thread. There is only one such
 * thread in the library. It starts with the first callback, blocks all signals, and does not keep the process from
 * exiting. */
#include "gx.h"
#include <pthread.h>
#include <signal.h>
#include <limits.h>

#define TICK_MS 100
#define STACK (256u << 10)

struct cb {
	enum gx_cb kind;
	bool used;
	void *obj, *fn, *user;
	struct notify *list; /* for a memory object */
	int32_t type;
	uint32_t next; /* free list, or the queue of local deliveries */
	int32_t status;
};
static gx_lock cb_lock;
static struct cb *cbs; /* token - 1 is the index */
static uint32_t ncbs, cap_cbs, free_cbs;
static uint32_t local_first, local_last;
static bool running;

void gx_callbacks_reset(void)
{
	cb_lock = (gx_lock){0};
	ncbs = free_cbs = local_first = local_last = 0;
	running = false;
}

/* take_out removes a token, so that each callback is delivered only once. */
static bool take_out(uint32_t token, struct cb *out)
{
	bool ok = false;
	gx_lock_take(&cb_lock);
	if (token && token <= ncbs && cbs[token - 1].used) {
		struct cb *c = &cbs[token - 1];
		*out = *c;
		c->used = false;
		c->next = free_cbs;
		free_cbs = token;
		ok = true;
	}
	gx_lock_drop(&cb_lock);
	return ok;
}

static void deliver(uint32_t token, int32_t status)
{
	struct cb c;
	if (!take_out(token, &c))
		return;
	gx_reap();
	gx_output(true);
	switch (c.kind) {
	case CBK_EVENT: {
		cl_event e = c.obj;
		if (c.type == CL_COMPLETE && status <= CL_COMPLETE)
			atomic_store(&e->status, status);
		((void(CL_CALLBACK *)(cl_event, cl_int, void *))c.fn)(e, status < 0 ? status : c.type, c.user);
		gx_unlink(e);
		break;
	}
	case CBK_BUILD: {
		cl_program p = c.obj;
		((void(CL_CALLBACK *)(cl_program, void *))c.fn)(p, c.user);
		gx_unlink(p);
		break;
	}
	case CBK_MAP: /* what it has brought has been copied */
		gx_unlink(c.obj);
		break;
	case CBK_MEM:
		for (struct notify *n = c.user, *next; n; n = next) {
			next = n->next;
			((void(CL_CALLBACK *)(cl_mem, void *))n->fn)(c.obj, n->user);
			free(n);
		}
		gx_recycle(c.obj, T_MEM);
		break;
	}
}

/* deliver_local runs the callbacks that need no message from the executor. If the session is lost, it runs all of
 * them. */
static void deliver_local(void)
{
	for (;;) {
		gx_lock_take(&cb_lock);
		uint32_t token = local_first;
		int32_t status = 0;
		if (token) {
			status = cbs[token - 1].status;
			local_first = cbs[token - 1].next;
			if (!local_first)
				local_last = 0;
		}
		gx_lock_drop(&cb_lock);
		if (!token)
			break;
		deliver(token, status);
	}
	if (atomic_load(&S.lost))
		for (uint32_t t = 1; t <= ncbs; t++)
			deliver(t, CL_DEVICE_NOT_AVAILABLE);
}

static void *run(void *arg)
{
	(void)arg;
	struct alive alive = {0};
	for (;;) {
		uint32_t head = atomic_load(gx_word(GX_HDR_CB_HEAD)), tail = atomic_load(gx_word(GX_HDR_CB_TAIL));
		while (head != tail) {
			uint32_t e[4];
			memcpy(e, S.ring + GX_CB_OFF + 16 * (head % GX_CB_COUNT), sizeof e);
			atomic_store(gx_word(GX_HDR_CB_HEAD), ++head);
			gx_futex_wake(gx_word(GX_HDR_CB_HEAD), INT_MAX);
			deliver(e[0], (int32_t)e[1]);
		}
		deliver_local();
		if (gx_futex_wait(gx_word(GX_HDR_CB_TAIL), tail, TICK_MS))
			gx_alive(&alive);
	}
	return NULL;
}

static bool start(void)
{
	if (running)
		return true;
	pthread_attr_t attr;
	pthread_t t;
	sigset_t all, old;
	if (pthread_attr_init(&attr))
		return false;
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, STACK);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	running = pthread_create(&t, &attr, run, NULL) == 0;
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
	return running;
}

uint32_t gx_cb_add(enum gx_cb kind, void *obj, void *fn, void *user, int32_t type)
{
	uint32_t token = 0;
	gx_lock_take(&cb_lock);
	if (!start())
		goto out;
	if (free_cbs) {
		token = free_cbs;
		free_cbs = cbs[token - 1].next;
	} else {
		if (ncbs == cap_cbs) {
			uint32_t cap = cap_cbs ? 2 * cap_cbs : 64;
			struct cb *more = realloc(cbs, cap * sizeof *more);
			if (!more)
				goto out;
			cbs = more;
			cap_cbs = cap;
		}
		token = ++ncbs;
	}
	cbs[token - 1] = (struct cb){.kind = kind, .used = true, .obj = obj, .fn = fn, .user = user, .type = type};
	if (kind != CBK_MEM)
		gx_link(obj);
out:
	gx_lock_drop(&cb_lock);
	return token;
}

void gx_cb_drop(uint32_t token)
{
	struct cb c;
	if (take_out(token, &c) && c.kind != CBK_MEM)
		gx_unlink(c.obj);
}

void gx_cb_local(uint32_t token, int32_t status)
{
	gx_lock_take(&cb_lock);
	struct cb *c = &cbs[token - 1];
	c->status = status;
	c->next = 0;
	if (local_last)
		cbs[local_last - 1].next = token;
	else
		local_first = token;
	local_last = token;
	gx_lock_drop(&cb_lock);
	gx_futex_wake(gx_word(GX_HDR_CB_TAIL), INT_MAX); /* at the latest, the next tick does this */
}
