package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

// PoCL and Oclgrind are the runtimes that make several models out of one
// machine: see docs of the packages pocl-opencl-icd and oclgrind.
const (
	Basic    = "small"        // PoCL basic, 1 GiB
	Pthread  = "large"        // PoCL pthread, 4 GiB
	Oclgrind = "other-vendor" // Oclgrind, 128 MiB
)

// OclgrindLibrary is where Debian's package puts it.
const OclgrindLibrary = "/usr/lib/oclgrind/liboclgrind-rt-icd.so"

// Memory says of what kind the memory of the GPUs is that PoCL plays.
type Memory string

// Kinds of memory. MemoryVariable in the environment of the tests names the one
// that they run with.
const (
	Unified  Memory = "unified"  // the device computes in the host's memory
	Discrete Memory = "discrete" // it has memory of its own, as cards have: test/cl/gpushim.c
	Mixed    Memory = "mixed"    // Basic is discrete and Pthread unified
	Mesa     Memory = "mesa"     // Pthread is Mesa's runtime, rusticl, on its software driver
	Cards    Memory = "cards"    // Basic and Pthread are two cards that have a driver, Oclgrind is PoCL

	MemoryVariable = "GPUCTL_TEST_MEMORY"

	// CardsVariable names the driver's OpenCL library.
	CardsVariable = "GPUCTL_TEST_CARDS"

	// CarrierVariable makes every GPU of a rig a remote one, over loopback: see
	// test/rig/carried for its values.
	CarrierVariable = "GPUCTL_TEST_CARRIER"
)

// Mesa's runtime offers no device that is not named in a variable.
const (
	mesaLibrary  = "libRusticlOpenCL.so.1"
	mesaVariable = "RUSTICL_ENABLE"
	mesaDriver   = "llvmpipe"
)

// TestMemory is the kind of memory that the environment asks for.
func TestMemory() (Memory, error) {
	switch m := Memory(os.Getenv(MemoryVariable)); m {
	case "":
		return Unified, nil
	case Unified, Discrete, Mixed, Mesa:
		return m, nil
	case Cards:
		if os.Getenv(CardsVariable) == "" {
			return "", fmt.Errorf("%s is %s, and %s names no library", MemoryVariable, m, CardsVariable)
		}
		return m, nil
	default:
		return "", fmt.Errorf("%s is %q, not %s, %s, %s, %s or %s", MemoryVariable, m, Unified, Discrete, Mixed, Mesa, Cards)
	}
}

// GPU is one more GPU of a Config.
type GPU struct {
	ID      string
	Library string   // its OpenCL runtime
	Env     []string // the runtime's environment, NAME=value
	Device  int      // which of the runtime's devices it is
	Model   string
	Rank    int // of the model
}

// YAML is the GPU as an entry of gpus in a configuration.
func (g GPU) YAML() string {
	var env []string
	for _, e := range g.Env {
		k, v, _ := strings.Cut(e, "=")
		env = append(env, fmt.Sprintf("%s: %q", k, v))
	}
	return fmt.Sprintf("{id: %s, library: %s, devices: [%d], env: {%s}, model: %s}", g.ID, g.Library, g.Device, strings.Join(env, ", "), g.Model)
}

// Config declares the three GPUs above with that kind of memory, but for those
// whose runtime is not there, and a virtual device that says GPU. More GPUs come
// after them.
func Config(root string, m Memory, more ...GPU) string {
	pocl := func(device string, gib int, discrete bool) string {
		runtime, more := "runtime: pocl", ""
		if discrete {
			runtime, more = "library: "+filepath.Join(root, "test/cl/bin/gpushim.so"), ", GPUSHIM_MEMORY: discrete"
		}
		return fmt.Sprintf(`%s
    env: {POCL_DEVICES: %s, POCL_MEMORY_LIMIT: "%d"%s}
    model: PoCL %[2]s %[3]d GiB`, runtime, device, gib, more)
	}
	basic, pthread := pocl("basic", 1, m == Discrete || m == Mixed), pocl("pthread", 4, m == Discrete)
	third := "\n  - id: " + Oclgrind + "\n    library: " + OclgrindLibrary + "\n    model: Oclgrind 128 MiB"
	if _, err := os.Stat(OclgrindLibrary); err != nil {
		third = "" // not on every machine with cards
	}
	if m == Mesa {
		pthread = fmt.Sprintf("library: %s\n    env: {%s: %s}\n    model: Mesa", mesaLibrary, mesaVariable, mesaDriver)
	}
	if m == Cards {
		card := func(i int) string {
			return fmt.Sprintf("library: %s\n    devices: [%d]\n    model: card %[2]d", os.Getenv(CardsVariable), i)
		}
		basic, pthread, third = card(0), card(1), "\n  - id: "+Oclgrind+"\n    "+pthread
	}
	var gpus, models strings.Builder
	ranked := map[string]bool{}
	for _, g := range more {
		fmt.Fprintf(&gpus, "\n  - %s", g.YAML())
		if !ranked[g.Model] {
			ranked[g.Model] = true
			fmt.Fprintf(&models, "  - {name: %s, rank: %d}\n", g.Model, g.Rank)
		}
	}
	return `version: 1
discover: false
virtualDevice:
  name: gpuctl virtual GPU
  type: gpu
gpus:
  - id: ` + Basic + `
    ` + basic + `
  - id: ` + Pthread + `
    ` + pthread + third + gpus.String() + `
models:
  - {name: PoCL pthread 4 GiB, rank: 3}
  - {name: card 1, rank: 3}
  - {name: Mesa, rank: 3}
  - {name: PoCL basic 1 GiB, rank: 2}
  - {name: card 0, rank: 2}
  - {name: Oclgrind 128 MiB, rank: 1}
` + models.String()
}

