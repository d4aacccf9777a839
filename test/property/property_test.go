package property

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"pgregory.net/rapid"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/test/rig"
)

// limit of one run of a script. Most take less than a second, on a machine that does nothing else.
const limit = 5 * time.Minute

// action is what happens at a pause: a swap or a suspension, with a fault or
// without, and for how long the thread still waits once it has begun.
type action struct {
	verb  string // migrate, memory, file or nothing
	fault string // in the operation, or in the resumption if it begins with "resume:"
	after int    // ms; <0: when it is over
}

func (a action) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %d %s", a.verb, a.after, a.fault))
}

var faults = map[string][]string{
	"migrate": {
		"check", "start", "prepare", "precopy", "freeze", "transfer", "switch", "retire",
		"kill_target@prepare", "kill_target@precopy", "kill_target@freeze", "kill_target@transfer",
	},
	"suspend": {"check", "precopy", "freeze", "export", "mark", "retire"},
	"resume":  {"check", "start", "prepare", "load", "switch", "discard", "kill_target@prepare", "kill_target@load"},
}

func drawAction(t *rapid.T) action {
	a := action{verb: rapid.SampledFrom([]string{"migrate", "migrate", "migrate", "memory", "file"}).Draw(t, "verb"), after: -1}
	if rapid.Bool().Draw(t, "at once") {
		a.after = rapid.IntRange(0, 300).Draw(t, "after")
	}
	if rapid.IntRange(0, 3).Draw(t, "fault") == 3 {
		switch {
		case a.verb == "migrate":
			a.fault = rapid.SampledFrom(faults["migrate"]).Draw(t, "at")
		case rapid.Bool().Draw(t, "resume"):
			a.fault = "resume:" + rapid.SampledFrom(faults["resume"]).Draw(t, "at")
		default:
			a.fault = rapid.SampledFrom(faults["suspend"]).Draw(t, "at")
		}
	}
	return a
}

// plan reads the actions from a script's comments.
func plan(script string) (out []action, err error) {
	for line := range strings.Lines(script) {
		f := strings.Fields(line)
		if len(f) < 4 || f[0] != "#pause" {
			continue
		}
		a := action{verb: f[2]}
		if a.after, err = strconv.Atoi(f[3]); err != nil {
			return nil, err
		}
		if len(f) > 4 {
			a.fault = f[4]
		}
		out = append(out, a)
	}
	return out, nil
}

func generate(t *rapid.T) string {
	g := &generator{t: t}
	g.begin()
	t.Repeat(g.actions())
	g.t = t
	g.end()
	return g.script()
}

// runner runs scripts on one hostd.
type runner struct {
	*rig.Rig
	client gpuctlv1connect.HostServiceClient
	on     string // where the session is
	files  int
	ops    map[string]int
	breaks bool // connections of contents break: an operation may fail without a fault of ours
	cards  bool // the GPUs are cards

	runtimes []string // a GPU of each runtime that is there
}

