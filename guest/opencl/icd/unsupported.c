/* Optional features that the virtual devices do not have. The queries report that; the calls return the errors that
 * the specification requires. Their prototypes differ between versions of the headers, so those of other APIs are
 * not included. */
#include "gx.h"

/* ---- shared virtual memory, pipes */

CL_API_ENTRY void *CL_API_CALL clSVMAlloc(cl_context c, cl_svm_mem_flags flags, size_t size, cl_uint align)
{
	(void)c, (void)flags, (void)size, (void)align;
	return NULL;
}

CL_API_ENTRY void CL_API_CALL clSVMFree(cl_context c, void *p) { (void)c, (void)p; }

static cl_int refuse(cl_command_queue q) { return gx_ok(q, T_QUEUE) ? CL_INVALID_OPERATION : CL_INVALID_COMMAND_QUEUE; }

CL_API_ENTRY cl_int CL_API_CALL clEnqueueSVMFree(cl_command_queue q, cl_uint n, void *ptrs[], void(CL_CALLBACK *fn)(cl_command_queue, cl_uint, void *[], void *), void *user,
	cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)n, (void)ptrs, (void)fn, (void)user, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueSVMMemcpy(cl_command_queue q, cl_bool b, void *d, const void *s, size_t n, cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)b, (void)d, (void)s, (void)n, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueSVMMemFill(cl_command_queue q, void *d, const void *p, size_t pn, size_t n, cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)d, (void)p, (void)pn, (void)n, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueSVMMap(cl_command_queue q, cl_bool b, cl_map_flags f, void *p, size_t n, cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)b, (void)f, (void)p, (void)n, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueSVMUnmap(cl_command_queue q, void *p, cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)p, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueSVMMigrateMem(cl_command_queue q, cl_uint n, const void **p, const size_t *s, cl_mem_migration_flags f, cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)n, (void)p, (void)s, (void)f, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreatePipe(cl_context c, cl_mem_flags f, cl_uint size, cl_uint n, const cl_pipe_properties *p, cl_int *errcode_ret)
{
	(void)f, (void)size, (void)n, (void)p;
	FAIL(gx_ok(c, T_CONTEXT) ? CL_INVALID_OPERATION : CL_INVALID_CONTEXT);
}

CL_API_ENTRY cl_int CL_API_CALL clGetPipeInfo(cl_mem m, cl_pipe_info name, INFO_ARGS)
{
	(void)m, (void)name, (void)size, (void)value, (void)size_ret;
	return CL_INVALID_MEM_OBJECT;
}

/* ---- cl_ext_device_fission is not offered; retain and release call the functions of the core */

CL_API_ENTRY cl_int CL_API_CALL clCreateSubDevicesEXT(cl_device_id d, const cl_device_partition_property_ext *p, cl_uint n, cl_device_id *out, cl_uint *count)
{
	(void)p, (void)n, (void)out, (void)count;
	return gx_device_ok(d) ? CL_INVALID_VALUE : CL_INVALID_DEVICE;
}

CL_API_ENTRY cl_int CL_API_CALL clRetainDeviceEXT(cl_device_id d) { return clRetainDevice(d); }
CL_API_ENTRY cl_int CL_API_CALL clReleaseDeviceEXT(cl_device_id d) { return clReleaseDevice(d); }

/* ---- sharing with OpenGL, Direct3D, EGL */

CL_API_ENTRY cl_mem CL_API_CALL clCreateFromGLBuffer(cl_context c, cl_mem_flags f, cl_GLuint b, int *errcode_ret)
{
	(void)c, (void)f, (void)b;
	FAIL(CL_INVALID_OPERATION);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateFromGLTexture2D(cl_context c, cl_mem_flags f, cl_GLenum t, cl_GLint l, cl_GLuint x, cl_int *errcode_ret)
{
	(void)c, (void)f, (void)t, (void)l, (void)x;
	FAIL(CL_INVALID_OPERATION);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateFromGLTexture3D(cl_context c, cl_mem_flags f, cl_GLenum t, cl_GLint l, cl_GLuint x, cl_int *errcode_ret)
{
	(void)c, (void)f, (void)t, (void)l, (void)x;
	FAIL(CL_INVALID_OPERATION);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateFromGLTexture(cl_context c, cl_mem_flags f, cl_GLenum t, cl_GLint l, cl_GLuint x, cl_int *errcode_ret)
{
	(void)c, (void)f, (void)t, (void)l, (void)x;
	FAIL(CL_INVALID_OPERATION);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateFromGLRenderbuffer(cl_context c, cl_mem_flags f, cl_GLuint b, cl_int *errcode_ret)
{
	(void)c, (void)f, (void)b;
	FAIL(CL_INVALID_OPERATION);
}

CL_API_ENTRY cl_int CL_API_CALL clGetGLObjectInfo(cl_mem m, cl_gl_object_type *t, cl_GLuint *n)
{
	(void)t, (void)n;
	return gx_ok(m, T_MEM) ? CL_INVALID_GL_OBJECT : CL_INVALID_MEM_OBJECT;
}

CL_API_ENTRY cl_int CL_API_CALL clGetGLTextureInfo(cl_mem m, cl_gl_texture_info i, INFO_ARGS)
{
	(void)i, (void)size, (void)value, (void)size_ret;
	return gx_ok(m, T_MEM) ? CL_INVALID_GL_OBJECT : CL_INVALID_MEM_OBJECT;
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueAcquireGLObjects(cl_command_queue q, cl_uint n, const cl_mem *m, cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)n, (void)m, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueReleaseGLObjects(cl_command_queue q, cl_uint n, const cl_mem *m, cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)n, (void)m, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_int CL_API_CALL clGetGLContextInfoKHR(const cl_context_properties *p, cl_gl_context_info i, INFO_ARGS)
{
	(void)p, (void)i, (void)size, (void)value, (void)size_ret;
	return CL_INVALID_OPERATION;
}

CL_API_ENTRY cl_event CL_API_CALL clCreateEventFromGLsyncKHR(cl_context c, cl_GLsync s, cl_int *errcode_ret)
{
	(void)c, (void)s;
	FAIL(CL_INVALID_OPERATION);
}

CL_API_ENTRY cl_mem CL_API_CALL clCreateFromEGLImageKHR(cl_context c, CLeglDisplayKHR d, CLeglImageKHR i, cl_mem_flags f, const cl_egl_image_properties_khr *p, cl_int *errcode_ret)
{
	(void)c, (void)d, (void)i, (void)f, (void)p;
	FAIL(CL_INVALID_OPERATION);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueAcquireEGLObjectsKHR(cl_command_queue q, cl_uint n, const cl_mem *m, cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)n, (void)m, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_int CL_API_CALL clEnqueueReleaseEGLObjectsKHR(cl_command_queue q, cl_uint n, const cl_mem *m, cl_uint nw, const cl_event *w, cl_event *e)
{
	(void)n, (void)m, (void)nw, (void)w, (void)e;
	return refuse(q);
}

CL_API_ENTRY cl_event CL_API_CALL clCreateEventFromEGLSyncKHR(cl_context c, CLeglSyncKHR s, CLeglDisplayKHR d, cl_int *errcode_ret)
{
	(void)c, (void)s, (void)d;
	FAIL(CL_INVALID_OPERATION);
}
