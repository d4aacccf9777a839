/* Images. */
#include "gx.h"

static unsigned channels(cl_channel_order o)
{
	switch (o) {
	case CL_R: case CL_A: case CL_Rx: case CL_INTENSITY: case CL_LUMINANCE: case CL_DEPTH: return 1;
	case CL_RG: case CL_RA: case CL_RGx: return 2;
	case CL_RGB: case CL_RGBx: case CL_sRGB: return 3;
	case CL_RGBA: case CL_BGRA: case CL_ARGB: case CL_ABGR: case CL_sRGBA: case CL_sBGRA: case CL_sRGBx: return 4;
	}
	return 0;
}

/* element_size returns 0 for a format that is not in the specification. */
static unsigned element_size(const cl_image_format *f)
{
	unsigned n = channels(f->image_channel_order), b = 0;
	cl_channel_order o = f->image_channel_order;
	bool packed3 = o == CL_RGB || o == CL_RGBx;
	switch (f->image_channel_data_type) {
	case CL_UNORM_SHORT_565:
	case CL_UNORM_SHORT_555: return packed3 ? 2 : 0;
	case CL_UNORM_INT_101010: return packed3 ? 4 : 0;
	case CL_UNORM_INT_101010_2: return o == CL_RGBA ? 4 : 0;
	case CL_SNORM_INT8: case CL_UNORM_INT8: case CL_SIGNED_INT8: case CL_UNSIGNED_INT8: b = 1; break;
	case CL_SNORM_INT16: case CL_UNORM_INT16: case CL_SIGNED_INT16: case CL_UNSIGNED_INT16: case CL_HALF_FLOAT: b = 2; break;
	case CL_SIGNED_INT32: case CL_UNSIGNED_INT32: case CL_FLOAT: b = 4; break;
	default: return 0;
	}
	if (packed3)
		return 0; /* only packed types are allowed */
	if (o == CL_sRGBx)
		n = 4;
	return n * b;
}

static bool is_array(cl_mem_object_type t) { return t == CL_MEM_OBJECT_IMAGE1D_ARRAY || t == CL_MEM_OBJECT_IMAGE2D_ARRAY; }
static bool is_1d(cl_mem_object_type t) { return t == CL_MEM_OBJECT_IMAGE1D || t == CL_MEM_OBJECT_IMAGE1D_BUFFER; }
static bool is_image_type(cl_mem_object_type t)
{
	return t == CL_MEM_OBJECT_IMAGE2D || t == CL_MEM_OBJECT_IMAGE3D || is_array(t) || is_1d(t);
}

static uint64_t limit(cl_device_id d, cl_device_info name)
{
	const void *p;
	size_t len;
	uint64_t v = 0;
	if (gx_device_param(d, name, &p, &len) || len > 8)
		return ~0ull;
	memcpy(&v, p, len);
	return v;
}

/* fits reports whether at least one device of the context can have an image of this size. */
static bool fits(cl_context c, const cl_image_desc *d)
{
	for (cl_uint i = 0; i < c->ndev; i++) {
		cl_device_id v = c->devs[i];
		if (!v->images)
			continue;
		bool ok = true;
		switch (d->image_type) {
		case CL_MEM_OBJECT_IMAGE2D_ARRAY:
			ok = d->image_array_size <= limit(v, CL_DEVICE_IMAGE_MAX_ARRAY_SIZE); /* fall through */
		case CL_MEM_OBJECT_IMAGE2D:
			ok = ok && d->image_width <= limit(v, CL_DEVICE_IMAGE2D_MAX_WIDTH) && d->image_height <= limit(v, CL_DEVICE_IMAGE2D_MAX_HEIGHT);
			break;
		case CL_MEM_OBJECT_IMAGE3D:
			ok = d->image_width <= limit(v, CL_DEVICE_IMAGE3D_MAX_WIDTH) && d->image_height <= limit(v, CL_DEVICE_IMAGE3D_MAX_HEIGHT) && d->image_depth <= limit(v, CL_DEVICE_IMAGE3D_MAX_DEPTH);
			break;
		case CL_MEM_OBJECT_IMAGE1D_ARRAY:
			ok = d->image_array_size <= limit(v, CL_DEVICE_IMAGE_MAX_ARRAY_SIZE); /* fall through */
		case CL_MEM_OBJECT_IMAGE1D:
			ok = ok && d->image_width <= limit(v, CL_DEVICE_IMAGE2D_MAX_WIDTH);
			break;
		case CL_MEM_OBJECT_IMAGE1D_BUFFER:
			ok = d->image_width <= limit(v, CL_DEVICE_IMAGE_MAX_BUFFER_SIZE);
			break;
		}
		if (ok)
			return true;
	}
	return false;
}