func start(t *testing.T) *runner {
	t.Helper()
	dir, err := os.MkdirTemp("", "gx") // short: sockets lie in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	memory, err := rig.TestMemory()
	if err != nil {
		t.Fatal(err)
	}
	r, err := rig.Start(t.Context(), rig.Options{Dir: dir, Env: []string{"GPUCTL_FAULTS=1"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	runtimes := []string{rig.Pthread}
	if memory == rig.Mesa {
		runtimes = append(runtimes, rig.Basic) // PoCL
	}
	return &runner{
		Rig: r, ops: map[string]int{}, breaks: os.Getenv(rig.CarrierVariable) == "break", cards: memory == rig.Cards, runtimes: runtimes,
		client: gpuctlv1connect.NewHostServiceClient(unixrpc.Client(filepath.Join(dir, "hostd.sock")), "http://hostd"),
	}
}

// run runs a script; swaps reports whether its plan is carried out. It returns
// what the script prints.
func (r *runner) run(ctx context.Context, script string, swaps bool) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	todo, err := plan(script)
	if err != nil {
		return "", err
	}
	file := filepath.Join(r.Dir, "script")
	if err := os.WriteFile(file, []byte(script), 0o600); err != nil {
		return "", err
	}
	r.on = rig.Basic
	cmd := r.Command(ctx, r.on, r.Program("script"), file)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return "", err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return "", err
	}
	if !swaps {
		_ = stdin.Close()
	}
	var out strings.Builder
	var ops sync.WaitGroup
	var failed []error
	queue := make(chan int, 256)
	ops.Go(func() {
		for n := range queue {
			if n > len(todo) {
				failed = append(failed, fmt.Errorf("pause %d is not in the plan", n))
				return
			}
			if err := r.act(ctx, todo[n-1], func() { _, _ = stdin.Write([]byte{byte(n)}) }); err != nil {
				failed = append(failed, fmt.Errorf("pause %d (%s): %w", n, todo[n-1], err))
				cancel()
				return
			}
		}
	})
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		l := lines.Text()
		if after, ok := strings.CutPrefix(l, "paused "); ok {
			n, _ := strconv.Atoi(after)
			if swaps {
				queue <- n
			}
			continue
		}
		if !r.early(l) {
			out.WriteString(l + "\n")
		}
	}
	close(queue)
	ops.Wait()
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil && len(failed) == 0 {
			err = fmt.Errorf("does not end: %w", ctx.Err())
		}
		failed = append(failed, fmt.Errorf("%w: %s", err, stderr.String()))
	}
	if err := errors.Join(failed...); err != nil {
		return out.String(), err
	}
	if !strings.HasSuffix(out.String(), "done\n") {
		return out.String(), fmt.Errorf("ended early: %s", stderr.String())
	}
	return out.String(), nil
}

// act does what is planned for a pause, and lets the thread go on.
func (r *runner) act(ctx context.Context, a action, release func()) error {
	var once sync.Once
	free := func() { once.Do(release) }
	defer free()
	if a.verb == "nothing" {
		return nil
	}
	s, err := r.session(ctx)
	if err != nil {
		return err
	}
	if a.after >= 0 {
		defer time.AfterFunc(time.Duration(a.after)*time.Millisecond, free).Stop()
	}
	other := rig.Pthread
	if r.on == other {
		other = rig.Basic
	}
	fault, resumeFault := a.fault, ""
	if f, ok := strings.CutPrefix(a.fault, "resume:"); ok {
		fault, resumeFault = "", f
	}
	if a.verb == "migrate" {
		err := r.operation(r.client.Swap(ctx, connect.NewRequest(&gpuctlv1.HostSwapRequest{
			Session: s, Verb: gpuctlv1.Verb_VERB_MIGRATE, To: other, FailAt: fault,
		})))
		r.ops["migrate "+fault]++
		if gone, e := r.settled(ctx, s); gone || e != nil {
			return e
		}
		return r.unasked(err, fault)
	}
	req := &gpuctlv1.HostSuspendRequest{Session: s, FailAt: fault}
	if a.verb == "file" {
		dir, err := r.States()
		if err != nil {
			return err
		}
		r.files++
		req.File = filepath.Join(dir, fmt.Sprintf("state%d", r.files))
	}
	err = r.operation(r.client.Suspend(ctx, connect.NewRequest(req)))
	r.ops["suspend "+fault]++
	gone, e := r.settled(ctx, s)
	if gone || e != nil {
		return e
	}
	if err := r.unasked(err, fault); err != nil {
		return err
	}
	tries := 2 // the second time without the fault
	if r.breaks {
		tries = 20
	}
	for range tries {
		suspended, err := r.suspended(ctx, s)
		if err != nil || !suspended {
			return err
		}
		err = r.operation(r.client.Resume(ctx, connect.NewRequest(&gpuctlv1.HostResumeRequest{Session: s, To: other, FailAt: resumeFault})))
		r.ops["resume "+resumeFault]++
		if err := r.unasked(err, resumeFault); err != nil {
			return err
		}
		resumeFault = ""
	}
	return nil
}

// errFailed is the error of an operation that has failed, and was not refused.
var errFailed = errors.New("it has failed")

