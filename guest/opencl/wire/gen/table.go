package main

// kind is the wire type of one field of a request.
type kind int

const (
	u32   kind = iota // unsigned, also object ids (0 is "no object")
	i32               // OpenCL error and status codes
	u64               // sizes, offsets and bit-fields
	u32s              // a list, mostly object ids
	u64s              // a list of sizes or properties
	bytes             // opaque bytes
)

type field struct {
	name string
	kind kind
	doc  string
}

type op struct {
	name   string // lower_snake
	doc    string
	fields []field
}

// transfer fields shared by every command that a queue takes.
var command = []field{
	{"event", u32, "id for the command's event, 0 when the application asked for none"},
	{"wait", u32s, "ids of the events in the wait list"},
}

func cmd(f ...field) []field { return append(f, command...) }

// data says where the bytes of a transfer lie; see Data in guest/opencl/wire.
var data = []field{
	{"mode", u32, "where the data lies: DATA_NONE, DATA_INLINE, DATA_STAGED, DATA_BULK"},
	{"stage_off", u64, "arena offset of staged data; of a bulk transfer the bytes that have been moved already: 0 from a client"},
	{"stage_len", u64, "bytes of that region"},
	{"pend", u32, "index of the completion word to set when the transfer is done, 0 for none"},
}

func xfer(f ...field) []field { return append(append(f, data...), command...) }

var imgRegion = []field{
	{"origin", u64s, "x, y, z in pixels"},
	{"region", u64s, "width, height, depth in pixels"},
}