static cl_int check_desc(cl_context c, cl_mem_flags *flags, const cl_image_format *f, const cl_image_desc *d, const void *host, unsigned *elem)
{
	if (!f)
		return CL_INVALID_IMAGE_FORMAT_DESCRIPTOR;
	if (!(*elem = element_size(f)))
		return CL_INVALID_IMAGE_FORMAT_DESCRIPTOR;
	if (!d || !is_image_type(d->image_type) || d->num_mip_levels || d->num_samples)
		return CL_INVALID_IMAGE_DESCRIPTOR;
	cl_mem_object_type t = d->image_type;
	uint64_t h = t == CL_MEM_OBJECT_IMAGE2D || t == CL_MEM_OBJECT_IMAGE2D_ARRAY || t == CL_MEM_OBJECT_IMAGE3D ? d->image_height : 1;
	uint64_t z = t == CL_MEM_OBJECT_IMAGE3D ? d->image_depth : is_array(t) ? d->image_array_size : 1;
	cl_mem p = d->mem_object;
	if (!d->image_width || !h)
		return d->image_width && !p ? CL_INVALID_IMAGE_SIZE : CL_INVALID_IMAGE_DESCRIPTOR;
	if (!z)
		return CL_INVALID_IMAGE_DESCRIPTOR;
	if (!fits(c, d))
		return CL_INVALID_IMAGE_SIZE;
	uint64_t row = d->image_width * *elem;
	if (p) {
		if (!gx_ok(p, T_MEM) || (t != CL_MEM_OBJECT_IMAGE1D_BUFFER && t != CL_MEM_OBJECT_IMAGE2D))
			return CL_INVALID_IMAGE_DESCRIPTOR;
		if (p->ctx != c)
			return CL_INVALID_CONTEXT;
		if (t == CL_MEM_OBJECT_IMAGE1D_BUFFER ? p->type != CL_MEM_OBJECT_BUFFER : p->type != CL_MEM_OBJECT_BUFFER && p->type != CL_MEM_OBJECT_IMAGE2D)
			return CL_INVALID_IMAGE_DESCRIPTOR;
		if (p->type == CL_MEM_OBJECT_BUFFER) {
			uint64_t pitch = d->image_row_pitch ? d->image_row_pitch : row;
			if (d->image_row_pitch && (t == CL_MEM_OBJECT_IMAGE1D_BUFFER || pitch < row))
				return CL_INVALID_IMAGE_DESCRIPTOR;
			if (pitch > p->size / h)
				return t == CL_MEM_OBJECT_IMAGE1D_BUFFER ? CL_INVALID_IMAGE_SIZE : CL_INVALID_IMAGE_DESCRIPTOR;
		} else if (d->image_width != p->width || d->image_height != p->height)
			return CL_INVALID_IMAGE_DESCRIPTOR;
		if (host)
			return CL_INVALID_HOST_PTR;
		return gx_mem_inherit(p, flags, false);
	}
	if (t == CL_MEM_OBJECT_IMAGE1D_BUFFER)
		return CL_INVALID_IMAGE_DESCRIPTOR;
	TRY(gx_mem_flags(*flags));
	if (!host != !(*flags & (CL_MEM_USE_HOST_PTR | CL_MEM_COPY_HOST_PTR)))
		return CL_INVALID_HOST_PTR;
	if (!host)
		return d->image_row_pitch || d->image_slice_pitch ? CL_INVALID_IMAGE_DESCRIPTOR : CL_SUCCESS;
	uint64_t pitch = d->image_row_pitch;
	if (pitch && (pitch < row || pitch % *elem))
		return CL_INVALID_IMAGE_DESCRIPTOR;
	if (!pitch)
		pitch = row;
	if (d->image_slice_pitch && (t == CL_MEM_OBJECT_IMAGE3D || is_array(t)) && (d->image_slice_pitch < pitch * h || d->image_slice_pitch % pitch))
		return CL_INVALID_IMAGE_DESCRIPTOR;
	return CL_SUCCESS;
}

