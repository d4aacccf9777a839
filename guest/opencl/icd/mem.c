/* Buffers, sub-buffers, and the parts that buffers and images share. */
#include "gx.h"

#define ACCESS (CL_MEM_READ_WRITE | CL_MEM_WRITE_ONLY | CL_MEM_READ_ONLY)
#define HOSTPTR (CL_MEM_USE_HOST_PTR | CL_MEM_ALLOC_HOST_PTR | CL_MEM_COPY_HOST_PTR)
#define HOSTACC (CL_MEM_HOST_WRITE_ONLY | CL_MEM_HOST_READ_ONLY | CL_MEM_HOST_NO_ACCESS)

static bool one_bit(cl_mem_flags f) { return (f & (f - 1)) == 0; }

cl_int gx_mem_flags(cl_mem_flags f)
{
	if (f & ~(cl_mem_flags)(ACCESS | HOSTPTR | HOSTACC))
		return CL_INVALID_VALUE;
	if (!one_bit(f & ACCESS) || !one_bit(f & HOSTACC))
		return CL_INVALID_VALUE;
	if ((f & CL_MEM_USE_HOST_PTR) && (f & (CL_MEM_ALLOC_HOST_PTR | CL_MEM_COPY_HOST_PTR)))
		return CL_INVALID_VALUE;
	return CL_SUCCESS;
}

/* gx_mem_inherit completes the flags of an object that is made from parent. They may allow less than the parent's
 * flags. */
cl_int gx_mem_inherit(cl_mem parent, cl_mem_flags *flags, bool host_flags)
{
	cl_mem_flags f = *flags, p = parent->flags;
	TRY(gx_mem_flags(f));
	if (!host_flags && (f & HOSTPTR))
		return CL_INVALID_VALUE;
	if ((p & CL_MEM_WRITE_ONLY) && (f & (CL_MEM_READ_WRITE | CL_MEM_READ_ONLY)))
		return CL_INVALID_VALUE;
	if ((p & CL_MEM_READ_ONLY) && (f & (CL_MEM_READ_WRITE | CL_MEM_WRITE_ONLY)))
		return CL_INVALID_VALUE;
	if ((p & CL_MEM_HOST_WRITE_ONLY) && (f & CL_MEM_HOST_READ_ONLY))
		return CL_INVALID_VALUE;
	if ((p & CL_MEM_HOST_READ_ONLY) && (f & CL_MEM_HOST_WRITE_ONLY))
		return CL_INVALID_VALUE;
	if ((p & CL_MEM_HOST_NO_ACCESS) && (f & (CL_MEM_HOST_READ_ONLY | CL_MEM_HOST_WRITE_ONLY)))
		return CL_INVALID_VALUE;
	if (!(f & ACCESS))
		f |= p & ACCESS;
	if (!(f & HOSTACC))
		f |= p & HOSTACC;
	*flags = f | (p & HOSTPTR);
	return CL_SUCCESS;
}

