package query

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/cel-go/cel"
	"google.golang.org/protobuf/reflect/protoreflect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/expr"
)

// Field is a variable of the expressions over one kind of object.
type Field struct {
	Name string
	Type string // bool, int, string, list(string), map(string, string) or timestamp
	Doc  string
}

// Fields returns the fields of a kind, sorted by name, or nil for an unknown kind.
func Fields(kind clusterv1.Kind) []Field {
	var out []Field
	for _, f := range fieldsOf(kind) {
		out = append(out, Field{Name: f.name, Type: f.celType().String(), Doc: f.doc})
	}
	return out
}

// KindName returns the name of a kind in expressions, such as gpu.
func KindName(kind clusterv1.Kind) string {
	return strings.ToLower(strings.TrimPrefix(kind.String(), "KIND_"))
}

// Enum returns the name of an enum's value in expressions: HEALTH_OK is ok.
func Enum(e protoreflect.Enum) string {
	values := e.Descriptor().Values()
	v := values.ByNumber(e.Number())
	if v == nil {
		return strconv.Itoa(int(e.Number()))
	}
	return enumName(v, enumPrefix(e))
}

// enumPrefix returns the common prefix of the names of all values.
func enumPrefix(e protoreflect.Enum) string {
	return strings.TrimSuffix(string(e.Descriptor().Values().Get(0).Name()), "UNSPECIFIED")
}

func enumName(v protoreflect.EnumValueDescriptor, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), prefix))
}

type object = *clusterv1.Object

// field reads one value of an object. Exactly one of its functions is set.
type field struct {
	name   string
	doc    string
	index  bool // the view has an index on it
	number func(object) int64
	text   func(object) string
	truth  func(object) bool
	list   func(object) []string
	labels func(object) map[string]string
	moment func(object) int64 // Unix time, ms
}

func (f *field) celType() *cel.Type {
	switch {
	case f.number != nil:
		return cel.IntType
	case f.text != nil:
		return cel.StringType
	case f.truth != nil:
		return cel.BoolType
	case f.list != nil:
		return cel.ListType(cel.StringType)
	case f.labels != nil:
		return cel.MapType(cel.StringType, cel.StringType)
	}
	return cel.TimestampType
}

// value returns the field's value for CEL's interpreter.
func (f *field) value(o object) any {
	switch {
	case f.number != nil:
		return f.number(o)
	case f.text != nil:
		return f.text(o)
	case f.truth != nil:
		return f.truth(o)
	case f.list != nil:
		return f.list(o)
	case f.labels != nil:
		return f.labels(o)
	}
	return time.UnixMilli(f.moment(o)).UTC()
}

func key(f field) field {
	f.index = true
	return f
}

func text(name, doc string, f func(object) string) field {
	return field{name: name, doc: doc, text: f}
}

func number(name, doc string, f func(object) int64) field {
	return field{name: name, doc: doc, number: f}
}

func truth(name, doc string, f func(object) bool) field {
	return field{name: name, doc: doc, truth: f}
}

func moment(name, doc string, f func(object) int64) field {
	return field{name: name, doc: doc, moment: f}
}

// named makes a field for an enum. Its values have the names that Enum returns: HEALTH_OK
// is ok.
func named[E protoreflect.Enum](name, doc string, f func(object) E) field {
	var zero E
	prefix := enumPrefix(zero)
	names := map[protoreflect.EnumNumber]string{}
	var all []string
	values := zero.Descriptor().Values()
	for i := range values.Len() {
		v := values.Get(i)
		n := enumName(v, prefix)
		names[v.Number()] = n
		if v.Number() != 0 {
			all = append(all, n)
		}
	}
	return text(name, doc+": "+strings.Join(all, ", "), func(o object) string {
		e := f(o).Number()
		if n, ok := names[e]; ok {
			return n
		}
		return strconv.Itoa(int(e))
	})
}

