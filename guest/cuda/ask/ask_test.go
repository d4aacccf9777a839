package ask

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain is the helper, too.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "helper" {
		os.Exit(helper(os.Args[2]))
	}
	os.Exit(m.Run())
}

// none is more than the pids of this machine: their processes have users.
const none = 4194000

// helper does what the request's pid says.
func helper(op string) int {
	req, err := ReadRequest(os.Stdin)
	if errors.Is(err, io.EOF) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	switch req.PID - none {
	case 2:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case 3:
		time.Sleep(time.Hour)
	case 4:
		fmt.Fprint(os.Stdout, strings.Repeat("x", mostAnswer+1))
		return 0
	case 5:
		_ = WriteAnswer(os.Stdout, &Answer{Gone: true, Trouble: "ended"})
	case 6:
		_ = WriteAnswer(os.Stdout, &Answer{NoDriver: true, Trouble: "no library"})
	case 7:
		_ = WriteAnswer(os.Stdout, &Answer{Code: CodeOutOfMemory, Name: "CUDA_ERROR_OUT_OF_MEMORY"})
	case 8:
		caps, err := os.ReadFile("/proc/self/status")
		for line := range strings.Lines(string(caps)) {
			if rest, ok := strings.CutPrefix(line, "CapEff:"); ok {
				_ = WriteAnswer(os.Stdout, &Answer{Driver: strings.TrimSpace(rest)})
				return 0
			}
		}
		fmt.Fprintln(os.Stderr, "no capabilities", err)
		return 1
	default:
		_ = WriteAnswer(os.Stdout, &Answer{State: State(op)})
	}
	return 0
}

func client(t *testing.T) *Client {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &Client{Helper: Helper{Path: exe, Args: []string{"helper"}}}
}

func TestCall(t *testing.T) {
	c := client(t)
	var refused *DriverError
	for _, k := range []struct {
		pid  int
		want error
		is   func(error) bool
	}{
		{pid: none + 2, want: ErrHelper},
		{pid: none + 3, want: ErrDeadline},
		{pid: none + 4, want: ErrHelper},
		{pid: none + 5, want: ErrGone},
		{pid: none + 6, want: ErrNoDriver},
		{pid: none + 7, is: func(err error) bool { return errors.As(err, &refused) && refused.Code == CodeOutOfMemory }},
	} {
		deadline := time.Minute
		if k.pid == none+3 {
			deadline = 50 * time.Millisecond
		}
		_, err := c.Call(context.Background(), Request{Op: Lock, PID: k.pid}, deadline)
		if k.is != nil && !k.is(err) || k.want != nil && !errors.Is(err, k.want) {
			t.Errorf("pid %d: %v, want %v", k.pid, err, k.want)
		}
	}
	a, err := c.Call(context.Background(), Request{Op: Unlock, PID: none + 100}, time.Minute)
	if err != nil || a.State != "unlock" {
		t.Errorf("%v, %v", a, err)
	}
	if _, err := c.Call(context.Background(), Request{Op: Unlock, PID: 1}, time.Minute); err == nil {
		t.Error("the first process of the system was asked about")
	}
}

func TestHelperHasOneCapability(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root has capabilities to give up")
	}
	a, err := client(t).Call(context.Background(), Request{Op: Lock, PID: none + 8}, time.Minute)
	if err != nil || a.Driver != "0000000000080000" { // CAP_SYS_PTRACE
		t.Errorf("capabilities %v, %v", a, err)
	}
}

// A helper whose gpuguest dies before it asks ends by itself.
func TestHelperThatIsNotAskedEnds(t *testing.T) {
	w, err := client(t).Start(Lock, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.in.Close()
	<-w.ended
	if w.err != nil || w.out.buf.Len() > 0 {
		t.Errorf("%v, %q", w.err, w.out.buf.String())
	}
}

func TestUUID(t *testing.T) {
	const text = UUID("GPU-0123abcd-4567-89ef-0011-223344556677")
	b, err := text.Bytes()
	if err != nil || NewUUID(b) != text {
		t.Errorf("%x, %v, %s", b, err, NewUUID(b))
	}
	for _, bad := range []UUID{"", "GPU-", "MIG-0123abcd-4567-89ef-0011-223344556677", "GPU-0123abcd-4567-89ef-0011-22334455667z", text + "0"} {
		if _, err := bad.Bytes(); err == nil {
			t.Errorf("%q is taken for a UUID", bad)
		}
	}
}

func FuzzReadRequest(f *testing.F) {
	f.Add([]byte(`{"version":1,"op":"restore","pid":7,"pairs":[{"old":"GPU-0123abcd-4567-89ef-0011-223344556677","new":"GPU-0123abcd-4567-89ef-0011-223344556678"}]}`))
	f.Add([]byte(`{"version":1,"op":"lock","pid":7,"timeout_ms":-1}`))
	f.Add([]byte(`{"version":1,"op":"devices"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ReadRequest(strings.NewReader(string(b)))
		if err != nil {
			return
		}
		if r.Op != Devices && (r.PID <= 1 || r.TimeoutMS < 0 || len(r.Pairs) > MostGPUs) {
			t.Errorf("taken: %+v", r)
		}
	})
}

func FuzzReadAnswer(f *testing.F) {
	f.Add([]byte(`{"version":1,"state":"running"}`))
	f.Add([]byte(`{"version":1,"gpus":[{"uuid":"GPU-0123abcd-4567-89ef-0011-223344556677"}],"processes":[{"pid":7}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := readAnswer(b)
		if err == nil && (a.Version != Version || len(a.GPUs) > MostGPUs) {
			t.Errorf("taken: %+v", a)
		}
	})
}
