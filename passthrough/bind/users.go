package bind

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

const (
	maxFolders   = 4096 // most folders that are searched below one function
	maxBehind    = 8    // most levels of block devices on block devices
	shownUsers   = 8
	maxComm      = 64
	maxMountRows = 1 << 16
)

// Kind is the kind of a user.
type Kind string

// Kinds of users.
const (
	UserProcess  Kind = "process"
	UserConsole  Kind = "console"
	UserMount    Kind = "mount"
	UserSwap     Kind = "swap"
	UserNetwork  Kind = "network"
	UserVFs      Kind = "virtual functions"
	UserInstance Kind = "vGPU"
	UserGuest    Kind = "guest"
)

// User is a process, VM or other user of a function.
type User struct {
	Function pci.Address
	Kind     Kind
	Name     string // name of the process, VM, mount point, …
	PID      int    // of a process
	What     string // the open file, or what to do
}

// String returns the user as a part of a sentence.
func (u User) String() string {
	switch u.Kind {
	case UserProcess:
		return fmt.Sprintf("%s (pid %d) has %s open", u.Name, u.PID, u.What)
	case UserConsole:
		return u.Name + " is on it"
	case UserMount:
		return u.Name + " is mounted from it"
	case UserSwap:
		return "the host swaps to " + u.Name
	case UserNetwork:
		return "network interface " + u.Name + " is up"
	case UserGuest:
		return "guest " + u.Name + " has it"
	default:
		return u.Name
	}
}

// InUseError is ErrInUse with the users of the functions.
type InUseError struct{ Users []User }

// Error returns a text that names the first users.
func (e *InUseError) Error() string {
	var parts []string
	for i, u := range e.Users {
		if i == shownUsers {
			parts = append(parts, fmt.Sprintf("and %d more", len(e.Users)-i))
			break
		}
		parts = append(parts, fmt.Sprintf("%s: %s", u.Function, u))
	}
	return ErrInUse.Error() + ": " + strings.Join(parts, "; ")
}

// Is reports whether target is ErrInUse.
func (e *InUseError) Is(target error) bool { return target == ErrInUse }

// Users finds the users of functions: processes that have one of their files open, the
// host's console, mounts and swap on disks behind them, their virtual functions and
// vGPUs, and VMs. It takes no longer than the Binder's patience. If something could not
// be checked, it returns an error.
func (b *Binder) Users(ctx context.Context, functions []pci.Address) ([]User, error) {
	ctx, cancel := context.WithTimeout(ctx, b.patience)
	defer cancel()
	var users []User
	files := map[string][]pci.Address{} // files below /dev
	for _, a := range functions {
		now, err := b.read(a)
		if err != nil {
			return nil, err
		}
		names, err := b.nodes(a, now)
		if err != nil {
			return nil, fmt.Errorf("find the files of %s: %w", a, err)
		}
		for _, n := range names {
			files[n] = append(files[n], a)
		}
		users = append(users, b.instances(a)...)
		users = append(users, b.console(a, now)...)
		users = append(users, b.network(a)...)
	}
	for _, f := range []func(context.Context, []pci.Address) ([]User, error){b.disks, b.others} {
		more, err := f(ctx, functions)
		if err != nil {
			return nil, err
		}
		users = append(users, more...)
	}
	more, err := b.processes(ctx, functions, files)
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w: that takes root with CAP_SYS_PTRACE", err)
	}
	if err != nil {
		return nil, fmt.Errorf("look for processes that have a device open: %w", err)
	}
	return append(users, more...), nil
}

func (b *Binder) others(ctx context.Context, functions []pci.Address) ([]User, error) {
	if b.users == nil {
		return nil, nil
	}
	users, err := b.users(ctx, functions)
	if err != nil {
		return nil, fmt.Errorf("ask which guests have a device: %w", err)
	}
	return users, nil
}

// nodes returns the files below /dev through which processes use a function.
func (b *Binder) nodes(a pci.Address, now state) ([]string, error) {
	var out []string
	left := maxFolders
	for _, class := range []string{"drm", "accel", "graphics", "sound"} {
		names, err := b.devNames(devicePath(a, class), 3, &left)
		if err != nil {
			return nil, err
		}
		out = append(out, names...)
	}
	entries, err := b.list(devicePath(a, "vfio-dev"))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		out = append(out, "vfio/devices/"+e.Name())
	}
	switch {
	case isVFIO(now.driver) && now.group != "":
		out = append(out, "vfio/"+now.group, "vfio/noiommu-"+now.group)
	case now.driver == "nvidia":
		out = append(out, b.nvidiaNode(a))
	case now.driver == "amdgpu":
		out = append(out, "kfd") // one file for all GPUs: its users have each GPU open
	}
	return out, nil
}

