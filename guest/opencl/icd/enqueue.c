/* The parts that all commands share, and the commands that do not move data of the application. */
#include "gx.h"

#define WAIT_MAX 3000u /* ids in one request */

static cl_int check_wait(cl_command_queue q, cl_uint n, const cl_event *list)
{
	if ((n == 0) != (list == NULL))
		return CL_INVALID_EVENT_WAIT_LIST;
	for (cl_uint i = 0; i < n; i++) {
		if (!gx_ok(list[i], T_EVENT))
			return CL_INVALID_EVENT_WAIT_LIST;
		if (list[i]->ctx != q->ctx)
			return CL_INVALID_CONTEXT;
	}
	return CL_SUCCESS;
}

/* gx_cmd_check checks the queue and the wait list. If the list is too long for a request, markers that wait for its
 * parts replace them. After success, gx_cmd_end must be called. */
cl_int gx_cmd_check(struct cmd *c, cl_command_queue q, cl_uint n, const cl_event *list)
{
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(check_wait(q, n, list));
	c->q = q;
	c->wait = c->inline_wait;
	c->nwait = c->nhidden = 0;
	c->ev = NULL;
	c->id = 0;
	c->maps = gx_map_stamp();
	if (n > COUNT(c->inline_wait) && !(c->wait = malloc(n * sizeof *c->wait)))
		return CL_OUT_OF_HOST_MEMORY;
	for (cl_uint i = 0; i < n; i++)
		c->wait[i] = list[i]->o.id;
	c->nwait = n;
	while (c->nwait > WAIT_MAX) {
		uint32_t id = c->nhidden < COUNT(c->hidden) ? gx_id_take() : 0;
		cl_int err = id ? CL_SUCCESS : CL_OUT_OF_RESOURCES;
		uint32_t part = c->nwait - WAIT_MAX + 1 < WAIT_MAX ? c->nwait - WAIT_MAX + 1 : WAIT_MAX;
		if (!err)
			err = post_marker(&(struct gx_marker){.queue = q->o.id, .event = id, .wait = c->wait + c->nwait - part, .n_wait = part});
		if (err)
			return gx_cmd_end(c, err, NULL, false);
		c->hidden[c->nhidden++] = id;
		c->nwait -= part;
		c->wait[c->nwait++] = id;
	}
	return CL_SUCCESS;
}

cl_int gx_cmd_event(struct cmd *c, cl_command_type type, bool wanted)
{
	if (!wanted)
		return CL_SUCCESS;
	c->ev = gx_event_new(c->q->ctx, c->q, type);
	if (!c->ev)
		return CL_OUT_OF_HOST_MEMORY;
	c->id = c->ev->o.id;
	return CL_SUCCESS;
}

/* gx_cmd_end returns the event to the application, or drops it if there was an error. It returns the error. */
cl_int gx_cmd_end(struct cmd *c, cl_int err, cl_event *out, bool complete)
{
	for (uint32_t i = 0; i < c->nhidden; i++) {
		post_release(&(struct gx_release){.id = c->hidden[i]});
		gx_id_drop(c->hidden[i]);
	}
	if (c->wait != c->inline_wait)
		free(c->wait);
	if (complete && !err && !(c->q->props & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE))
		gx_maps_ran(c->q, c->maps);
	if (!c->ev)
		return err;
	if (err) {
		/* The executor may have created the event, so its id is not used again. */
		gx_recycle(&c->ev->o, T_EVENT);
		gx_unlink(c->q->ctx);
		gx_unlink(c->q);
		return err;
	}
	if (complete)
		atomic_store(&c->ev->status, CL_COMPLETE);
	if (out)
		*out = c->ev;
	return CL_SUCCESS;
}

bool gx_overlap(uint64_t a, uint64_t b, uint64_t size) { return a < b + size && b < a + size; }