static cl_mem make_buffer(cl_context c, const cl_mem_properties *props, cl_mem_flags flags, size_t size, void *host, cl_int *errcode_ret)
{
	size_t nprops = 0;
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	if (props) {
		if (props[0])
			FAIL(CL_INVALID_PROPERTY);
		nprops = 1;
	}
	cl_int err = gx_mem_flags(flags);
	if (err)
		FAIL(err);
	bool fits = false;
	for (cl_uint i = 0; i < c->ndev; i++)
		fits |= size <= c->devs[i]->max_alloc;
	if (!size || !fits)
		FAIL(CL_INVALID_BUFFER_SIZE);
	if (!host != !(flags & (CL_MEM_USE_HOST_PTR | CL_MEM_COPY_HOST_PTR)))
		FAIL(CL_INVALID_HOST_PTR);
	cl_mem m = gx_new(T_MEM, sizeof *m);
	if (!m)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	m->ctx = c;
	m->type = CL_MEM_OBJECT_BUFFER;
	m->flags = flags & ACCESS ? flags : flags | CL_MEM_READ_WRITE;
	m->size = size;
	m->host = flags & CL_MEM_USE_HOST_PTR ? host : NULL;
	m->nprops = nprops;
	struct gx_create_buffer r = {.id = m->o.id, .context = c->o.id, .flags = flags, .size = size};
	uint64_t stage = 0;
	if (host && size <= GX_MAX_INLINE) {
		r.mode = GX_DATA_INLINE;
		r.content = host;
		r.n_content = (uint32_t)size;
	} else if (host && gx_in_arena(host, size, &r.stage_off)) {
		r.mode = GX_DATA_STAGED;
		r.stage_len = size;
	} else if (host && !gx_content_apart(size)) {
		err = gx_stage_wait(size, &stage);
		if (!err) {
			memcpy(S.arena + stage, host, size);
			r.mode = GX_DATA_STAGED;
			r.stage_off = stage;
			r.stage_len = size;
		}
	}
	if (!err)
		err = call_create_buffer(&r, NULL);
	if (stage)
		gx_stage_free(stage, size);
	if (!err && host && !r.mode && (err = gx_content(m, host, 0, 0)))
		post_release(&(struct gx_release){.id = m->o.id});
	if (err) {
		gx_abandon(m);
		FAIL(err);
	}
	gx_link(c);
	DONE(m);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateBuffer(cl_context c, cl_mem_flags flags, size_t size, void *host, cl_int *errcode_ret)
{
	return make_buffer(c, NULL, flags, size, host, errcode_ret);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateBufferWithProperties(cl_context c, const cl_mem_properties *props, cl_mem_flags flags, size_t size, void *host, cl_int *errcode_ret)
{
	return make_buffer(c, props, flags, size, host, errcode_ret);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateSubBuffer(cl_mem b, cl_mem_flags flags, cl_buffer_create_type type, const void *info, cl_int *errcode_ret)
{
	if (!gx_ok(b, T_MEM) || b->type != CL_MEM_OBJECT_BUFFER || b->parent)
		FAIL(CL_INVALID_MEM_OBJECT);
	cl_mem_flags full = flags;
	cl_int err = gx_mem_inherit(b, &full, false);
	if (err)
		FAIL(err);
	if (type != CL_BUFFER_CREATE_TYPE_REGION || !info)
		FAIL(CL_INVALID_VALUE);
	const cl_buffer_region *r = info;
	if (!r->size)
		FAIL(CL_INVALID_BUFFER_SIZE);
	if (r->origin > b->size || r->size > b->size - r->origin)
		FAIL(CL_INVALID_VALUE);
	bool aligned = false;
	for (cl_uint i = 0; i < b->ctx->ndev; i++)
		aligned |= r->origin % b->ctx->devs[i]->base_align == 0;
	if (!aligned)
		FAIL(CL_MISALIGNED_SUB_BUFFER_OFFSET);
	cl_mem m = gx_new(T_MEM, sizeof *m);
	if (!m)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	m->ctx = b->ctx;
	m->parent = b;
	m->type = CL_MEM_OBJECT_BUFFER;
	m->flags = full;
	m->origin = r->origin;
	m->size = r->size;
	m->host = b->host ? b->host + r->origin : NULL;
	err = call_create_sub_buffer(&(struct gx_create_sub_buffer){.id = m->o.id, .parent = b->o.id, .flags = flags, .origin = r->origin, .size = r->size}, NULL);
	if (err) {
		gx_abandon(m);
		FAIL(err);
	}
	gx_link(b);
	DONE(m);
}

CL_API_ENTRY cl_int CL_API_CALL clRetainMemObject(cl_mem m) { return gx_ok(m, T_MEM) && gx_retain(m) ? CL_SUCCESS : CL_INVALID_MEM_OBJECT; }

CL_API_ENTRY cl_int CL_API_CALL clReleaseMemObject(cl_mem m)
{
	return gx_ok(m, T_MEM) && gx_release_ref(m) ? CL_SUCCESS : CL_INVALID_MEM_OBJECT;
}

void gx_mem_destroy(struct obj *o)
{
	cl_mem m = (cl_mem)o;
	uint32_t token = 0;
	if (gx_pend_outlast(m))
		return;
	gx_map_known(m, 0);
	for (struct map *p = m->maps, *next; p; p = next) {
		next = p->next;
		free(p);
	}
	m->maps = NULL;
	o->magic = 0;
	if (m->destructors)
		token = gx_cb_add(CBK_MEM, m, NULL, m->destructors, 0);
	if (post_release(&(struct gx_release){.id = o->id, .callback = token}) && token)
		gx_cb_local(token, 0);
	gx_id_drop(o->id);
	cl_context c = m->ctx;
	cl_mem parent = m->parent;
	free(m->props);
	m->props = NULL;
	if (!token)
		gx_recycle(o, T_MEM);
	if (parent)
		gx_unlink(parent);
	else
		gx_unlink(c);
}

CL_API_ENTRY cl_int CL_API_CALL clSetMemObjectDestructorCallback(cl_mem m, void(CL_CALLBACK *fn)(cl_mem, void *), void *user)
{
	if (!gx_ok(m, T_MEM))
		return CL_INVALID_MEM_OBJECT;
	if (!fn)
		return CL_INVALID_VALUE;
	gx_lock_take(&S.misc);
	bool ok = gx_notify_push(&m->destructors, (void *)fn, user);
	gx_lock_drop(&S.misc);
	return ok ? CL_SUCCESS : CL_OUT_OF_HOST_MEMORY;
}

CL_API_ENTRY cl_int CL_API_CALL clGetMemObjectInfo(cl_mem m, cl_mem_info name, INFO_ARGS)
{
	static const cl_mem_properties none[1];
	if (!gx_ok(m, T_MEM))
		return CL_INVALID_MEM_OBJECT;
	switch (name) {
	case CL_MEM_TYPE: INFO(cl_mem_object_type, m->type);
	case CL_MEM_FLAGS: INFO(cl_mem_flags, m->flags);
	case CL_MEM_SIZE: INFO(size_t, m->size);
	case CL_MEM_HOST_PTR: INFO(void *, m->host);
	case CL_MEM_MAP_COUNT: INFO(cl_uint, m->nmaps);
	case CL_MEM_REFERENCE_COUNT: INFO(cl_uint, atomic_load(&m->o.refs));
	case CL_MEM_CONTEXT: INFO(cl_context, m->ctx);
	case CL_MEM_ASSOCIATED_MEMOBJECT: INFO(cl_mem, m->parent);
	case CL_MEM_OFFSET: INFO(size_t, m->origin);
	case CL_MEM_USES_SVM_POINTER: INFO(cl_bool, CL_FALSE);
	case CL_MEM_PROPERTIES: return gx_info(none, m->nprops * sizeof *none, size, value, size_ret);
	}
	return CL_INVALID_VALUE;
}

/* gx_mem_for_queue checks an object that a command of q will use. */
cl_int gx_mem_for_queue(cl_mem m, cl_command_queue q, bool image)
{
	if (!gx_ok(m, T_MEM) || (m->type != CL_MEM_OBJECT_BUFFER) != image)
		return CL_INVALID_MEM_OBJECT;
	if (m->ctx != q->ctx)
		return CL_INVALID_CONTEXT;
	if (image && !q->dev->images)
		return CL_INVALID_OPERATION;
	if (!image && m->origin % q->dev->base_align)
		return CL_MISALIGNED_SUB_BUFFER_OFFSET;
	return CL_SUCCESS;
}
