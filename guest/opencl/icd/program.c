/* Programs. */
#include "gx.h"

static cl_program new_program(cl_context c)
{
	cl_program p = gx_new(T_PROGRAM, sizeof *p);
	if (!p)
		return NULL;
	p->ctx = c;
	p->ndev = c->ndev;
	p->devs = malloc(c->ndev * sizeof *p->devs);
	if (!p->devs) {
		gx_abandon(p);
		return NULL;
	}
	memcpy(p->devs, c->devs, c->ndev * sizeof *p->devs);
	return p;
}

static void drop_program(cl_program p)
{
	free(p->devs);
	free(p->source);
	gx_abandon(p);
}

struct blob { uint32_t mode, inlined; uint64_t stage, len; };

/* put_blob places a program's text in the request if it is short. Otherwise the text is staged until the call
 * returns. */
static cl_int put_blob(struct blob *b, const void *data, size_t len)
{
	*b = (struct blob){.mode = GX_DATA_INLINE, .len = len, .inlined = (uint32_t)len};
	if (len <= GX_MAX_INLINE)
		return CL_SUCCESS;
	b->inlined = 0;
	b->mode = GX_DATA_STAGED;
	TRY(gx_stage_wait(len, &b->stage));
	memcpy(S.arena + b->stage, data, len);
	return CL_SUCCESS;
}

static void end_blob(struct blob *b)
{
	if (b->mode == GX_DATA_STAGED)
		gx_stage_free(b->stage, b->len);
}

CL_API_ENTRY cl_program CL_API_CALL clCreateProgramWithSource(cl_context c, cl_uint n, const char **strings, const size_t *lengths, cl_int *errcode_ret)
{
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	if (!n || !strings)
		FAIL(CL_INVALID_VALUE);
	size_t total = 0;
	for (cl_uint i = 0; i < n; i++) {
		if (!strings[i])
			FAIL(CL_INVALID_VALUE);
		total += lengths && lengths[i] ? lengths[i] : strlen(strings[i]);
	}
	cl_program p = new_program(c);
	if (!p || !(p->source = malloc(total + 1))) {
		if (p)
			drop_program(p);
		FAIL(CL_OUT_OF_HOST_MEMORY);
	}
	char *at = p->source;
	for (cl_uint i = 0; i < n; i++) {
		size_t len = lengths && lengths[i] ? lengths[i] : strlen(strings[i]);
		memcpy(at, strings[i], len);
		at += len;
	}
	*at = 0;
	p->nsource = total + 1;
	struct blob b;
	cl_int err = put_blob(&b, p->source, total);
	if (!err) {
		struct gx_create_program_source m = {.id = p->o.id, .context = c->o.id, .mode = b.mode,
			.stage_off = b.stage, .stage_len = b.stage ? b.len : 0, .source = p->source, .n_source = b.inlined};
		err = b.stage ? call_create_program_source(&m, NULL) : post_create_program_source(&m);
		end_blob(&b);
	}
	if (err) {
		drop_program(p);
		FAIL(err);
	}
	gx_link(c);
	DONE(p);
}

CL_API_ENTRY cl_program CL_API_CALL clCreateProgramWithIL(cl_context c, const void *il, size_t len, cl_int *errcode_ret)
{
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	bool any = false;
	for (cl_uint i = 0; i < c->ndev; i++) {
		const void *v;
		size_t n;
		any |= !gx_device_param(c->devs[i], CL_DEVICE_IL_VERSION, &v, &n) && n > 1;
	}
	if (!any)
		FAIL(CL_INVALID_OPERATION);
	if (!il || !len)
		FAIL(CL_INVALID_VALUE);
	cl_program p = new_program(c);
	if (!p)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	struct blob b;
	cl_int err = put_blob(&b, il, len);
	if (!err) {
		err = call_create_program_il(&(struct gx_create_program_il){.id = p->o.id, .context = c->o.id, .mode = b.mode,
			.stage_off = b.stage, .stage_len = b.stage ? b.len : 0, .il = il, .n_il = b.inlined}, NULL);
		end_blob(&b);
	}
	if (err) {
		drop_program(p);
		FAIL(err);
	}
	gx_link(c);
	DONE(p);
}

