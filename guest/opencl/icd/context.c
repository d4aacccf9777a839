/* Contexts, command queues, samplers. */
#include "gx.h"

bool gx_ctx_has(cl_context c, cl_device_id d)
{
	for (cl_uint i = 0; i < c->ndev; i++)
		if (c->devs[i] == d)
			return true;
	return false;
}

static void *copy_list(const void *list, size_t bytes)
{
	void *p = malloc(bytes ? bytes : 1);
	if (p && bytes)
		memcpy(p, list, bytes);
	return p;
}

static cl_int check_ctx_props(const cl_context_properties *props, size_t *n)
{
	bool platform = false, sync = false;
	*n = 0;
	if (!props)
		return CL_SUCCESS;
	for (; props[*n]; *n += 2)
		switch (props[*n]) {
		case CL_CONTEXT_PLATFORM:
			if (platform)
				return CL_INVALID_PROPERTY;
			platform = true;
			if (props[*n + 1] != (cl_context_properties)&gx_platform)
				return CL_INVALID_PLATFORM;
			break;
		case CL_CONTEXT_INTEROP_USER_SYNC:
			if (sync || (props[*n + 1] != CL_TRUE && props[*n + 1] != CL_FALSE))
				return CL_INVALID_PROPERTY;
			sync = true;
			break;
		default:
			return CL_INVALID_PROPERTY;
		}
	++*n;
	return CL_SUCCESS;
}

CL_API_ENTRY cl_context CL_API_CALL clCreateContext(const cl_context_properties *props, cl_uint n, const cl_device_id *devs,
	void(CL_CALLBACK *fn)(const char *, const void *, size_t, void *), void *user, cl_int *errcode_ret)
{
	size_t nprops;
	gx_enter();
	cl_int err = check_ctx_props(props, &nprops);
	if (err)
		FAIL(err);
	if (!devs || !n || (!fn && user))
		FAIL(CL_INVALID_VALUE);
	if ((err = gx_connect()))
		FAIL(err);
	for (cl_uint i = 0; i < n; i++) {
		if (!gx_device_ok(devs[i]))
			FAIL(CL_INVALID_DEVICE);
		const void *avail;
		size_t len;
		if (!gx_device_param(devs[i], CL_DEVICE_AVAILABLE, &avail, &len) && len == sizeof(cl_bool) && !*(const cl_bool *)avail)
			FAIL(CL_DEVICE_NOT_AVAILABLE);
	}
	cl_context c = gx_new(T_CONTEXT, sizeof *c);
	if (!c)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	c->devs = malloc(n * sizeof *c->devs);
	c->props = copy_list(props, nprops * sizeof *props);
	uint32_t *ids = malloc(n * sizeof *ids);
	err = !c->devs || !c->props || !ids ? CL_OUT_OF_HOST_MEMORY : CL_SUCCESS;
	if (!err) {
		c->nprops = nprops;
		for (cl_uint i = 0; i < n; i++)
			if (!gx_ctx_has(c, devs[i])) {
				ids[c->ndev] = devs[i]->o.id;
				c->devs[c->ndev++] = devs[i];
				c->images |= devs[i]->images;
			}
		err = call_create_context(&(struct gx_create_context){.id = c->o.id, .devices = ids, .n_devices = c->ndev}, NULL);
	}
	free(ids);
	if (err) {
		free(c->devs);
		free(c->props);
		gx_abandon(c);
		FAIL(err);
	}
	for (cl_uint i = 0; i < c->ndev; i++)
		gx_link(c->devs[i]);
	DONE(c);
}

CL_API_ENTRY cl_context CL_API_CALL clCreateContextFromType(const cl_context_properties *props, cl_device_type type,
	void(CL_CALLBACK *fn)(const char *, const void *, size_t, void *), void *user, cl_int *errcode_ret)
{
	cl_device_id devs[GX_FIRST_ID];
	cl_uint n = 0;
	size_t nprops;
	cl_int err = check_ctx_props(props, &nprops);
	if (!err && !fn && user)
		err = CL_INVALID_VALUE;
	if (!err)
		err = clGetDeviceIDs(&gx_platform, type, COUNT(devs), devs, &n);
	if (err)
		FAIL(err);
	return clCreateContext(props, n, devs, fn, user, errcode_ret);
}

CL_API_ENTRY cl_int CL_API_CALL clRetainContext(cl_context c)
{
	return gx_ok(c, T_CONTEXT) && gx_retain(c) ? CL_SUCCESS : CL_INVALID_CONTEXT;
}

