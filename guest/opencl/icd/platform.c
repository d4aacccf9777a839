/* Platform and devices, as described by the first reply of the session. Root devices and the platform are static, so
 * their handles survive a fork. In the child they mean the devices of the child's own session. */
#include "gx.h"

struct _cl_platform_id gx_platform = {.o = {.dispatch = &gx_dispatch, .magic = GX_OBJ_MAGIC | T_PLATFORM}};

static struct _cl_device_id roots[GX_FIRST_ID];
static uint32_t nroots;
static struct param *plat_params;
static uint32_t nplat;
static uint8_t *plat_blob;

struct cursor { const uint8_t *p; uint64_t len; bool bad; };

static uint32_t take_u32(struct cursor *c)
{
	uint32_t v = 0;
	if (c->len < 4)
		c->bad = true;
	else
		memcpy(&v, c->p, 4), c->p += 4, c->len -= 4;
	return v;
}

/* take_params reads n parameters and copies their values to *blob. */
static struct param *take_params(struct cursor *c, uint32_t n, uint8_t **blob)
{
	struct cursor scan = *c;
	for (uint32_t i = 0; i < n && !scan.bad; i++) {
		take_u32(&scan);
		uint64_t len = GX_ALIGN8((uint64_t)take_u32(&scan));
		if (scan.bad || scan.len < len)
			scan.bad = true;
		else
			scan.p += len, scan.len -= len;
	}
	if ((c->bad |= scan.bad))
		return NULL;
	size_t bytes = (size_t)(scan.p - c->p);
	struct param *out = malloc((n + 1) * sizeof *out);
	*blob = malloc(bytes + 1);
	if (!out || !*blob) {
		free(out);
		free(*blob);
		*blob = NULL;
		c->bad = true;
		return NULL;
	}
	memcpy(*blob, c->p, bytes);
	struct cursor b = {*blob, bytes, false};
	for (uint32_t i = 0; i < n; i++) {
		out[i].name = take_u32(&b);
		out[i].len = take_u32(&b);
		out[i].data = b.p;
		b.p += GX_ALIGN8(out[i].len);
		b.len -= GX_ALIGN8(out[i].len);
	}
	*c = scan;
	return out;
}

static const struct param *find(const struct param *p, uint32_t n, uint32_t name)
{
	for (uint32_t i = 0; i < n; i++)
		if (p[i].name == name)
			return &p[i];
	return NULL;
}

static uint64_t number(cl_device_id d, uint32_t name, uint64_t dflt)
{
	const struct param *p = find(d->params, d->nparams, name);
	uint64_t v = 0;
	if (!p || p->len > 8)
		return dflt;
	memcpy(&v, p->data, p->len);
	return v;
}

static void describe(cl_device_id d)
{
	uint64_t bits = number(d, CL_DEVICE_MEM_BASE_ADDR_ALIGN, 1024);
	d->base_align = bits >= 8 ? bits / 8 : 1;
	d->queue_props = number(d, CL_DEVICE_QUEUE_ON_HOST_PROPERTIES, CL_QUEUE_PROFILING_ENABLE);
	d->max_alloc = number(d, CL_DEVICE_MAX_MEM_ALLOC_SIZE, ~0ull);
	d->local_mem = number(d, CL_DEVICE_LOCAL_MEM_SIZE, ~0ull);
	d->address_bits = (uint32_t)number(d, CL_DEVICE_ADDRESS_BITS, 64);
	d->images = number(d, CL_DEVICE_IMAGE_SUPPORT, 0) != 0;
}