// nvidiaNode returns the device file of NVIDIA's driver for a GPU. If the driver does not
// report which one, it returns a pattern for all of them.
func (b *Binder) nvidiaNode(a pci.Address) string {
	data, err := b.root.ReadFile(path.Join("proc/driver/nvidia/gpus", a.String(), "information"))
	if err != nil {
		return "nvidia*"
	}
	for line := range strings.Lines(string(data)) {
		if minor, ok := strings.CutPrefix(line, "Device Minor:"); ok {
			if n, err := strconv.ParseUint(strings.TrimSpace(minor), 10, 16); err == nil {
				return "nvidia" + strconv.FormatUint(n, 10)
			}
		}
	}
	return "nvidia*"
}

// devNames returns the DEVNAMEs in a folder and the folders below it.
func (b *Binder) devNames(dir string, depth int, left *int) ([]string, error) {
	entries, err := b.list(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if !e.IsDir() || e.Name() == "power" || strings.HasPrefix(e.Name(), "input") {
			continue
		}
		if *left--; *left < 0 {
			return nil, fmt.Errorf("more than %d folders", maxFolders)
		}
		below := path.Join(dir, e.Name())
		data, err := b.root.ReadFile(path.Join(below, "uevent"))
		if err != nil && !gone(err) {
			return nil, err
		}
		for line := range strings.Lines(string(data)) {
			if name, ok := strings.CutPrefix(line, "DEVNAME="); ok {
				out = append(out, strings.TrimSpace(name))
			}
		}
		if depth > 1 {
			more, err := b.devNames(below, depth-1, left)
			if err != nil {
				return nil, err
			}
			out = append(out, more...)
		}
	}
	return out, nil
}

// instances returns the virtual functions and mediated devices of a function.
func (b *Binder) instances(a pci.Address) []User {
	var out []User
	add := func(kind Kind, format string, args ...any) {
		out = append(out, User{Function: a, Kind: kind, Name: fmt.Sprintf(format, args...)})
	}
	if n, err := strconv.Atoi(b.text(devicePath(a, "sriov_numvfs"))); err == nil && n > 0 {
		add(UserVFs, "its %d virtual functions are out; write 0 to %s", n, "/"+devicePath(a, "sriov_numvfs"))
	}
	if t := b.text(devicePath(a, "nvidia/current_vgpu_type")); t != "" && t != "0" {
		add(UserInstance, "it carries a vGPU of type %s; write 0 to %s", clean(t), "/"+devicePath(a, "nvidia/current_vgpu_type"))
	}
	types, _ := b.list(devicePath(a, "mdev_supported_types"))
	n := 0
	for _, t := range types {
		devices, _ := b.list(devicePath(a, "mdev_supported_types", t.Name(), "devices"))
		n += len(devices)
	}
	if n > 0 {
		add(UserInstance, "it carries %d mediated devices; remove them", n)
	}
	return out
}

// console reports whether the host's console is on a function. A function that is bound
// to a driver for VMs is not used by the host.
func (b *Binder) console(a pci.Address, now state) []User {
	if handsOut(now.driver) {
		return nil
	}
	if !b.bootVGA && b.text(devicePath(a, "boot_vga")) == "1" {
		return []User{{Function: a, Kind: UserConsole, Name: "the host's boot display"}}
	}
	screens, _ := b.list(devicePath(a, "graphics"))
	if !slices.ContainsFunc(screens, func(e fs.DirEntry) bool { return e.Name() == "fb0" }) {
		return nil // the console is on the first one
	}
	const consoles = "sys/class/vtconsole"
	entries, _ := b.list(consoles)
	for _, e := range entries {
		if strings.Contains(b.text(path.Join(consoles, e.Name(), "name")), "frame buffer") && b.text(path.Join(consoles, e.Name(), "bind")) == "1" {
			return []User{{Function: a, Kind: UserConsole, Name: "the framebuffer console " + clean(e.Name())}}
		}
	}
	return nil
}

func (b *Binder) network(a pci.Address) []User {
	var out []User
	entries, _ := b.list(devicePath(a, "net"))
	for _, e := range entries {
		if b.text(devicePath(a, "net", e.Name(), "operstate")) == "up" {
			out = append(out, User{Function: a, Kind: UserNetwork, Name: clean(e.Name())})
		}
	}
	return out
}

// disks finds mounts and swap on disks behind the functions, for example on a card's USB
// controller.
func (b *Binder) disks(_ context.Context, functions []pci.Address) ([]User, error) {
	var out []User
	behind := func(link string, kind Kind, name string) {
		for _, a := range functions {
			if b.behind(link, a, maxBehind) {
				out = append(out, User{Function: a, Kind: kind, Name: clean(name)})
			}
		}
	}
	for _, row := range b.rows("proc/1/mountinfo") {
		if len(row) > 4 {
			behind(path.Join("sys/dev/block", row[2]), UserMount, row[4])
		}
	}
	for i, row := range b.rows("proc/swaps") {
		if name, ok := strings.CutPrefix(row[0], "/dev/"); ok && i > 0 {
			behind(path.Join("sys/class/block", path.Base(name)), UserSwap, row[0])
		}
	}
	return out, nil
}

