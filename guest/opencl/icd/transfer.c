/* Reads and writes of buffers, rectangles and images. */
#include "gx.h"

#ifndef BULK_MIN /* a test builds the library with other limits */
#define BULK_MIN (64u << 10) /* blocking transfers of buffers */
#define BULK_MIN_PACKED (1u << 20) /* blocking ones of rectangles and images */
#define EAGER_MAX (4u << 20) /* others up to here are staged at once while the window has room */
#define INLINE_MAX GX_MAX_INLINE
#endif

/* bulk_min returns from how many bytes on blocking transfers of buffers take a lane. A GPU of another host wants more. */
static uint64_t bulk_min(void)
{
	uint32_t hint = atomic_load_explicit(gx_word(GX_HDR_BULK_FROM), memory_order_relaxed);
	return BULK_MIN && hint > BULK_MIN && hint <= EAGER_MAX ? hint : BULK_MIN;
}

/* access returns an error if the object's host flags forbid the access. */
static cl_int access(cl_mem m, bool write)
{
	cl_mem_flags no = CL_MEM_HOST_NO_ACCESS | (write ? CL_MEM_HOST_READ_ONLY : CL_MEM_HOST_WRITE_ONLY);
	return m->flags & no ? CL_INVALID_OPERATION : CL_SUCCESS;
}

struct stage { uint64_t off, len; uint32_t pend, mode; bool own; };

/* arrives reports whether a command that has not ended yet, as far as is known, brings data to this memory. What is to
 * be sent from there is late: it may be taken only when the sending command's turn has come. */
static bool arrives(const struct layout *l) { return gx_pend_reads(l, false) || gx_move_reads(l) || gx_map_comes(l); }

/* stage_begin decides how the data that l describes is moved. Memory that is in the arena already, because the
 * application mapped it, is used directly. Little data is staged in the window, and for a write it is packed at
 * once. All other data is moved when the command's turn has come, so the data of a write is read only then. */
static cl_int stage_begin(struct stage *s, const struct layout *l, bool write, bool blocking, uint64_t from)
{
	bool tight = (l->height == 1 || l->row == l->width) && (l->depth == 1 || l->slice == l->width * l->height);
	*s = (struct stage){.len = gx_layout_bytes(l), .mode = GX_DATA_STAGED};
	if (atomic_load(&S.npending) > 8)
		gx_reap_slow(8); /* the oldest are usually complete */
	bool late = write ? arrives(l) : gx_pend_reads(l, true); /* of a read: it must not arrive before older data */
	if (!late && tight && gx_in_arena(l->host, s->len, &s->off))
		return write || blocking ? CL_SUCCESS : gx_pend_add(l, 0, 0, &s->pend);
	if (!(late && write) && (blocking ? s->len < from : s->len <= EAGER_MAX) && (s->off = gx_stage_window(s->len))) {
		s->own = true;
		if (write)
			gx_pack(S.arena + s->off, l);
		cl_int err = blocking ? CL_SUCCESS : gx_pend_add(write ? NULL : l, s->off, s->len, &s->pend);
		if (err)
			gx_stage_free(s->off, s->len);
		return err;
	}
	s->off = s->len = 0;
	s->mode = GX_DATA_BULK;
	return gx_move_add(l, write, late, blocking, &s->pend);
}

static void stage_end(struct stage *s, const struct layout *l, bool write, bool blocking, cl_int err)
{
	if (blocking)
		gx_reap(); /* what earlier reads have brought, maybe to the same place */
	if (s->mode == GX_DATA_BULK) {
		if (err && s->pend) /* the request was never sent */
			gx_move_drop(s->pend);
		return;
	}
	if (!blocking) {
		if (err && s->pend) /* posted requests can fail only before they are sent */
			gx_pend_cancel(s->pend);
		return;
	}
	if (!s->own)
		return;
	if (!err && !write)
		gx_unpack(l, S.arena + s->off);
	gx_stage_free(s->off, s->len);
}