CL_API_ENTRY cl_program CL_API_CALL clCreateProgramWithBinary(cl_context c, cl_uint n, const cl_device_id *devs, const size_t *lengths,
	const unsigned char **binaries, cl_int *status, cl_int *errcode_ret)
{
	uint32_t ids[GX_FIRST_ID];
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	if (!devs || !n || !lengths || !binaries)
		FAIL(CL_INVALID_VALUE);
	for (cl_uint i = 0; i < n; i++)
		if (!gx_device_ok(devs[i]) || !gx_ctx_has(c, devs[i]))
			FAIL(CL_INVALID_DEVICE);
	if (n > COUNT(ids))
		FAIL(CL_INVALID_VALUE);
	bool bad = false;
	for (cl_uint i = 0; i < n; i++) {
		bool none = !lengths[i] || !binaries[i];
		bad |= none;
		if (status)
			status[i] = none ? CL_INVALID_VALUE : CL_SUCCESS;
		ids[i] = devs[i]->o.id;
	}
	if (bad)
		FAIL(CL_INVALID_VALUE);
	/* gpuctl's binaries are the same container for every device, and each contains a whole program. So binaries
	 * that differ would be different programs. */
	for (cl_uint i = 1; i < n; i++)
		if (lengths[i] != lengths[0] || memcmp(binaries[i], binaries[0], lengths[0])) {
			if (status)
				status[i] = CL_INVALID_BINARY;
			bad = true;
		}
	if (bad)
		FAIL(CL_INVALID_BINARY);
	if (n > c->ndev) /* one twice */
		FAIL(CL_INVALID_VALUE);
	cl_program p = new_program(c);
	if (!p)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	memcpy(p->devs, devs, n * sizeof *devs);
	p->ndev = n;
	struct blob b;
	cl_int err = put_blob(&b, binaries[0], lengths[0]);
	if (!err) {
		err = call_create_program_binary(&(struct gx_create_program_binary){.id = p->o.id, .context = c->o.id, .devices = ids, .n_devices = n,
			.mode = b.mode, .stage_off = b.stage, .stage_len = b.stage ? b.len : 0, .binary = binaries[0], .n_binary = b.inlined}, NULL);
		end_blob(&b);
	}
	if (err) {
		for (cl_uint i = 0; status && i < n; i++)
			status[i] = err == CL_INVALID_BINARY ? CL_INVALID_BINARY : CL_INVALID_VALUE;
		drop_program(p);
		FAIL(err);
	}
	gx_link(c);
	DONE(p);
}

CL_API_ENTRY cl_program CL_API_CALL clCreateProgramWithBuiltInKernels(cl_context c, cl_uint n, const cl_device_id *devs, const char *names, cl_int *errcode_ret)
{
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	if (!devs || !n || !names)
		FAIL(CL_INVALID_VALUE);
	for (cl_uint i = 0; i < n; i++)
		if (!gx_device_ok(devs[i]) || !gx_ctx_has(c, devs[i]))
			FAIL(CL_INVALID_DEVICE);
	FAIL(CL_INVALID_VALUE); /* no device has built-in kernels */
}

CL_API_ENTRY cl_int CL_API_CALL clRetainProgram(cl_program p) { return gx_ok(p, T_PROGRAM) && gx_retain(p) ? CL_SUCCESS : CL_INVALID_PROGRAM; }

CL_API_ENTRY cl_int CL_API_CALL clReleaseProgram(cl_program p)
{
	return gx_ok(p, T_PROGRAM) && gx_release_ref(p) ? CL_SUCCESS : CL_INVALID_PROGRAM;
}

void gx_program_destroy(struct obj *o)
{
	cl_program p = (cl_program)o;
	post_release(&(struct gx_release){.id = o->id});
	gx_id_drop(o->id);
	cl_context c = p->ctx;
	free(p->devs);
	free(p->source);
	free(p->told);
	gx_recycle(o, T_PROGRAM);
	gx_unlink(c);
}

/* The callback is for destructors of program scope variables, which no device supports. */
CL_API_ENTRY cl_int CL_API_CALL clSetProgramReleaseCallback(cl_program p, void(CL_CALLBACK *fn)(cl_program, void *), void *user)
{
	(void)user;
	if (!gx_ok(p, T_PROGRAM))
		return CL_INVALID_PROGRAM;
	return fn ? CL_INVALID_OPERATION : CL_INVALID_VALUE;
}