// Native is the environment in which a program runs on the GPU's runtime
// itself, without gpuctl. dir takes the folder of the ICD file.
func Native(dir, gpu string) ([]string, error) {
	library, env := "libpocl.so.2", []string(nil)
	switch m, err := TestMemory(); {
	case err != nil:
		return nil, err
	case m == Cards && gpu != Oclgrind:
		return Vendor(filepath.Join(dir, "native-cards"), os.Getenv(CardsVariable), nil)
	case m == Mesa && gpu == Pthread:
		return Vendor(filepath.Join(dir, "native-mesa"), mesaLibrary, []string{mesaVariable + "=" + mesaDriver})
	}
	switch gpu {
	case Basic:
		env = []string{"POCL_DEVICES=basic", "POCL_MEMORY_LIMIT=1"}
	case Pthread:
		env = []string{"POCL_DEVICES=pthread", "POCL_MEMORY_LIMIT=4"}
	case Oclgrind:
		library = OclgrindLibrary
	default:
		return nil, fmt.Errorf("native run on %q: no such GPU", gpu)
	}
	if text, err := os.ReadFile("/etc/OpenCL/vendors/pocl.icd"); err == nil && gpu != Oclgrind {
		library = strings.TrimSpace(string(text))
	}
	return Vendor(filepath.Join(dir, "native-"+gpu), library, env)
}

// Vendor returns env with an ICD folder that names only the library.
func Vendor(dir, library string, env []string) ([]string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("icd folder: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "vendor.icd"), []byte(library+"\n"), 0o644); err != nil {
		return nil, fmt.Errorf("icd file: %w", err)
	}
	// With the slash: CUDA's loader joins folder and file without one.
	return append(env, "OCL_ICD_VENDORS="+dir+"/", "OCL_ICD_FILENAMES="), nil
}

// Root is the folder that holds bin/ and lib/: $GPUCTL_ROOT, else the folder of
// $GPUCTL_BIN, else the nearest one above the working directory with go.mod or
// bin/gpuctl.
func Root() (string, error) {
	if r := os.Getenv("GPUCTL_ROOT"); r != "" {
		return filepath.Abs(r)
	}
	if b := os.Getenv("GPUCTL_BIN"); b != "" {
		return filepath.Abs(filepath.Dir(b))
	}
	d, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("root: %w", err)
	}
	for ; ; d = filepath.Dir(d) {
		for _, f := range []string{"go.mod", "bin/gpuctl"} {
			if _, err := os.Stat(filepath.Join(d, f)); err == nil {
				return d, nil
			}
		}
		if d == filepath.Dir(d) {
			return "", errors.New("root: no bin/gpuctl here or above; run make build")
		}
	}
}

// patience is for what takes moments where nothing else runs.
const patience = 5 * time.Minute

// Options of a private hostd.
type Options struct {
	Dir    string    // its run folder; short, because sockets lie in it
	Config string    // default Config of the memory that the environment asks for
	Env    []string  // added to its environment
	Log    io.Writer // its log; nil: dropped

	// Carriers makes every GPU a remote one: a value of CarrierVariable, which it goes before.
	Carriers string
}

// Rig is a running private hostd.
type Rig struct {
	Root, Dir string

	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}
	log   *testkit.Log
}