cl_int gx_devices_load(struct gx_reply *r)
{
	struct cursor c = {r->data, r->len, false};
	uint32_t n = take_u32(&c);
	take_u32(&c);
	free(plat_params);
	free(plat_blob);
	plat_blob = NULL; /* take_params may fail before it sets it */
	plat_params = take_params(&c, n, &plat_blob);
	nplat = plat_params ? n : 0;
	n = take_u32(&c);
	take_u32(&c);
	if (c.bad || n >= GX_FIRST_ID)
		return CL_DEVICE_NOT_AVAILABLE;
	for (uint32_t i = 0; i < n; i++) {
		cl_device_id d = &roots[i];
		uint32_t id = take_u32(&c), np = take_u32(&c);
		uint8_t *blob = NULL;
		struct param *params = take_params(&c, np, &blob);
		if (!params)
			return CL_DEVICE_NOT_AVAILABLE;
		/* a query may still be using the parameters of an earlier session, so they are not freed */
		d->o.dispatch = &gx_dispatch;
		d->o.id = id;
		d->params = params;
		d->nparams = np;
		d->blob = blob;
		d->root = true;
		describe(d);
		d->o.magic = GX_OBJ_MAGIC | T_DEVICE;
	}
	nroots = n;
	return CL_SUCCESS;
}

void gx_devices_reset(void) {} /* the tables are filled again when the child connects */

bool gx_device_ok(cl_device_id d)
{
	gx_enter();
	if (!d || d->o.magic != (GX_OBJ_MAGIC | T_DEVICE))
		return false;
	if (!d->root)
		return d->o.gen == atomic_load(&S.gen);
	gx_connect();
	return (uint32_t)(d - roots) < nroots;
}

cl_int gx_device_param(cl_device_id d, uint32_t name, const void **data, size_t *len)
{
	const struct param *p = find(d->params, d->nparams, name);
	if (!p)
		return CL_INVALID_VALUE;
	*data = p->data;
	*len = p->len;
	return CL_SUCCESS;
}

/* ---- platform */

CL_API_ENTRY cl_int CL_API_CALL clGetPlatformIDs(cl_uint n, cl_platform_id *list, cl_uint *count)
{
	gx_enter();
	if ((n == 0 && list) || (!list && !count))
		return CL_INVALID_VALUE;
	if (gx_connect()) {
		if (count)
			*count = 0;
		return CL_PLATFORM_NOT_FOUND_KHR;
	}
	if (list)
		list[0] = &gx_platform;
	if (count)
		*count = 1;
	return CL_SUCCESS;
}

__attribute__((visibility("default"))) CL_API_ENTRY cl_int CL_API_CALL clIcdGetPlatformIDsKHR(cl_uint n, cl_platform_id *list, cl_uint *count)
{
	return clGetPlatformIDs(n, list, count);
}

__attribute__((visibility("default"))) CL_API_ENTRY cl_int CL_API_CALL clGetPlatformInfo(cl_platform_id p, cl_platform_info name, INFO_ARGS)
{
	static const cl_name_version ext[] = {{CL_MAKE_VERSION(2, 0, 0), "cl_khr_icd"}};
	const char *text = NULL;
	gx_enter();
	if (p && p != &gx_platform)
		return CL_INVALID_PLATFORM;
	gx_connect();
	const struct param *q = find(plat_params, nplat, name);
	if (q && name != CL_PLATFORM_ICD_SUFFIX_KHR)
		return gx_info(q->data, q->len, size, value, size_ret);
	switch (name) {
	case CL_PLATFORM_PROFILE: text = "FULL_PROFILE"; break;
	case CL_PLATFORM_VERSION: text = "OpenCL 3.0 gpuctl"; break;
	case CL_PLATFORM_NAME: text = "gpuctl"; break;
	case CL_PLATFORM_VENDOR: text = "gpuctl"; break;
	case CL_PLATFORM_EXTENSIONS: text = "cl_khr_icd"; break;
	case CL_PLATFORM_ICD_SUFFIX_KHR: text = "GPUCTL"; break;
	case CL_PLATFORM_NUMERIC_VERSION: INFO(cl_version, CL_MAKE_VERSION(3, 0, 0));
	case CL_PLATFORM_EXTENSIONS_WITH_VERSION: return gx_info(ext, sizeof ext, size, value, size_ret);
	case CL_PLATFORM_HOST_TIMER_RESOLUTION: INFO(cl_ulong, 0);
	default: return CL_INVALID_VALUE;
	}
	return gx_info(text, strlen(text) + 1, size, value, size_ret);
}

