package executor

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
)

// limits are those of the device on which the executor runs.
type limits = gpuctlv1.Limits

type param struct {
	key   uint32
	value []byte
}

func p32(k, v uint32) param        { return param{k, binary.LittleEndian.AppendUint32(nil, v)} }
func p64(k uint32, v uint64) param { return param{k, binary.LittleEndian.AppendUint64(nil, v)} }
func pstr(k uint32, v string) param {
	return param{k, append([]byte(v), 0)}
}

// vendorParams are properties that have the vendor's values.
var vendorParams = []uint32{
	cl.DeviceVendorId, cl.DeviceMaxComputeUnits, cl.DeviceMaxWorkItemDimensions, cl.DeviceMaxWorkGroupSize,
	cl.DeviceMaxWorkItemSizes, cl.DevicePreferredVectorWidthChar, cl.DevicePreferredVectorWidthShort,
	cl.DevicePreferredVectorWidthInt, cl.DevicePreferredVectorWidthLong, cl.DevicePreferredVectorWidthFloat,
	cl.DevicePreferredVectorWidthDouble, cl.DevicePreferredVectorWidthHalf, cl.DeviceNativeVectorWidthChar,
	cl.DeviceNativeVectorWidthShort, cl.DeviceNativeVectorWidthInt, cl.DeviceNativeVectorWidthLong,
	cl.DeviceNativeVectorWidthFloat, cl.DeviceNativeVectorWidthDouble, cl.DeviceNativeVectorWidthHalf,
	cl.DeviceMaxClockFrequency, cl.DeviceAddressBits, cl.DeviceMaxReadImageArgs, cl.DeviceMaxWriteImageArgs,
	cl.DeviceMaxMemAllocSize, cl.DeviceImage2dMaxWidth, cl.DeviceImage2dMaxHeight, cl.DeviceImage3dMaxWidth,
	cl.DeviceImage3dMaxHeight, cl.DeviceImage3dMaxDepth, cl.DeviceImageSupport, cl.DeviceMaxParameterSize,
	cl.DeviceMaxSamplers, cl.DeviceMemBaseAddrAlign, cl.DeviceMinDataTypeAlignSize, cl.DeviceSingleFpConfig,
	cl.DeviceGlobalMemCacheType, cl.DeviceGlobalMemCachelineSize, cl.DeviceGlobalMemCacheSize,
	cl.DeviceMaxConstantBufferSize, cl.DeviceMaxConstantArgs, cl.DeviceLocalMemType, cl.DeviceLocalMemSize,
	cl.DeviceErrorCorrectionSupport, cl.DeviceProfilingTimerResolution, cl.DeviceEndianLittle, cl.DeviceAvailable,
	cl.DeviceCompilerAvailable, cl.DeviceVendor, cl.DeviceProfile, cl.DeviceOpenclCVersion,
	cl.DeviceHostUnifiedMemory, cl.DeviceLinkerAvailable, cl.DeviceImageMaxBufferSize, cl.DeviceImageMaxArraySize,
	cl.DevicePrintfBufferSize, cl.DevicePreferredInteropUserSync, cl.DevicePartitionMaxSubDevices,
	cl.DevicePartitionProperties, cl.DevicePartitionAffinityDomain, cl.DeviceDoubleFpConfig,
}

// laterParams are properties of OpenCL 2.x and 3.0, with the minimum that the specification
// requires. A device that does not know a property is assumed to offer the minimum.
func laterParams(version uint32) []param {
	return []param{
		p32(cl.DeviceMaxReadWriteImageArgs, 0), p32(cl.DeviceImagePitchAlignment, 0), p32(cl.DeviceImageBaseAddressAlignment, 0),
		p32(cl.DevicePreferredPlatformAtomicAlignment, 0), p32(cl.DevicePreferredGlobalAtomicAlignment, 0),
		p32(cl.DevicePreferredLocalAtomicAlignment, 0), p32(cl.DeviceMaxNumSubGroups, 0),
		p32(cl.DeviceSubGroupIndependentForwardProgress, 0), pstr(cl.DeviceIlVersion, ""),
		p32(cl.DeviceNumericVersion, version),
		{cl.DeviceIlsWithVersion, nil},
		p64(cl.DeviceAtomicMemoryCapabilities, cl.DeviceAtomicOrderRelaxed|cl.DeviceAtomicScopeWorkGroup),
		p64(cl.DeviceAtomicFenceCapabilities, cl.DeviceAtomicOrderRelaxed|cl.DeviceAtomicOrderAcqRel|cl.DeviceAtomicScopeWorkGroup),
		p32(cl.DeviceNonUniformWorkGroupSupport, 0),
		{cl.DeviceOpenclCAllVersions, nil},
		p64(cl.DevicePreferredWorkGroupSizeMultiple, 1), p32(cl.DeviceWorkGroupCollectiveFunctionsSupport, 0),
		p32(cl.DeviceGenericAddressSpaceSupport, 0),
		{cl.DeviceOpenclCFeatures, nil},
		pstr(cl.DeviceLatestConformanceVersionPassed, "v0000-01-01-00"),
	}
}