// Start starts hostd and waits until it answers.
func Start(ctx context.Context, o Options) (*Rig, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	if o.Config == "" {
		m, err := TestMemory()
		if err != nil {
			return nil, fmt.Errorf("rig: %w", err)
		}
		o.Config = Config(root, m)
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("rig: %w", err)
	}
	if err := Passable(o.Dir); err != nil {
		return nil, err
	}
	file := filepath.Join(o.Dir, "hostd.yaml")
	if err := os.WriteFile(file, []byte(o.Config), 0o600); err != nil {
		return nil, fmt.Errorf("rig: %w", err)
	}
	r := &Rig{Root: root, Dir: o.Dir, ended: make(chan struct{}), log: &testkit.Log{Tee: o.Log}}
	r.cmd = exec.Command(r.Bin("hostd"), "--dev", "--private", "--rundir", o.Dir, "--config", file, "--log-level", "debug")
	r.cmd.Env = append(os.Environ(), o.Env...)
	if o.Carriers != "" {
		r.cmd.Env = append(r.cmd.Env, CarrierVariable+"="+o.Carriers)
	}
	if o.Carriers != "" || os.Getenv(CarrierVariable) != "" {
		r.cmd.Args = append(r.cmd.Args, "--gpuguest", r.Bin("gpuguest-carried"))
	}
	r.cmd.Stdout, r.cmd.Stderr = r.log, r.log
	r.cmd.WaitDelay = 5 * time.Second
	if r.stdin, err = r.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("rig: %w", err)
	}
	if err := r.cmd.Start(); err != nil {
		return nil, fmt.Errorf("rig: %w", err)
	}
	go func() { _ = r.cmd.Wait(); close(r.ended) }()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	up, ended := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-r.ended:
			ended(errors.New("hostd ended"))
		case <-up.Done():
		}
	}()
	defer ended(nil)
	err = testkit.Poll(up, "hostd's answer", func() error {
		_, err := r.Gpuctl(up, "-o", "json", "inventory")
		return err
	})
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("rig: %w; its log: %s", err, r.log)
	}
	return r, nil
}

// Passable lets the users of executors pass through a folder, and those above it
// that a test has made, as a root hostd's run folder needs.
func Passable(dir string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	for ; dir != filepath.Clean(os.TempDir()) && dir != "/"; dir = filepath.Dir(dir) {
		fi, err := os.Stat(dir)
		if err == nil && fi.Mode().Perm()&0o001 == 0 {
			err = os.Chmod(dir, fi.Mode().Perm()|0o011)
		}
		if err != nil {
			return fmt.Errorf("rig: %w", err)
		}
	}
	return nil
}

// States is a folder where the users of sessions may make files.
func (r *Rig) States() (string, error) {
	dir := filepath.Join(r.Dir, "states")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("rig: %w", err)
	}
	return dir, os.Chmod(dir, 0o777|os.ModeSticky)
}

// Close ends hostd, gpuguest and the sessions.
func (r *Rig) Close() {
	_ = r.stdin.Close()
	select {
	case <-r.ended:
	case <-time.After(15 * time.Second):
		_ = r.cmd.Process.Kill()
		<-r.ended
	}
	// A hostd that was killed leaves its gpuguest running, as it should.
	if peer, err := unixrpc.PeerOf(filepath.Join(r.Dir, "guest.sock")); err == nil {
		_ = syscall.Kill(int(peer.PID), syscall.SIGTERM)
	}
}

// Log is what hostd has logged.
func (r *Rig) Log() string { return r.log.String() }

// GuestLog is what gpuguest has logged, why executors ended included.
func (r *Rig) GuestLog() string {
	text, err := os.ReadFile(filepath.Join(r.Dir, "gpuguest.log"))
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// Pid of hostd.
func (r *Rig) Pid() int { return r.cmd.Process.Pid }

// Bin is the path of one of the built programs.
func (r *Rig) Bin(name string) string { return filepath.Join(r.Root, "bin", name) }

// Program is the path of one of the OpenCL test programs.
func (r *Rig) Program(name string) string { return filepath.Join(r.Root, "test", "cl", "bin", name) }

// Env is the environment of gpuctl commands for this hostd.
func (r *Rig) Env() []string {
	return append(os.Environ(), "GPUCTL_HOST=unix://"+filepath.Join(r.Dir, "hostd.sock"))
}

// ExitError is a gpuctl command that did not end with 0.
type ExitError struct {
	Args   []string
	Code   int
	Output string // of both streams
}

func (e *ExitError) Error() string {
	return fmt.Sprintf("gpuctl %s: exit status %d: %s", strings.Join(e.Args, " "), e.Code, strings.TrimSpace(e.Output))
}

// Gpuctl runs a gpuctl command and returns its standard output. An exit status
// other than 0 is an *ExitError.
func (r *Rig) Gpuctl(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, r.Bin("gpuctl"), args...)
	cmd.Env = r.Env()
	cmd.WaitDelay = 5 * time.Second
	var out bytes.Buffer
	all := &testkit.Log{} // two write it
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&out, all), all
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return out.Bytes(), &ExitError{args, exit.ExitCode(), all.String()}
	}
	if err != nil {
		return nil, fmt.Errorf("gpuctl %s: %w", strings.Join(args, " "), err)
	}
	return out.Bytes(), nil
}