/* ---- devices */

CL_API_ENTRY cl_int CL_API_CALL clGetDeviceIDs(cl_platform_id p, cl_device_type type, cl_uint n, cl_device_id *list, cl_uint *count)
{
	const cl_device_type known = CL_DEVICE_TYPE_DEFAULT | CL_DEVICE_TYPE_CPU | CL_DEVICE_TYPE_GPU | CL_DEVICE_TYPE_ACCELERATOR | CL_DEVICE_TYPE_CUSTOM;
	gx_enter();
	if (p && p != &gx_platform)
		return CL_INVALID_PLATFORM;
	if (type != CL_DEVICE_TYPE_ALL && (!type || (type & ~known)))
		return CL_INVALID_DEVICE_TYPE;
	if ((n == 0 && list) || (!list && !count))
		return CL_INVALID_VALUE;
	cl_uint found = 0;
	if (!gx_connect())
		for (uint32_t i = 0; i < nroots; i++) {
			cl_device_type t = number(&roots[i], CL_DEVICE_TYPE, CL_DEVICE_TYPE_GPU);
			bool match = type == CL_DEVICE_TYPE_ALL ? t != CL_DEVICE_TYPE_CUSTOM : (t & type & ~(cl_device_type)CL_DEVICE_TYPE_DEFAULT) != 0;
			if ((type != CL_DEVICE_TYPE_ALL && (type & CL_DEVICE_TYPE_DEFAULT) && i == 0) || match) {
				if (list && found < n)
					list[found] = &roots[i];
				found++;
			}
		}
	if (count)
		*count = found;
	return found ? CL_SUCCESS : CL_DEVICE_NOT_FOUND;
}