func fieldsOf(kind clusterv1.Kind) []field {
	var out []field
	switch kind {
	case clusterv1.Kind_KIND_HOST:
		out = hostFields()
	case clusterv1.Kind_KIND_GPU:
		out = gpuFields()
	case clusterv1.Kind_KIND_MODEL:
		out = modelFields()
	case clusterv1.Kind_KIND_VGPU:
		out = vgpuFields()
	case clusterv1.Kind_KIND_CLAIM:
		out = claimFields()
	case clusterv1.Kind_KIND_ASSIGNMENT:
		out = assignmentFields()
	case clusterv1.Kind_KIND_SESSION:
		out = sessionFields()
	case clusterv1.Kind_KIND_MIGRATION:
		out = migrationFields()
	case clusterv1.Kind_KIND_RESERVATION:
		out = reservationFields()
	case clusterv1.Kind_KIND_LINK:
		out = linkFields()
	case clusterv1.Kind_KIND_UNSPECIFIED:
	}
	slices.SortFunc(out, func(a, b field) int { return strings.Compare(a.name, b.name) })
	return out
}

func hostFields() []field {
	return []field{
		key(text("name", "unique name", func(o object) string { return o.GetHost().GetName() })),
		key(text("id", "random id, made once", func(o object) string { return o.GetHost().GetId() })),
		key(text("address", "host:port of its API", func(o object) string { return o.GetHost().GetAddress() })),
		text("hypervisor", "xen, kvm or none", func(o object) string { return o.GetHost().GetHypervisor() }),
		text("hypervisor_version", "version of the hypervisor", func(o object) string { return o.GetHost().GetHypervisorVersion() }),
		text("version", "version of its hostd", func(o object) string { return o.GetHost().GetVersion() }),
		number("protocol", "highest command version that it applies", func(o object) int64 { return int64(o.GetHost().GetProtocol()) }),
		{name: "labels", doc: "what operators have set", labels: func(o object) map[string]string { return o.GetHost().GetLabels() }},
		named("state", "state", func(o object) clusterv1.HostState { return o.GetHost().GetState() }),
		truth("draining", "an operator wants it empty", func(o object) bool { return o.GetHost().GetDraining() }),
		truth("down", "the leader has not heard of it for too long", func(o object) bool { return o.GetHost().GetDown() }),
		text("message", "why it is draining or down", func(o object) string { return o.GetHost().GetMessage() }),
		number("cpus", "number of CPUs", func(o object) int64 { return int64(o.GetHost().GetCpus()) }),
		number("memory", "bytes of main memory", func(o object) int64 { return expr.Int(o.GetHost().GetMemory()) }),
		number("numa_nodes", "number of NUMA nodes", func(o object) int64 { return int64(o.GetHost().GetNumaNodes()) }),
		number("nic_speed", "bits per second of the fastest interface", func(o object) int64 {
			var speed uint64
			for _, n := range o.GetHost().GetNics() {
				speed = max(speed, n.GetSpeed())
			}
			return expr.Int(speed)
		}),
		text("boot_id", "changes when the machine is started anew", func(o object) string { return o.GetHost().GetBootId() }),
		moment("joined", "when it joined", func(o object) int64 { return o.GetHost().GetJoinedUnixMs() }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetHost().GetRevision()) }),
		text("lend_address", "where sessions of other hosts reach its GPUs; empty: it lends none", func(o object) string { return o.GetHost().GetLendAddress() }),
	}
}