// ownParams are properties of the virtual device: what gpuctl does not offer on any
// vendor's device.
func ownParams() []param {
	return []param{
		p64(cl.DeviceSvmCapabilities, 0), p32(cl.DevicePipeSupport, 0), p32(cl.DeviceMaxPipeArgs, 0),
		p32(cl.DevicePipeMaxActiveReservations, 0), p32(cl.DevicePipeMaxPacketSize, 0),
		p64(cl.DeviceDeviceEnqueueCapabilities, 0), p64(cl.DeviceQueueOnDeviceProperties, 0),
		p32(cl.DeviceQueueOnDevicePreferredSize, 0), p32(cl.DeviceQueueOnDeviceMaxSize, 0),
		p32(cl.DeviceMaxOnDeviceQueues, 0), p32(cl.DeviceMaxOnDeviceEvents, 0),
		p64(cl.DeviceMaxGlobalVariableSize, 0), p64(cl.DeviceGlobalVariablePreferredTotalSize, 0),
		pstr(cl.DeviceBuiltInKernels, ""),
		{cl.DeviceBuiltInKernelsWithVersion, nil},
		p64(cl.DeviceExecutionCapabilities, cl.ExecKernel),
		pstr(cl.DriverVersion, "gpuctl 1"),
	}
}

// languageExtensions need nothing from the host API, so the application can use them.
var languageExtensions = map[string]bool{
	"cl_khr_byte_addressable_store": true, "cl_khr_global_int32_base_atomics": true, "cl_khr_global_int32_extended_atomics": true,
	"cl_khr_local_int32_base_atomics": true, "cl_khr_local_int32_extended_atomics": true, "cl_khr_int64_base_atomics": true,
	"cl_khr_int64_extended_atomics": true, "cl_khr_fp64": true, "cl_khr_fp16": true, "cl_khr_3d_image_writes": true,
	"cl_khr_subgroups": true, "cl_khr_subgroup_ballot": true, "cl_khr_subgroup_shuffle": true, "cl_khr_subgroup_shuffle_relative": true,
	"cl_khr_subgroup_extended_types": true, "cl_khr_subgroup_non_uniform_vote": true, "cl_khr_subgroup_non_uniform_arithmetic": true,
	"cl_khr_subgroup_clustered_reduce": true, "cl_khr_integer_dot_product": true, "cl_khr_select_fprounding_mode": true,
	"cl_nv_compiler_options": true, "cl_nv_pragma_unroll": true, "cl_ext_float_atomics": true,
}

// hiddenFeatures are OpenCL C features whose host functions gpuctl does not have, or whose
// state it cannot move.
var hiddenFeatures = map[string]bool{
	"__opencl_c_pipes": true, "__opencl_c_device_enqueue": true, "__opencl_c_program_scope_global_variables": true,
	"__opencl_c_ext_fp32_global_atomic_add": false,
}

func nameVersion(version uint32, name string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, version)
	n := make([]byte, 64)
	copy(n[:63], name)
	return append(b, n...)
}

// clVersion converts "OpenCL 1.2 …" or "OpenCL C 1.2 …" to a cl_version.
func clVersion(s string) uint32 {
	var major, minor uint32
	s = strings.TrimPrefix(strings.TrimPrefix(s, "OpenCL "), "C ")
	if n, _ := fmt.Sscanf(s, "%d.%d", &major, &minor); n != 2 {
		return 1 << 22
	}
	return major<<22 | minor<<12
}