CL_API_ENTRY cl_int CL_API_CALL clGetDeviceInfo(cl_device_id d, cl_device_info name, INFO_ARGS)
{
	if (!gx_device_ok(d))
		return CL_INVALID_DEVICE;
	switch (name) {
	case CL_DEVICE_PLATFORM: INFO(cl_platform_id, &gx_platform);
	case CL_DEVICE_PARENT_DEVICE: INFO(cl_device_id, d->parent);
	case CL_DEVICE_REFERENCE_COUNT: INFO(cl_uint, d->root ? 1 : atomic_load(&d->o.refs));
	case CL_DEVICE_DEVICE_ENQUEUE_CAPABILITIES: INFO(cl_device_device_enqueue_capabilities, 0); /* some runtimes return 4 bytes */
	}
	const struct param *p = find(d->params, d->nparams, name);
	if (p)
		return gx_info(p->data, p->len, size, value, size_ret);
	switch (name) { /* optional features that the device did not report are not supported */
	case CL_DEVICE_SVM_CAPABILITIES:
	case CL_DEVICE_QUEUE_ON_DEVICE_PROPERTIES:
	case CL_DEVICE_ATOMIC_MEMORY_CAPABILITIES:
	case CL_DEVICE_ATOMIC_FENCE_CAPABILITIES:
	case CL_DEVICE_PARTITION_AFFINITY_DOMAIN: INFO(cl_ulong, 0);
	case CL_DEVICE_MAX_PIPE_ARGS:
	case CL_DEVICE_PIPE_MAX_ACTIVE_RESERVATIONS:
	case CL_DEVICE_PIPE_MAX_PACKET_SIZE:
	case CL_DEVICE_PIPE_SUPPORT:
	case CL_DEVICE_GENERIC_ADDRESS_SPACE_SUPPORT:
	case CL_DEVICE_WORK_GROUP_COLLECTIVE_FUNCTIONS_SUPPORT:
	case CL_DEVICE_NON_UNIFORM_WORK_GROUP_SUPPORT:
	case CL_DEVICE_MAX_ON_DEVICE_QUEUES:
	case CL_DEVICE_MAX_ON_DEVICE_EVENTS:
	case CL_DEVICE_QUEUE_ON_DEVICE_PREFERRED_SIZE:
	case CL_DEVICE_QUEUE_ON_DEVICE_MAX_SIZE:
	case CL_DEVICE_MAX_NUM_SUB_GROUPS:
	case CL_DEVICE_SUB_GROUP_INDEPENDENT_FORWARD_PROGRESS:
	case CL_DEVICE_MAX_READ_WRITE_IMAGE_ARGS:
	case CL_DEVICE_IMAGE_PITCH_ALIGNMENT:
	case CL_DEVICE_IMAGE_BASE_ADDRESS_ALIGNMENT:
	case CL_DEVICE_PREFERRED_PLATFORM_ATOMIC_ALIGNMENT:
	case CL_DEVICE_PREFERRED_GLOBAL_ATOMIC_ALIGNMENT:
	case CL_DEVICE_PREFERRED_LOCAL_ATOMIC_ALIGNMENT: INFO(cl_uint, 0);
	case CL_DEVICE_MAX_GLOBAL_VARIABLE_SIZE:
	case CL_DEVICE_GLOBAL_VARIABLE_PREFERRED_TOTAL_SIZE:
	case CL_DEVICE_PREFERRED_WORK_GROUP_SIZE_MULTIPLE: INFO(size_t, name == CL_DEVICE_PREFERRED_WORK_GROUP_SIZE_MULTIPLE);
	case CL_DEVICE_IL_VERSION:
	case CL_DEVICE_BUILT_IN_KERNELS:
	case CL_DEVICE_LATEST_CONFORMANCE_VERSION_PASSED: return gx_info("", 1, size, value, size_ret);
	case CL_DEVICE_ILS_WITH_VERSION:
	case CL_DEVICE_BUILT_IN_KERNELS_WITH_VERSION:
	case CL_DEVICE_PARTITION_TYPE: return gx_info("", 0, size, value, size_ret);
	case CL_DEVICE_PARTITION_PROPERTIES: INFO(cl_device_partition_property, 0);
	}
	return CL_INVALID_VALUE;
}

CL_API_ENTRY cl_int CL_API_CALL clRetainDevice(cl_device_id d)
{
	if (!gx_device_ok(d))
		return CL_INVALID_DEVICE;
	if (!d->root)
		gx_retain(d);
	return CL_SUCCESS;
}

CL_API_ENTRY cl_int CL_API_CALL clReleaseDevice(cl_device_id d)
{
	if (!gx_device_ok(d))
		return CL_INVALID_DEVICE;
	return d->root || gx_release_ref(d) ? CL_SUCCESS : CL_INVALID_DEVICE;
}

/* gx_device_destroy deletes a sub-device. Root devices are never deleted, although they are counted. */
void gx_device_destroy(struct obj *o)
{
	cl_device_id d = (cl_device_id)o;
	if (d->root)
		return;
	post_release(&(struct gx_release){.id = o->id});
	gx_id_drop(o->id);
	cl_device_id parent = d->parent;
	free(d->params);
	free(d->blob);
	gx_recycle(o, T_DEVICE);
	if (!parent->root)
		gx_unlink(parent);
}