// unasked returns the error of an operation that was to be done: no fault was asked for, and
// contents do not break.
func (r *runner) unasked(err error, fault string) error {
	if fault != "" || r.breaks && errors.Is(err, errFailed) {
		return nil
	}
	return err
}

// operation reads the result of one; what is refused or rolled back is an error.
func (r *runner) operation(stream *connect.ServerStreamForClient[gpuctlv1.OperationUpdate], err error) error {
	res, err := outcome(stream, err)
	switch {
	case errors.Is(err, errFailed):
		r.ops["of them failed"]++
	case err == nil && res.GetBytesStraight() > 0:
		r.ops["of them straight"]++
	}
	return err
}

// outcome reads the result of an operation. Errors wrap errFailed if it has failed.
func outcome(stream *connect.ServerStreamForClient[gpuctlv1.OperationUpdate], err error) (*gpuctlv1.SwapResult, error) {
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var res *gpuctlv1.SwapResult
	var rejected []*gpuctlv1.Candidate
	for stream.Receive() {
		if p := stream.Msg().GetProgress(); p.GetResult() != nil {
			res, rejected = p.GetResult(), stream.Msg().GetRejected()
		}
	}
	switch {
	case stream.Err() != nil:
		return nil, stream.Err()
	case res.GetRefused():
		return nil, fmt.Errorf("refused: %s: %v %v", res.GetError(), res.GetReasons(), rejected)
	case res.GetError() != "":
		return nil, fmt.Errorf("%w: %s", errFailed, res.GetError())
	}
	return res, nil
}

func (r *runner) get(ctx context.Context, id string) (*gpuctlv1.Session, error) {
	resp, err := r.client.ListSessions(ctx, connect.NewRequest(&gpuctlv1.HostListSessionsRequest{}))
	if err != nil {
		return nil, err
	}
	for _, s := range resp.Msg.GetSessions() {
		if s.GetState() != gpuctlv1.SessionState_SESSION_STATE_ENDED && (id == "" || s.GetId() == id) {
			return s, nil
		}
	}
	return nil, nil
}

// session waits for the only one.
func (r *runner) session(ctx context.Context) (string, error) {
	var id string
	var failed error
	err := testkit.Poll(ctx, "a session", func() error {
		s, err := r.get(ctx, "")
		id, failed = s.GetId(), err
		return testkit.Want(s != nil || err != nil)
	})
	return id, errors.Join(failed, err)
}

// settled notes where the session is now. gone: the application has ended.
func (r *runner) settled(ctx context.Context, id string) (gone bool, err error) {
	s, err := r.get(ctx, id)
	if err != nil || s == nil {
		return true, err
	}
	if s.GetState() == gpuctlv1.SessionState_SESSION_STATE_LOST {
		return false, fmt.Errorf("the session is lost: %s", s.GetMessage())
	}
	r.on = s.GetTarget().GetGpu()
	return false, nil
}

func (r *runner) suspended(ctx context.Context, id string) (bool, error) {
	s, err := r.get(ctx, id)
	return s.GetSuspendedTo() != "", err
}

// natively runs a script on a GPU's runtime itself.
func (r *runner) natively(ctx context.Context, script, gpu string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	env, err := rig.Native(r.Dir, gpu)
	if err != nil {
		return "", err
	}
	file := filepath.Join(r.Dir, "native.script")
	if err := os.WriteFile(file, []byte(script), 0o600); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, r.Program("script"), file)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.Output()
	var b strings.Builder
	for l := range strings.Lines(string(out)) {
		if !strings.HasPrefix(l, "paused ") && !strings.HasPrefix(l, "device ") && !r.early(l) {
			b.WriteString(l)
		}
	}
	return b.String(), err
}

// contents leaves only what a program has in buffers, images and its own memory: PoCL has other
// errors than OpenCL says for what waits for failed events, and forgets some callbacks.
func contents(out string) string {
	var b strings.Builder
	for l := range strings.Lines(out) {
		if strings.HasPrefix(l, "memory ") || strings.HasPrefix(l, "result ") {
			b.WriteString(l)
		}
	}
	return b.String()
}