CL_API_ENTRY cl_int CL_API_CALL clReleaseContext(cl_context c)
{
	return gx_ok(c, T_CONTEXT) && gx_release_ref(c) ? CL_SUCCESS : CL_INVALID_CONTEXT;
}

void gx_context_destroy(struct obj *o)
{
	cl_context c = (cl_context)o;
	for (struct notify *n = c->destructors, *next; n; n = next) {
		next = n->next;
		((void(CL_CALLBACK *)(cl_context, void *))n->fn)(c, n->user);
		free(n);
	}
	post_release(&(struct gx_release){.id = o->id});
	gx_id_drop(o->id);
	for (cl_uint i = 0; i < c->ndev; i++)
		gx_unlink(c->devs[i]);
	free(c->devs);
	free(c->props);
	gx_recycle(o, T_CONTEXT);
}

CL_API_ENTRY cl_int CL_API_CALL clGetContextInfo(cl_context c, cl_context_info name, INFO_ARGS)
{
	if (!gx_ok(c, T_CONTEXT))
		return CL_INVALID_CONTEXT;
	switch (name) {
	case CL_CONTEXT_REFERENCE_COUNT: INFO(cl_uint, atomic_load(&c->o.refs));
	case CL_CONTEXT_NUM_DEVICES: INFO(cl_uint, c->ndev);
	case CL_CONTEXT_DEVICES: return gx_info(c->devs, c->ndev * sizeof *c->devs, size, value, size_ret);
	case CL_CONTEXT_PROPERTIES: return gx_info(c->props, c->nprops * sizeof *c->props, size, value, size_ret);
	}
	return CL_INVALID_VALUE;
}

CL_API_ENTRY cl_int CL_API_CALL clSetContextDestructorCallback(cl_context c, void(CL_CALLBACK *fn)(cl_context, void *), void *user)
{
	if (!gx_ok(c, T_CONTEXT))
		return CL_INVALID_CONTEXT;
	if (!fn)
		return CL_INVALID_VALUE;
	gx_lock_take(&S.misc);
	bool ok = gx_notify_push(&c->destructors, (void *)fn, user);
	gx_lock_drop(&S.misc);
	return ok ? CL_SUCCESS : CL_OUT_OF_HOST_MEMORY;
}

/* ---- queues */

#define HOST_PROPS (CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE | CL_QUEUE_PROFILING_ENABLE)
#define DEVICE_PROPS (CL_QUEUE_ON_DEVICE | CL_QUEUE_ON_DEVICE_DEFAULT)

static cl_command_queue make_queue(cl_context c, cl_device_id d, cl_command_queue_properties props, const cl_queue_properties *array, size_t narray, cl_int *errcode_ret)
{
	static _Atomic uint64_t serial;
	if (props & ~(cl_command_queue_properties)(HOST_PROPS | DEVICE_PROPS))
		FAIL(CL_INVALID_VALUE);
	if ((props & DEVICE_PROPS) || (props & ~d->queue_props))
		FAIL(CL_INVALID_QUEUE_PROPERTIES);
	cl_command_queue q = gx_new(T_QUEUE, sizeof *q);
	if (!q)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	q->array = copy_list(array, narray * sizeof *array);
	q->narray = narray;
	q->ctx = c;
	q->dev = d;
	q->props = props;
	q->serial = atomic_fetch_add(&serial, 1);
	cl_int err = q->array ? call_create_queue(&(struct gx_create_queue){.id = q->o.id, .context = c->o.id, .device = d->o.id, .props = props}, NULL) : CL_OUT_OF_HOST_MEMORY;
	if (err) {
		free(q->array);
		gx_abandon(q);
		FAIL(err);
	}
	gx_link(c);
	gx_link(d);
	DONE(q);
}

CL_API_ENTRY cl_command_queue CL_API_CALL clCreateCommandQueue(cl_context c, cl_device_id d, cl_command_queue_properties props, cl_int *errcode_ret)
{
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	if (!gx_device_ok(d) || !gx_ctx_has(c, d))
		FAIL(CL_INVALID_DEVICE);
	if (props & ~(cl_command_queue_properties)HOST_PROPS)
		FAIL(CL_INVALID_VALUE);
	return make_queue(c, d, props, NULL, 0, errcode_ret);
}

