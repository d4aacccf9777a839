/* Handles, their two counts, ids, and small helpers for queries. */
#include "gx.h"

static gx_lock id_lock;
static uint32_t next_id = GX_FIRST_ID, *free_ids, nfree, cap_free, first_free; /* a circular buffer; cap_free is a power of two */
static gx_lock pool_lock;
static struct obj *pool[T_COUNT];

/* gx_objects_reset makes the locks usable in a forked child; ids start again with its session. */

void gx_objects_reset(void)
{
	id_lock = pool_lock = (gx_lock){0};
	next_id = GX_FIRST_ID;
	nfree = first_free = 0;
}

/* Ids are used again in the order of their release, and not at once. So whoever reads an old id late does not find
 * the next object with the same id. */
#define ID_REST 1024u

uint32_t gx_id_take(void)
{
	uint32_t id = 0;
	gx_lock_take(&id_lock);
	if (nfree > ID_REST || (nfree && next_id > GX_MAX_ID)) {
		id = free_ids[first_free];
		first_free = (first_free + 1) & (cap_free - 1);
		nfree--;
	} else if (next_id <= GX_MAX_ID)
		id = next_id++;
	gx_lock_drop(&id_lock);
	return id;
}

void gx_id_drop(uint32_t id)
{
	gx_lock_take(&id_lock);
	if (nfree == cap_free) {
		uint32_t cap = cap_free ? 2 * cap_free : 2048;
		uint32_t *more = malloc(cap * sizeof *more);
		if (more) {
			for (uint32_t i = 0; i < nfree; i++)
				more[i] = free_ids[(first_free + i) & (cap_free - 1)];
			free(free_ids);
			free_ids = more;
			cap_free = cap;
			first_free = 0;
		}
	}
	if (nfree < cap_free) /* otherwise the id is lost; there are 16 million */
		free_ids[(first_free + nfree++) & (cap_free - 1)] = id;
	gx_lock_drop(&id_lock);
}

/* The memory of handles is never freed, so a handle that is used after its end is still recognized as invalid. */
void *gx_new(enum gx_type t, size_t size)
{
	gx_lock_take(&pool_lock);
	struct obj *o = pool[t];
	if (o)
		pool[t] = o->next;
	gx_lock_drop(&pool_lock);
	if (!o && !(o = malloc(size)))
		return NULL;
	memset(o, 0, size);
	o->id = gx_id_take();
	if (!o->id) {
		gx_recycle(o, t);
		return NULL;
	}
	o->dispatch = &gx_dispatch;
	o->gen = atomic_load(&S.gen);
	atomic_store_explicit(&o->refs, 1, memory_order_relaxed);
	atomic_store_explicit(&o->links, 1, memory_order_relaxed);
	o->magic = GX_OBJ_MAGIC | t;
	return o;
}

void gx_recycle(struct obj *o, enum gx_type t)
{
	o->magic = 0;
	gx_lock_take(&pool_lock);
	o->next = pool[t];
	pool[t] = o;
	gx_lock_drop(&pool_lock);
}

static void (*const destroy[T_COUNT])(struct obj *) = {
	[T_DEVICE] = gx_device_destroy, [T_CONTEXT] = gx_context_destroy, [T_QUEUE] = gx_queue_destroy,
	[T_MEM] = gx_mem_destroy, [T_SAMPLER] = gx_sampler_destroy, [T_PROGRAM] = gx_program_destroy,
	[T_KERNEL] = gx_kernel_destroy, [T_EVENT] = gx_event_destroy,
};

void gx_abandon(void *obj)
{
	struct obj *o = obj;
	gx_id_drop(o->id);
	gx_recycle(o, (enum gx_type)(o->magic & 0xff));
}

void gx_link(void *obj) { atomic_fetch_add_explicit(&((struct obj *)obj)->links, 1, memory_order_relaxed); }

void gx_unlink(void *obj)
{
	struct obj *o = obj;
	if (atomic_fetch_sub_explicit(&o->links, 1, memory_order_acq_rel) == 1)
		destroy[o->magic & 0xff](o);
}

bool gx_retain(void *obj)
{
	struct obj *o = obj;
	atomic_fetch_add_explicit(&o->links, 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&o->refs, 1, memory_order_relaxed);
	return true;
}

bool gx_release_ref(void *obj)
{
	struct obj *o = obj;
	uint32_t n = atomic_load(&o->refs);
	do
		if (n == 0)
			return false; /* the object lives only because others need it */
	while (!atomic_compare_exchange_weak(&o->refs, &n, n - 1));
	gx_unlink(o);
	return true;
}

cl_int gx_info(const void *src, size_t len, size_t cap, void *dst, size_t *ret)
{
	if (dst) {
		if (cap < len)
			return CL_INVALID_VALUE;
		if (len)
			memcpy(dst, src, len);
	}
	if (ret)
		*ret = len;
	return CL_SUCCESS;
}

cl_int gx_reply_info(struct gx_reply *r, size_t cap, void *dst, size_t *ret)
{
	cl_int err = gx_info(r->data, r->len, cap, dst, ret);
	gx_reply_free(r);
	return err;
}

bool gx_notify_push(struct notify **list, void *fn, void *user)
{
	struct notify *n = malloc(sizeof *n);
	if (!n)
		return false;
	n->fn = fn;
	n->user = user;
	n->next = *list;
	*list = n;
	return true;
}