// table is the whole protocol. Append only: an op's number is its place here.
// Names of fields have a meaning in commands: mem, image, src, dst and mems are
// memory objects that outlive their release until the command is over; a caller
// that set blocking waits for that.
var table = []op{
	{"session_info", "platform and device properties; the first call of a session", nil},
	{"fetch", "next part of a reply that did not fit into its slot", []field{
		{"token", u32, "from the reply's header"}, {"offset", u64, "where to go on; ^0 drops the rest"}}},
	{"release", "the last reference of any object is gone", []field{
		{"id", u32, ""}, {"callback", u32, "token to deliver once the memory object is really gone, 0 for none"}}},
	{"create_sub_devices", "partition a device", []field{
		{"parent", u32, ""}, {"ids", u32s, "ids for the new devices, as many as the application can take; none to only count"}, {"props", u64s, "cl_device_partition_property list with its final 0"}}},
	{"create_context", "", []field{{"id", u32, ""}, {"devices", u32s, ""}}},
	{"create_queue", "", []field{
		{"id", u32, ""}, {"context", u32, ""}, {"device", u32, ""}, {"props", u64, "cl_command_queue_properties"}}},
	{"flush", "", []field{{"queue", u32, ""}}},
	{"finish", "", []field{{"queue", u32, ""}}},
	{"create_buffer", "", append([]field{
		{"id", u32, ""}, {"context", u32, ""}, {"flags", u64, "as the application gave them"}, {"size", u64, "bytes"}, {"content", bytes, "initial content when mode is DATA_INLINE"}}, data...)},
	{"create_sub_buffer", "", []field{
		{"id", u32, ""}, {"parent", u32, ""}, {"flags", u64, ""}, {"origin", u64, ""}, {"size", u64, ""}}},
	{"create_image", "", append([]field{
		{"id", u32, ""}, {"context", u32, ""}, {"flags", u64, ""}, {"order", u32, ""}, {"type", u32, "channel data type"},
		{"image_type", u32, "cl_mem_object_type"}, {"width", u64, ""}, {"height", u64, ""}, {"depth", u64, ""}, {"array_size", u64, ""},
		{"row_pitch", u64, "of an image made from a buffer; host data is always sent tightly packed"}, {"slice_pitch", u64, ""},
		{"mip_levels", u32, ""}, {"samples", u32, ""}, {"buffer", u32, "buffer or image the image is made from"}}, data...)},
	{"image_formats", "supported image formats", []field{{"context", u32, ""}, {"flags", u64, ""}, {"image_type", u32, ""}}},
	{"create_sampler", "", []field{
		{"id", u32, ""}, {"context", u32, ""}, {"normalized", u32, ""}, {"addressing", u32, ""}, {"filter", u32, ""}}},
	{"create_program_source", "", append([]field{{"id", u32, ""}, {"context", u32, ""}, {"source", bytes, "when mode is DATA_INLINE"}}, data...)},
	{"create_program_il", "", append([]field{{"id", u32, ""}, {"context", u32, ""}, {"il", bytes, "when mode is DATA_INLINE"}}, data...)},
	{"create_program_binary", "", append([]field{
		{"id", u32, ""}, {"context", u32, ""}, {"devices", u32s, ""}, {"binary", bytes, "when mode is DATA_INLINE"}}, data...)},
	{"build_program", "", []field{
		{"program", u32, ""}, {"devices", u32s, "none for all"}, {"options", bytes, ""}, {"callback", u32, ""}}},
	{"compile_program", "", []field{
		{"program", u32, ""}, {"devices", u32s, ""}, {"options", bytes, ""}, {"headers", u32s, "programs"}, {"names", bytes, "their include names, each ended by NUL"}, {"callback", u32, ""}}},
	{"link_program", "", []field{
		{"id", u32, ""}, {"context", u32, ""}, {"devices", u32s, ""}, {"options", bytes, ""}, {"inputs", u32s, ""}, {"callback", u32, ""}}},
	{"program_info", "CL_PROGRAM_{NUM_KERNELS,KERNEL_NAMES,BINARY_SIZES,BINARIES,IL,SCOPE_*}", []field{{"program", u32, ""}, {"param", u32, ""}}},
	{"build_info", "", []field{{"program", u32, ""}, {"device", u32, ""}, {"param", u32, ""}}},
	{"spec_constant", "", []field{{"program", u32, ""}, {"spec", u32, ""}, {"value", bytes, ""}}},
	{"create_kernel", "", []field{{"id", u32, ""}, {"program", u32, ""}, {"name", bytes, ""}}},
	{"clone_kernel", "", []field{{"id", u32, ""}, {"kernel", u32, ""}}},
	{"set_arg", "", []field{
		{"kernel", u32, ""}, {"index", u32, ""}, {"kind", u32, "ARG_*"}, {"object", u32, "memory object or sampler"}, {"size", u64, "arg_size as given"}, {"value", bytes, "of a plain argument"}}},
	{"kernel_info", "", []field{{"kernel", u32, ""}, {"param", u32, ""}}},
	{"kernel_arg_info", "", []field{{"kernel", u32, ""}, {"index", u32, ""}, {"param", u32, ""}}},
	{"kernel_wg_info", "", []field{{"kernel", u32, ""}, {"device", u32, ""}, {"param", u32, ""}}},
	{"kernel_sub_group_info", "", []field{{"kernel", u32, ""}, {"device", u32, ""}, {"param", u32, ""}, {"input", u64s, ""}}},
	{"create_user_event", "", []field{{"id", u32, ""}, {"context", u32, ""}}},
	{"set_user_event", "", []field{{"event", u32, ""}, {"status", i32, ""}}},
	{"wait_events", "maybe the times of the one event", []field{{"wait", u32s, ""}}},
	{"event_status", "execution status", []field{{"event", u32, ""}}},
	{"event_profiling", "queued, submit, start, end, complete in ns", []field{{"event", u32, ""}}},
	{"event_callback", "", []field{{"event", u32, ""}, {"type", i32, ""}, {"callback", u32, ""}}},
	{"device_timer", "device and host timestamps", []field{{"device", u32, ""}}},
	{"ndrange", "clEnqueueNDRangeKernel and clEnqueueTask", cmd(
		field{"queue", u32, ""}, field{"kernel", u32, ""}, field{"dims", u32, "1 to 3"}, field{"has", u32, "bit 0: global offset, bit 1: local size, bit 2: it is a task"},
		field{"off0", u64, ""}, field{"off1", u64, ""}, field{"off2", u64, ""},
		field{"glob0", u64, ""}, field{"glob1", u64, ""}, field{"glob2", u64, ""},
		field{"loc0", u64, ""}, field{"loc1", u64, ""}, field{"loc2", u64, ""})},
	{"read_buffer", "", xfer(
		field{"queue", u32, ""}, field{"mem", u32, ""}, field{"blocking", u32, ""}, field{"offset", u64, ""}, field{"size", u64, ""})},
	{"write_buffer", "", xfer(
		field{"queue", u32, ""}, field{"mem", u32, ""}, field{"blocking", u32, ""}, field{"offset", u64, ""}, field{"size", u64, ""}, field{"content", bytes, ""})},
	{"read_buffer_rect", "into tightly packed staged data", xfer(
		field{"queue", u32, ""}, field{"mem", u32, ""}, field{"blocking", u32, ""}, field{"origin", u64s, "bytes, rows, slices"}, field{"region", u64s, "bytes, rows, slices"}, field{"row_pitch", u64, "of the buffer"}, field{"slice_pitch", u64, ""})},
	{"write_buffer_rect", "from tightly packed staged data", xfer(
		field{"queue", u32, ""}, field{"mem", u32, ""}, field{"blocking", u32, ""}, field{"origin", u64s, ""}, field{"region", u64s, ""}, field{"row_pitch", u64, ""}, field{"slice_pitch", u64, ""})},
	{"copy_buffer", "", cmd(
		field{"queue", u32, ""}, field{"src", u32, ""}, field{"dst", u32, ""}, field{"src_off", u64, ""}, field{"dst_off", u64, ""}, field{"size", u64, ""})},
	{"copy_buffer_rect", "", cmd(
		field{"queue", u32, ""}, field{"src", u32, ""}, field{"dst", u32, ""}, field{"src_origin", u64s, ""}, field{"dst_origin", u64s, ""}, field{"region", u64s, ""},
		field{"src_row_pitch", u64, ""}, field{"src_slice_pitch", u64, ""}, field{"dst_row_pitch", u64, ""}, field{"dst_slice_pitch", u64, ""})},
	{"fill_buffer", "", cmd(
		field{"queue", u32, ""}, field{"mem", u32, ""}, field{"offset", u64, ""}, field{"size", u64, ""}, field{"pattern", bytes, ""})},
	{"read_image", "into tightly packed staged data", xfer(append([]field{{"queue", u32, ""}, {"image", u32, ""}, {"blocking", u32, ""}}, imgRegion...)...)},
	{"write_image", "from tightly packed staged data", xfer(append([]field{{"queue", u32, ""}, {"image", u32, ""}, {"blocking", u32, ""}}, imgRegion...)...)},
	{"copy_image", "", cmd(
		field{"queue", u32, ""}, field{"src", u32, ""}, field{"dst", u32, ""}, field{"src_origin", u64s, ""}, field{"dst_origin", u64s, ""}, field{"region", u64s, ""})},
	{"fill_image", "", cmd(append([]field{{"queue", u32, ""}, {"image", u32, ""}, {"color", bytes, "16 bytes"}}, imgRegion...)...)},
	{"copy_image_to_buffer", "", cmd(append([]field{{"queue", u32, ""}, {"src", u32, ""}, {"dst", u32, ""}, {"dst_off", u64, ""}}, imgRegion...)...)},
	{"copy_buffer_to_image", "", cmd(append([]field{{"queue", u32, ""}, {"src", u32, ""}, {"dst", u32, ""}, {"src_off", u64, ""}}, imgRegion...)...)},
	{"map_buffer", "", cmd(
		field{"queue", u32, ""}, field{"mem", u32, ""}, field{"blocking", u32, ""}, field{"flags", u64, "cl_map_flags"}, field{"offset", u64, ""}, field{"size", u64, ""}, field{"map", u32, "id of the mapping, chosen by the client"})},
	{"map_image", "", cmd(append([]field{{"queue", u32, ""}, {"image", u32, ""}, {"blocking", u32, ""}, {"flags", u64, ""}, {"map", u32, ""}}, imgRegion...)...)},
	{"unmap", "", cmd(field{"queue", u32, ""}, field{"mem", u32, ""}, field{"map", u32, ""})},
	{"migrate", "", cmd(field{"queue", u32, ""}, field{"flags", u64, ""}, field{"mems", u32s, ""})},
	{"marker", "", cmd(field{"queue", u32, ""})},
	{"barrier", "", cmd(field{"queue", u32, ""})},
	{"build_with_files", "build_program of a source that includes files", []field{
		{"program", u32, ""}, {"devices", u32s, "none for all"}, {"options", bytes, ""}, {"callback", u32, ""},
		{"files", u32s, "programs with the files' text"}, {"paths", bytes, "their absolute paths with one more slash, then the working folder, each ended by NUL"}}},
	{"compile_with_files", "compile_program of a source that includes files", []field{
		{"program", u32, ""}, {"devices", u32s, ""}, {"options", bytes, ""}, {"headers", u32s, "programs"}, {"names", bytes, "their include names, each ended by NUL"}, {"callback", u32, ""},
		{"files", u32s, "as in build_with_files"}, {"paths", bytes, ""}}},
}