/* gx_rect_check checks a rectangle in a memory of size bytes, and sets pitches that are 0. */
cl_int gx_rect_check(const size_t *origin, const size_t *region, uint64_t *row, uint64_t *slice, uint64_t size)
{
	if (!region[0] || !region[1] || !region[2])
		return CL_INVALID_VALUE;
	if (*row && *row < region[0])
		return CL_INVALID_VALUE;
	if (!*row)
		*row = region[0];
	unsigned __int128 least = (unsigned __int128)region[1] * *row;
	if (*slice && (*slice < least || *slice % *row))
		return CL_INVALID_VALUE;
	if (!*slice) {
		if (least > UINT64_MAX)
			return CL_INVALID_VALUE;
		*slice = (uint64_t)least;
	}
	if (origin[0] > size || origin[1] > size || origin[2] > size || region[0] > size || region[1] > size || region[2] > size)
		return size == UINT64_MAX ? CL_SUCCESS : CL_INVALID_VALUE;
	unsigned __int128 end = (unsigned __int128)(origin[2] + region[2] - 1) * *slice + (unsigned __int128)(origin[1] + region[1] - 1) * *row + origin[0] + region[0];
	return end > size ? CL_INVALID_VALUE : CL_SUCCESS;
}

/* ---- copies */

CL_API_ENTRY cl_int CL_API_CALL clEnqueueCopyBuffer(cl_command_queue q, cl_mem src, cl_mem dst, size_t so, size_t d_o, size_t size, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(gx_mem_for_queue(src, q, false));
	TRY(gx_mem_for_queue(dst, q, false));
	if (!size || so > src->size || size > src->size - so || d_o > dst->size || size > dst->size - d_o)
		return CL_INVALID_VALUE;
	if (gx_root(src) == gx_root(dst) && gx_overlap(src->origin + so, dst->origin + d_o, size))
		return CL_MEM_COPY_OVERLAP;
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_COPY_BUFFER, event);
	if (!err)
		err = post_copy_buffer(&(struct gx_copy_buffer){.queue = q->o.id, .src = src->o.id, .dst = dst->o.id, .src_off = so, .dst_off = d_o, .size = size,
			.event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

/* rect_overlap is the test that the specification defines. base is where a sub-buffer begins. */
static bool rect_overlap(const size_t *so, uint64_t sbase, const size_t *d_o, uint64_t dbase, const size_t *r, uint64_t row, uint64_t slice)
{
	uint64_t slice_size = (r[1] - 1) * row + r[0], block = (r[2] - 1) * slice + slice_size;
	uint64_t s = sbase + so[2] * slice + so[1] * row + so[0], d = dbase + d_o[2] * slice + d_o[1] * row + d_o[0];
	if (d + block <= s || s + block <= d)
		return false;
	uint64_t sx = (sbase + so[0]) % row, dx = (dbase + d_o[0]) % row;
	if ((dx >= sx + r[0] && dx + r[0] <= sx + row) || (sx >= dx + r[0] && sx + r[0] <= dx + row))
		return false;
	uint64_t sy = (sbase + so[1] * row + so[0]) % slice, dy = (dbase + d_o[1] * row + d_o[0]) % slice;
	return !((dy >= sy + slice_size && dy + slice_size <= sy + slice) || (sy >= dy + slice_size && sy + slice_size <= dy + slice));
}

static void three(uint64_t out[3], const size_t *in) { out[0] = in[0], out[1] = in[1], out[2] = in[2]; }

CL_API_ENTRY cl_int CL_API_CALL clEnqueueCopyBufferRect(cl_command_queue q, cl_mem src, cl_mem dst, const size_t *so, const size_t *d_o, const size_t *r,
	size_t srow, size_t sslice, size_t drow, size_t dslice, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(gx_mem_for_queue(src, q, false));
	TRY(gx_mem_for_queue(dst, q, false));
	if (!so || !d_o || !r)
		return CL_INVALID_VALUE;
	uint64_t sr = srow, ss = sslice, dr = drow, ds = dslice, so3[3], do3[3], r3[3];
	TRY(gx_rect_check(so, r, &sr, &ss, src->size));
	TRY(gx_rect_check(d_o, r, &dr, &ds, dst->size));
	if (src == dst && (sr != dr || ss != ds))
		return CL_INVALID_VALUE;
	if (gx_root(src) == gx_root(dst)) {
		bool same = sr == dr && ss == ds;
		uint64_t s0 = src->origin + so[2] * ss + so[1] * sr + so[0], d0 = dst->origin + d_o[2] * ds + d_o[1] * dr + d_o[0];
		uint64_t sn = (r[2] - 1) * ss + (r[1] - 1) * sr + r[0], dn = (r[2] - 1) * ds + (r[1] - 1) * dr + r[0];
		if (same ? rect_overlap(so, src->origin, d_o, dst->origin, r, sr, ss) : s0 < d0 + dn && d0 < s0 + sn)
			return CL_MEM_COPY_OVERLAP;
	}
	three(so3, so), three(do3, d_o), three(r3, r);
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_COPY_BUFFER_RECT, event);
	if (!err)
		err = post_copy_buffer_rect(&(struct gx_copy_buffer_rect){.queue = q->o.id, .src = src->o.id, .dst = dst->o.id, .src_origin = so3, .n_src_origin = 3,
			.dst_origin = do3, .n_dst_origin = 3, .region = r3, .n_region = 3, .src_row_pitch = sr, .src_slice_pitch = ss, .dst_row_pitch = dr, .dst_slice_pitch = ds,
			.event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueCopyImage(cl_command_queue q, cl_mem src, cl_mem dst, const size_t *so, const size_t *d_o, const size_t *r, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	uint64_t so3[3], do3[3], r3[3];
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(gx_mem_for_queue(src, q, true));
	TRY(gx_mem_for_queue(dst, q, true));
	if (src->format.image_channel_order != dst->format.image_channel_order || src->format.image_channel_data_type != dst->format.image_channel_data_type)
		return CL_IMAGE_FORMAT_MISMATCH;
	TRY(gx_img_region(src, so, r));
	TRY(gx_img_region(dst, d_o, r));
	if (src == dst && gx_overlap(so[0], d_o[0], r[0]) && gx_overlap(so[1], d_o[1], r[1]) && gx_overlap(so[2], d_o[2], r[2]))
		return CL_MEM_COPY_OVERLAP;
	three(so3, so), three(do3, d_o), three(r3, r);
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_COPY_IMAGE, event);
	if (!err)
		err = post_copy_image(&(struct gx_copy_image){.queue = q->o.id, .src = src->o.id, .dst = dst->o.id, .src_origin = so3, .n_src_origin = 3,
			.dst_origin = do3, .n_dst_origin = 3, .region = r3, .n_region = 3, .event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

static cl_int check_image_buffer(cl_command_queue q, cl_mem img, cl_mem buf, const size_t *o, const size_t *r, size_t off)
{
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(gx_mem_for_queue(img, q, true));
	TRY(gx_mem_for_queue(buf, q, false));
	TRY(gx_img_region(img, o, r));
	uint64_t bytes = (uint64_t)r[0] * r[1] * r[2] * img->elem;
	return off > buf->size || bytes > buf->size - off ? CL_INVALID_VALUE : CL_SUCCESS;
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueCopyImageToBuffer(cl_command_queue q, cl_mem src, cl_mem dst, const size_t *o, const size_t *r, size_t off, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	uint64_t o3[3], r3[3];
	TRY(check_image_buffer(q, src, dst, o, r, off));
	three(o3, o), three(r3, r);
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_COPY_IMAGE_TO_BUFFER, event);
	if (!err)
		err = post_copy_image_to_buffer(&(struct gx_copy_image_to_buffer){.queue = q->o.id, .src = src->o.id, .dst = dst->o.id, .dst_off = off,
			.origin = o3, .n_origin = 3, .region = r3, .n_region = 3, .event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueCopyBufferToImage(cl_command_queue q, cl_mem src, cl_mem dst, size_t off, const size_t *o, const size_t *r, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	uint64_t o3[3], r3[3];
	TRY(check_image_buffer(q, dst, src, o, r, off));
	three(o3, o), three(r3, r);
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_COPY_BUFFER_TO_IMAGE, event);
	if (!err)
		err = post_copy_buffer_to_image(&(struct gx_copy_buffer_to_image){.queue = q->o.id, .src = src->o.id, .dst = dst->o.id, .src_off = off,
			.origin = o3, .n_origin = 3, .region = r3, .n_region = 3, .event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

/* ---- fills, markers, migration */

CL_API_ENTRY cl_int CL_API_CALL clEnqueueFillBuffer(cl_command_queue q, cl_mem m, const void *pattern, size_t plen, size_t off, size_t size, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(gx_mem_for_queue(m, q, false));
	if (!pattern || !plen || plen > 128 || (plen & (plen - 1)) || !size || off > m->size || size > m->size - off || off % plen || size % plen)
		return CL_INVALID_VALUE;
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_FILL_BUFFER, event);
	if (!err)
		err = post_fill_buffer(&(struct gx_fill_buffer){.queue = q->o.id, .mem = m->o.id, .offset = off, .size = size, .pattern = pattern, .n_pattern = (uint32_t)plen,
			.event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueFillImage(cl_command_queue q, cl_mem m, const void *color, const size_t *o, const size_t *r, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	uint64_t o3[3], r3[3];
	uint8_t rgba[16] = {0};
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	TRY(gx_mem_for_queue(m, q, true));
	if (!color)
		return CL_INVALID_VALUE;
	TRY(gx_img_region(m, o, r));
	memcpy(rgba, color, m->format.image_channel_order == CL_DEPTH ? 4 : 16); /* a depth is one float */
	three(o3, o), three(r3, r);
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_FILL_IMAGE, event);
	if (!err)
		err = post_fill_image(&(struct gx_fill_image){.queue = q->o.id, .image = m->o.id, .color = rgba, .n_color = 16, .origin = o3, .n_origin = 3, .region = r3, .n_region = 3,
			.event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueMigrateMemObjects(cl_command_queue q, cl_uint nm, const cl_mem *mems, cl_mem_migration_flags flags, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	uint32_t ids[1024];
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	if (!nm || !mems || (flags & ~(cl_mem_migration_flags)(CL_MIGRATE_MEM_OBJECT_HOST | CL_MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED)))
		return CL_INVALID_VALUE;
	if (nm > COUNT(ids))
		return CL_OUT_OF_RESOURCES;
	for (cl_uint i = 0; i < nm; i++) {
		if (!gx_ok(mems[i], T_MEM))
			return CL_INVALID_MEM_OBJECT;
		if (mems[i]->ctx != q->ctx)
			return CL_INVALID_CONTEXT;
		ids[i] = mems[i]->o.id;
	}
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_MIGRATE_MEM_OBJECTS, event);
	if (!err)
		err = post_migrate(&(struct gx_migrate){.queue = q->o.id, .flags = flags, .mems = ids, .n_mems = nm, .event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueMarkerWithWaitList(cl_command_queue q, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_MARKER, event);
	if (!err)
		err = post_marker(&(struct gx_marker){.queue = q->o.id, .event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueBarrierWithWaitList(cl_command_queue q, cl_uint n, const cl_event *list, cl_event *event)
{
	struct cmd c;
	TRY(gx_cmd_check(&c, q, n, list));
	cl_int err = gx_cmd_event(&c, CL_COMMAND_BARRIER, event);
	if (!err)
		err = post_barrier(&(struct gx_barrier){.queue = q->o.id, .event = c.id, .wait = c.wait, .n_wait = c.nwait});
	return gx_cmd_end(&c, err, event, false);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueMarker(cl_command_queue q, cl_event *event)
{
	if (gx_ok(q, T_QUEUE) && !event)
		return CL_INVALID_VALUE;
	return clEnqueueMarkerWithWaitList(q, 0, NULL, event);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueBarrier(cl_command_queue q) { return clEnqueueBarrierWithWaitList(q, 0, NULL, NULL); }

CL_API_ENTRY cl_int CL_API_CALL clEnqueueWaitForEvents(cl_command_queue q, cl_uint n, const cl_event *list)
{
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	if (!n || !list)
		return CL_INVALID_VALUE;
	cl_int err = clEnqueueBarrierWithWaitList(q, n, list, NULL);
	return err == CL_INVALID_EVENT_WAIT_LIST ? CL_INVALID_EVENT : err;
}