// differ compares two outputs line by line.
func differ(a, b string) string {
	if a == b {
		return ""
	}
	al, bl := strings.Split(a, "\n"), strings.Split(b, "\n")
	var out strings.Builder
	for i := range max(len(al), len(bl)) {
		x, y := "", ""
		if i < len(al) {
			x = al[i]
		}
		if i < len(bl) {
			y = bl[i]
		}
		if x != y {
			fmt.Fprintf(&out, "- %s\n+ %s\n", x, y)
		}
		if out.Len() > 2000 {
			break
		}
	}
	return out.String()
}

// errVendor is returned for a script that the runtime fails to run natively too.
var errVendor = errors.New("the vendor's runtime can't run it")

// early reports whether a line says that a command began before the one before it had ended, as it
// does now and then by the times of NVIDIA's driver.
func (r *runner) early(l string) bool {
	return r.cards && strings.HasSuffix(strings.TrimSpace(l), "starts before its predecessor")
}

// unexpected says what a valid script must not print.
func unexpected(out string) error {
	for l := range strings.Lines(out) {
		for _, bad := range []string{"line ", "error -", "profiling", "starts before", "finish gives", " 0 times"} {
			if strings.HasPrefix(l, bad) || bad != "line " && strings.Contains(l, bad) {
				return errors.New(strings.TrimSpace(l))
			}
		}
	}
	return nil
}

// check runs a script undisturbed and disturbed.
func (r *runner) check(ctx context.Context, script string) error {
	want, err := r.run(ctx, script, false)
	if wrong := errors.Join(err, unexpected(want)); wrong != nil {
		for _, gpu := range r.runtimes {
			if native, err := r.natively(ctx, script, gpu); err != nil || unexpected(native) != nil {
				return fmt.Errorf("%w: on %s: %w, through gpuctl: %w", errVendor, gpu, errors.Join(err, unexpected(native)), wrong)
			}
		}
		return fmt.Errorf("undisturbed: %w\n%s", wrong, want)
	}
	// A card's driver takes the bytes of a small write when it is enqueued, also of one whose
	// source a read before it is still to bring, and writes back a region whose map has failed.
	if os.Getenv("GPUCTL_PROPERTY_NATIVE") != "" && !r.cards {
		switch native, err := r.natively(ctx, script, rig.Pthread); {
		case err != nil || unexpected(native) != nil:
			return fmt.Errorf("%w: natively: %w\n%s", errVendor, errors.Join(err, unexpected(native)), native)
		case contents(native) != contents(want):
			return fmt.Errorf("natively (-) and undisturbed (+) differ:\n%s", differ(contents(native), contents(want)))
		}
	}
	got, err := r.run(ctx, script, true)
	if err != nil {
		return fmt.Errorf("disturbed: %w\n%s", err, got)
	}
	if want != got {
		return fmt.Errorf("undisturbed (-) and disturbed (+) differ:\n%s", differ(want, got))
	}
	return nil
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

// set gives a flag another default.
func set(name, value string) {
	if f := flag.Lookup(name); f != nil && f.Value.String() == f.DefValue {
		_ = f.Value.Set(value)
	}
}

// TestSwapsDoNotShow is the property.
func TestSwapsDoNotShow(t *testing.T) { swapsDoNotShow(t, 30*time.Second) }

// TestSwapsDoNotShowWithEveryTransferInALane runs such programs with a library
// that puts no transfer aside, however small: each is moved when its turn has
// come, and may be stopped for a swap in between.
func TestSwapsDoNotShowWithEveryTransferInALane(t *testing.T) {
	root, err := rig.Root()
	if err != nil {
		t.Fatal(err)
	}
	library := filepath.Join(t.TempDir(), "libgpuctl-opencl.so")
	build := exec.Command(filepath.Join(root, "guest/opencl/icd/build.sh"), library, "-DBULK_MIN=0u", "-DBULK_MIN_PACKED=0u", "-DEAGER_MAX=0u", "-DINLINE_MAX=0u")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Setenv("GPUCTL_ICD", library)
	swapsDoNotShow(t, 20*time.Second)
}

// TestSwapsDoNotShowBehindCarriers runs such programs on GPUs here and of another host, and
// compares what they print with what they print natively.
func TestSwapsDoNotShowBehindCarriers(t *testing.T) {
	behindCarriers(t, "roam")
	swapsDoNotShow(t, 15*time.Second)
}

// TestSwapsDoNotShowOverRDMA does the same over connections as RDMA has them.
func TestSwapsDoNotShowOverRDMA(t *testing.T) {
	behindCarriers(t, "rdma")
	swapsDoNotShow(t, 8*time.Second)
}

// TestMappedRegionsThatCommandsUse has programs with commands that read to mapped regions, or
// write from them, before the application can see that the regions are mapped, and after it has
// asked to unmap them.
func TestMappedRegionsThatCommandsUse(t *testing.T) {
	t.Setenv("GPUCTL_PROPERTY_NATIVE", "1")
	commandsUseMappedRegions(t)
}

// TestMappedRegionsThatCommandsUseBehindCarriers has them on GPUs here and of another host.
func TestMappedRegionsThatCommandsUseBehindCarriers(t *testing.T) {
	behindCarriers(t, "tcp")
	commandsUseMappedRegions(t)
}

func commandsUseMappedRegions(t *testing.T) {
	t.Helper()
	files, err := filepath.Glob("testdata/*mapped*.script")
	if err != nil {
		t.Fatal(err)
	}
	r := start(t)
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			switch err := r.check(t.Context(), string(b)); {
			case errors.Is(err, errVendor) && r.cards: // they were found on PoCL
				t.Log(f, err)
			case err != nil:
				t.Errorf("%s: %v", f, err)
			}
		}
	}
}