// Command is "gpuctl run" of a program on a GPU, not yet started.
func (r *Rig) Command(ctx context.Context, gpu string, argv ...string) *exec.Cmd {
	args := append([]string{"run", "--gpu", fmt.Sprintf("id == %q", gpu), "--"}, argv...)
	cmd := exec.CommandContext(ctx, r.Bin("gpuctl"), args...)
	cmd.Env = r.Env()
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// Sessions returns the ids of the live sessions.
func (r *Rig) Sessions(ctx context.Context) ([]string, error) {
	out, err := r.Gpuctl(ctx, "-o", "json", "sessions")
	if err != nil {
		return nil, err
	}
	var v any
	if err := json.Unmarshal(out, &v); err != nil {
		return nil, fmt.Errorf("sessions: %w", err)
	}
	var ids []string
	walk(v, func(m map[string]any) {
		if id, ok := m["id"].(string); ok && m["pid"] != nil {
			ids = append(ids, id)
		}
	})
	return ids, nil
}

// Session waits until there is exactly one session and returns its id.
func (r *Rig) Session(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("it took too long"))
	defer cancel()
	var ids []string
	err := testkit.Poll(ctx, "one session", func() (err error) {
		if ids, err = r.Sessions(ctx); err != nil {
			return testkit.GiveUp(err)
		}
		return testkit.Want(len(ids) == 1, len(ids), "sessions")
	})
	if err != nil {
		return "", fmt.Errorf("%w; log: %s", err, r.Log())
	}
	return ids[0], nil
}

// Swap is what an operation reported.
type Swap struct {
	Stopped    time.Duration // downtime of the application
	Total      time.Duration
	Precopied  uint64 // bytes
	Frozen     uint64 // bytes copied while it was frozen
	RolledBack bool
	Refused    bool
	Error      string
	Steps      map[string]time.Duration
}

// Operate runs one of gpuctl's operations on a session (migrate, upgrade,
// downgrade, suspend, resume) and returns its result.
func (r *Rig) Operate(ctx context.Context, verb string, args ...string) (Swap, error) {
	out, err := r.Gpuctl(ctx, append([]string{"-o", "json", verb}, args...)...)
	if err != nil {
		return Swap{}, err
	}
	return parseSwap(out)
}

// parseSwap reads a SwapResult, whatever it is wrapped in; 64-bit numbers may be strings.
func parseSwap(out []byte) (Swap, error) {
	dec := json.NewDecoder(bytes.NewReader(out))
	var s Swap
	found := false
	for {
		var v any
		if err := dec.Decode(&v); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return s, fmt.Errorf("result: %w: %s", err, out)
		}
		walk(v, func(m map[string]any) {
			if get(m, "stopped_ns", "stoppedNs") == nil && get(m, "total_ns", "totalNs") == nil {
				return
			}
			found = true
			s.Stopped = time.Duration(number(get(m, "stopped_ns", "stoppedNs")))
			s.Total = time.Duration(number(get(m, "total_ns", "totalNs")))
			s.Precopied = uint64(number(get(m, "bytes_precopied", "bytesPrecopied")))
			s.Frozen = uint64(number(get(m, "bytes_frozen", "bytesFrozen")))
			s.RolledBack, _ = get(m, "rolled_back", "rolledBack").(bool)
			s.Refused, _ = m["refused"].(bool)
			s.Error, _ = m["error"].(string)
			steps, _ := m["steps"].([]any)
			s.Steps = make(map[string]time.Duration, len(steps))
			for _, st := range steps {
				if sm, ok := st.(map[string]any); ok {
					name, _ := sm["step"].(string)
					s.Steps[name] += time.Duration(number(get(sm, "duration_ns", "durationNs")))
				}
			}
		})
	}
	if !found {
		return s, fmt.Errorf("result: no times in it: %s", out)
	}
	return s, nil
}

func get(m map[string]any, names ...string) any {
	for _, n := range names {
		if v, ok := m[n]; ok {
			return v
		}
	}
	return nil
}

func number(v any) int64 {
	switch n := v.(type) {
	case float64:
		return int64(n)
	case string:
		i, _ := strconv.ParseInt(n, 10, 64)
		return i
	}
	return 0
}

// walk visits every JSON object in v.
func walk(v any, visit func(map[string]any)) {
	switch n := v.(type) {
	case map[string]any:
		visit(n)
		for _, c := range n {
			walk(c, visit)
		}
	case []any:
		for _, c := range n {
			walk(c, visit)
		}
	}
}