static cl_mem make_image(cl_context c, const cl_mem_properties *props, cl_mem_flags flags, const cl_image_format *f, const cl_image_desc *d, void *host, cl_int *errcode_ret)
{
	unsigned elem;
	if (!gx_ok(c, T_CONTEXT))
		FAIL(CL_INVALID_CONTEXT);
	if (props && props[0])
		FAIL(CL_INVALID_PROPERTY);
	if (!c->images)
		FAIL(CL_INVALID_OPERATION);
	cl_mem_flags full = flags;
	cl_int err = gx_mem_flags(flags);
	if (!err)
		err = check_desc(c, &full, f, d, host, &elem);
	if (err)
		FAIL(err);
	cl_mem m = gx_new(T_MEM, sizeof *m);
	if (!m)
		FAIL(CL_OUT_OF_HOST_MEMORY);
	cl_mem_object_type t = d->image_type;
	m->ctx = c;
	m->parent = d->mem_object;
	m->buffer_info = d->mem_object;
	m->type = t;
	m->flags = full & (CL_MEM_READ_WRITE | CL_MEM_WRITE_ONLY | CL_MEM_READ_ONLY) ? full : full | CL_MEM_READ_WRITE;
	m->format = *f;
	m->elem = elem;
	m->nprops = props ? 1 : 0;
	m->width = d->image_width;
	m->height = is_1d(t) || t == CL_MEM_OBJECT_IMAGE1D_ARRAY ? 1 : d->image_height;
	m->depth = t == CL_MEM_OBJECT_IMAGE3D ? d->image_depth : 1;
	m->array = is_array(t) ? d->image_array_size : 0;
	struct gx_create_image r = {.id = m->o.id, .context = c->o.id, .flags = flags, .order = f->image_channel_order, .type = f->image_channel_data_type,
		.image_type = t, .width = m->width, .height = is_1d(t) || t == CL_MEM_OBJECT_IMAGE1D_ARRAY ? 0 : m->height, .depth = t == CL_MEM_OBJECT_IMAGE3D ? m->depth : 0,
		.array_size = m->array, .buffer = m->parent ? m->parent->o.id : 0};
	if (m->parent)
		r.row_pitch = d->image_row_pitch;
	uint64_t stage = 0, bytes = 0;
	if (host) {
		uint64_t z = m->array ? m->array : m->depth;
		m->host_row = d->image_row_pitch ? d->image_row_pitch : m->width * elem;
		m->host_slice = d->image_slice_pitch && z > 0 && (m->array || t == CL_MEM_OBJECT_IMAGE3D) ? d->image_slice_pitch : m->host_row * m->height;
		m->host = full & CL_MEM_USE_HOST_PTR ? host : NULL;
		struct layout l = {host, m->host_row, m->host_slice, m->width * elem, m->height, z};
		bytes = gx_layout_bytes(&l);
		if (!gx_content_apart(bytes) && !(err = gx_stage_wait(bytes, &stage))) {
			gx_pack(S.arena + stage, &l);
			r.mode = GX_DATA_STAGED;
			r.stage_off = stage;
			r.stage_len = bytes;
		}
	} else if (m->parent && m->parent->host) { /* uses its parent's host memory */
		m->host = m->parent->host;
		m->host_row = d->image_row_pitch ? d->image_row_pitch : m->parent->host_row ? m->parent->host_row : m->width * elem;
		m->host_slice = m->host_row * m->height;
	}
	struct gx_reply rep;
	if (!err && !(err = call_create_image(&r, &rep))) {
		m->size = gx_u64(&rep, 0);
		m->row = gx_u64(&rep, 1);
		m->slice = gx_u64(&rep, 2);
		uint64_t theirs = gx_u64(&rep, 3), least;
		gx_reply_free(&rep);
		/* The application allocates memory according to these values. */
		bool sliced = t == CL_MEM_OBJECT_IMAGE3D || m->array;
		if ((theirs && theirs != m->elem) || __builtin_mul_overflow(m->width, m->elem, &least) || m->row < least ||
			__builtin_mul_overflow(m->row, m->height, &least) || (sliced && m->slice < least))
			err = CL_OUT_OF_RESOURCES;
		else if (host && !r.mode)
			err = gx_content(m, host, m->host_row, m->host_slice);
		if (err)
			post_release(&(struct gx_release){.id = m->o.id});
		if (m->host && m->host_row) {
			m->row = m->host_row;
			if (t == CL_MEM_OBJECT_IMAGE3D || m->array)
				m->slice = m->host_slice;
		}
	}
	if (stage)
		gx_stage_free(stage, bytes);
	if (err) {
		gx_abandon(m);
		FAIL(err);
	}
	gx_link(m->parent ? (void *)m->parent : (void *)c);
	DONE(m);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateImage(cl_context c, cl_mem_flags flags, const cl_image_format *f, const cl_image_desc *d, void *host, cl_int *errcode_ret)
{
	return make_image(c, NULL, flags, f, d, host, errcode_ret);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateImageWithProperties(cl_context c, const cl_mem_properties *props, cl_mem_flags flags, const cl_image_format *f, const cl_image_desc *d, void *host, cl_int *errcode_ret)
{
	return make_image(c, props, flags, f, d, host, errcode_ret);
}

/* The functions of OpenCL 1.0 report a bad size where the newer one reports a bad descriptor. */
static cl_mem legacy(cl_context c, cl_mem_flags flags, const cl_image_format *f, const cl_image_desc *d, void *host, cl_int *errcode_ret)
{
	cl_int err;
	cl_mem m = make_image(c, NULL, flags, f, d, host, &err);
	if (errcode_ret)
		*errcode_ret = err == CL_INVALID_IMAGE_DESCRIPTOR ? CL_INVALID_IMAGE_SIZE : err;
	return m;
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateImage2D(cl_context c, cl_mem_flags flags, const cl_image_format *f, size_t w, size_t h, size_t row, void *host, cl_int *errcode_ret)
{
	cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = w, .image_height = h, .image_row_pitch = row};
	return legacy(c, flags, f, &d, host, errcode_ret);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateImage3D(cl_context c, cl_mem_flags flags, const cl_image_format *f, size_t w, size_t h, size_t z, size_t row, size_t slice, void *host, cl_int *errcode_ret)
{
	cl_image_desc d = {.image_type = CL_MEM_OBJECT_IMAGE3D, .image_width = w, .image_height = h, .image_depth = z, .image_row_pitch = row, .image_slice_pitch = slice};
	return legacy(c, flags, f, &d, host, errcode_ret);
}

CL_API_ENTRY cl_int CL_API_CALL clGetSupportedImageFormats(cl_context c, cl_mem_flags flags, cl_mem_object_type type, cl_uint n, cl_image_format *list, cl_uint *count)
{
	if (!gx_ok(c, T_CONTEXT))
		return CL_INVALID_CONTEXT;
	cl_mem_flags plain = flags & ~(cl_mem_flags)CL_MEM_KERNEL_READ_AND_WRITE;
	if (gx_mem_flags(plain) || !is_image_type(type) || (n == 0 && list))
		return CL_INVALID_VALUE;
	if (!c->images) {
		if (count)
			*count = 0;
		return CL_SUCCESS;
	}
	struct gx_reply r;
	TRY(call_image_formats(&(struct gx_image_formats){.context = c->o.id, .flags = flags, .image_type = type}, &r));
	cl_uint have = (cl_uint)(r.len / 8);
	for (cl_uint i = 0; list && i < n && i < have; i++) {
		uint32_t f[2];
		memcpy(f, r.data + 8 * i, 8);
		list[i].image_channel_order = f[0];
		list[i].image_channel_data_type = f[1];
	}
	if (count)
		*count = have;
	gx_reply_free(&r);
	return CL_SUCCESS;
}

CL_API_ENTRY cl_int CL_API_CALL clGetImageInfo(cl_mem m, cl_image_info name, INFO_ARGS)
{
	if (!gx_ok(m, T_MEM) || m->type == CL_MEM_OBJECT_BUFFER)
		return CL_INVALID_MEM_OBJECT;
	bool flat = is_1d(m->type) || m->type == CL_MEM_OBJECT_IMAGE1D_ARRAY;
	bool sliced = m->type == CL_MEM_OBJECT_IMAGE3D || m->array;
	switch (name) {
	case CL_IMAGE_FORMAT: INFO(cl_image_format, m->format);
	case CL_IMAGE_ELEMENT_SIZE: INFO(size_t, m->elem);
	case CL_IMAGE_ROW_PITCH: INFO(size_t, m->row);
	case CL_IMAGE_SLICE_PITCH: INFO(size_t, sliced ? m->slice : 0);
	case CL_IMAGE_WIDTH: INFO(size_t, m->width);
	case CL_IMAGE_HEIGHT: INFO(size_t, flat ? 0 : m->height);
	case CL_IMAGE_DEPTH: INFO(size_t, m->type == CL_MEM_OBJECT_IMAGE3D ? m->depth : 0);
	case CL_IMAGE_ARRAY_SIZE: INFO(size_t, m->array);
	case CL_IMAGE_BUFFER: INFO(cl_mem, m->buffer_info);
	case CL_IMAGE_NUM_MIP_LEVELS:
	case CL_IMAGE_NUM_SAMPLES: INFO(cl_uint, 0);
	}
	return CL_INVALID_VALUE;
}

/* gx_img_region checks a region of an image, in pixels. */
cl_int gx_img_region(cl_mem m, const size_t *origin, const size_t *region)
{
	if (!origin || !region)
		return CL_INVALID_VALUE;
	uint64_t size[3] = {m->width, m->height, m->depth};
	if (m->type == CL_MEM_OBJECT_IMAGE1D_ARRAY)
		size[1] = m->array;
	if (m->type == CL_MEM_OBJECT_IMAGE2D_ARRAY)
		size[2] = m->array;
	for (int i = 0; i < 3; i++)
		if (!region[i] || origin[i] >= size[i] || region[i] > size[i] - origin[i])
			return CL_INVALID_VALUE;
	return CL_SUCCESS;
}
