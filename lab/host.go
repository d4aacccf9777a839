package lab

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/wait"
)

// disk is the name of a running host's disk in its folder.
const disk = "disk.qcow2"

// snapshot is the name of the QEMU snapshot inside the disk.
const snapshot = "ready"

// A Host is one Xen host. Its methods may be called by several goroutines.
type Host struct {
	Name    string
	Address string // on the network between the hosts

	lab   *Lab
	index int
	kvm   bool // no Xen: its VMs are of libvirt's qemu driver
	dir   string
	quota int    // percent of one processor that its QEMU may use; 0: all
	group string // the name of its cgroup, if it has a quota

	mu     sync.Mutex
	client *ssh.Client // nil: not connected
	lost   error       // why the last connection broke
}

// state is what is written down about a host that was started.
type state struct {
	PID     int    `json:"pid"`
	Started string `json:"started"` // the process's start time, which tells it from a later one of that number
	Port    int    `json:"port"`    // ssh, on 127.0.0.1
	Image   string `json:"image"`
	Ready   string `json:"ready"`
}

func (h *Host) statePath() string { return filepath.Join(h.dir, "state.json") }

func (h *Host) lastState() (*state, error) {
	b, err := os.ReadFile(h.statePath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w; `lab up` starts it", h.Name, ErrDown)
	}
	if err != nil {
		return nil, err
	}
	s := new(state)
	if err := json.Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("%s: %w", h.statePath(), err)
	}
	return s, nil
}

// current returns the state of a host that runs.
func (h *Host) current() (*state, error) {
	s, err := h.lastState()
	if err != nil {
		return nil, err
	}
	if started, err := startTime(s.PID); err != nil || started != s.Started {
		return nil, fmt.Errorf("%s: %w: its QEMU, process %d, has ended; see %s and console.log beside it",
			h.Name, ErrDown, s.PID, filepath.Join(h.dir, "qemu.log"))
	}
	return s, nil
}

// startTime is field 22 of /proc/PID/stat; a zombie counts as ended.
func startTime(pid int) (string, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", err
	}
	text := string(b)
	f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(f) < 20 || f[0] == "Z" {
		return "", fs.ErrNotExist
	}
	return f[19], nil
}

// URI is libvirt's of the host's VMs.
func (h *Host) URI() string {
	if h.kvm {
		return "qemu:///system"
	}
	return "xen:///system"
}

// Alive reports whether the host's QEMU runs.
func (h *Host) Alive() bool {
	_, err := h.current()
	return err == nil
}

// SSHPort returns the port on 127.0.0.1 that leads to the host's sshd.
func (h *Host) SSHPort() (int, error) {
	s, err := h.current()
	if err != nil {
		return 0, err
	}
	return s.Port, nil
}

// Key returns the path of the private key that opens the hosts' root account.
func (h *Host) Key() (string, error) {
	s, err := h.current()
	if err != nil {
		return "", err
	}
	return image{s.Image}.path("key"), nil
}

// Console returns the path of what the host printed since it was started.
func (h *Host) Console() string { return filepath.Join(h.dir, "console.log") }

// cpu is what of AMD's EPYC Xen, dom0 and libvirt can live with under emulation
// (docs/lab.md has a reason for every flag).
const cpu = "EPYC,-monitor,-smap,-rdtscp,vme=on,x-force-features=on,-rdseed,-sha-ni,-fxsr-opt,-misalignsse," +
	"-3dnowprefetch,-osvw,-topoext,-nrip-save,-xsave,-xsaveopt,-xsavec,-xgetbv1,-avx,-avx2,-f16c,-fma"

// lanPort is the UDP port of the loopback's addresses that the hosts' network is made of.
const lanPort = 7770

// arguments are QEMU's. Paths are relative to the host's folder, but the
// image's. lan is what addresses of the hosts' network begin with.
func (h *Host) arguments(img image, port int, lan string) []string {
	if h.kvm {
		return h.kvmArguments(img, port)
	}
	args := append(h.machine(port), "-smp", "1", "-m", "2560",
		"-device", "intel-iommu,intremap=on,device-iotlb=on",
		"-kernel", img.path("xen"),
		"-append", "dom0_mem=1024M,max:1024M dom0_max_vcpus=1 console=com1 com1=115200,8n1 iommu=verbose,no-sharept spec-ctrl=eager-fpu",
		// QEMU splits initrd modules at commas: dom0's command line has none.
		"-initrd", img.path("vmlinuz")+" console=hvc0 "+h.commandLine()+","+img.path("initrd.img"),
		// UDP, which loses packets for a host that boots. Of Unix sockets QEMU does not see that they are full, and asks all the time:
		// the other host hardly ran for a minute then.
		"-netdev", fmt.Sprintf("dgram,id=lan,local.type=inet,local.host=%s%d,local.port=%d,remote.type=inet,remote.host=%s%d,remote.port=%d",
			lan, 1+h.index, lanPort, lan, 2-h.index, lanPort))
	return append(append(args, h.devices()...), cardArgs()...)
}