func (b *Binder) rows(name string) [][]string {
	data, err := b.root.ReadFile(name)
	if err != nil {
		return nil
	}
	var out [][]string
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 0 && len(out) < maxMountRows {
			out = append(out, fields)
		}
	}
	return out
}

// behind reports whether a block device is below a function, or consists of block devices
// that are, as a RAID or a logical volume does.
func (b *Binder) behind(link string, a pci.Address, depth int) bool {
	if !fs.ValidPath(link) || depth == 0 {
		return false
	}
	target, err := b.root.ReadLink(link)
	if err != nil {
		return false
	}
	if strings.Contains(target, "/"+a.String()+"/") {
		return true
	}
	slaves, _ := b.list(path.Join(link, "slaves"))
	return slices.ContainsFunc(slaves, func(e fs.DirEntry) bool {
		return b.behind(path.Join("sys/class/block", e.Name()), a, depth-1)
	})
}

// processes checks the open files of all processes, if there are any files to look for. A
// process that ends meanwhile has nothing open.
func (b *Binder) processes(ctx context.Context, functions []pci.Address, files map[string][]pci.Address) ([]User, error) {
	entries, err := b.list("proc")
	if err != nil {
		return nil, err
	}
	var out []User
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid <= 0 {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("not all of them within %v: %w", b.patience, err)
		}
		dir, fds, err := b.opened(path.Join("proc", e.Name()))
		if err != nil {
			return nil, fmt.Errorf("process %d: %w", pid, err)
		}
		comm := ""
		seen := map[string]bool{}
		for _, fd := range fds {
			target, err := b.root.ReadLink(path.Join(dir, fd.Name()))
			if err != nil && !gone(err) {
				return nil, fmt.Errorf("process %d: %w", pid, err)
			}
			if seen[target] {
				continue
			}
			seen[target] = true
			for _, a := range owners(target, functions, files) {
				if comm == "" {
					comm = clean(b.text(path.Join("proc", e.Name(), "comm")))
				}
				out = append(out, User{Function: a, Kind: UserProcess, Name: comm, PID: pid, What: clean(target)})
			}
		}
	}
	return out, nil
}

// opened returns the folder with what a process has open. When its first thread has ended, and
// others go on, that one has nothing any more.
func (b *Binder) opened(process string) (dir string, fds []fs.DirEntry, err error) {
	dir = path.Join(process, "fd")
	if fds, err = b.list(dir); err != nil || len(fds) > 0 {
		return dir, fds, err
	}
	threads, err := b.list(path.Join(process, "task"))
	if err != nil {
		return dir, nil, err
	}
	for _, t := range threads {
		dir = path.Join(process, "task", t.Name(), "fd")
		if fds, err = b.list(dir); err != nil || len(fds) > 0 {
			break
		}
	}
	return dir, fds, err
}

// owners returns the functions to which an open file belongs.
func owners(target string, functions []pci.Address, files map[string][]pci.Address) []pci.Address {
	if name, ok := strings.CutPrefix(target, "/dev/"); ok {
		out := files[name]
		if number, ok := strings.CutPrefix(name, "nvidia"); ok && len(files["nvidia*"]) > 0 {
			if _, err := strconv.ParseUint(number, 10, 16); err == nil {
				out = append(slices.Clone(out), files["nvidia*"]...)
			}
		}
		return out
	}
	// A BAR that is mapped through sysfs: resource0, resource0_wc, …. What is named resource is a table of their addresses,
	// which anybody may read, as lspci and hostd do.
	dir, file := path.Split(target)
	if bar, ok := strings.CutPrefix(file, "resource"); ok && bar != "" && strings.HasPrefix(dir, "/sys/") {
		for _, a := range functions {
			if path.Base(dir) == a.String() {
				return []pci.Address{a}
			}
		}
	}
	return nil
}

// list returns a folder's entries; none if the folder does not exist.
func (b *Binder) list(dir string) ([]fs.DirEntry, error) {
	entries, err := b.root.ReadDir(dir)
	if gone(err) {
		err = nil
	}
	return entries, err
}

// text returns the content of a small file; empty if it cannot be read.
func (b *Binder) text(name string) string {
	data, err := b.root.ReadFile(name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) || errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ENOTDIR)
}

// clean returns a name of a process or device without control characters.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
	if len(s) > maxComm {
		s = strings.ToValidUTF8(s[:maxComm], "") + "…"
	}
	return s
}