CL_API_ENTRY cl_command_queue CL_API_CALL clCreateCommandQueueWithProperties(cl_context c, cl_device_id d, const cl_queue_properties *array, cl_int *errcode_ret)
{
	cl_command_queue_properties props = 0;
	size_t n = 0;
	bool sized = false, given = false;
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	if (!gx_device_ok(d) || !gx_ctx_has(c, d))
		FAIL(CL_INVALID_DEVICE);
	if (array) {
		for (; array[n]; n += 2)
			if (array[n] == CL_QUEUE_PROPERTIES && !given)
				props = array[n + 1], given = true;
			else if (array[n] == CL_QUEUE_SIZE && !sized)
				sized = true;
			else
				FAIL(CL_INVALID_VALUE);
		n++;
	}
	if (sized && !(props & CL_QUEUE_ON_DEVICE))
		FAIL(CL_INVALID_VALUE);
	return make_queue(c, d, props, array, n, errcode_ret);
}

CL_API_ENTRY cl_int CL_API_CALL clRetainCommandQueue(cl_command_queue q)
{
	return gx_ok(q, T_QUEUE) && gx_retain(q) ? CL_SUCCESS : CL_INVALID_COMMAND_QUEUE;
}

CL_API_ENTRY cl_int CL_API_CALL clReleaseCommandQueue(cl_command_queue q)
{
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	post_flush(&(struct gx_flush){.queue = q->o.id});
	return gx_release_ref(q) ? CL_SUCCESS : CL_INVALID_COMMAND_QUEUE;
}

void gx_queue_destroy(struct obj *o)
{
	cl_command_queue q = (cl_command_queue)o;
	gx_maps_orphan(q);
	post_release(&(struct gx_release){.id = o->id});
	gx_id_drop(o->id);
	cl_context c = q->ctx;
	cl_device_id d = q->dev;
	free(q->array);
	gx_recycle(o, T_QUEUE);
	gx_unlink(d);
	gx_unlink(c);
}

CL_API_ENTRY cl_int CL_API_CALL clGetCommandQueueInfo(cl_command_queue q, cl_command_queue_info name, INFO_ARGS)
{
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	switch (name) {
	case CL_QUEUE_CONTEXT: INFO(cl_context, q->ctx);
	case CL_QUEUE_DEVICE: INFO(cl_device_id, q->dev);
	case CL_QUEUE_REFERENCE_COUNT: INFO(cl_uint, atomic_load(&q->o.refs));
	case CL_QUEUE_PROPERTIES: INFO(cl_command_queue_properties, q->props);
	case CL_QUEUE_PROPERTIES_ARRAY: return gx_info(q->array, q->narray * sizeof *q->array, size, value, size_ret);
	case CL_QUEUE_SIZE: return CL_INVALID_COMMAND_QUEUE;
	case CL_QUEUE_DEVICE_DEFAULT: INFO(cl_command_queue, NULL);
	}
	return CL_INVALID_VALUE;
}

CL_API_ENTRY cl_int CL_API_CALL clSetCommandQueueProperty(cl_command_queue q, cl_command_queue_properties props, cl_bool enable, cl_command_queue_properties *old)
{
	(void)props, (void)enable, (void)old;
	return gx_ok(q, T_QUEUE) ? CL_INVALID_OPERATION : CL_INVALID_COMMAND_QUEUE;
}

CL_API_ENTRY cl_int CL_API_CALL clSetDefaultDeviceCommandQueue(cl_context c, cl_device_id d, cl_command_queue q)
{
	if (!gx_ok(c, T_CONTEXT))
		return CL_INVALID_CONTEXT;
	if (!gx_device_ok(d) || !gx_ctx_has(c, d))
		return CL_INVALID_DEVICE;
	(void)q;
	return CL_INVALID_OPERATION;
}

CL_API_ENTRY cl_int CL_API_CALL clFlush(cl_command_queue q)
{
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	return post_flush(&(struct gx_flush){.queue = q->o.id});
}

CL_API_ENTRY cl_int CL_API_CALL clFinish(cl_command_queue q)
{
	if (!gx_ok(q, T_QUEUE))
		return CL_INVALID_COMMAND_QUEUE;
	uint64_t maps = gx_map_stamp();
	cl_int err = call_finish(&(struct gx_finish){.queue = q->o.id}, NULL);
	if (!err)
		gx_maps_ran(q, maps);
	gx_reap();
	return err;
}

/* ---- samplers */

