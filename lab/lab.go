package lab

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrDown means that a host's QEMU does not run.
var ErrDown = errors.New("host is down")

// A Lab is the two Xen hosts of one cache, and one without Xen. Several processes may use it at once;
// those that start and stop hosts wait for each other.
type Lab struct {
	source   string // this package's folder
	cache    string
	run      string // where the hosts of this instance run, below cache
	lan      string // what the addresses of the loopback begin with that the hosts' network is made of
	progress *Progress
	hosts    []*Host
	kvm      *Host
}

// Open returns the lab whose cache is the folder cache, made if need be. Empty
// means $GPUCTL_LAB_CACHE, else .cache/lab in the repository that holds the
// working folder. $GPUCTL_LAB_INSTANCE, a short name, is another pair of hosts
// beside the usual one, from the same image and snapshots. $GPUCTL_LAB_QUOTA is
// percent of one processor that each host may use when it is started from now on;
// it needs root. Nothing starts.
func Open(cache string, progress *Progress) (*Lab, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	if cache == "" {
		cache = os.Getenv("GPUCTL_LAB_CACHE")
	}
	if cache == "" {
		cache = filepath.Join(root, ".cache", "lab")
	}
	cache, err = filepath.Abs(cache)
	if err != nil {
		return nil, err
	}
	run := filepath.Join(cache, "run")
	if name := os.Getenv("GPUCTL_LAB_INSTANCE"); name != "" {
		if strings.ContainsAny(name, "/.") {
			return nil, fmt.Errorf("lab: GPUCTL_LAB_INSTANCE is a name, not %q", name)
		}
		run += "-" + name
	}
	if len(run) > 80 { // a socket's path has at most 107 bytes
		return nil, fmt.Errorf("lab: the path %s is too long for sockets; set GPUCTL_LAB_CACHE to a shorter one", run)
	}
	quota, err := parseQuota(os.Getenv("GPUCTL_LAB_QUOTA"))
	if err != nil {
		return nil, err
	}
	id := sha256.Sum256([]byte(run))
	l := &Lab{source: filepath.Join(root, "lab"), cache: cache, run: run, lan: fmt.Sprintf("127.%d.%d.", 1+id[0]%254, id[1]), progress: progress}
	for i, name := range []string{"xena", "xenb"} {
		dir := filepath.Join(run, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("lab: %w", err)
		}
		l.hosts = append(l.hosts, &Host{
			Name: name, Address: fmt.Sprintf("10.77.0.%d", i+1), lab: l, index: i, dir: dir,
			quota: quota, group: "gpuctl-" + filepath.Base(run) + "-" + name,
		})
	}
	l.kvm = l.newKVM()
	return l, nil
}

// Root returns the folder of the repository that holds the working folder.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "lab", "image", "build.sh")); err == nil {
			return at, nil
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("lab: %s is not inside gpuctl's repository", dir)
		}
	}
}

// Hosts returns both Xen hosts, xena first.
func (l *Lab) Hosts() []*Host { return slices.Clone(l.hosts) }

// Host returns the host of that name.
func (l *Lab) Host(name string) (*Host, error) {
	for _, h := range append(l.Hosts(), l.kvm) {
		if h.Name == name {
			return h, nil
		}
	}
	return nil, fmt.Errorf("lab: no host %q; there are xena, xenb and, in some tests, %s", name, kvmName)
}

// Close ends the connections to the hosts, which keep running.
func (l *Lab) Close() {
	for _, h := range append(l.Hosts(), l.kvm) {
		h.disconnect()
	}
}

// lock keeps other processes from starting and stopping this instance's hosts.
func (l *Lab) lock(ctx context.Context) (unlock func(), err error) {
	return l.lockFile(ctx, filepath.Join(l.run, "lock"))
}

// lockCache keeps other processes from building what all instances start from.
func (l *Lab) lockCache(ctx context.Context) (unlock func(), err error) {
	return l.lockFile(ctx, filepath.Join(l.cache, "lock"))
}

