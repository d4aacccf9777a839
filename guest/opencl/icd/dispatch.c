/* The table through which the ICD loader calls. Every entry is set, because loaders do not check. */
#include "gx.h"

CL_API_ENTRY cl_int CL_API_CALL clIcdGetPlatformIDsKHR(cl_uint n, cl_platform_id *list, cl_uint *count);

/* The Direct3D entries have no type except on Windows. Their functions return an error, or NULL if they have an
 * error argument. */
static cl_int d3d_refuse(void) { return CL_INVALID_OPERATION; }
static cl_mem d3d_create4(cl_context c, cl_mem_flags f, void *r, cl_int *errcode_ret)
{
	(void)c, (void)f, (void)r;
	FAIL(CL_INVALID_OPERATION);
}
static cl_mem d3d_create5(cl_context c, cl_mem_flags f, void *r, cl_uint s, cl_int *errcode_ret)
{
	(void)c, (void)f, (void)r, (void)s;
	FAIL(CL_INVALID_OPERATION);
}
static cl_mem dx9_create(cl_context c, cl_mem_flags f, cl_uint t, void *i, cl_uint p, cl_int *errcode_ret)
{
	(void)c, (void)f, (void)t, (void)i, (void)p;
	FAIL(CL_INVALID_OPERATION);
}

/* names that an application or loader may request with clGetExtensionFunctionAddress */
static const struct { const char *name; void *fn; } extensions[] = {
	{"clIcdGetPlatformIDsKHR", (void *)clIcdGetPlatformIDsKHR},
	{"clGetPlatformInfo", (void *)clGetPlatformInfo},
	{"clGetKernelSubGroupInfoKHR", (void *)clGetKernelSubGroupInfo},
	{"clCreateProgramWithILKHR", (void *)clCreateProgramWithIL},
	{"clCreateCommandQueueWithPropertiesKHR", (void *)clCreateCommandQueueWithProperties},
};

__attribute__((visibility("default"))) CL_API_ENTRY void *CL_API_CALL clGetExtensionFunctionAddress(const char *name)
{
	for (size_t i = 0; name && i < COUNT(extensions); i++)
		if (!strcmp(name, extensions[i].name))
			return extensions[i].fn;
	return NULL;
}

CL_API_ENTRY void *CL_API_CALL clGetExtensionFunctionAddressForPlatform(cl_platform_id p, const char *name)
{
	return p == &gx_platform ? clGetExtensionFunctionAddress(name) : NULL;
}

CL_API_ENTRY cl_int CL_API_CALL clGetKernelSubGroupInfoKHR(cl_kernel k, cl_device_id d, cl_kernel_sub_group_info name, size_t in_size, const void *in, INFO_ARGS)
{
	return clGetKernelSubGroupInfo(k, d, name, in_size, in, size, value, size_ret);
}

