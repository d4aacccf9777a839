package holders

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/glimpse"
)

// Limits of what is read of a process. It chooses some of it.
const (
	mostFile = 64 << 10 // bytes
	mostText = 256
	mostFDs  = 1 << 20
)

// Process is one of the machine's.
type Process struct {
	PID, Parent    int
	Group, Session int // of processes, as job control has them
	Terminal       int // its controlling terminal's number; 0: none
	Start          uint64
	Name           string // of the program, as the kernel has it
	Stopped        bool   // by a signal, or by a debugger

	// zombie is what has ended. With half, only its first thread has: the process goes on, and
	// what it has open is seen by its other threads only.
	zombie, half, own bool
}

// Holder is a process that has nodes of the driver.
type Holder struct {
	Process
	UID     uint32
	Command string
	Cgroup  string
	Nodes   []string // names of nodes that it has open, as nvidia0 and nvidiactl, sorted
	Mapped  []string // the same of nodes that it has mapped; only if maps were read
}

// GPUs returns the numbers of the GPUs whose nodes it has.
func (h *Holder) GPUs() []int {
	var ns []int
	for _, node := range slices.Concat(h.Nodes, h.Mapped) {
		if n, err := strconv.Atoi(strings.TrimPrefix(node, "nvidia")); err == nil && !slices.Contains(ns, n) {
			ns = append(ns, n)
		}
	}
	slices.Sort(ns)
	return ns
}

// Look is what was found.
type Look struct {
	Processes map[int]*Process
	Holders   map[int]*Holder
	// Blind are processes of which nobody can say, for lack of rights.
	Blind []int
}

// Roots say where to look. The zero value is this machine.
type Roots struct {
	Proc string // empty: /proc
	Dev  string // folder of the nodes; empty: /dev. In another one nodes may be plain files.
	// Except reports whether a process is gpuguest's own: no holder, and no launcher of
	// what it has started. nil: none is.
	Except func(pid int) bool
	// Reads bounds reads that a process can keep from ending. nil: they are waited for.
	Reads *glimpse.Reads
}

func (r Roots) proc() string {
	if r.Proc == "" {
		return "/proc"
	}
	return r.Proc
}

// Take looks at all processes. With maps it also looks for nodes that a process has mapped
// and closed; that takes longer, and is needed before a card is taken away.
func (r Roots) Take(maps bool) (*Look, error) {
	d, err := beneath.OpenDir(r.proc(), ".")
	if err != nil {
		return nil, fmt.Errorf("look for processes: %w", err)
	}
	names, err := d.Readdirnames(-1)
	d.Close()
	if err != nil {
		return nil, fmt.Errorf("look for processes: %w", err)
	}
	l := &Look{Processes: map[int]*Process{}, Holders: map[int]*Holder{}}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid <= 0 {
			continue
		}
		p, err := readStat(r.proc(), pid)
		switch {
		case errors.Is(err, fs.ErrPermission):
			l.Blind = append(l.Blind, pid)
			continue
		case err != nil && !gone(err): // for lack of descriptors: what is not seen would be taken for ended
			return nil, fmt.Errorf("look at pid %d: %w", pid, err)
		case err != nil || p.zombie:
			continue // it has ended
		}
		l.Processes[pid] = p
		if r.Except != nil && r.Except(pid) {
			p.own = true
			continue
		}
		h, err := r.holder(p, maps)
		switch {
		case err == nil && h != nil:
			l.Holders[pid] = h
		case errors.Is(err, fs.ErrPermission):
			l.Blind = append(l.Blind, pid)
		case err != nil && !gone(err):
			return nil, fmt.Errorf("look at pid %d: %w", pid, err)
		}
	}
	slices.Sort(l.Blind)
	return l, nil
}

