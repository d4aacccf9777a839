/* Events. */
#include "gx.h"

cl_event gx_event_new(cl_context ctx, cl_command_queue q, cl_command_type type)
{
	cl_event e = gx_new(T_EVENT, sizeof *e);
	if (!e)
		return NULL;
	e->ctx = ctx;
	e->queue = q;
	e->type = type;
	atomic_store_explicit(&e->status, type == CL_COMMAND_USER ? CL_SUBMITTED : CL_QUEUED, memory_order_relaxed);
	gx_link(ctx);
	if (q)
		gx_link(q);
	return e;
}

void gx_event_destroy(struct obj *o)
{
	cl_event e = (cl_event)o;
	post_release(&(struct gx_release){.id = o->id});
	gx_id_drop(o->id);
	cl_context c = e->ctx;
	cl_command_queue q = e->queue;
	gx_recycle(o, T_EVENT);
	if (q)
		gx_unlink(q);
	gx_unlink(c);
}

/* gx_event_poll requests the status, unless the final one is known. A final one stays: another thread may have learned it
 * while this one waited. If the session is lost, the status is an error. */
cl_int gx_event_poll(cl_event e, int32_t *status)
{
	*status = atomic_load(&e->status);
	if (*status <= CL_COMPLETE || e->type == CL_COMMAND_USER)
		return CL_SUCCESS;
	struct gx_reply r;
	cl_int err = call_event_status(&(struct gx_event_status){.event = e->o.id}, &r);
	if (!err) {
		if (r.len >= 4)
			memcpy(status, r.data, 4);
		gx_reply_free(&r);
	} else if (atomic_load(&S.lost))
		*status = CL_DEVICE_NOT_AVAILABLE;
	else
		return err;
	int32_t known = atomic_load(&e->status);
	while (known > CL_COMPLETE && !atomic_compare_exchange_weak(&e->status, &known, *status))
		;
	if (known <= CL_COMPLETE)
		*status = known;
	return CL_SUCCESS;
}

static void note_times(cl_event e, const struct gx_reply *r)
{
	for (size_t i = 0; i < COUNT(e->times); i++)
		e->times[i] = gx_u64(r, i);
	atomic_store(&e->status, CL_COMPLETE);
	atomic_store(&e->profiled, true);
}

CL_API_ENTRY cl_int CL_API_CALL clWaitForEvents(cl_uint n, const cl_event *list)
{
	gx_enter();
	if (!n || !list)
		return CL_INVALID_VALUE;
	for (cl_uint i = 0; i < n; i++)
		if (!gx_ok(list[i], T_EVENT))
			return CL_INVALID_EVENT;
		else if (list[i]->ctx != list[0]->ctx)
			return CL_INVALID_CONTEXT;
	cl_int err = CL_SUCCESS;
	for (cl_uint i = 0; i < n;) { /* a request has room for a few thousand ids; all are waited for, also after an error */
		uint32_t ids[1024], k = 0;
		cl_uint from = i;
		for (; i < n && k < COUNT(ids); i++) {
			int32_t st = atomic_load(&list[i]->status);
			if (st < CL_COMPLETE)
				err = CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST;
			else if (st > CL_COMPLETE)
				ids[k++] = list[i]->o.id;
		}
		if (k) {
			struct gx_reply r;
			cl_int e = call_wait_events(&(struct gx_wait_events){.wait = ids, .n_wait = k}, &r);
			if (!e) {
				if (n == 1 && r.len == sizeof list[0]->times)
					note_times(list[0], &r);
				gx_reply_free(&r);
			}
			if (e && atomic_load(&S.lost))
				e = CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST;
			if (!e && !err)
				for (cl_uint j = from; j < i; j++)
					atomic_store(&list[j]->status, CL_COMPLETE);
			if (!err)
				err = e;
		}
	}
	gx_reap();
	return err;
}