CL_API_ENTRY cl_int CL_API_CALL clSetProgramSpecializationConstant(cl_program p, cl_uint id, size_t size, const void *value)
{
	if (!gx_ok(p, T_PROGRAM))
		return CL_INVALID_PROGRAM;
	if (p->source)
		return CL_INVALID_OPERATION;
	if (!value || !size || size > 64)
		return CL_INVALID_VALUE;
	return call_spec_constant(&(struct gx_spec_constant){.program = p->o.id, .spec = id, .value = value, .n_value = (uint32_t)size}, NULL);
}

/* ---- building */

typedef void(CL_CALLBACK *build_fn)(cl_program, void *);

/* check_devices converts the device list of a build to ids. NULL means all devices. */
static cl_int check_devices(const cl_device_id *have, cl_uint nhave, cl_uint n, const cl_device_id *devs, uint32_t ids[GX_FIRST_ID])
{
	if ((n == 0) != (devs == NULL) || n > GX_FIRST_ID)
		return CL_INVALID_VALUE;
	for (cl_uint i = 0; i < n; i++) {
		bool found = false;
		for (cl_uint j = 0; j < nhave; j++)
			found |= have[j] == devs[i];
		if (!found || !gx_device_ok(devs[i]))
			return CL_INVALID_DEVICE;
		ids[i] = devs[i]->o.id;
	}
	return CL_SUCCESS;
}

CL_API_ENTRY cl_int CL_API_CALL clBuildProgram(cl_program p, cl_uint n, const cl_device_id *devs, const char *options, build_fn fn, void *user)
{
	uint32_t ids[GX_FIRST_ID], token = 0;
	if (!gx_ok(p, T_PROGRAM))
		return CL_INVALID_PROGRAM;
	if (!fn && user)
		return CL_INVALID_VALUE;
	TRY(check_devices(p->devs, p->ndev, n, devs, ids));
	if (atomic_load(&p->kernels))
		return CL_INVALID_OPERATION;
	struct gx_files f;
	TRY(gx_files_find(p, options, 0, NULL, &f));
	cl_int err = CL_SUCCESS;
	uint32_t nopt = options ? (uint32_t)strlen(options) : 0;
	if (fn && !(token = gx_cb_add(CBK_BUILD, p, (void *)fn, user, 0)))
		err = CL_OUT_OF_HOST_MEMORY;
	else if (f.n)
		err = call_build_with_files(&(struct gx_build_with_files){.program = p->o.id, .callback = token, .devices = ids, .n_devices = n,
			.options = options, .n_options = nopt, .files = f.ids, .n_files = f.n, .paths = f.names, .n_paths = f.nnames}, NULL);
	else
		err = call_build_program(&(struct gx_build_program){.program = p->o.id, .callback = token, .devices = ids, .n_devices = n,
			.options = options, .n_options = nopt}, NULL);
	gx_files_drop(&f);
	if (err && token)
		gx_cb_drop(token);
	return err;
}

CL_API_ENTRY cl_int CL_API_CALL clCompileProgram(cl_program p, cl_uint n, const cl_device_id *devs, const char *options, cl_uint nheaders,
	const cl_program *headers, const char **names, build_fn fn, void *user)
{
	uint32_t ids[GX_FIRST_ID], token = 0;
	if (!gx_ok(p, T_PROGRAM))
		return CL_INVALID_PROGRAM;
	if ((!fn && user) || (nheaders == 0 && (headers || names)) || (nheaders && (!headers || !names)))
		return CL_INVALID_VALUE;
	TRY(check_devices(p->devs, p->ndev, n, devs, ids));
	size_t bytes = 0;
	for (cl_uint i = 0; i < nheaders; i++) {
		if (!gx_ok(headers[i], T_PROGRAM))
			return CL_INVALID_PROGRAM;
		if (!names[i])
			return CL_INVALID_VALUE;
		bytes += strlen(names[i]) + 1;
	}
	if (atomic_load(&p->kernels))
		return CL_INVALID_OPERATION;
	uint32_t *hids = malloc(nheaders * sizeof *hids + bytes + 1);
	if (!hids)
		return CL_OUT_OF_HOST_MEMORY;
	char *all = (char *)(hids + nheaders), *at = all;
	for (cl_uint i = 0; i < nheaders; i++) {
		hids[i] = headers[i]->o.id;
		at = stpcpy(at, names[i]) + 1;
	}
	struct gx_files f;
	cl_int err = gx_files_find(p, options, nheaders, headers, &f);
	uint32_t nopt = options ? (uint32_t)strlen(options) : 0;
	if (!err && fn && !(token = gx_cb_add(CBK_BUILD, p, (void *)fn, user, 0)))
		err = CL_OUT_OF_HOST_MEMORY;
	if (!err && f.n)
		err = call_compile_with_files(&(struct gx_compile_with_files){.program = p->o.id, .callback = token, .devices = ids, .n_devices = n,
			.options = options, .n_options = nopt, .headers = hids, .n_headers = nheaders, .names = all, .n_names = (uint32_t)bytes,
			.files = f.ids, .n_files = f.n, .paths = f.names, .n_paths = f.nnames}, NULL);
	else if (!err)
		err = call_compile_program(&(struct gx_compile_program){.program = p->o.id, .callback = token, .devices = ids, .n_devices = n,
			.options = options, .n_options = nopt, .headers = hids, .n_headers = nheaders, .names = all, .n_names = (uint32_t)bytes}, NULL);
	gx_files_drop(&f);
	free(hids);
	if (err && token)
		gx_cb_drop(token);
	return err;
}