func info(d cl.Device, key uint32) []byte {
	b, st := cl.GetDeviceInfo(d, key)
	if st != cl.Success {
		return nil
	}
	return b
}

func infoString(d cl.Device, key uint32) string { return cl.CString(info(d, key)) }

// number reads an info value of any width; 0 if the vendor does not have it.
func number(d cl.Device, key uint32) uint64 {
	b := info(d, key)
	switch {
	case len(b) >= 8:
		return cl.Uint64(b)
	case len(b) >= 4:
		return uint64(cl.Uint32(b))
	}
	return 0
}

// numbers reads a list of size_t.
func numbers(b []byte) []uint64 {
	var v []uint64
	for ; len(b) >= 8; b = b[8:] {
		v = append(v, cl.Uint64(b))
	}
	return v
}

// deviceLimits reads the device's limits from the vendor.
func deviceLimits(d cl.Device) *limits {
	l := &limits{
		GlobalMemory: number(d, cl.DeviceGlobalMemSize), MaxAlloc: number(d, cl.DeviceMaxMemAllocSize),
		LocalMemory: number(d, cl.DeviceLocalMemSize), MaxWorkGroupSize: number(d, cl.DeviceMaxWorkGroupSize),
		MaxWorkItemSizes: numbers(info(d, cl.DeviceMaxWorkItemSizes)), MaxConstantBuffer: number(d, cl.DeviceMaxConstantBufferSize),
		MaxParameterSize: number(d, cl.DeviceMaxParameterSize), Images: number(d, cl.DeviceImageSupport) != 0,
		Image2DMaxWidth: number(d, cl.DeviceImage2dMaxWidth), Image2DMaxHeight: number(d, cl.DeviceImage2dMaxHeight),
		Image3DMaxWidth: number(d, cl.DeviceImage3dMaxWidth), Image3DMaxHeight: number(d, cl.DeviceImage3dMaxHeight),
		Image3DMaxDepth: number(d, cl.DeviceImage3dMaxDepth), ImageMaxBufferSize: number(d, cl.DeviceImageMaxBufferSize),
		ImageMaxArraySize: number(d, cl.DeviceImageMaxArraySize), MaxSamplers: uint32(number(d, cl.DeviceMaxSamplers)),
		ComputeUnits: uint32(number(d, cl.DeviceMaxComputeUnits)), ClockMhz: uint32(number(d, cl.DeviceMaxClockFrequency)),
		Version: infoString(d, cl.DeviceVersion), CVersion: infoString(d, cl.DeviceOpenclCVersion),
		Extensions: strings.Fields(infoString(d, cl.DeviceExtensions)), Fp64: number(d, cl.DeviceDoubleFpConfig) != 0,
		OutOfOrder:           number(d, cl.DeviceQueueOnHostProperties)&cl.QueueOutOfOrderExecModeEnable != 0,
		MaxSubDevices:        number(d, cl.DevicePartitionMaxSubDevices),
		MemBaseAddrAlignBits: uint32(number(d, cl.DeviceMemBaseAddrAlign)),
	}
	for b := info(d, cl.DeviceOpenclCFeatures); len(b) >= 68; b = b[68:] {
		l.CFeatures = append(l.CFeatures, cl.CString(b[4:68]))
	}
	if il := infoString(d, cl.DeviceIlVersion); il != "" {
		l.IlVersions = strings.Fields(il)
	}
	return l
}

