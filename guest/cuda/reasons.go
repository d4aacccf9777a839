package cuda

import (
	"errors"
	"fmt"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Codes of reasons why a process or a target is refused. Nothing has been touched then.
const (
	ReasonDriver    = "driver_version"    // the driver can't suspend processes, or not restore on another GPU
	ReasonThread    = "thread"            // the pid is a thread's
	ReasonGone      = "process_ended"     // no such process
	ReasonForeign   = "foreign_process"   // it is another user's
	ReasonNamespace = "pid_namespace"     // it has pids of another namespace
	ReasonNoCUDA    = "no_cuda"           // the process and its children do not use CUDA
	ReasonState     = "process_state"     // a process is not running, for the driver
	ReasonFork      = "forked_holder"     // a process without CUDA has nodes of the GPU, so it can't be taken away
	ReasonHolder    = "unknown_holder"    // nobody knows which process has the GPU
	ReasonMIG       = "mig"               // a GPU is divided by MIG
	ReasonMPS       = "mps"               // a process computes through MPS
	ReasonSlice     = "vgpu"              // a GPU is a vGPU
	ReasonMemory    = "host_memory"       // the state does not fit into host memory
	ReasonGPU       = "gpu"               // there is no such GPU, or the driver can't tell about it
	ReasonChip      = "other_chip"        // the target is of another chip
	ReasonFree      = "gpu_memory"        // the target has not enough free memory
	ReasonPairs     = "gpu_pairs"         // not every GPU that the driver showed has one to go to
	ReasonCanary    = "canary"            // a test process did not bear it
	ReasonExclusive = "exclusive_process" // the target takes one process only
	ReasonCRIU      = "criu"              // criu is missing, too old, or can't work here
	ReasonTied      = "tied"              // the processes are tied to a terminal, or to processes that stay
	ReasonFolder    = "folder"            // the folder is there already, or is not what was written
	ReasonPID       = "pid_in_use"        // a process has a number that one of the folder must have
	ReasonSession   = "other_session"     // the process is in a session of another engine
)

// ErrLost means that the driver does not give a process back.
var ErrLost = errors.New("the driver does not give the process back")

// ErrUnsettled means that the driver has not told in which state a process is.
var ErrUnsettled = errors.New("the driver has not told in which state the process is")

// lostError is ErrLost with what the operator can do.
func lostError(pid int, why error) error {
	return fmt.Errorf("pid %d: %w: %w; end the job's processes, best while they are suspended, and start the job from its own checkpoint", pid, ErrLost, why)
}

// reasons collects them.
type reasons []*gpuctlv1.Reason

func (rs *reasons) add(code, format string, args ...any) {
	*rs = append(*rs, &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)})
}

// size formats bytes for people.
func size(n uint64) string {
	const gib = 1 << 30
	if n >= gib {
		return fmt.Sprintf("%.1f GiB", float64(n)/gib)
	}
	return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20))
}