func gpuFields() []field {
	limit := func(name, doc string, f func(*gpuctlv1.Limits) uint64) field {
		return number(name, doc, func(o object) int64 { return expr.Int(f(o.GetGpu().GetLimits())) })
	}
	return []field{
		key(text("id", "HOST/NAME", func(o object) string { return o.GetGpu().GetId() })),
		key(text("host", "host that has it", func(o object) string { return o.GetGpu().GetHost() })),
		text("name", "PCI address or runtime device", func(o object) string { return o.GetGpu().GetName() }),
		key(text("model", "model", func(o object) string { return o.GetGpu().GetModel() })),
		text("vendor", "vendor", func(o object) string { return o.GetGpu().GetVendor() }),
		text("type", "gpu, cpu or accelerator", func(o object) string { return o.GetGpu().GetType() }),
		limit("memory", "bytes", (*gpuctlv1.Limits).GetGlobalMemory),
		limit("max_alloc", "bytes of one memory object", (*gpuctlv1.Limits).GetMaxAlloc),
		limit("local_memory", "bytes", (*gpuctlv1.Limits).GetLocalMemory),
		limit("max_work_group_size", "work-items", (*gpuctlv1.Limits).GetMaxWorkGroupSize),
		limit("compute_units", "number", func(l *gpuctlv1.Limits) uint64 { return uint64(l.GetComputeUnits()) }),
		limit("clock_mhz", "MHz", func(l *gpuctlv1.Limits) uint64 { return uint64(l.GetClockMhz()) }),
		truth("images", "has images", func(o object) bool { return o.GetGpu().GetLimits().GetImages() }),
		truth("fp64", "has double precision", func(o object) bool { return o.GetGpu().GetLimits().GetFp64() }),
		text("version", "version of OpenCL", func(o object) string { return o.GetGpu().GetLimits().GetVersion() }),
		{name: "extensions", doc: "extensions of OpenCL", list: func(o object) []string { return o.GetGpu().GetLimits().GetExtensions() }},
		text("runtime", "runtime that serves it", func(o object) string { return o.GetGpu().GetRuntime() }),
		text("platform", "platform of the runtime", func(o object) string { return o.GetGpu().GetPlatform() }),
		text("driver", "kernel driver, or the runtime's version", func(o object) string { return o.GetGpu().GetDriver() }),
		text("uuid", "the vendor's id", func(o object) string { return o.GetGpu().GetUuid() }),
		{name: "engines", doc: "engines of sessions that can use it: portable (OpenCL), driver (CUDA)", list: func(o object) []string { return o.GetGpu().GetEngines() }},
		text("pci_address", "as 0000:65:00.0", func(o object) string { return o.GetGpu().GetPciAddress() }),
		number("numa_node", "-1: not known", func(o object) int64 { return int64(o.GetGpu().GetNumaNode()) }),
		text("isolation_group", "what can only be given away together", func(o object) string { return o.GetGpu().GetIsolationGroup() }),
		named("health", "health", func(o object) clusterv1.Health { return o.GetGpu().GetHealth() }),
		text("health_reason", "why it is not ok", func(o object) string { return o.GetGpu().GetHealthReason() }),
		truth("cordoned", "gets nothing new", func(o object) bool { return o.GetGpu().GetCordoned() }),
		text("cordon_reason", "why", func(o object) string { return o.GetGpu().GetCordonReason() }),
		number("rank", "place in the order of models", func(o object) int64 { return int64(o.GetGpu().GetRank()) }),
		truth("present", "its host reports it", func(o object) bool { return o.GetGpu().GetPresent() }),
		number("processes", "how many use it outside of any assignment", func(o object) int64 { return int64(len(o.GetGpu().GetProcesses())) }),
		{name: "kinds", doc: "ways in which it is given away: passthrough, slice, remote, mediated", list: func(o object) []string { return o.GetGpu().GetKinds() }},
		text("server", "service VM that owns it", func(o object) string { return o.GetGpu().GetServer() }),
		{name: "lend_addresses", doc: "where carriers reach the service VM", list: func(o object) []string { return o.GetGpu().GetLendAddresses() }},
		{name: "profiles", doc: "slices that it can be cut into", list: func(o object) []string {
			var names []string
			for _, p := range o.GetGpu().GetProfiles() {
				names = append(names, p.GetName())
			}
			return names
		}},
		number("used_memory", "bytes scheduled, resident and reserved", func(o object) int64 { return expr.Int(o.GetGpu().GetUsedMemory()) }),
		number("free_memory", "bytes that a claim can get", func(o object) int64 { return expr.Int(o.GetGpu().GetFreeMemory()) }),
		truth("free", "nobody holds any of it", func(o object) bool { return o.GetGpu().GetFree() }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetGpu().GetRevision()) }),
	}
}