CL_API_ENTRY cl_program CL_API_CALL clLinkProgram(cl_context c, cl_uint n, const cl_device_id *devs, const char *options, cl_uint ninputs,
	const cl_program *inputs, build_fn fn, void *user, cl_int *errcode_ret)
{
	uint32_t ids[GX_FIRST_ID], token = 0;
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	if ((!fn && user) || !ninputs || !inputs)
		FAIL(CL_INVALID_VALUE);
	cl_int err = n > c->ndev ? CL_INVALID_VALUE : check_devices(c->devs, c->ndev, n, devs, ids);
	if (err)
		FAIL(err);
	for (cl_uint i = 0; i < ninputs; i++)
		if (!gx_ok(inputs[i], T_PROGRAM))
			FAIL(CL_INVALID_PROGRAM);
		else if (inputs[i]->ctx != c)
			FAIL(CL_INVALID_PROGRAM);
	cl_program p = new_program(c);
	uint32_t *in = malloc(ninputs * sizeof *in);
	if (!p || !in) {
		if (p)
			drop_program(p);
		free(in);
		FAIL(CL_OUT_OF_HOST_MEMORY);
	}
	for (cl_uint i = 0; i < ninputs; i++)
		in[i] = inputs[i]->o.id;
	if (n) {
		memcpy(p->devs, devs, n * sizeof *devs);
		p->ndev = n;
	}
	gx_link(c);
	if (fn && !(token = gx_cb_add(CBK_BUILD, p, (void *)fn, user, 0)))
		err = CL_OUT_OF_HOST_MEMORY;
	if (!err)
		err = call_link_program(&(struct gx_link_program){.id = p->o.id, .context = c->o.id, .callback = token, .devices = ids, .n_devices = n,
			.options = options, .n_options = options ? (uint32_t)strlen(options) : 0, .inputs = in, .n_inputs = ninputs}, NULL);
	free(in);
	if (errcode_ret)
		*errcode_ret = err;
	if (err && token)
		gx_cb_drop(token);
	if (!err || err == CL_LINK_PROGRAM_FAILURE) /* in that case there is a program, with a log */
		return p;
	drop_program(p);
	gx_unlink(c);
	return NULL;
}

/* ---- queries */

/* tell_sizes returns the sizes of the binaries and stores them, because the application allocates memory according
 * to them. */
static cl_int tell_sizes(cl_program p, INFO_ARGS)
{
	struct gx_reply r;
	TRY(call_program_info(&(struct gx_program_info){.program = p->o.id, .param = CL_PROGRAM_BINARY_SIZES}, &r));
	if (r.len != p->ndev * sizeof(uint64_t)) {
		gx_reply_free(&r);
		return CL_OUT_OF_RESOURCES;
	}
	if (value && size >= r.len) {
		gx_lock_take(&S.misc);
		if (!p->told)
			p->told = malloc(r.len);
		if (p->told)
			memcpy(p->told, r.data, r.len);
		gx_lock_drop(&S.misc);
		if (!p->told) {
			gx_reply_free(&r);
			return CL_OUT_OF_HOST_MEMORY;
		}
	}
	return gx_reply_info(&r, size, value, size_ret);
}