const cl_icd_dispatch gx_dispatch = {
	.clGetPlatformIDs = clGetPlatformIDs,
	.clGetPlatformInfo = clGetPlatformInfo,
	.clGetDeviceIDs = clGetDeviceIDs,
	.clGetDeviceInfo = clGetDeviceInfo,
	.clCreateContext = clCreateContext,
	.clCreateContextFromType = clCreateContextFromType,
	.clRetainContext = clRetainContext,
	.clReleaseContext = clReleaseContext,
	.clGetContextInfo = clGetContextInfo,
	.clCreateCommandQueue = clCreateCommandQueue,
	.clRetainCommandQueue = clRetainCommandQueue,
	.clReleaseCommandQueue = clReleaseCommandQueue,
	.clGetCommandQueueInfo = clGetCommandQueueInfo,
	.clSetCommandQueueProperty = clSetCommandQueueProperty,
	.clCreateBuffer = clCreateBuffer,
	.clCreateImage2D = clCreateImage2D,
	.clCreateImage3D = clCreateImage3D,
	.clRetainMemObject = clRetainMemObject,
	.clReleaseMemObject = clReleaseMemObject,
	.clGetSupportedImageFormats = clGetSupportedImageFormats,
	.clGetMemObjectInfo = clGetMemObjectInfo,
	.clGetImageInfo = clGetImageInfo,
	.clCreateSampler = clCreateSampler,
	.clRetainSampler = clRetainSampler,
	.clReleaseSampler = clReleaseSampler,
	.clGetSamplerInfo = clGetSamplerInfo,
	.clCreateProgramWithSource = clCreateProgramWithSource,
	.clCreateProgramWithBinary = clCreateProgramWithBinary,
	.clRetainProgram = clRetainProgram,
	.clReleaseProgram = clReleaseProgram,
	.clBuildProgram = clBuildProgram,
	.clUnloadCompiler = clUnloadCompiler,
	.clGetProgramInfo = clGetProgramInfo,
	.clGetProgramBuildInfo = clGetProgramBuildInfo,
	.clCreateKernel = clCreateKernel,
	.clCreateKernelsInProgram = clCreateKernelsInProgram,
	.clRetainKernel = clRetainKernel,
	.clReleaseKernel = clReleaseKernel,
	.clSetKernelArg = clSetKernelArg,
	.clGetKernelInfo = clGetKernelInfo,
	.clGetKernelWorkGroupInfo = clGetKernelWorkGroupInfo,
	.clWaitForEvents = clWaitForEvents,
	.clGetEventInfo = clGetEventInfo,
	.clRetainEvent = clRetainEvent,
	.clReleaseEvent = clReleaseEvent,
	.clGetEventProfilingInfo = clGetEventProfilingInfo,
	.clFlush = clFlush,
	.clFinish = clFinish,
	.clEnqueueReadBuffer = clEnqueueReadBuffer,
	.clEnqueueWriteBuffer = clEnqueueWriteBuffer,
	.clEnqueueCopyBuffer = clEnqueueCopyBuffer,
	.clEnqueueReadImage = clEnqueueReadImage,
	.clEnqueueWriteImage = clEnqueueWriteImage,
	.clEnqueueCopyImage = clEnqueueCopyImage,
	.clEnqueueCopyImageToBuffer = clEnqueueCopyImageToBuffer,
	.clEnqueueCopyBufferToImage = clEnqueueCopyBufferToImage,
	.clEnqueueMapBuffer = clEnqueueMapBuffer,
	.clEnqueueMapImage = clEnqueueMapImage,
	.clEnqueueUnmapMemObject = clEnqueueUnmapMemObject,
	.clEnqueueNDRangeKernel = clEnqueueNDRangeKernel,
	.clEnqueueTask = clEnqueueTask,
	.clEnqueueNativeKernel = clEnqueueNativeKernel,
	.clEnqueueMarker = clEnqueueMarker,
	.clEnqueueWaitForEvents = clEnqueueWaitForEvents,
	.clEnqueueBarrier = clEnqueueBarrier,
	.clGetExtensionFunctionAddress = clGetExtensionFunctionAddress,
	.clCreateFromGLBuffer = clCreateFromGLBuffer,
	.clCreateFromGLTexture2D = clCreateFromGLTexture2D,
	.clCreateFromGLTexture3D = clCreateFromGLTexture3D,
	.clCreateFromGLRenderbuffer = clCreateFromGLRenderbuffer,
	.clGetGLObjectInfo = clGetGLObjectInfo,
	.clGetGLTextureInfo = clGetGLTextureInfo,
	.clEnqueueAcquireGLObjects = clEnqueueAcquireGLObjects,
	.clEnqueueReleaseGLObjects = clEnqueueReleaseGLObjects,
	.clGetGLContextInfoKHR = clGetGLContextInfoKHR,
	.clGetDeviceIDsFromD3D10KHR = (void *)d3d_refuse,
	.clCreateFromD3D10BufferKHR = (void *)d3d_create4,
	.clCreateFromD3D10Texture2DKHR = (void *)d3d_create5,
	.clCreateFromD3D10Texture3DKHR = (void *)d3d_create5,
	.clEnqueueAcquireD3D10ObjectsKHR = (void *)d3d_refuse,
	.clEnqueueReleaseD3D10ObjectsKHR = (void *)d3d_refuse,
	.clSetEventCallback = clSetEventCallback,
	.clCreateSubBuffer = clCreateSubBuffer,
	.clSetMemObjectDestructorCallback = clSetMemObjectDestructorCallback,
	.clCreateUserEvent = clCreateUserEvent,
	.clSetUserEventStatus = clSetUserEventStatus,
	.clEnqueueReadBufferRect = clEnqueueReadBufferRect,
	.clEnqueueWriteBufferRect = clEnqueueWriteBufferRect,
	.clEnqueueCopyBufferRect = clEnqueueCopyBufferRect,
	.clCreateSubDevicesEXT = clCreateSubDevicesEXT,
	.clRetainDeviceEXT = clRetainDeviceEXT,
	.clReleaseDeviceEXT = clReleaseDeviceEXT,
	.clCreateEventFromGLsyncKHR = clCreateEventFromGLsyncKHR,
	.clCreateSubDevices = clCreateSubDevices,
	.clRetainDevice = clRetainDevice,
	.clReleaseDevice = clReleaseDevice,
	.clCreateImage = clCreateImage,
	.clCreateProgramWithBuiltInKernels = clCreateProgramWithBuiltInKernels,
	.clCompileProgram = clCompileProgram,
	.clLinkProgram = clLinkProgram,
	.clUnloadPlatformCompiler = clUnloadPlatformCompiler,
	.clGetKernelArgInfo = clGetKernelArgInfo,
	.clEnqueueFillBuffer = clEnqueueFillBuffer,
	.clEnqueueFillImage = clEnqueueFillImage,
	.clEnqueueMigrateMemObjects = clEnqueueMigrateMemObjects,
	.clEnqueueMarkerWithWaitList = clEnqueueMarkerWithWaitList,
	.clEnqueueBarrierWithWaitList = clEnqueueBarrierWithWaitList,
	.clGetExtensionFunctionAddressForPlatform = clGetExtensionFunctionAddressForPlatform,
	.clCreateFromGLTexture = clCreateFromGLTexture,
	.clGetDeviceIDsFromD3D11KHR = (void *)d3d_refuse,
	.clCreateFromD3D11BufferKHR = (void *)d3d_create4,
	.clCreateFromD3D11Texture2DKHR = (void *)d3d_create5,
	.clCreateFromD3D11Texture3DKHR = (void *)d3d_create5,
	.clCreateFromDX9MediaSurfaceKHR = (void *)dx9_create,
	.clEnqueueAcquireD3D11ObjectsKHR = (void *)d3d_refuse,
	.clEnqueueReleaseD3D11ObjectsKHR = (void *)d3d_refuse,
	.clGetDeviceIDsFromDX9MediaAdapterKHR = (void *)d3d_refuse,
	.clEnqueueAcquireDX9MediaSurfacesKHR = (void *)d3d_refuse,
	.clEnqueueReleaseDX9MediaSurfacesKHR = (void *)d3d_refuse,
	.clCreateFromEGLImageKHR = clCreateFromEGLImageKHR,
	.clEnqueueAcquireEGLObjectsKHR = clEnqueueAcquireEGLObjectsKHR,
	.clEnqueueReleaseEGLObjectsKHR = clEnqueueReleaseEGLObjectsKHR,
	.clCreateEventFromEGLSyncKHR = clCreateEventFromEGLSyncKHR,
	.clCreateCommandQueueWithProperties = clCreateCommandQueueWithProperties,
	.clCreatePipe = clCreatePipe,
	.clGetPipeInfo = clGetPipeInfo,
	.clSVMAlloc = clSVMAlloc,
	.clSVMFree = clSVMFree,
	.clEnqueueSVMFree = clEnqueueSVMFree,
	.clEnqueueSVMMemcpy = clEnqueueSVMMemcpy,
	.clEnqueueSVMMemFill = clEnqueueSVMMemFill,
	.clEnqueueSVMMap = clEnqueueSVMMap,
	.clEnqueueSVMUnmap = clEnqueueSVMUnmap,
	.clCreateSamplerWithProperties = clCreateSamplerWithProperties,
	.clSetKernelArgSVMPointer = clSetKernelArgSVMPointer,
	.clSetKernelExecInfo = clSetKernelExecInfo,
	.clGetKernelSubGroupInfoKHR = clGetKernelSubGroupInfoKHR,
	.clCloneKernel = clCloneKernel,
	.clCreateProgramWithIL = clCreateProgramWithIL,
	.clEnqueueSVMMigrateMem = clEnqueueSVMMigrateMem,
	.clGetDeviceAndHostTimer = clGetDeviceAndHostTimer,
	.clGetHostTimer = clGetHostTimer,
	.clGetKernelSubGroupInfo = clGetKernelSubGroupInfo,
	.clSetDefaultDeviceCommandQueue = clSetDefaultDeviceCommandQueue,
	.clSetProgramReleaseCallback = clSetProgramReleaseCallback,
	.clSetProgramSpecializationConstant = clSetProgramSpecializationConstant,
	.clCreateBufferWithProperties = clCreateBufferWithProperties,
	.clCreateImageWithProperties = clCreateImageWithProperties,
	.clSetContextDestructorCallback = clSetContextDestructorCallback,
};