/* TRANSFER sends the request of a transfer that stage_begin has prepared. */
#define TRANSFER(name, NAME, m) \
	do { \
		uint32_t slot_; \
		if (!blocking) \
			err = post_##name(m); \
		else if (s.mode != GX_DATA_BULK) \
			err = call_##name(m, NULL); \
		else if (!(err = gx_slot_take(&slot_))) { \
			if ((err = send_##name(slot_, m))) \
				gx_slot_drop(slot_); \
			else { \
				err = gx_move_wait(NAME, slot_, s.pend); \
				s.pend = 0; \
			} \
		} \
	} while (0)

static cl_int buffer(cl_command_queue q, cl_mem m, bool blocking, bool write, size_t off, size_t size, void *ptr, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(gx_mem_for_queue(m, q, false));
	if (!ptr || !size || off > m->size || size > m->size - off)
		return CL_INVALID_VALUE;
	TRY(access(m, write));
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, write ? CL_COMMAND_WRITE_BUFFER : CL_COMMAND_READ_BUFFER, event);
	if (err)
		return gx_cmd_end(&c, err, NULL, false);
	struct gx_read_buffer r = {.queue = q->o.id, .mem = m->o.id, .blocking = blocking, .offset = off, .size = size, .event = c.id, .wait = c.wait, .n_wait = c.nwait};
	struct gx_write_buffer w = {.queue = q->o.id, .mem = m->o.id, .blocking = blocking, .offset = off, .size = size, .event = c.id, .wait = c.wait, .n_wait = c.nwait};
	struct layout l = {ptr, size, size, size, 1, 1};
	struct stage s = {0};
	bool late = write && size <= INLINE_MAX && arrives(&l);
	if (write && size <= INLINE_MAX && !late) {
		w.mode = GX_DATA_INLINE;
		w.content = ptr;
		w.n_content = (uint32_t)size;
		err = blocking ? call_write_buffer(&w, NULL) : post_write_buffer(&w);
		if (blocking)
			gx_reap();
	} else if (!(err = stage_begin(&s, &l, write, blocking, bulk_min()))) {
		r.mode = w.mode = s.mode;
		r.stage_off = w.stage_off = s.off;
		r.stage_len = w.stage_len = s.len;
		r.pend = w.pend = s.pend;
		if (write)
			TRANSFER(write_buffer, GX_WRITE_BUFFER, &w);
		else
			TRANSFER(read_buffer, GX_READ_BUFFER, &r);
		stage_end(&s, &l, write, blocking, err);
	}
	return gx_cmd_end(&c, err, event, blocking);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueReadBuffer(cl_command_queue q, cl_mem m, cl_bool blocking, size_t off, size_t size, void *ptr, cl_uint n, const cl_event *list, cl_event *event)
{
	return buffer(q, m, blocking != 0, false, off, size, ptr, n, list, event);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueWriteBuffer(cl_command_queue q, cl_mem m, cl_bool blocking, size_t off, size_t size, const void *ptr, cl_uint n, const cl_event *list, cl_event *event)
{
	return buffer(q, m, blocking != 0, true, off, size, (void *)(uintptr_t)ptr, n, list, event);
}

static cl_int rect(cl_command_queue q, cl_mem m, bool blocking, bool write, const size_t *bo, const size_t *ho, const size_t *region,
	size_t brow, size_t bslice, size_t hrow, size_t hslice, void *ptr, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(gx_mem_for_queue(m, q, false));
	if (!bo || !ho || !region || !ptr)
		return CL_INVALID_VALUE;
	uint64_t br = brow, bs = bslice, hr = hrow, hs = hslice;
	TRY(gx_rect_check(bo, region, &br, &bs, m->size));
	TRY(gx_rect_check(ho, region, &hr, &hs, UINT64_MAX));
	TRY(access(m, write));
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, write ? CL_COMMAND_WRITE_BUFFER_RECT : CL_COMMAND_READ_BUFFER_RECT, event);
	struct layout l = {(uint8_t *)ptr + ho[2] * hs + ho[1] * hr + ho[0], hr, hs, region[0], region[1], region[2]};
	struct stage s;
	if (!err && !(err = stage_begin(&s, &l, write, blocking, BULK_MIN_PACKED))) {
		uint64_t o3[3] = {bo[0], bo[1], bo[2]}, r3[3] = {region[0], region[1], region[2]};
		struct gx_read_buffer_rect r = {.queue = q->o.id, .mem = m->o.id, .blocking = blocking, .origin = o3, .n_origin = 3, .region = r3, .n_region = 3, .row_pitch = br, .slice_pitch = bs,
			.mode = s.mode, .stage_off = s.off, .stage_len = s.len, .pend = s.pend, .event = c.id, .wait = c.wait, .n_wait = c.nwait};
		if (write) {
			struct gx_write_buffer_rect w = {.queue = r.queue, .mem = r.mem, .blocking = blocking, .origin = o3, .n_origin = 3, .region = r3, .n_region = 3, .row_pitch = br, .slice_pitch = bs,
				.mode = s.mode, .stage_off = s.off, .stage_len = s.len, .pend = s.pend, .event = c.id, .wait = c.wait, .n_wait = c.nwait};
			TRANSFER(write_buffer_rect, GX_WRITE_BUFFER_RECT, &w);
		} else
			TRANSFER(read_buffer_rect, GX_READ_BUFFER_RECT, &r);
		stage_end(&s, &l, write, blocking, err);
	}
	return gx_cmd_end(&c, err, event, blocking);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueReadBufferRect(cl_command_queue q, cl_mem m, cl_bool blocking, const size_t *bo, const size_t *ho, const size_t *region,
	size_t brow, size_t bslice, size_t hrow, size_t hslice, void *ptr, cl_uint n, const cl_event *list, cl_event *event)
{
	return rect(q, m, blocking != 0, false, bo, ho, region, brow, bslice, hrow, hslice, ptr, n, list, event);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueWriteBufferRect(cl_command_queue q, cl_mem m, cl_bool blocking, const size_t *bo, const size_t *ho, const size_t *region,
	size_t brow, size_t bslice, size_t hrow, size_t hslice, const void *ptr, cl_uint n, const cl_event *list, cl_event *event)
{
	return rect(q, m, blocking != 0, true, bo, ho, region, brow, bslice, hrow, hslice, (void *)(uintptr_t)ptr, n, list, event);
}

static cl_int image(cl_command_queue q, cl_mem m, bool blocking, bool write, const size_t *origin, const size_t *region, size_t row, size_t slice, void *ptr,
	cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(gx_mem_for_queue(m, q, true));
	if (!ptr)
		return CL_INVALID_VALUE;
	TRY(gx_img_region(m, origin, region));
	uint64_t w = region[0] * m->elem, hr = row ? row : w;
	bool array1d = m->type == CL_MEM_OBJECT_IMAGE1D_ARRAY;
	bool sliced = array1d || m->type == CL_MEM_OBJECT_IMAGE2D_ARRAY || m->type == CL_MEM_OBJECT_IMAGE3D;
	if (hr < w || (slice && !sliced))
		return CL_INVALID_VALUE;
	uint64_t hs = slice ? slice : array1d ? hr : hr * region[1];
	if (hs < (array1d ? hr : hr * region[1]))
		return CL_INVALID_VALUE;
	TRY(access(m, write));
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, write ? CL_COMMAND_WRITE_IMAGE : CL_COMMAND_READ_IMAGE, event);
	struct layout l = {ptr, array1d ? hs : hr, hs, w, region[1], region[2]};
	struct stage s;
	if (!err && !(err = stage_begin(&s, &l, write, blocking, BULK_MIN_PACKED))) {
		uint64_t o3[3] = {origin[0], origin[1], origin[2]}, r3[3] = {region[0], region[1], region[2]};
		if (write) {
			struct gx_write_image r = {.queue = q->o.id, .image = m->o.id, .blocking = blocking, .origin = o3, .n_origin = 3, .region = r3, .n_region = 3,
				.mode = s.mode, .stage_off = s.off, .stage_len = s.len, .pend = s.pend, .event = c.id, .wait = c.wait, .n_wait = c.nwait};
			TRANSFER(write_image, GX_WRITE_IMAGE, &r);
		} else {
			struct gx_read_image r = {.queue = q->o.id, .image = m->o.id, .blocking = blocking, .origin = o3, .n_origin = 3, .region = r3, .n_region = 3,
				.mode = s.mode, .stage_off = s.off, .stage_len = s.len, .pend = s.pend, .event = c.id, .wait = c.wait, .n_wait = c.nwait};
			TRANSFER(read_image, GX_READ_IMAGE, &r);
		}
		stage_end(&s, &l, write, blocking, err);
	}
	return gx_cmd_end(&c, err, event, blocking);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueReadImage(cl_command_queue q, cl_mem m, cl_bool blocking, const size_t *origin, const size_t *region, size_t row, size_t slice, void *ptr,
	cl_uint n, const cl_event *list, cl_event *event)
{
	return image(q, m, blocking != 0, false, origin, region, row, slice, ptr, n, list, event);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueWriteImage(cl_command_queue q, cl_mem m, cl_bool blocking, const size_t *origin, const size_t *region, size_t row, size_t slice, const void *ptr,
	cl_uint n, const cl_event *list, cl_event *event)
{
	return image(q, m, blocking != 0, true, origin, region, row, slice, (void *)(uintptr_t)ptr, n, list, event);
}

/* ---- the first content of objects */

bool gx_content_apart(uint64_t size) { return size > EAGER_MAX; }

/* gx_content writes the first content of an object, which only the caller has yet. It uses a queue of its own. As a
 * transfer, this takes no more memory than other transfers, however large the content is. row and slice are the
 * pitches of an image's content. */
cl_int gx_content(cl_mem m, const void *host, size_t row, size_t slice)
{
	cl_int err = CL_INVALID_OPERATION;
	cl_device_id d = NULL;
	for (cl_uint i = 0; i < m->ctx->ndev && !d; i++)
		if (m->type == CL_MEM_OBJECT_BUFFER || m->ctx->devs[i]->images)
			d = m->ctx->devs[i];
	cl_command_queue q = d ? clCreateCommandQueue(m->ctx, d, 0, &err) : NULL;
	if (!q)
		return err;
	cl_mem_flags flags = m->flags;
	m->flags &= ~(cl_mem_flags)(CL_MEM_HOST_NO_ACCESS | CL_MEM_HOST_READ_ONLY); /* these flags apply only later */
	void *from = (void *)(uintptr_t)host;
	if (m->type == CL_MEM_OBJECT_BUFFER)
		err = buffer(q, m, true, true, 0, m->size, from, 0, NULL, NULL);
	else {
		static const size_t origin[3];
		bool array1d = m->type == CL_MEM_OBJECT_IMAGE1D_ARRAY, sliced = m->array || m->type == CL_MEM_OBJECT_IMAGE3D;
		size_t region[3] = {m->width, array1d ? m->array : m->height, array1d || !m->array ? m->depth : m->array};
		err = image(q, m, true, true, origin, region, row, sliced ? slice : 0, from, 0, NULL, NULL);
	}
	m->flags = flags;
	clReleaseCommandQueue(q);
	return err;
}

/* ---- mappings */

static cl_int map_flags(cl_mem m, cl_map_flags f)
{
	const cl_map_flags rw = CL_MAP_READ | CL_MAP_WRITE;
	if ((f & ~(rw | CL_MAP_WRITE_INVALIDATE_REGION)) || ((f & CL_MAP_WRITE_INVALIDATE_REGION) && (f & rw)))
		return CL_INVALID_VALUE;
	if ((f & CL_MAP_READ) && access(m, false))
		return CL_INVALID_OPERATION;
	if ((f & (CL_MAP_WRITE | CL_MAP_WRITE_INVALIDATE_REGION)) && access(m, true))
		return CL_INVALID_OPERATION;
	return CL_SUCCESS;
}

/* in_arena reports whether a mapping that the executor made is completely in the arena, with pitches that keep its
 * rows apart. The application and the library write with these pitches. */
static bool in_arena(const struct map *p)
{
	uint64_t rows = p->height - 1, slices = p->depth - 1, area, last, end;
	return p->arena_row >= p->width && !__builtin_mul_overflow(p->arena_row, p->height, &area) && (!slices || p->arena_slice >= area) &&
		!__builtin_mul_overflow(p->arena_slice, slices, &end) && !__builtin_mul_overflow(p->arena_row, rows, &last) &&
		!__builtin_add_overflow(end, last, &end) && !__builtin_add_overflow(end, p->width, &end) &&
		p->arena <= S.arena_size && end <= S.arena_size - p->arena;
}

/* comes reports whether a map command brings the content of its region. */
static bool comes(cl_map_flags f) { return !(f & CL_MAP_WRITE_INVALIDATE_REGION); }

/* end_map stores a mapping that the executor has made. */
static void *end_map(struct cmd *c, cl_mem m, struct map *p, const struct gx_reply *r, bool blocking, cl_event *event, cl_int *err)
{
	p->arena = gx_u64(r, 0);
	bool wrong = !in_arena(p);
	if (wrong)
		*err = CL_MAP_FAILURE;
	if (blocking) /* before newer data comes to the same place */
		gx_reap();
	bool bring = p->host && comes(p->flags);
	p->ptr = p->host ? p->host : S.arena + p->arena;
	if (!*err) {
		gx_lock_take(&S.misc);
		p->next = m->maps;
		m->maps = p;
		m->nmaps++;
		gx_lock_drop(&S.misc);
		if (bring && blocking)
			gx_map_in(p);
		else if (bring)
			*err = gx_pend_map(m, p, c->ev);
		else if (!blocking && comes(p->flags))
			*err = gx_map_await(c->q, m, p, c->ev);
	}
	cl_event ev = c->ev;
	void *ptr = p->ptr;
	if (wrong)
		free(p);
	*err = gx_cmd_end(c, *err, event, blocking);
	if (!*err && ev && !event)
		gx_release_ref(ev);
	return ptr;
}

static uint32_t next_map(void)
{
	static _Atomic uint32_t n;
	return atomic_fetch_add(&n, 1) % GX_MAX_ID + 1;
}

CL_API_ENTRY void *CL_API_CALL clEnqueueMapBuffer(cl_command_queue q, cl_mem m, cl_bool blocking, cl_map_flags flags, size_t off, size_t size, cl_uint n, const cl_event *list, cl_event *event, cl_int *errcode_ret)
{
	struct cmd c;
	struct gx_reply r;
	if (!gx_ok(q, T_QUEUE))
		FAIL(CL_INVALID_COMMAND_QUEUE);
	cl_int err = gx_mem_for_queue(m, q, false);
	if (!err && (!size || off > m->size || size > m->size - off))
		err = CL_INVALID_VALUE;
	if (!err)
		err = map_flags(m, flags);
	if (!err)
		err = gx_cmd_check(&c, q, n, list);
	if (err)
		FAIL(err);
	struct map *p = calloc(1, sizeof *p);
	err = p ? gx_cmd_event(&c, CL_COMMAND_MAP_BUFFER, event || (m->host && !blocking)) : CL_OUT_OF_HOST_MEMORY;
	if (!err) {
		p->id = next_map();
		p->flags = flags;
		p->width = p->host_row = p->host_slice = p->arena_row = p->arena_slice = size;
		p->height = p->depth = 1;
		p->host = m->host ? m->host + off : NULL;
		p->at[0] = off;
		err = call_map_buffer(&(struct gx_map_buffer){.queue = q->o.id, .mem = m->o.id, .blocking = blocking != 0, .flags = flags, .offset = off, .size = size, .map = p->id,
			.event = c.id, .wait = c.wait, .n_wait = c.nwait}, &r);
	}
	if (err) {
		free(p);
		FAIL(gx_cmd_end(&c, err, NULL, false));
	}
	void *ptr = end_map(&c, m, p, &r, blocking != 0, event, &err);
	gx_reply_free(&r);
	if (err)
		FAIL(err);
	DONE(ptr);
}

CL_API_ENTRY void *CL_API_CALL clEnqueueMapImage(cl_command_queue q, cl_mem m, cl_bool blocking, cl_map_flags flags, const size_t *o, const size_t *region, size_t *row, size_t *slice,
	cl_uint n, const cl_event *list, cl_event *event, cl_int *errcode_ret)
{
	struct cmd c;
	struct gx_reply r;
	if (!gx_ok(q, T_QUEUE))
		FAIL(CL_INVALID_COMMAND_QUEUE);
	cl_int err = gx_mem_for_queue(m, q, true);
	if (!err)
		err = gx_img_region(m, o, region);
	bool array1d = !err && m->type == CL_MEM_OBJECT_IMAGE1D_ARRAY;
	bool sliced = array1d || (!err && (m->type == CL_MEM_OBJECT_IMAGE3D || m->type == CL_MEM_OBJECT_IMAGE2D_ARRAY));
	if (!err && (!row || (sliced && !slice)))
		err = CL_INVALID_VALUE;
	if (!err)
		err = map_flags(m, flags);
	if (!err)
		err = gx_cmd_check(&c, q, n, list);
	if (err)
		FAIL(err);
	struct map *p = calloc(1, sizeof *p);
	err = p ? gx_cmd_event(&c, CL_COMMAND_MAP_IMAGE, event || (m->host && !blocking)) : CL_OUT_OF_HOST_MEMORY;
	if (!err) {
		uint64_t o3[3] = {o[0], o[1], o[2]}, r3[3] = {region[0], region[1], region[2]};
		p->id = next_map();
		p->flags = flags;
		p->width = region[0] * m->elem;
		p->height = region[1];
		p->depth = region[2];
		p->host_row = array1d ? m->host_slice : m->host_row;
		p->host_slice = m->host_slice;
		memcpy(p->at, o3, sizeof o3);
		p->host = m->host ? m->host + o[2] * p->host_slice + o[1] * p->host_row + o[0] * m->elem : NULL;
		err = call_map_image(&(struct gx_map_image){.queue = q->o.id, .image = m->o.id, .blocking = blocking != 0, .flags = flags, .map = p->id,
			.origin = o3, .n_origin = 3, .region = r3, .n_region = 3, .event = c.id, .wait = c.wait, .n_wait = c.nwait}, &r);
	}
	if (err) {
		free(p);
		FAIL(gx_cmd_end(&c, err, NULL, false));
	}
	uint64_t arow = gx_u64(&r, 1), aslice = gx_u64(&r, 2);
	p->arena_row = array1d && aslice ? aslice : arow;
	p->arena_slice = aslice;
	if (arow < p->width || (sliced && aslice / (array1d ? 1 : region[1]) < arow)) /* the application gets both pitches */
		p->arena_row = 0;
	void *ptr = end_map(&c, m, p, &r, blocking != 0, event, &err);
	gx_reply_free(&r);
	if (err)
		FAIL(err);
	*row = m->host ? m->host_row : arow;
	if (slice)
		*slice = !sliced ? 0 : m->host ? m->host_slice : aslice;
	DONE(ptr);
}

/* write_late sends a mapping's content when it is the command's turn. */
static cl_int write_late(const struct cmd *c, cl_mem m, const struct map *p, uint32_t pend, uint32_t event, uint32_t *wait, uint32_t nwait)
{
	if (m->type == CL_MEM_OBJECT_BUFFER)
		return post_write_buffer(&(struct gx_write_buffer){.queue = c->q->o.id, .mem = m->o.id, .offset = p->at[0], .size = p->width, .mode = GX_DATA_BULK, .pend = pend,
			.event = event, .wait = wait, .n_wait = nwait});
	uint64_t o3[3] = {p->at[0], p->at[1], p->at[2]}, r3[3] = {p->width / m->elem, p->height, p->depth};
	return post_write_image(&(struct gx_write_image){.queue = c->q->o.id, .image = m->o.id, .origin = o3, .n_origin = 3, .region = r3, .n_region = 3, .mode = GX_DATA_BULK, .pend = pend,
		.event = event, .wait = wait, .n_wait = nwait});
}

/* unmap sends the request. Data that earlier commands bring to the region comes first, so the content is sent by a write
 * of its own when it is here. The executor sees that such a write was that of a region in the arena. Another region is
 * unmapped before, which sends what it had when it was mapped; the application may write there until the events have
 * come. */
static cl_int unmap(struct cmd *c, cl_mem m, const struct map *p, bool writes)
{
	struct gx_unmap r = {.queue = c->q->o.id, .mem = m->o.id, .map = p->id, .event = c->id, .wait = c->wait, .n_wait = c->nwait};
	struct layout l = gx_map_layout(p);
	if (!writes || !(arrives(&l) || (p->host && c->nwait))) {
		if (writes && p->host)
			gx_map_out(p);
		return post_unmap(&r);
	}
	uint32_t pend, first = c->nhidden < COUNT(c->hidden) ? gx_id_take() : 0;
	if (!first)
		return CL_OUT_OF_RESOURCES;
	cl_int err = gx_move_add(&l, true, true, false, &pend), sent;
	if (err) {
		gx_id_drop(first);
		return err;
	}
	if (p->host) {
		r.event = first;
		sent = post_unmap(&r);
		err = sent ? sent : write_late(c, m, p, pend, c->id, &first, 1);
	} else {
		r.wait = &first;
		r.n_wait = 1;
		sent = err = write_late(c, m, p, pend, first, c->wait, c->nwait);
		if (!err)
			err = post_unmap(&r);
	}
	if (sent)
		gx_id_drop(first);
	else
		c->hidden[c->nhidden++] = first;
	if (p->host ? err : sent)
		gx_move_drop(pend);
	return err;
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueUnmapMemObject(cl_command_queue q, cl_mem m, void *ptr, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	if (!gx_ok(m, T_MEM))
		return CL_INVALID_MEM_OBJECT;
	if (m->ctx != q->ctx)
		return CL_INVALID_CONTEXT;
	TRY(gx_cmd_check(&c, q, n, list));
	gx_lock_take(&S.misc);
	struct map **at = &m->maps, *p;
	while (*at && (*at)->ptr != ptr)
		at = &(*at)->next;
	if ((p = *at)) {
		*at = p->next;
		m->nmaps--;
	}
	gx_lock_drop(&S.misc);
	if (!p)
		return gx_cmd_end(&c, CL_INVALID_VALUE, NULL, false);
	cl_int err = gx_cmd_event(&c, CL_COMMAND_UNMAP_MEM_OBJECT, event);
	if (!err) {
		/* Before its content is there, the application writes nothing to it, and does not miss it. But commands that
		 * it has enqueued since may bring data to it, or send what is there. */
		struct layout l = gx_map_layout(p);
		bool used = gx_pend_brings(&l) || gx_move_uses(&l);
		bool seen = used || !gx_pend_forget(m, p->id);
		if (!used)
			gx_map_known(m, p->id);
		err = unmap(&c, m, p, seen && (p->flags & (CL_MAP_WRITE | CL_MAP_WRITE_INVALIDATE_REGION)));
		gx_map_known(m, p->id);
	}
	free(p);
	return gx_cmd_end(&c, err, event, false);
}
