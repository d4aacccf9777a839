package driver

import (
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
)

// Serve answers one request. It loads the driver's library while it waits for it; for a
// restore it initializes it, too. Errors are of the streams; what the driver says is in the
// answer.
func Serve(op ask.Op, in io.Reader, out io.Writer) error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("no core dumps: %w", err)
	}
	var lib *cuda
	var loadErr error
	if op != ask.Devices {
		if lib, loadErr = openCUDA(); loadErr == nil && op == ask.Restore {
			loadErr = lib.init()
		}
	}
	req, err := ask.ReadRequest(in)
	if errors.Is(err, io.EOF) {
		return nil // whoever started this has ended, or needs it no more
	}
	if err != nil {
		return err
	}
	if req.Op != op {
		return fmt.Errorf("asked to %s, and started to %s", req.Op, op)
	}
	a, err := answer(req, lib, loadErr)
	if err != nil {
		a = &ask.Answer{
			Trouble: err.Error(), Gone: errors.Is(err, holders.ErrGone),
			NoDriver: errors.Is(err, errNoLibrary) || errors.Is(err, errNoFunction),
		}
	}
	return ask.WriteAnswer(out, a)
}

func answer(req *ask.Request, lib *cuda, loadErr error) (*ask.Answer, error) {
	if req.Op == ask.Devices {
		return devices()
	}
	if loadErr != nil {
		return nil, loadErr
	}
	if err := lib.checkpoints(); err != nil {
		return nil, fmt.Errorf("%w: %w", errNoFunction, err)
	}
	// The pidfd keeps the pid from being another process's as long as this one asks.
	p, err := holders.Pin(req.PID, req.Start)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	return lib.process(req)
}

// devices lists GPUs. Their list does not need the driver's own library, the version does.
func devices() (*ask.Answer, error) {
	n, err := openNVML()
	if err != nil {
		return nil, err
	}
	defer n.close()
	a := &ask.Answer{}
	if err := n.list(a); err != nil {
		return nil, err
	}
	c, err := openCUDA()
	if err != nil {
		return nil, err
	}
	a.CUDA = c.version
	return a, nil
}
