package driver

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"time"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
)

// cuda is the driver's library.
type cuda struct {
	*library
	version int // as 13000
}

func openCUDA() (*cuda, error) {
	lib, err := load("libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1", "/run/opengl-driver/lib/libcuda.so.1")
	if err != nil {
		return nil, err
	}
	c := &cuda{library: lib}
	v := alloc(8)
	defer v.free()
	code, err := c.call("cuDriverGetVersion", v.at())
	if err != nil {
		return nil, err
	}
	if code != 0 {
		return nil, fmt.Errorf("read the driver's version: %s", c.nameOf(code))
	}
	c.version = int(binary.NativeEndian.Uint32(v.bytes()))
	return c, nil
}

// checkpoints returns an error if the driver can't suspend processes.
func (c *cuda) checkpoints() error {
	if c.version < cudaCheckpoints {
		return fmt.Errorf("the driver is of CUDA %s; suspending processes needs 12.8, which is driver 570", dotted(c.version))
	}
	_, err := c.find("cuCheckpointProcessLock")
	return err
}

// nameOf returns the name of a CUresult.
func (c *cuda) nameOf(code int) string {
	p := alloc(8)
	defer p.free()
	if ret, err := c.call("cuGetErrorName", uintptr(code), p.at()); err == nil && ret == 0 {
		if name := *(*unsafe.Pointer)(p.p); name != nil {
			m := memory{name, 64}
			return m.text(0, m.n)
		}
	}
	return "error " + strconv.Itoa(code)
}

// state asks for a process's state.
func (c *cuda) state(pid int) (ask.State, int, error) {
	s := alloc(8)
	defer s.free()
	code, err := c.callPID("cuCheckpointProcessGetState", pid, s)
	if err != nil || code != 0 {
		return "", code, err
	}
	return stateOf(binary.NativeEndian.Uint32(s.bytes())), 0, nil
}

// process carries out a request for one process.
func (c *cuda) process(r *ask.Request) (*ask.Answer, error) {
	a := &ask.Answer{CUDA: c.version}
	if r.Op == ask.GetState {
		began := time.Now()
		state, code, err := c.state(r.PID)
		if err != nil {
			return nil, err
		}
		a.State, a.TookNS = state, time.Since(began).Nanoseconds()
		c.judge(a, code)
		return a, nil
	}
	args := alloc(argsSize)
	defer args.free()
	var name string
	switch r.Op {
	case ask.Lock:
		name = "cuCheckpointProcessLock"
		putLock(args.bytes(), uint32(min(r.TimeoutMS, ask.MostTimeout.Milliseconds())))
	case ask.Checkpoint:
		name = "cuCheckpointProcessCheckpoint"
	case ask.Unlock:
		name = "cuCheckpointProcessUnlock"
	case ask.Restore:
		name = "cuCheckpointProcessRestore"
		if len(r.Pairs) > 0 {
			if err := pairsAllowed(c.version); err != nil {
				return nil, err
			}
			pairs := alloc(len(r.Pairs) * pairBytes)
			defer pairs.free()
			if err := putPairs(pairs.bytes(), r.Pairs); err != nil {
				return nil, err
			}
			putRestore(args.bytes(), uint64(pairs.at()), uint32(len(r.Pairs)))
		}
	default:
		return nil, fmt.Errorf("unknown request %.40q", string(r.Op))
	}
	began := time.Now()
	code, err := c.callPID(name, r.PID, args)
	if err != nil {
		return nil, err
	}
	a.TookNS = time.Since(began).Nanoseconds()
	c.judge(a, code)
	return a, nil
}

func (c *cuda) judge(a *ask.Answer, code int) {
	if code != 0 {
		a.Code, a.Name = code, c.nameOf(code)
	}
}

// init initializes the library. The driver restores only if a process has done so, or if
// persistence mode is on. It has descriptors of the GPUs from then on.
func (c *cuda) init() error {
	code, err := c.call("cuInit", 0)
	if err != nil {
		return err
	}
	if code != 0 {
		return fmt.Errorf("initialize the driver: %s", c.nameOf(code))
	}
	return nil
}