func behindCarriers(t *testing.T, how string) {
	t.Helper()
	if os.Getenv(rig.CarrierVariable) == "" { // else the whole suite is
		t.Setenv(rig.CarrierVariable, how)
	}
	t.Setenv("GPUCTL_PROPERTY_NATIVE", "1")
}

func swapsDoNotShow(t *testing.T, most time.Duration) {
	seconds, _ := strconv.Atoi(os.Getenv("GPUCTL_PROPERTY_SECONDS"))
	end := time.Now().Add(most)
	set("rapid.checks", "10")
	set("rapid.steps", "70")
	set("rapid.nofailfile", "true")
	if seconds > 0 {
		end = time.Now().Add(time.Duration(seconds) * time.Second)
		_ = flag.Set("rapid.checks", "1000000")
	}
	r := start(t)
	scripts, vendor, bad := 0, 0, false
	t.Cleanup(func() {
		t.Logf("%d scripts, %d of them beyond the runtime; operations: %v", scripts, vendor, r.ops)
		if os.Getenv(rig.CarrierVariable) == "straight" && r.ops["migrate "] >= 8 && r.ops["of them straight"] == 0 {
			t.Error("no contents went straight from one lease manager to the other")
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		if time.Now().After(end) && !bad {
			return
		}
		script := generate(t)
		scripts++
		switch err := r.check(context.Background(), script); {
		case errors.Is(err, errVendor):
			vendor++
		case err != nil:
			bad = true
			// Shrinking writes ever smaller ones.
			file := "testdata/failed.script"
			if e := os.WriteFile(file, []byte(script), 0o600); e != nil {
				t.Log(e)
			}
			t.Fatalf("%v\nscript: %s\nhostd: %s\ngpuguest: %s", err, file, tail(r.Log(), 3000), tail(r.GuestLog(), 3000))
		}
	})
}

// TestRegressions runs the scripts that failed once.
func TestRegressions(t *testing.T) {
	files, err := filepath.Glob("testdata/*.script")
	if err != nil {
		t.Fatal(err)
	}
	if one := os.Getenv("GPUCTL_PROPERTY_SCRIPT"); one != "" {
		files = []string{one}
	}
	r := start(t)
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			switch err := r.check(t.Context(), string(b)); {
			case errors.Is(err, errVendor) && r.cards: // they were found on PoCL
				t.Skip(err)
			case err != nil:
				t.Errorf("%v\nhostd: %s\ngpuguest: %s", err, tail(r.Log(), 3000), tail(r.GuestLog(), 3000))
			}
		})
	}
}