func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// holder returns what a process has, or nil.
func (r Roots) holder(p *Process, maps bool) (*Holder, error) {
	h := &Holder{Process: *p}
	at, err := r.alive(p)
	if err != nil {
		return nil, err
	}
	if h.Nodes, err = r.open(at); err != nil {
		return nil, err
	}
	if maps {
		if h.Mapped, err = r.mapped(at); err != nil {
			return nil, err
		}
	}
	if len(h.Nodes) == 0 && len(h.Mapped) == 0 {
		return nil, nil
	}
	st, err := r.Status(p.PID)
	if err != nil {
		return nil, err
	}
	h.UID, h.Command, h.Cgroup = st.UID, r.Command(p.PID), r.cgroup(p.PID)
	if h.Command == "" {
		h.Command = p.Name
	}
	return h, nil
}

// alive returns the folder in /proc that has what a process has: its own, or that of a thread
// which goes on after the first one.
func (r Roots) alive(p *Process) (string, error) {
	pid := strconv.Itoa(p.PID)
	if !p.half {
		return pid, nil
	}
	names, err := r.list(pid + "/task")
	if err != nil {
		return "", err
	}
	for _, name := range names {
		at := pid + "/task/" + name
		b, err := r.readAt(at, "stat")
		if err != nil {
			continue // it has ended
		}
		if t, err := parseStat(p.PID, string(b)); err == nil && !t.zombie && !t.half {
			return at, nil
		}
	}
	return "", fmt.Errorf("pid %d: %w", p.PID, unix.ESRCH)
}

// at returns the same for a process of that number.
func (r Roots) at(pid int) (string, error) {
	p, err := readStat(r.proc(), pid)
	if err != nil {
		return "", err
	}
	return r.alive(p)
}