/* room returns the size of binary i that the application was given, and UINT64_MAX if it has not asked. */
static uint64_t room(cl_program p, cl_uint i)
{
	gx_lock_take(&S.misc);
	uint64_t n = p->told ? p->told[i] : UINT64_MAX;
	gx_lock_drop(&S.misc);
	return n;
}

static cl_int binaries(cl_program p, INFO_ARGS)
{
	unsigned char **out = value;
	size_t need = p->ndev * sizeof *out;
	if (value && size < need)
		return CL_INVALID_VALUE;
	if (size_ret)
		*size_ret = need;
	if (!value)
		return CL_SUCCESS;
	struct gx_reply sizes, data;
	TRY(call_program_info(&(struct gx_program_info){.program = p->o.id, .param = CL_PROGRAM_BINARY_SIZES}, &sizes));
	cl_int err = call_program_info(&(struct gx_program_info){.program = p->o.id, .param = CL_PROGRAM_BINARIES}, &data);
	if (!err) {
		uint64_t at = 0;
		for (cl_uint i = 0; i < p->ndev && !err; i++) {
			uint64_t n = gx_u64(&sizes, i);
			if (n > data.len - at || (out[i] && n > room(p, i))) {
				err = CL_OUT_OF_RESOURCES;
				break;
			}
			if (out[i])
				memcpy(out[i], data.data + at, n);
			at += n;
		}
		gx_reply_free(&data);
	}
	gx_reply_free(&sizes);
	return err;
}

CL_API_ENTRY cl_int CL_API_CALL clGetProgramInfo(cl_program p, cl_program_info name, INFO_ARGS)
{
	struct gx_reply r;
	if (!gx_ok(p, T_PROGRAM))
		return CL_INVALID_PROGRAM;
	switch (name) {
	case CL_PROGRAM_REFERENCE_COUNT: INFO(cl_uint, atomic_load(&p->o.refs));
	case CL_PROGRAM_CONTEXT: INFO(cl_context, p->ctx);
	case CL_PROGRAM_NUM_DEVICES: INFO(cl_uint, p->ndev);
	case CL_PROGRAM_DEVICES: return gx_info(p->devs, p->ndev * sizeof *p->devs, size, value, size_ret);
	case CL_PROGRAM_SOURCE: return gx_info(p->source ? p->source : "", p->source ? p->nsource : 1, size, value, size_ret);
	case CL_PROGRAM_BINARY_SIZES: return tell_sizes(p, size, value, size_ret);
	case CL_PROGRAM_BINARIES: return binaries(p, size, value, size_ret);
	case CL_PROGRAM_SCOPE_GLOBAL_CTORS_PRESENT:
	case CL_PROGRAM_SCOPE_GLOBAL_DTORS_PRESENT: INFO(cl_bool, CL_FALSE);
	case CL_PROGRAM_IL:
		if (p->source)
			return gx_info("", 0, size, value, size_ret);
		break;
	case CL_PROGRAM_NUM_KERNELS:
	case CL_PROGRAM_KERNEL_NAMES: break;
	default: return CL_INVALID_VALUE;
	}
	TRY(call_program_info(&(struct gx_program_info){.program = p->o.id, .param = name}, &r));
	return gx_reply_info(&r, size, value, size_ret);
}

CL_API_ENTRY cl_int CL_API_CALL clGetProgramBuildInfo(cl_program p, cl_device_id d, cl_program_build_info name, INFO_ARGS)
{
	struct gx_reply r;
	if (!gx_ok(p, T_PROGRAM))
		return CL_INVALID_PROGRAM;
	bool found = false;
	for (cl_uint i = 0; i < p->ndev; i++)
		found |= p->devs[i] == d;
	if (!gx_device_ok(d) || !found)
		return CL_INVALID_DEVICE;
	if (name < CL_PROGRAM_BUILD_STATUS || name > CL_PROGRAM_BUILD_GLOBAL_VARIABLE_TOTAL_SIZE)
		return CL_INVALID_VALUE;
	TRY(call_build_info(&(struct gx_build_info){.program = p->o.id, .device = d->o.id, .param = name}, &r));
	return gx_reply_info(&r, size, value, size_ret);
}