static cl_sampler make_sampler(cl_context c, cl_bool norm, cl_addressing_mode addr, cl_filter_mode filter, const cl_sampler_properties *props, size_t nprops, cl_int *errcode_ret)
{
	if (!c->images)
		FAIL(CL_INVALID_OPERATION);
	if ((norm != CL_TRUE && norm != CL_FALSE) || addr < CL_ADDRESS_NONE || addr > CL_ADDRESS_MIRRORED_REPEAT ||
	    (filter != CL_FILTER_NEAREST && filter != CL_FILTER_LINEAR))
		FAIL(CL_INVALID_VALUE);
	cl_sampler s = gx_new(T_SAMPLER, sizeof *s);
	if (!s)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	s->ctx = c;
	s->normalized = norm;
	s->addressing = addr;
	s->filter = filter;
	s->props = copy_list(props, nprops * sizeof *props);
	s->nprops = nprops;
	cl_int err = s->props ? call_create_sampler(&(struct gx_create_sampler){.id = s->o.id, .context = c->o.id, .normalized = norm, .addressing = addr, .filter = filter}, NULL) : CL_OUT_OF_HOST_MEMORY;
	if (err) {
		free(s->props);
		gx_abandon(s);
		FAIL(err);
	}
	gx_link(c);
	DONE(s);
}

CL_API_ENTRY cl_sampler CL_API_CALL clCreateSampler(cl_context c, cl_bool norm, cl_addressing_mode addr, cl_filter_mode filter, cl_int *errcode_ret)
{
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	return make_sampler(c, norm, addr, filter, NULL, 0, errcode_ret);
}

CL_API_ENTRY cl_sampler CL_API_CALL clCreateSamplerWithProperties(cl_context c, const cl_sampler_properties *props, cl_int *errcode_ret)
{
	cl_bool norm = CL_TRUE;
	cl_addressing_mode addr = CL_ADDRESS_CLAMP;
	cl_filter_mode filter = CL_FILTER_NEAREST;
	unsigned seen = 0;
	size_t n = 0;
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	if (props) {
		for (; props[n]; n += 2) {
			unsigned bit = 0;
			switch (props[n]) {
			case CL_SAMPLER_NORMALIZED_COORDS: bit = 1, norm = (cl_bool)props[n + 1]; break;
			case CL_SAMPLER_ADDRESSING_MODE: bit = 2, addr = (cl_addressing_mode)props[n + 1]; break;
			case CL_SAMPLER_FILTER_MODE: bit = 4, filter = (cl_filter_mode)props[n + 1]; break;
			}
			if (!bit || (seen & bit))
				FAIL(CL_INVALID_VALUE);
			seen |= bit;
		}
		n++;
	}
	return make_sampler(c, norm, addr, filter, props, n, errcode_ret);
}

CL_API_ENTRY cl_int CL_API_CALL clRetainSampler(cl_sampler s)
{
	return gx_ok(s, T_SAMPLER) && gx_retain(s) ? CL_SUCCESS : CL_INVALID_SAMPLER;
}

CL_API_ENTRY cl_int CL_API_CALL clReleaseSampler(cl_sampler s)
{
	return gx_ok(s, T_SAMPLER) && gx_release_ref(s) ? CL_SUCCESS : CL_INVALID_SAMPLER;
}

void gx_sampler_destroy(struct obj *o)
{
	cl_sampler s = (cl_sampler)o;
	post_release(&(struct gx_release){.id = o->id});
	gx_id_drop(o->id);
	cl_context c = s->ctx;
	free(s->props);
	gx_recycle(o, T_SAMPLER);
	gx_unlink(c);
}

CL_API_ENTRY cl_int CL_API_CALL clGetSamplerInfo(cl_sampler s, cl_sampler_info name, INFO_ARGS)
{
	if (!gx_ok(s, T_SAMPLER))
		return CL_INVALID_SAMPLER;
	switch (name) {
	case CL_SAMPLER_REFERENCE_COUNT: INFO(cl_uint, atomic_load(&s->o.refs));
	case CL_SAMPLER_CONTEXT: INFO(cl_context, s->ctx);
	case CL_SAMPLER_NORMALIZED_COORDS: INFO(cl_bool, s->normalized);
	case CL_SAMPLER_ADDRESSING_MODE: INFO(cl_addressing_mode, s->addressing);
	case CL_SAMPLER_FILTER_MODE: INFO(cl_filter_mode, s->filter);
	case CL_SAMPLER_PROPERTIES: return gx_info(s->props, s->nprops * sizeof *s->props, size, value, size_ret);
	}
	return CL_INVALID_VALUE;
}