// commandLine is Linux's, but for its console.
func (h *Host) commandLine() string {
	return fmt.Sprintf("root=/dev/vda rw systemd.hostname=%s systemd.machine_id=6770756374006c616200000000000%03d "+
		"modprobe.blacklist=bochs modprobe.blacklist=virtio_gpu", h.Name, h.index+1)
}

// machine are the arguments that come first.
func (h *Host) machine(port int) []string {
	return []string{
		"-name", h.Name, "-machine", "q35", "-accel", "tcg,thread=multi",
		"-uuid", fmt.Sprintf("67707563-746c-4162-8000-%012d", h.index+1),
		"-nodefaults", "-no-user-config", "-display", "none", "-vga", "none", "-cpu", cpu,
		"-serial", "file:console.log", "-qmp", "unix:qmp.sock,server=on,wait=off",
		"-netdev", fmt.Sprintf("user,id=user,hostfwd=tcp:127.0.0.1:%d-:22", port),
	}
}

// devices are those of every host, but its cards. The network "lan" is said by others.
func (h *Host) devices() []string {
	return []string{
		"-blockdev", "driver=qcow2,node-name=root,cache.no-flush=on,file.driver=file,file.filename=" + disk,
		"-device", "virtio-blk-pci,drive=root,addr=0x3",
		"-device", fmt.Sprintf("virtio-net-pci,id=net-user,netdev=user,mac=52:54:00:78:00:%02x,romfile=,addr=0x4", h.index+1),
		"-device", fmt.Sprintf("virtio-net-pci,id=net-lan,netdev=lan,mac=52:54:00:77:00:%02x,romfile=,addr=0x5", h.index+1),
		"-fsdev", "local,id=share,path=share,security_model=none",
		"-device", "virtio-9p-pci,fsdev=share,mount_tag=lab,addr=0x6",
	}
}

// start starts QEMU with the disk that is in the host's folder.
func (h *Host) start(ctx context.Context, img image, ready string, more ...string) error {
	if err := os.RemoveAll(filepath.Join(h.dir, "share")); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(h.dir, "share"), 0o755); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(h.dir, "qemu.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	port, err := freePort()
	if err != nil {
		return err
	}
	c := exec.Command("qemu-system-x86_64", append(h.arguments(img, port, h.lab.lan), more...)...)
	c.Dir, c.Stdout, c.Stderr = h.dir, log, log
	c.SysProcAttr = &unix.SysProcAttr{Setsid: true} // it outlives who starts it
	if err := c.Start(); err != nil {
		return fmt.Errorf("start QEMU: %w", err)
	}
	go func() { _ = c.Wait() }() // no zombie while this process lives
	if h.quota > 0 {
		if err := limit(cgroups, h.group, c.Process.Pid, h.quota); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", h.Name, err), c.Process.Kill())
		}
	}
	s := &state{PID: c.Process.Pid, Port: port, Image: img.dir, Ready: ready}
	if s.Started, err = startTime(s.PID); err != nil {
		return fmt.Errorf("QEMU ended at once:\n%s", h.tail("qemu.log"))
	}
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(h.statePath(), b, 0o644); err != nil {
		return errors.Join(err, c.Process.Kill())
	}
	// QMP answers when the machine is made, and with -loadvm when it is loaded.
	return testkit.Poll(ctx, "QEMU's answer", func() error {
		q, err := dialQMP(ctx, filepath.Join(h.dir, "qmp.sock"))
		if err == nil {
			q.close()
			return nil
		}
		if _, cerr := h.current(); cerr != nil {
			return testkit.GiveUp(fmt.Errorf("QEMU ended:\n%s", h.tail("qemu.log")))
		}
		return err
	})
}

func (h *Host) tail(name string) string {
	b, err := os.ReadFile(filepath.Join(h.dir, name))
	if err != nil {
		return err.Error()
	}
	return lastLines(string(b), 10)
}