func modelFields() []field {
	return []field{
		key(text("name", "unique name", func(o object) string { return o.GetModel().GetName() })),
		text("vendor", "vendor", func(o object) string { return o.GetModel().GetVendor() }),
		number("rank", "place in the order of upgrade and downgrade", func(o object) int64 { return int64(o.GetModel().GetRank()) }),
		truth("ranked", "the rank is an operator's", func(o object) bool { return o.GetModel().GetRanked() }),
		number("memory", "bytes of the largest device", func(o object) int64 { return expr.Int(o.GetModel().GetMemory()) }),
		number("gpus", "how many are present", func(o object) int64 { return int64(o.GetModel().GetGpus()) }),
		number("free", "how many nobody holds any of", func(o object) int64 { return int64(o.GetModel().GetFree()) }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetModel().GetRevision()) }),
	}
}

func vgpuFields() []field {
	return []field{
		key(text("id", "GPU/SLICE", func(o object) string { return o.GetVgpu().GetId() })),
		key(text("gpu", "GPU that it is a slice of", func(o object) string { return o.GetVgpu().GetGpu() })),
		text("host", "host that has it", func(o object) string { return o.GetVgpu().GetHost() }),
		named("kind", "kind", func(o object) clusterv1.VGPUKind { return o.GetVgpu().GetKind() }),
		text("profile", "the vendor's name of the slice", func(o object) string { return o.GetVgpu().GetProfile() }),
		number("memory", "bytes", func(o object) int64 { return expr.Int(o.GetVgpu().GetMemory()) }),
		named("residence", "residence", func(o object) clusterv1.Residence { return o.GetVgpu().GetResidence() }),
		text("assignment", "who has it", func(o object) string { return o.GetVgpu().GetAssignment() }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetVgpu().GetRevision()) }),
	}
}

func claimFields() []field {
	return []field{
		key(text("id", "unique id", func(o object) string { return o.GetClaim().GetId() })),
		text("owner", "who made it", func(o object) string { return o.GetClaim().GetOwner() }),
		text("holder", "what it is for", func(o object) string { return o.GetClaim().GetHolder() }),
		number("min_memory", "bytes of each GPU; 0: whole GPUs", func(o object) int64 { return expr.Int(o.GetClaim().GetMinMemory()) }),
		number("prefer_memory", "bytes of each GPU", func(o object) int64 { return expr.Int(o.GetClaim().GetPreferMemory()) }),
		number("count", "GPUs", func(o object) int64 { return int64(max(1, o.GetClaim().GetCount())) }),
		text("expr", "condition on its GPUs", func(o object) string { return o.GetClaim().GetExpr() }),
		text("host", "only there", func(o object) string { return o.GetClaim().GetHost() }),
		{name: "hosts_not", doc: "not there", list: func(o object) []string { return o.GetClaim().GetHostsNot() }},
		key(text("group", "claims of one group go to different hosts", func(o object) string { return o.GetClaim().GetGroup() })),
		text("profile", "only slices of this profile", func(o object) string { return o.GetClaim().GetProfile() }),
		truth("one_runtime", "all its GPUs served by one executor", func(o object) bool { return o.GetClaim().GetOneRuntime() }),
		named("policy", "policy", func(o object) clusterv1.Policy { return o.GetClaim().GetPolicy() }),
		named("unmet", "what happens when nothing can meet it", func(o object) clusterv1.Unmet { return o.GetClaim().GetUnmet() }),
		{name: "labels", doc: "labels", labels: func(o object) map[string]string { return o.GetClaim().GetLabels() }},
		key(named("state", "state", func(o object) clusterv1.ClaimState { return o.GetClaim().GetState() })),
		text("message", "why it is pending", func(o object) string { return o.GetClaim().GetMessage() }),
		{name: "assignments", doc: "ids of its assignments", list: func(o object) []string { return o.GetClaim().GetAssignments() }},
		moment("created", "when it was made", func(o object) int64 { return o.GetClaim().GetCreatedUnixMs() }),
		text("home", "host of its application", func(o object) string { return o.GetClaim().GetHome() }),
		named("remote", "whether GPUs of other hosts will do", func(o object) clusterv1.Remote { return o.GetClaim().GetRemote() }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetClaim().GetRevision()) }),
	}
}