// open returns the names of the nodes that a process has open.
func (r Roots) open(at string) ([]string, error) {
	d, err := beneath.OpenDir(r.proc(), at+"/fd")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	var nodes []string
	for read := 0; read < mostFDs; {
		names, err := d.Readdirnames(1024)
		read += len(names)
		for _, name := range names {
			buf := make([]byte, 512)
			n, err := unix.Readlinkat(int(d.Fd()), name, buf)
			if err != nil {
				continue // closed meanwhile
			}
			node, ok := r.node(string(buf[:n]), func() bool { return isDevice(int(d.Fd()), name) })
			if ok && !slices.Contains(nodes, node) {
				nodes = append(nodes, node)
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(nodes)
	return nodes, nil
}

// node returns the name of a node of the driver, as nvidia0 or nvidia-caps/nvidia-cap1.
// Outside of /dev a path may have been chosen by anybody: there only a device counts.
func (r Roots) node(path string, device func() bool) (string, bool) {
	path = strings.TrimSuffix(path, " (deleted)")
	dev := r.Dev
	if dev == "" {
		dev = "/dev"
	}
	if name, ok := strings.CutPrefix(path, dev+"/"); ok && strings.HasPrefix(name, "nvidia") {
		return name, dev != "/dev" || device()
	}
	if i := strings.LastIndex(path, "/dev/nvidia"); r.Dev == "" && i >= 0 && device() {
		return path[i+len("/dev/"):], true // of another root, as that of a container
	}
	return "", false
}

// isDevice reports whether a descriptor is of a character device. It asks no file server.
func isDevice(dir int, name string) bool {
	var st unix.Statx_t
	err := unix.Statx(dir, name, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st)
	return err == nil && uint32(st.Mode)&unix.S_IFMT == unix.S_IFCHR
}

// mapped returns the names of the nodes that a process has mapped. A mapping keeps a device
// open without a descriptor.
func (r Roots) mapped(at string) ([]string, error) {
	var nodes []string
	err := r.mappings(at, func(line string) bool {
		i := strings.IndexByte(line, '/')
		if i < 0 {
			return true
		}
		node, ok := r.node(line[i:], func() bool { return deviceMapping(line) })
		if ok && !slices.Contains(nodes, node) {
			nodes = append(nodes, node)
		}
		return true
	})
	slices.Sort(nodes)
	return nodes, err
}

// mappings calls f with each line of maps, as long as it returns true. A process can have very
// many, with long names, and no more than one is kept.
func (r Roots) mappings(at string, f func(line string) bool) error {
	maps, err := beneath.OpenFile(r.proc(), at+"/maps", os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer maps.Close()
	sc := bufio.NewScanner(maps)
	for sc.Scan() {
		if !f(sc.Text()) {
			return nil
		}
	}
	return sc.Err()
}

// deviceMapping reports whether a line of maps is of a device: what NVIDIA's driver maps is
// shared. A private mapping of a plain file of that name is not.
func deviceMapping(line string) bool {
	f := strings.Fields(line)
	return len(f) > 1 && strings.HasSuffix(f[1], "s")
}

// Status is what /proc/PID/status has.
type Status struct {
	Leader int // the thread group's: the process that a thread belongs to
	UID    uint32
	UIDs   [4]uint32 // real, effective, saved, of the file system
	GIDs   [4]uint32 // the same of its group
}

// Status reads it. The pid may be a thread's.
func (r Roots) Status(pid int) (st Status, err error) {
	b, err := r.read(pid, "status")
	if err != nil {
		return st, err
	}
	for line := range strings.Lines(string(b)) {
		key, rest, _ := strings.Cut(line, ":")
		f := strings.Fields(rest)
		switch {
		case key == "Tgid" && len(f) == 1:
			st.Leader, err = strconv.Atoi(f[0])
		case key == "Uid" && len(f) == 4:
			st.UIDs, err = ids(f)
			st.UID = st.UIDs[0]
		case key == "Gid" && len(f) == 4:
			st.GIDs, err = ids(f)
		}
		if err != nil {
			return st, fmt.Errorf("pid %d: malformed status: %w", pid, err)
		}
	}
	if st.Leader == 0 {
		return st, fmt.Errorf("pid %d: malformed status", pid)
	}
	return st, nil
}

// ids parses the four of a user or group.
func ids(f []string) (out [4]uint32, err error) {
	for i := range out {
		n, perr := strconv.ParseUint(f[i], 10, 32)
		out[i], err = uint32(n), errors.Join(err, perr)
	}
	return out, err
}

// Loads reports whether a process has mapped a library of that name, and lets itself be looked at.
func (r Roots) Loads(pid int, library string) bool {
	at, err := r.at(pid)
	if err != nil {
		return false
	}
	found, _ := glimpse.Do(r.Reads, r.user(pid), at+"/maps", func() (found bool) {
		_ = r.mappings(at, func(line string) bool {
			found = strings.Contains(line, "/"+library)
			return !found
		})
		return found
	})
	return found
}

// user returns whose a process is.
func (r Roots) user(pid int) uint32 {
	st, err := r.Status(pid)
	if err != nil {
		return 0 // it has ended
	}
	return st.UID
}

// SameNamespace reports whether a process has pids of the same namespace as this one.
func (r Roots) SameNamespace(pid int) (bool, error) {
	theirs, err := os.Readlink(filepath.Join(r.proc(), strconv.Itoa(pid), "ns/pid")) // the kernel's own
	if err != nil {
		return false, err
	}
	ours, err := os.Readlink(filepath.Join(r.proc(), "self/ns/pid"))
	return ours == theirs, err
}

// read returns one file of a process, at most 64 KiB.
func (r Roots) read(pid int, name string) ([]byte, error) { return r.readAt(strconv.Itoa(pid), name) }

// readLive returns one that a process has no more when its first thread has ended.
func (r Roots) readLive(pid int, name string) ([]byte, error) {
	at, err := r.at(pid)
	if err != nil {
		return nil, err
	}
	return r.readAt(at, name)
}

// glimpsed returns the same of what is in the process's own memory; nil if it keeps that from being
// read.
func (r Roots) glimpsed(pid int, name string) []byte {
	b, _ := glimpse.Do(r.Reads, r.user(pid), strconv.Itoa(pid)+"/"+name, func() []byte {
		b, err := r.readLive(pid, name)
		if err != nil {
			return nil
		}
		return b
	})
	return b
}

func (r Roots) readAt(at, name string) ([]byte, error) {
	f, err := beneath.OpenFile(r.proc(), at+"/"+name, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, mostFile))
}

// Command returns the process's command line, short enough for a table.
func (r Roots) Command(pid int) string {
	b := r.glimpsed(pid, "cmdline")
	s := strings.Map(func(c rune) rune {
		if c < ' ' || c == 0x7f || c == 0xfffd {
			return ' '
		}
		return c
	}, strings.ToValidUTF8(string(b[:min(len(b), mostText)]), ""))
	return strings.TrimSpace(s)
}

// Variable returns a variable of the environment that a process was started with, or "".
func (r Roots) Variable(pid int, name string) string {
	b := r.glimpsed(pid, "environ")
	for v := range strings.SplitSeq(string(b), "\x00") {
		if value, ok := strings.CutPrefix(v, name+"="); ok {
			return value
		}
	}
	return ""
}

// cgroup returns the path of the process's control group.
func (r Roots) cgroup(pid int) string {
	b, err := r.read(pid, "cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSpace(path)
		}
	}
	return ""
}

// Parent returns the process that a process is a child of; 0: the kernel's.
func (r Roots) Parent(pid int) (int, error) {
	p, err := readStat(r.proc(), pid)
	if err != nil {
		return 0, err
	}
	return p.Parent, nil
}

// readStat reads /proc/PID/stat.
func readStat(proc string, pid int) (*Process, error) {
	b, err := Roots{Proc: proc}.read(pid, "stat")
	if err != nil {
		return nil, err
	}
	return parseStat(pid, string(b))
}

// Layout says where the parts of a process's memory are: its program, stack, data, arguments
// and environment, as the kernel has put them there at random.
func (r Roots) Layout(pid int) (string, error) {
	b, err := r.read(pid, "stat")
	if err != nil {
		return "", fmt.Errorf("layout of pid %d: %w", pid, err)
	}
	f := strings.Fields(string(b[max(0, strings.LastIndexByte(string(b), ')')):]))
	const program, stack, data, environment = 24, 26, 43, 49 // fields 26, 28, 45 and 51 of proc(5)
	if len(f) <= environment {
		return "", fmt.Errorf("pid %d: malformed stat", pid)
	}
	return strings.Join(slices.Concat(f[program:stack+1], f[data:environment+1]), "-"), nil
}

// Resident returns how many bytes of memory a process has.
func (r Roots) Resident(pid int) (uint64, error) {
	b, err := r.readLive(pid, "statm")
	if err != nil {
		return 0, fmt.Errorf("memory of pid %d: %w", pid, err)
	}
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0, fmt.Errorf("pid %d: malformed statm", pid)
	}
	pages, err := strconv.ParseUint(f[1], 10, 50)
	return pages * uint64(os.Getpagesize()), err
}

// parseStat parses it. The name in field 2 may contain any character.
func parseStat(pid int, s string) (*Process, error) {
	open, end := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
	if open < 0 || end < open {
		return nil, fmt.Errorf("pid %d: malformed stat", pid)
	}
	f := strings.Fields(s[end+1:])
	if len(f) < 20 {
		return nil, fmt.Errorf("pid %d: malformed stat", pid)
	}
	p := &Process{PID: pid, Name: strings.ToValidUTF8(s[open+1:end], "?"), zombie: f[0] == "Z" || f[0] == "X", Stopped: f[0] == "T" || f[0] == "t"}
	if p.zombie && f[17] != "0" && f[17] != "1" { // it has other threads
		p.zombie, p.half = false, true
	}
	var errs []error
	for i, into := range []*int{&p.Parent, &p.Group, &p.Session, &p.Terminal} {
		n, err := strconv.Atoi(f[1+i])
		*into = n
		errs = append(errs, err)
	}
	var err error
	p.Start, err = strconv.ParseUint(f[19], 10, 64)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, fmt.Errorf("pid %d: malformed stat: %w", pid, err)
	}
	return p, nil
}