// freePort finds a TCP port of the loopback that nobody listens on.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	a, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return 0, errors.New("no TCP address")
	}
	return a.Port, nil
}

// coldBoot boots the host from a fresh disk and waits until libvirt answers.
func (h *Host) coldBoot(ctx context.Context, img image) error {
	done := h.lab.progress.Start("boot " + h.Name)
	err := func() error {
		path := filepath.Join(h.dir, disk)
		if out, err := exec.CommandContext(ctx, "qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw",
			"-b", img.path("root.img"), path).CombinedOutput(); err != nil {
			return fmt.Errorf("make its disk: %w: %s", err, out)
		}
		if err := h.start(ctx, img, ""); err != nil {
			return err
		}
		return h.waitBooted(ctx)
	}()
	done(err)
	return err
}

// How long a host may boot depends on the machine. One whose console goes on is
// waited for; one that hangs says nothing any more.
const (
	bootTimeout = 45 * time.Minute
	bootSilence = 8 * time.Minute
	bootAsk     = 2 * time.Minute // for one answer
	endTimeout  = time.Minute     // after a kill
)

func (h *Host) waitBooted(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	said, since := int64(-1), time.Now()
	for {
		// Settled means that nothing of the boot goes on behind a snapshot.
		ask, answered := context.WithTimeout(ctx, bootAsk)
		out, err := h.Run(ask, "systemctl is-system-running --wait; timeout 60 virsh -q -c "+h.URI()+" list")
		answered()
		if err == nil && (h.kvm || strings.Contains(out, "Domain-0")) {
			if !h.kvm && !strings.HasPrefix(out, "running\n") { // without Xen, its services fail
				failed, _ := h.Run(ctx, "systemctl --failed --no-legend")
				return fmt.Errorf("the host is not well: %s\n%s", out, failed)
			}
			return nil
		}
		if _, cerr := h.current(); cerr != nil {
			return cerr
		}
		if i, serr := os.Stat(filepath.Join(h.dir, "console.log")); serr == nil && i.Size() != said {
			said, since = i.Size(), time.Now()
		}
		if silent := time.Since(since); ctx.Err() != nil || silent > bootSilence {
			return fmt.Errorf("it did not boot, and its console has been silent for %v: %w; it ends with\n%s",
				silent.Round(time.Second), errors.Join(ctx.Err(), err), h.tail("console.log"))
		}
		if err := wait.For(ctx, 500*time.Millisecond); err != nil {
			continue // the next round tells why
		}
	}
}

// save snapshots a running host into its disk and ends it.
func (h *Host) save(ctx context.Context) error {
	done := h.lab.progress.Start("snapshot " + h.Name)
	err := func() error {
		if _, err := h.Run(ctx, "sync; ! mountpoint -q /lab || umount /lab"); err != nil {
			return err
		}
		h.disconnect() // a connection that is saved comes back dead
		q, err := h.qmp(ctx)
		if err != nil {
			return err
		}
		defer q.close()
		if err := q.monitor(ctx, "savevm "+snapshot); err != nil {
			return err
		}
		if _, err := q.do(ctx, "quit", nil); err != nil {
			return err
		}
		return testkit.Poll(ctx, "QEMU's end", func() error { return testkit.Want(!h.Alive(), "a process that is alive") })
	}()
	done(err)
	return err
}

// fromSnapshot starts the host as it was when it was saved in ready.
func (h *Host) fromSnapshot(ctx context.Context, img image, ready string) error {
	done := h.lab.progress.Start("start " + h.Name)
	err := func() error {
		h.disconnect()
		from := filepath.Join(ready, h.Name+".qcow2")
		if out, err := exec.CommandContext(ctx, "cp", "--sparse=always", from, filepath.Join(h.dir, disk)).CombinedOutput(); err != nil {
			return fmt.Errorf("copy its disk: %w: %s", err, out)
		}
		if err := h.start(ctx, img, ready, "-loadvm", snapshot); err != nil {
			return err
		}
		return h.resume(ctx)
	}()
	done(err)
	return err
}

// resume makes a host whole after QEMU started.
func (h *Host) resume(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bootSilence)
	defer cancel()
	var out string
	err := h.connected(ctx)
	if err == nil {
		out, err = h.Run(ctx, fmt.Sprintf("lab-resume %d", time.Now().Unix()))
	}
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	if h.kvm {
		return nil
	}
	q, err := h.qmp(ctx)
	if err != nil {
		return err
	}
	defer q.close()
	if _, err := q.do(ctx, "device_add", lateCard()); err != nil {
		return err
	}
	_, err = h.Run(ctx, "for i in $(seq 100); do [ -e /sys/bus/pci/devices/0000:06:00.0/driver ] && exit 0; sleep 0.2; done; exit 1")
	if err != nil {
		return fmt.Errorf("dom0 did not find the card that was plugged in: %w", err)
	}
	return nil
}