func assignmentFields() []field {
	return []field{
		key(text("id", "unique id", func(o object) string { return o.GetAssignment().GetId() })),
		key(text("claim", "claim that is bound", func(o object) string { return o.GetAssignment().GetClaim() })),
		text("vgpu", "slice that it is bound to", func(o object) string { return o.GetAssignment().GetVgpu() }),
		key(text("gpu", "GPU of the slice", func(o object) string { return o.GetAssignment().GetGpu() })),
		key(text("host", "host of the GPU", func(o object) string { return o.GetAssignment().GetHost() })),
		number("memory", "bytes; 0: the whole GPU", func(o object) int64 { return expr.Int(o.GetAssignment().GetMemory()) }),
		number("token", "fencing token", func(o object) int64 { return expr.Int(o.GetAssignment().GetToken()) }),
		named("residence", "residence", func(o object) clusterv1.Residence { return o.GetAssignment().GetResidence() }),
		moment("created", "when it was made", func(o object) int64 { return o.GetAssignment().GetCreatedUnixMs() }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetAssignment().GetRevision()) }),
	}
}

func sessionFields() []field {
	return []field{
		key(text("id", "HOST/ID", func(o object) string { return o.GetSession().GetId() })),
		key(text("host", "host that it runs on", func(o object) string { return o.GetSession().GetHost() })),
		key(text("claim", "claim that it uses", func(o object) string { return o.GetSession().GetClaim() })),
		number("pid", "process", func(o object) int64 { return int64(o.GetSession().GetPid()) }),
		text("command", "the process's command", func(o object) string { return o.GetSession().GetCommand() }),
		named("state", "state", func(o object) gpuctlv1.SessionState { return o.GetSession().GetState() }),
		text("gpu", "its GPUs, with commas between", func(o object) string { return strings.Join(o.GetSession().GetGpus(), ",") }),
		{name: "gpus", doc: "its GPUs", list: func(o object) []string { return o.GetSession().GetGpus() }},
		text("model", "model of its GPUs", func(o object) string { return o.GetSession().GetModel() }),
		number("generation", "of its executor; grows with every swap", func(o object) int64 { return int64(o.GetSession().GetGeneration()) }),
		text("engine", "portable (OpenCL) or driver (CUDA)", func(o object) string { return o.GetSession().GetEngine() }),
		text("suspended_to", "memory, away or a file", func(o object) string { return o.GetSession().GetSuspendedTo() }),
		text("message", "why it is lost or suspended", func(o object) string { return o.GetSession().GetMessage() }),
		moment("started", "when it started", func(o object) int64 { return o.GetSession().GetStartedUnixMs() }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetSession().GetRevision()) }),
	}
}