CL_API_ENTRY cl_int CL_API_CALL clCreateSubDevices(cl_device_id d, const cl_device_partition_property *props, cl_uint n, cl_device_id *list, cl_uint *count)
{
	if (!gx_device_ok(d))
		return CL_INVALID_DEVICE;
	if (!props || !props[0] || (!list && !count) || (list && n == 0))
		return CL_INVALID_VALUE;
	uint32_t np = 1;
	if (props[0] == CL_DEVICE_PARTITION_BY_COUNTS) {
		while (props[np] != CL_DEVICE_PARTITION_BY_COUNTS_LIST_END)
			if (++np > 1024)
				return CL_INVALID_VALUE;
		np += props[np + 1] == 0 ? 2 : 1;
	} else if (props[0] == CL_DEVICE_PARTITION_EQUALLY || props[0] == CL_DEVICE_PARTITION_BY_AFFINITY_DOMAIN)
		np = 3;
	else
		return CL_INVALID_VALUE;
	uint64_t wire[1032] = {0};
	for (uint32_t i = 0; i < np; i++)
		wire[i] = (uint64_t)props[i];
	if (props[0] != CL_DEVICE_PARTITION_BY_COUNTS && wire[2])
		return CL_INVALID_VALUE;
	if (wire[np - 1])
		wire[np++] = 0;
	struct gx_create_sub_devices m = {.parent = d->o.id, .props = wire, .n_props = np};
	struct gx_reply r;
	TRY(call_create_sub_devices(&m, &r));
	uint32_t have = (uint32_t)gx_u64(&r, 0);
	gx_reply_free(&r);
	if (list) {
		if (n < have)
			return CL_INVALID_VALUE;
		uint32_t ids[1024], made = 0;
		if (have > COUNT(ids))
			return CL_OUT_OF_HOST_MEMORY;
		cl_int err = CL_SUCCESS;
		for (; made < have; made++) {
			cl_device_id s = gx_new(T_DEVICE, sizeof *s);
			if (!s) {
				err = CL_OUT_OF_HOST_MEMORY;
				break;
			}
			list[made] = s;
			ids[made] = s->o.id;
		}
		m.ids = ids;
		m.n_ids = have;
		if (!err && !(err = call_create_sub_devices(&m, &r))) {
			struct cursor c = {r.data, r.len, false};
			take_u32(&c);
			take_u32(&c);
			for (uint32_t i = 0; i < have && !c.bad; i++) {
				take_u32(&c);
				list[i]->nparams = take_u32(&c);
				list[i]->params = take_params(&c, list[i]->nparams, &list[i]->blob);
				list[i]->parent = d;
				if (!c.bad)
					describe(list[i]);
			}
			if (c.bad)
				err = CL_OUT_OF_RESOURCES;
			gx_reply_free(&r);
		}
		if (err) {
			for (uint32_t i = 0; i < made; i++)
				gx_abandon(list[i]);
			return err;
		}
		for (uint32_t i = 0; i < have && !d->root; i++)
			gx_link(d);
	}
	if (count)
		*count = have;
	return CL_SUCCESS;
}

static cl_int timer(cl_device_id d, cl_ulong *dev, cl_ulong *host)
{
	struct gx_reply r;
	if (!gx_device_ok(d))
		return CL_INVALID_DEVICE;
	if (!host)
		return CL_INVALID_VALUE;
	TRY(call_device_timer(&(struct gx_device_timer){.device = d->o.id}, &r));
	if (dev)
		*dev = gx_u64(&r, 0);
	*host = gx_u64(&r, 1);
	gx_reply_free(&r);
	return CL_SUCCESS;
}

CL_API_ENTRY cl_int CL_API_CALL clGetDeviceAndHostTimer(cl_device_id d, cl_ulong *dev, cl_ulong *host)
{
	if (gx_device_ok(d) && !dev)
		return CL_INVALID_VALUE;
	return timer(d, dev, host);
}

CL_API_ENTRY cl_int CL_API_CALL clGetHostTimer(cl_device_id d, cl_ulong *host) { return timer(d, NULL, host); }

CL_API_ENTRY cl_int CL_API_CALL clUnloadCompiler(void) { return CL_SUCCESS; }

CL_API_ENTRY cl_int CL_API_CALL clUnloadPlatformCompiler(cl_platform_id p)
{
	return p == &gx_platform ? CL_SUCCESS : CL_INVALID_PLATFORM;
}