func (l *Lab) lockFile(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	told := false
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("lab: lock: %w", err)
		}
		if !told {
			l.progress.Printf("waiting for another process that starts or stops the lab")
			told = true
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("lab: another process starts or stops it: %w", ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// each does something for every host at once.
func (l *Lab) each(do func(*Host) error) error {
	errs := make([]error, len(l.hosts))
	var wg sync.WaitGroup
	for i, h := range l.hosts {
		wg.Go(func() {
			if err := do(h); err != nil {
				errs[i] = fmt.Errorf("%s: %w", h.Name, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Up starts the hosts that are down. They come from their snapshots in seconds;
// without snapshots, or with cold, they boot and make them. It builds the image
// when what it is made of has changed. Up of what is up does nothing, unless
// cold says to begin anew.
func (l *Lab) Up(ctx context.Context, cold bool) error {
	unlock, err := l.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		return fmt.Errorf("lab: %w; lab/setup.sh installs what it needs", err)
	}
	if cold {
		if err := l.down(); err != nil {
			return err
		}
	}
	running := 0
	for _, h := range l.hosts {
		if h.Alive() {
			running++
		}
	}
	if running == len(l.hosts) {
		l.progress.Printf("both hosts are up")
		return nil
	}
	if running > 0 {
		// The one that runs keeps what it was started from.
		return l.each(func(h *Host) error {
			if h.Alive() {
				return nil
			}
			s, err := h.lastState()
			if err != nil {
				return err
			}
			return h.fromSnapshot(ctx, image{s.Image}, s.Ready)
		})
	}
	img, ready, err := l.prepare(ctx, cold)
	if err != nil {
		return errors.Join(fmt.Errorf("lab: %w", err), l.down())
	}
	if err := l.each(func(h *Host) error { return h.fromSnapshot(ctx, img, ready) }); err != nil {
		return errors.Join(err, l.down())
	}
	return nil
}

// prepare makes image and snapshots, or finds them in the cache.
func (l *Lab) prepare(ctx context.Context, cold bool) (img image, ready string, err error) {
	unlock, err := l.lockCache(ctx)
	if err != nil {
		return image{}, "", err
	}
	defer unlock()
	if img, err = l.build(ctx); err != nil {
		return image{}, "", err
	}
	if ready, err = l.readyDir(ctx, img); err != nil {
		return image{}, "", err
	}
	if _, err := os.Stat(ready); cold || errors.Is(err, fs.ErrNotExist) {
		if err := l.boot(ctx, img, ready); err != nil {
			return image{}, "", err
		}
	}
	return img, ready, nil
}

// readyDir is where the snapshots are of hosts that this QEMU boots with these
// arguments from that image.
func (l *Lab) readyDir(ctx context.Context, img image) (string, error) {
	version, err := exec.CommandContext(ctx, "qemu-system-x86_64", "--version").Output()
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "%s\n%s\n", img.dir, version)
	for _, h := range l.hosts {
		fmt.Fprintln(sum, strings.Join(h.arguments(img, 0, ""), "\n"))
	}
	return filepath.Join(l.cache, "ready-"+hex.EncodeToString(sum.Sum(nil))[:16]), nil
}

// boot boots both hosts, snapshots them and leaves their disks in ready.
func (l *Lab) boot(ctx context.Context, img image, ready string) error {
	if err := l.keepOnly("ready-", ""); err != nil {
		return err
	}
	if err := l.each(func(h *Host) error { return h.coldBoot(ctx, img) }); err != nil {
		return err
	}
	return l.keep(ctx, ready)
}

// keep snapshots the running hosts, stops them and moves their disks to ready.
func (l *Lab) keep(ctx context.Context, ready string) error {
	part := ready + ".part"
	if err := os.RemoveAll(part); err != nil {
		return err
	}
	if err := os.MkdirAll(part, 0o755); err != nil {
		return err
	}
	err := l.each(func(h *Host) error {
		if err := h.save(ctx); err != nil {
			return err
		}
		return os.Rename(filepath.Join(h.dir, disk), filepath.Join(part, h.Name+".qcow2"))
	})
	if err != nil {
		return err
	}
	if err := os.RemoveAll(ready); err != nil {
		return err
	}
	return os.Rename(part, ready)
}

// Snapshot keeps the state of the running hosts as what later labs start from,
// until the next cold start, and starts them from it.
func (l *Lab) Snapshot(ctx context.Context) error {
	unlock, err := l.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	var states []*state
	for _, h := range l.hosts {
		if !h.Alive() {
			return fmt.Errorf("lab: %s: %w; a snapshot takes both", h.Name, ErrDown)
		}
		s, err := h.lastState()
		if err != nil {
			return err
		}
		states = append(states, s)
	}
	if err := l.each(func(h *Host) error { return h.unplug(ctx) }); err != nil {
		return err
	}
	unlockCache, err := l.lockCache(ctx)
	if err != nil {
		return err
	}
	err = l.keep(ctx, states[0].Ready)
	unlockCache()
	if err != nil {
		return err
	}
	return l.each(func(h *Host) error { return h.fromSnapshot(ctx, image{states[0].Image}, states[0].Ready) })
}

// Down ends both hosts, as a power cut does, and forgets what they did since
// they were started.
func (l *Lab) Down(ctx context.Context) error {
	unlock, err := l.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return l.down()
}

func (l *Lab) down() error {
	end := func(h *Host) error {
		if err := h.kill(); err != nil {
			return err
		}
		return h.forget()
	}
	return errors.Join(l.each(end), end(l.kvm))
}

// Build builds the image if it is not in the cache.
func (l *Lab) Build(ctx context.Context) error {
	unlock, err := l.lockCache(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	img, err := l.build(ctx)
	if err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	l.progress.Printf("image %s", img.dir)
	return nil
}