func migrationFields() []field {
	return []field{
		key(text("id", "unique id", func(o object) string { return o.GetMigration().GetId() })),
		text("verb", "migrate, upgrade, downgrade, suspend or resume", func(o object) string { return o.GetMigration().GetVerb() }),
		text("object", "VM or session", func(o object) string { return o.GetMigration().GetObject() }),
		key(text("claim", "its claim", func(o object) string { return o.GetMigration().GetClaim() })),
		text("from", "host, or GPUs", func(o object) string { return o.GetMigration().GetFrom() }),
		text("to", "host, or GPUs", func(o object) string { return o.GetMigration().GetTo() }),
		text("driver", "host that runs it", func(o object) string { return o.GetMigration().GetDriver() }),
		named("state", "state", func(o object) clusterv1.MigrationState { return o.GetMigration().GetState() }),
		text("step", "step that runs", func(o object) string { return o.GetMigration().GetStep() }),
		text("message", "what went wrong", func(o object) string { return o.GetMigration().GetMessage() }),
		number("bytes", "bytes moved", func(o object) int64 { return expr.Int(o.GetMigration().GetBytes()) }),
		number("stopped_ns", "downtime of the application", func(o object) int64 { return o.GetMigration().GetStoppedNs() }),
		number("lost", "sessions of the VM that were lost on the way", func(o object) int64 { return int64(len(o.GetMigration().GetMachine().GetLost())) }),
		moment("started", "when it started", func(o object) int64 { return o.GetMigration().GetStartedUnixMs() }),
		moment("ended", "when it ended", func(o object) int64 { return o.GetMigration().GetEndedUnixMs() }),
		number("token", "fencing token", func(o object) int64 { return expr.Int(o.GetMigration().GetToken()) }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetMigration().GetRevision()) }),
	}
}

func reservationFields() []field {
	return []field{
		key(text("id", "unique id", func(o object) string { return o.GetReservation().GetId() })),
		key(text("owner", "claim or migration", func(o object) string { return o.GetReservation().GetOwner() })),
		key(text("gpu", "GPU", func(o object) string { return o.GetReservation().GetGpu() })),
		text("host", "host of the GPU", func(o object) string { return o.GetReservation().GetHost() }),
		number("memory", "bytes; 0: the whole GPU", func(o object) int64 { return expr.Int(o.GetReservation().GetMemory()) }),
		number("ttl_ms", "how long the leader waits", func(o object) int64 { return int64(o.GetReservation().GetTtlMs()) }),
		number("token", "fencing token", func(o object) int64 { return expr.Int(o.GetReservation().GetToken()) }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetReservation().GetRevision()) }),
	}
}

func linkFields() []field {
	return []field{
		key(text("id", "unique id, FROM/TO", func(o object) string { return o.GetLink().GetId() })),
		text("from", "host that sends", func(o object) string { return o.GetLink().GetFrom() }),
		text("to", "host that it leads to", func(o object) string { return o.GetLink().GetTo() }),
		number("rtt_ns", "of a small message and its answer", func(o object) int64 { return o.GetLink().GetRttNs() }),
		number("rate", "bytes per second", func(o object) int64 { return expr.Int(o.GetLink().GetRate()) }),
		number("samples", "calibrations and moves", func(o object) int64 { return int64(o.GetLink().GetSamples()) }),
		number("moves", "moves of sessions over it", func(o object) int64 { return int64(o.GetLink().GetMoves()) }),
		number("fixed_ns", "their downtime beyond what bytes and hosts account for", func(o object) int64 { return o.GetLink().GetFixedNs() }),
		number("frozen_ppm", "share of the memory that they sent while frozen, in millionths", func(o object) int64 { return int64(o.GetLink().GetFrozenPpm()) }),
		number("back_moves", "moves of sessions back over it", func(o object) int64 { return int64(o.GetLink().GetBackMoves()) }),
		number("back_fixed_ns", "their downtime beyond what bytes and hosts account for", func(o object) int64 { return o.GetLink().GetBackFixedNs() }),
		number("back_frozen_ppm", "share of the memory that they sent while frozen, in millionths", func(o object) int64 { return int64(o.GetLink().GetBackFrozenPpm()) }),
		number("predicted_stop_ns", "of the last move", func(o object) int64 { return o.GetLink().GetPredictedStopNs() }),
		number("stopped_ns", "downtime of the last move", func(o object) int64 { return o.GetLink().GetStoppedNs() }),
		moment("measured", "when it was measured", func(o object) int64 { return o.GetLink().GetMeasuredUnixMs() }),
		number("revision", "log entry that changed it last", func(o object) int64 { return expr.Int(o.GetLink().GetRevision()) }),
	}
}