// deviceParams returns all properties of the device that the application can ever read.
// They are read once, when the session begins, and stay the same through every swap.
func deviceParams(d cl.Device, v *gpuctlv1.VirtualDevice, l *limits) []param {
	var ps []param
	for _, k := range vendorParams {
		if b := info(d, k); b != nil {
			ps = append(ps, param{k, b})
		}
	}
	version := clVersion(l.Version)
	for _, def := range laterParams(version) {
		if b, st := cl.GetDeviceInfo(d, def.key); st == cl.Success {
			def.value = b
		}
		ps = append(ps, def)
	}
	ps = append(ps, ownParams()...)
	name := v.GetName()
	if name == "" {
		name = infoString(d, cl.DeviceName)
	}
	types := map[string]uint64{"gpu": cl.DeviceTypeGpu, "cpu": cl.DeviceTypeCpu, "accelerator": cl.DeviceTypeAccelerator}
	typ, ok := types[v.GetType()]
	if !ok {
		typ = number(d, cl.DeviceType) &^ cl.DeviceTypeDefault
		if typ&(typ-1) != 0 { // a device that reports several types
			typ = cl.DeviceTypeGpu
		}
	}
	memory := l.GlobalMemory
	if m := v.GetGlobalMemory(); m > 0 && m < memory {
		memory = m
	}
	queueProps := number(d, cl.DeviceQueueOnHostProperties) | cl.QueueProfilingEnable
	var exts []string
	var extv, cver, feat []byte
	for _, e := range l.Extensions {
		if languageExtensions[e] {
			exts = append(exts, e)
			extv = append(extv, nameVersion(1<<22, e)...)
		}
	}
	if b := info(d, cl.DeviceOpenclCAllVersions); len(b) > 0 {
		cver = b
	} else {
		for _, w := range []uint32{1 << 22, 1<<22 | 1<<12, 1<<22 | 2<<12} {
			if w <= clVersion(l.CVersion) {
				cver = append(cver, nameVersion(w, "OpenCL C")...)
			}
		}
	}
	for b := info(d, cl.DeviceOpenclCFeatures); len(b) >= 68; b = b[68:] {
		if !hiddenFeatures[cl.CString(b[4:68])] {
			feat = append(feat, b[:68]...)
		}
	}
	over := []param{
		pstr(cl.DeviceName, name), p64(cl.DeviceType, typ), p64(cl.DeviceGlobalMemSize, memory),
		p64(cl.DeviceMaxMemAllocSize, min(l.MaxAlloc, memory)),
		pstr(cl.DeviceVersion, fmt.Sprintf("OpenCL %d.%d gpuctl", version>>22, version>>12&0x3ff)),
		p64(cl.DeviceQueueOnHostProperties, queueProps), pstr(cl.DeviceExtensions, strings.Join(exts, " ")),
		{cl.DeviceExtensionsWithVersion, extv},
		{cl.DeviceOpenclCAllVersions, cver},
		{cl.DeviceOpenclCFeatures, feat},
	}
	byKey := map[uint32]int{}
	out := ps[:0:0]
	for _, p := range append(ps, over...) {
		if i, ok := byKey[p.key]; ok {
			out[i] = p
			continue
		}
		byKey[p.key] = len(out)
		out = append(out, p)
	}
	return out
}

func platformParams() []param {
	return []param{
		pstr(cl.PlatformProfile, "FULL_PROFILE"), pstr(cl.PlatformVersion, "OpenCL 3.0 gpuctl"), pstr(cl.PlatformName, "gpuctl"),
		pstr(cl.PlatformVendor, "gpuctl"), pstr(cl.PlatformExtensions, "cl_khr_icd"), pstr(cl.PlatformIcdSuffixKhr, "GPUCTL"),
		p64(cl.PlatformHostTimerResolution, 1), p32(cl.PlatformNumericVersion, 3<<22),
		{cl.PlatformExtensionsWithVersion, nameVersion(1<<22, "cl_khr_icd")},
	}
}

func appendParams(b []byte, ps []param) []byte {
	for _, p := range ps {
		b = binary.LittleEndian.AppendUint32(b, p.key)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p.value)))
		b = append(b, p.value...)
		for len(b)%8 != 0 {
			b = append(b, 0)
		}
	}
	return b
}

func pair(b []byte, x, y uint32) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(b, x), y)
}

// sessionInfo returns the answer to session_info.
func (s *session) sessionInfo() []byte {
	pp := platformParams()
	b := appendParams(pair(nil, uint32(len(pp)), 0), pp)
	b = pair(b, uint32(len(s.devices)), 0)
	for _, d := range s.devices {
		ps := deviceParams(d.vendor, s.cfg.Device, deviceLimits(d.vendor))
		b = appendParams(pair(b, d.id, uint32(len(ps))), ps)
	}
	return b
}

// memoryLimit returns how many bytes the session may allocate on this device.
func (s *session) memoryLimit() uint64 {
	l := s.limits.GlobalMemory
	if m := s.cfg.Device.GetGlobalMemory(); m > 0 && m < l {
		l = m
	}
	if l == 0 {
		return math.MaxUint64
	}
	return l
}