// unplug takes out the card that QEMU cannot save.
func (h *Host) unplug(ctx context.Context) error {
	q, err := h.qmp(ctx)
	if err != nil {
		return err
	}
	defer q.close()
	if _, err := q.do(ctx, "device_del", map[string]any{"id": "nvme0"}); err != nil {
		return err
	}
	_, err = h.Run(ctx, "for i in $(seq 100); do [ -e /sys/bus/pci/devices/0000:06:00.0 ] || exit 0; sleep 0.2; done; exit 1")
	if err != nil {
		return fmt.Errorf("dom0 did not let go of the NVMe card: %w", err)
	}
	return nil
}

func (h *Host) qmp(ctx context.Context) (*qmp, error) {
	if _, err := h.current(); err != nil {
		return nil, err
	}
	return dialQMP(ctx, filepath.Join(h.dir, "qmp.sock"))
}

// kill ends the host's QEMU.
func (h *Host) kill() error {
	h.disconnect()
	s, err := h.current()
	if errors.Is(err, ErrDown) {
		return nil
	}
	if err != nil {
		return err
	}
	p, err := os.FindProcess(s.PID)
	if err != nil {
		return err
	}
	defer func() { _ = p.Release() }()
	// The handle is taken: if the number is still the same process's, so is it.
	if !h.Alive() {
		return nil
	}
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end QEMU, process %d: %w", s.PID, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	err = testkit.Poll(ctx, fmt.Sprintf("the end of QEMU, process %d", s.PID), func() error { return testkit.Want(!h.Alive(), "a process that is alive") })
	if h.quota > 0 {
		lift(cgroups, h.group)
	}
	return err
}

// forget removes what a run left, but the logs.
func (h *Host) forget() error {
	for _, name := range []string{"state.json", disk, "qmp.sock", "share"} {
		if err := os.RemoveAll(filepath.Join(h.dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// PowerOff cuts the host's power: no program on it gets a chance to act.
// PowerOn boots it again with its disk as it was then.
func (h *Host) PowerOff(ctx context.Context) error {
	unlock, err := h.lab.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := h.current(); err != nil {
		return err
	}
	return h.kill()
}

// PowerOn boots a host that PowerOff cut off, a minute or two, and waits until
// its libvirt answers.
func (h *Host) PowerOn(ctx context.Context) error {
	unlock, err := h.lab.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if h.Alive() {
		return nil
	}
	s, err := h.lastState()
	if err != nil {
		return err
	}
	done := h.lab.progress.Start("boot " + h.Name)
	err = h.start(ctx, image{s.Image}, s.Ready)
	if err == nil {
		err = h.waitBooted(ctx)
	}
	if err == nil {
		err = h.resume(ctx)
	}
	done(err)
	if err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	return nil
}

// Link connects the host to the network between the hosts, or cuts it off: its
// interface loses carrier.
func (h *Host) Link(ctx context.Context, up bool) error {
	q, err := h.qmp(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	defer q.close()
	_, err = q.do(ctx, "set_link", map[string]any{"name": "net-lan", "up": up})
	return err
}

// Put copies a file of this machine to the host, with its mode. It goes through
// a shared folder, since the way through ssh takes a second for a megabyte.
func (h *Host) Put(ctx context.Context, src, dst string) error {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	return h.PutReader(ctx, in, dst, info.Mode().Perm())
}

// PutReader writes what r has to a file of the host. Folders above dst are made;
// dst is replaced at once, so that a running program may be.
func (h *Host) PutReader(ctx context.Context, r io.Reader, dst string, mode fs.FileMode) error {
	name := rand.Text()
	path := filepath.Join(h.dir, "share", name)
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	defer func() { _ = os.Remove(path) }()
	_, err = io.Copy(f, r)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	q := Quote(dst)
	_, err = h.Run(ctx, fmt.Sprintf("mkdir -p $(dirname %s) && cp /lab/%s %s.new && chmod %o %s.new && mv %s.new %s", q, name, q, mode, q, q, q))
	return err
}

// Quote makes s one word of a shell.
func Quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
