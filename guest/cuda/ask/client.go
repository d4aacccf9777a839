package ask

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
)

// killPatience is how long a killed helper may take to end.
const killPatience = 5 * time.Second

// Helper is the command line of a helper.
type Helper struct {
	Path string
	Args []string
	Env  []string // nil: this process's
}

// Client asks. The zero value runs this program's own binary.
type Client struct {
	Helper Helper
}

// Waiting is a helper that has been started and waits for its request. It holds no GPU
// unless it was started ready.
type Waiting struct {
	op    Op
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *limited
	msg   *limited
	ended chan struct{}
	err   error // of the end; read it after ended is closed
}

// PID returns the helper's pid.
func (w *Waiting) PID() int { return w.cmd.Process.Pid }

// Start starts a helper for one request of that kind about a process; pid is 0 if it is about
// none. It loads the driver's library, and for a restore initializes it, while it waits. End
// it if it is not to be asked.
//
// If this process is root, the helper runs as the process's user, with CAP_SYS_PTRACE: the
// driver opens what belongs to that user, and root without other capabilities may not.
func (c *Client) Start(op Op, pid int) (*Waiting, error) {
	h := c.Helper
	if h.Path == "" {
		h.Path, h.Args = "/proc/self/exe", []string{"driver", "call", string(op)}
	}
	cmd := exec.Command(h.Path, h.Args...)
	if c.Helper.Path != "" {
		cmd.Args = append(cmd.Args, string(op))
	}
	cmd.Env = h.Env
	w := &Waiting{op: op, cmd: cmd, out: &limited{most: mostAnswer}, msg: &limited{most: 4096}, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = w.out, w.msg
	// A signal for gpuguest's group must not end a helper in the middle of a call.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if pid > 0 && os.Geteuid() == 0 {
		st, err := holders.Roots{}.Status(pid)
		if err == nil && (st.UIDs[1] != 0 || st.GIDs[1] != 0) {
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: st.UIDs[1], Gid: st.GIDs[1]}
			cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_PTRACE}
		}
	}
	cmd.WaitDelay = time.Second
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start helper: %w", err)
	}
	w.in = in
	err = confine.OnThread(func() error {
		if err := confine.KeepOnly(unix.CAP_SYS_PTRACE); err != nil {
			return err
		}
		return cmd.Start()
	})
	if err != nil {
		in.Close()
		return nil, fmt.Errorf("start helper: %w", err)
	}
	go func() {
		w.err = cmd.Wait()
		close(w.ended)
	}()
	return w, nil
}

// End ends a helper that was not asked.
func (w *Waiting) End() {
	w.in.Close()
	_ = w.cmd.Process.Kill()
	select {
	case <-w.ended:
	case <-time.After(killPatience):
	}
}

// Ask sends the request and returns the answer. After the deadline the helper is killed.
// The end of ctx does not interrupt a call of the driver: nobody would know what it did.
//
// Errors may wrap ErrDeadline, ErrStuck, ErrHelper, ErrNoDriver, ErrGone or a *DriverError.
func (w *Waiting) Ask(req Request, deadline time.Duration) (*Answer, error) {
	req.Version = Version
	if req.Op == "" {
		req.Op = w.op
	}
	if err := req.Check(); err != nil {
		w.End()
		return nil, err
	}
	about := func(err error) error {
		if req.Op.ofProcess() {
			return fmt.Errorf("%s pid %d: %w", req.Op, req.PID, err)
		}
		return fmt.Errorf("%s: %w", req.Op, err)
	}
	b, err := json.Marshal(req)
	if err == nil {
		_, err = w.in.Write(b)
	}
	w.in.Close()
	timer := time.NewTimer(deadline)
	defer timer.Stop()
	select {
	case <-w.ended:
	case <-timer.C:
		_ = w.cmd.Process.Kill()
		select {
		case <-w.ended:
			return nil, about(fmt.Errorf("%w within %v", ErrDeadline, deadline))
		case <-time.After(killPatience):
			return nil, about(fmt.Errorf("%w within %v: %w (pid %d)", ErrDeadline, deadline, ErrStuck, w.PID()))
		}
	}
	if w.out.over {
		return nil, about(fmt.Errorf("%w: its answer is longer than %d bytes", ErrHelper, mostAnswer))
	}
	a, rerr := readAnswer(w.out.buf.Bytes())
	if rerr != nil {
		said := strings.TrimSpace(clip(w.msg.buf.String()))
		return nil, about(fmt.Errorf("%w: %w (%s)", ErrHelper, errors.Join(rerr, w.err, err), said))
	}
	switch {
	case a.Gone:
		return a, about(ErrGone)
	case a.NoDriver:
		return a, about(fmt.Errorf("%w: %s", ErrNoDriver, clip(a.Trouble)))
	case a.Trouble != "":
		return a, about(errors.New(clip(a.Trouble)))
	case a.Code != 0:
		return a, &DriverError{Op: req.Op, PID: req.PID, Code: a.Code, Name: clip(a.Name), State: a.State}
	}
	return a, nil
}

// Call starts a helper and asks it. If ctx has ended, nothing is asked.
func (c *Client) Call(ctx context.Context, req Request, deadline time.Duration) (*Answer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	w, err := c.Start(req.Op, req.PID)
	if err != nil {
		return nil, err
	}
	return w.Ask(req, deadline)
}

// limited keeps the beginning of what is written.
type limited struct {
	buf  bytes.Buffer
	most int
	over bool
}

func (l *limited) Write(b []byte) (int, error) {
	n := min(len(b), l.most-l.buf.Len())
	l.buf.Write(b[:n])
	l.over = l.over || n < len(b)
	return len(b), nil
}