CL_API_ENTRY cl_int CL_API_CALL clGetEventInfo(cl_event e, cl_event_info name, INFO_ARGS)
{
	if (!gx_ok(e, T_EVENT))
		return CL_INVALID_EVENT;
	switch (name) {
	case CL_EVENT_COMMAND_QUEUE: INFO(cl_command_queue, e->queue);
	case CL_EVENT_CONTEXT: INFO(cl_context, e->ctx);
	case CL_EVENT_COMMAND_TYPE: INFO(cl_command_type, e->type);
	case CL_EVENT_REFERENCE_COUNT: INFO(cl_uint, atomic_load(&e->o.refs));
	case CL_EVENT_COMMAND_EXECUTION_STATUS: {
		int32_t st;
		if (value && size < sizeof(cl_int))
			return CL_INVALID_VALUE;
		TRY(gx_event_poll(e, &st));
		gx_reap();
		gx_output(true); /* before the application can find out that the command that printed it is complete */
		INFO(cl_int, st);
	}
	}
	return CL_INVALID_VALUE;
}

CL_API_ENTRY cl_int CL_API_CALL clGetEventProfilingInfo(cl_event e, cl_profiling_info name, INFO_ARGS)
{
	if (!gx_ok(e, T_EVENT))
		return CL_INVALID_EVENT;
	if (name < CL_PROFILING_COMMAND_QUEUED || name > CL_PROFILING_COMMAND_COMPLETE)
		return CL_INVALID_VALUE;
	if (!e->queue || !(e->queue->props & CL_QUEUE_PROFILING_ENABLE))
		return CL_PROFILING_INFO_NOT_AVAILABLE;
	if (!atomic_load(&e->profiled)) {
		struct gx_reply r;
		TRY(call_event_profiling(&(struct gx_event_profiling){.event = e->o.id}, &r));
		note_times(e, &r);
		gx_reply_free(&r);
	}
	gx_reap();
	INFO(cl_ulong, e->times[name - CL_PROFILING_COMMAND_QUEUED]);
}

CL_API_ENTRY cl_int CL_API_CALL clRetainEvent(cl_event e) { return gx_ok(e, T_EVENT) && gx_retain(e) ? CL_SUCCESS : CL_INVALID_EVENT; }

CL_API_ENTRY cl_int CL_API_CALL clReleaseEvent(cl_event e)
{
	return gx_ok(e, T_EVENT) && gx_release_ref(e) ? CL_SUCCESS : CL_INVALID_EVENT;
}

CL_API_ENTRY cl_event CL_API_CALL clCreateUserEvent(cl_context c, cl_int *errcode_ret)
{
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	cl_event e = gx_event_new(c, NULL, CL_COMMAND_USER);
	if (!e)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	cl_int err = post_create_user_event(&(struct gx_create_user_event){.id = e->o.id, .context = c->o.id});
	if (err) {
		gx_abandon(e);
		gx_unlink(c);
		FAIL(err);
	}
	DONE(e);
}

CL_API_ENTRY cl_int CL_API_CALL clSetUserEventStatus(cl_event e, cl_int status)
{
	int32_t pending = CL_SUBMITTED;
	if (!gx_ok(e, T_EVENT) || e->type != CL_COMMAND_USER)
		return CL_INVALID_EVENT;
	if (status > CL_COMPLETE)
		return CL_INVALID_VALUE;
	if (!atomic_compare_exchange_strong(&e->status, &pending, status))
		return CL_INVALID_OPERATION;
	return post_set_user_event(&(struct gx_set_user_event){.event = e->o.id, .status = status});
}

CL_API_ENTRY cl_int CL_API_CALL clSetEventCallback(cl_event e, cl_int type, void(CL_CALLBACK *fn)(cl_event, cl_int, void *), void *user)
{
	if (!gx_ok(e, T_EVENT))
		return CL_INVALID_EVENT;
	if (!fn || (type != CL_SUBMITTED && type != CL_RUNNING && type != CL_COMPLETE))
		return CL_INVALID_VALUE;
	uint32_t token = gx_cb_add(CBK_EVENT, e, (void *)fn, user, type);
	if (!token)
		return CL_OUT_OF_HOST_MEMORY;
	cl_int err = post_event_callback(&(struct gx_event_callback){.event = e->o.id, .type = type, .callback = token});
	if (err)
		gx_cb_drop(token);
	return err;
}
