package libvirt

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// ErrMissing says what is not installed or not permitted.
var ErrMissing = errors.New("can't start libvirtd here")

// packages are Debian's, with a file of each.
func packages() map[string]string {
	return map[string]string{
		"libvirt-daemon-system":      "/etc/libvirt/libvirtd.conf",
		"libvirt-daemon":             "/usr/sbin/libvirtd", // and virtlockd
		"libvirt-daemon-driver-qemu": "/usr/lib/" + multiarch + "/libvirt/connection-driver/libvirt_driver_qemu.so",
		"qemu-system-x86":            "/usr/bin/qemu-system-x86_64",
		"iproute2":                   "/sbin/ip",
		"util-linux":                 "/usr/bin/nsenter",
	}
}

const (
	multiarch = "x86_64-linux-gnu"
	patience  = 90 * time.Second // for a libvirtd to come up on a busy machine
)

// Need skips the test when what it needs is not installed, and fails it for
// any other reason, or in CI, where everything has to be installed.
func Need(tb testing.TB, err error) {
	tb.Helper()
	if errors.Is(err, ErrMissing) && os.Getenv("CI") == "" {
		tb.Skip(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
}

// Rig is a set of hosts.
type Rig struct {
	// Dir holds all files of the hosts.
	Dir string
	// Locks is what keeps a guest from being on two hosts.
	Locks Locks
	// Hosts reach each other by their addresses.
	Hosts []*Host

	emulator string // of guests
}

// Host is a libvirtd with namespaces of its own.
type Host struct {
	Name string
	// Address is its IPv4 address in the network of the rig.
	Address string
	dir     string
	holder  *exec.Cmd // unshare, which waits for init
	init    int       // process 1 of the host
	daemon  *exec.Cmd // nsenter, which waits for libvirtd
	locker  *exec.Cmd // the same for virtlockd
	errors  *bytes.Buffer
}

// Start starts one host per name, at most nine, without a lock manager.
func Start(names ...string) (*Rig, error) { return StartLocked(NoLocks, names...) }

// StartLocked starts them with a lock manager.
func StartLocked(locks Locks, names ...string) (_ *Rig, err error) {
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("%w: namespaces take root", ErrMissing)
	}
	for name, file := range packages() {
		if _, err := os.Stat(file); err != nil {
			return nil, fmt.Errorf("%w: install %s (%w)", ErrMissing, name, err)
		}
	}
	dir, err := os.MkdirTemp("", "libvirt") // short: a socket's path has 107 bytes
	if err != nil {
		return nil, err
	}
	r := &Rig{Dir: dir, Locks: locks, emulator: "/usr/bin/qemu-system-x86_64"}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	for i, name := range names {
		h := &Host{Name: name, Address: fmt.Sprintf("10.77.0.%d", i+1), dir: filepath.Join(dir, name)}
		r.Hosts = append(r.Hosts, h)
		if err := h.boot(i + 1); err != nil {
			return nil, fmt.Errorf("host %s: %w", name, err)
		}
	}
	if err := r.certify(); err != nil {
		return nil, err
	}
	if err := r.wire(); err != nil {
		return nil, err
	}
	if err := r.lock(); err != nil {
		return nil, err
	}
	for _, h := range r.Hosts {
		if err := h.launch(); err != nil {
			return nil, err
		}
	}
	for _, h := range r.Hosts {
		if err := h.wait(); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Close ends all hosts with everything that runs on them and removes their
// files.
func (r *Rig) Close() error {
	for _, h := range r.Hosts {
		h.end()
	}
	return os.RemoveAll(r.Dir)
}

// boot makes the namespaces, with a process 1 that reaps and waits.
func (h *Host) boot(number int) error {
	const unrestricted = `user = "root"
group = "root"
security_driver = "none"
cgroup_controllers = []
namespaces = []
remember_owner = 0
stdio_handler = "file"
seccomp_sandbox = 0
migrate_tls_x509_cert_dir = "/etc/libvirt/pki"
migrate_tls_x509_verify = 1
`
	daemon := fmt.Sprintf(`listen_tls = 0
listen_tcp = 1
auth_tcp = "none"
auth_unix_rw = "none"
unix_sock_rw_perms = "0700"
host_uuid = "67707563-746c-4000-8000-0000000000%02x"
log_filters = "3:*"
log_outputs = "3:file:/var/log/libvirt/libvirtd.log"
`, number)
	for file, text := range map[string]string{
		"etc/libvirtd.conf": daemon, "etc/qemu.conf": unrestricted, "etc/hooks/README": "", "run/lock/x": "", "lib/x": "", "cache/x": "", "log/x": "",
	} {
		path := filepath.Join(h.dir, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	script := `set -e
d=$1
mount --bind "$d/run" /run
mount --bind "$d/etc" /etc/libvirt
mount --bind "$d/lib" /var/lib/libvirt
mount --bind "$d/cache" /var/cache/libvirt
mount --bind "$d/log" /var/log/libvirt
echo "$2" > /proc/sys/kernel/hostname
ip link set lo up
echo ready
set +e
while :; do sleep 3600; done`
	h.holder = exec.Command("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private",
		"bash", "-c", script, "init", h.dir, h.Name)
	h.holder.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	out, err := h.holder.StdoutPipe()
	if err != nil {
		return err
	}
	h.errors = &bytes.Buffer{}
	h.holder.Stderr = h.errors
	if err := h.holder.Start(); err != nil {
		return err
	}
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		h.end()
		return fmt.Errorf("%w: namespaces: %s", ErrMissing, strings.TrimSpace(h.errors.String()))
	}
	h.init, err = child(h.holder.Process.Pid)
	return err
}

// child is the only child of a process.
func child(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("process %d has children %q, not one", pid, b)
	}
	return n, nil
}

// certify gives each host's qemu a certificate for its address, by which the
// other's knows it when one sends a guest to it.
func (r *Rig) certify() error {
	authority := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "libvirt rig"}, NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	signer, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	ca, err := x509.CreateCertificate(rand.Reader, authority, authority, signer.Public(), signer)
	if err != nil {
		return err
	}
	for i, h := range r.Hosts {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return err
		}
		cert, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
			SerialNumber: big.NewInt(int64(i) + 2), Subject: pkix.Name{CommonName: h.Name}, NotAfter: authority.NotAfter,
			IPAddresses: []net.IP{net.ParseIP(h.Address)}, KeyUsage: x509.KeyUsageDigitalSignature,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}, authority, key.Public(), signer)
		if err != nil {
			return err
		}
		private, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			return err
		}
		dir := filepath.Join(h.dir, "etc/pki")
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		for name, block := range map[string]*pem.Block{
			"ca-cert": {Type: "CERTIFICATE", Bytes: ca}, "server-cert": {Type: "CERTIFICATE", Bytes: cert}, "client-cert": {Type: "CERTIFICATE", Bytes: cert},
			"server-key": {Type: "PRIVATE KEY", Bytes: private}, "client-key": {Type: "PRIVATE KEY", Bytes: private},
		} {
			if err := os.WriteFile(filepath.Join(dir, name+".pem"), pem.EncodeToMemory(block), 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// wire joins the hosts by a bridge on the first one.
func (r *Rig) wire() error {
	first := r.Hosts[0]
	steps := [][]string{{"ip", "link", "add", "br0", "type", "bridge"}, {"ip", "addr", "add", first.Address + "/24", "dev", "br0"}, {"ip", "link", "set", "br0", "up"}}
	for i, h := range r.Hosts[1:] {
		port := fmt.Sprintf("port%d", i)
		// From outside: a host does not see the other's processes.
		out, err := exec.Command("ip", "link", "add", "eth0", "netns", strconv.Itoa(h.init), "type", "veth", "peer", "name", port, "netns", strconv.Itoa(first.init)).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: veth: %w: %s", ErrMissing, err, bytes.TrimSpace(out))
		}
		steps = append(steps, []string{"ip", "link", "set", port, "master", "br0", "up"})
		for _, step := range [][]string{{"ip", "addr", "add", h.Address + "/24", "dev", "eth0"}, {"ip", "link", "set", "eth0", "up"}} {
			if err := h.run(step...); err != nil {
				return err
			}
		}
	}
	for _, step := range steps {
		if err := first.run(step...); err != nil {
			return err
		}
	}
	return nil
}

// Command is a command on the host.
func (h *Host) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, "nsenter", append([]string{"-t", strconv.Itoa(h.init), "-m", "-u", "-i", "-n", "-p", "--", name}, args...)...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return c
}

func (h *Host) run(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if out, err := h.Command(ctx, args[0], args[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("host %s: %s: %w: %s", h.Name, strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// launch starts libvirtd.
func (h *Host) launch() error {
	var err error
	h.daemon, err = h.serve("/usr/sbin/libvirtd", "--listen")
	return err
}

// serve starts a daemon of the host's.
func (h *Host) serve(program string, args ...string) (*exec.Cmd, error) {
	c := h.Command(context.Background(), program, args...)
	c.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	// Files, not pipes: guests outlive the daemon and would keep a pipe open.
	f, err := os.Create(filepath.Join(h.dir, "log", filepath.Base(program)+".stderr"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	c.Stderr = f
	if err := c.Start(); err != nil {
		return nil, fmt.Errorf("host %s: %w", h.Name, err)
	}
	return c, nil
}

// wait waits until libvirtd listens.
func (h *Host) wait() error { return h.listens("libvirtd", h.Socket()) }

// listens waits until a daemon listens.
func (h *Host) listens(daemon, socket string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := testkit.Poll(ctx, daemon+" listens", func() error {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			conn.Close()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("host %s: %w:\n%s", h.Name, err, h.Log())
	}
	return nil
}

// StartDaemon starts libvirtd again after Kill and waits until it listens.
func (h *Host) StartDaemon() error {
	if err := h.launch(); err != nil {
		return err
	}
	return h.wait()
}

// Signal sends a signal to libvirtd.
func (h *Host) Signal(s syscall.Signal) error {
	pid, err := child(h.daemon.Process.Pid)
	if err != nil {
		return fmt.Errorf("host %s: libvirtd: %w", h.Name, err)
	}
	err = syscall.Kill(pid, s)
	if s == syscall.SIGCONT { // nsenter has stopped with its child
		err = errors.Join(err, h.daemon.Process.Signal(s))
	}
	return err
}

// Threads says in which state each thread of libvirtd is, and in which system call: for
// the message of a test in which it does not answer.
func (h *Host) Threads() string {
	pid, err := child(h.daemon.Process.Pid)
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, task := range tasks {
		status, _ := os.ReadFile(filepath.Join(task, "stat"))
		call, _ := os.ReadFile(filepath.Join(task, "syscall"))
		state, _, _ := strings.Cut(string(status[bytes.LastIndexByte(status, ')')+1:]), " 0 ")
		fmt.Fprintf(&b, "%s%.4s call %s; ", filepath.Base(task), state, bytes.TrimSpace(call))
	}
	return b.String()
}

// Kill ends libvirtd as kill -9 does, and waits for that. Guests go on.
func (h *Host) Kill() error {
	if err := h.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	ended(h.daemon)
	return nil
}

// end ends process 1, and with it the kernel ends all others and removes the
// namespaces.
func (h *Host) end() {
	if h.holder == nil || h.holder.Process == nil {
		return
	}
	// Errors mean that a process is gone already, which is as well.
	if h.init != 0 {
		_ = syscall.Kill(h.init, syscall.SIGKILL)
	} else {
		_ = h.holder.Process.Kill()
	}
	// Process 1 is gone when its last child is reaped, which is libvirtd's
	// nsenter's to do, or virtlockd's, and that may have been stopped.
	for _, c := range []*exec.Cmd{h.daemon, h.locker} {
		if c != nil && c.Process != nil && c.ProcessState == nil {
			_ = c.Process.Signal(syscall.SIGCONT)
			ended(c)
		}
	}
	ended(h.holder)
}

// ended waits for a process that was killed: its error is that it was.
func ended(c *exec.Cmd) { _ = c.Wait() }

// Socket is where libvirtd listens, as seen from outside.
func (h *Host) Socket() string { return filepath.Join(h.dir, "run/libvirt/libvirt-sock") }

// URI is how another host's libvirtd reaches this one.
func (h *Host) URI() string { return "qemu+tcp://" + h.Address + "/system" }

// DataURI is where this host receives the memory of guests.
func (h *Host) DataURI() string { return "tcp://" + h.Address }

// Log is the end of what libvirtd has logged.
func (h *Host) Log() string {
	const most = 8 << 10
	var all []byte
	for _, name := range []string{"virtlockd.stderr", "libvirtd.stderr", "libvirtd.log"} {
		b, _ := os.ReadFile(filepath.Join(h.dir, "log", name))
		all = append(all, b[max(0, len(b)-most):]...)
	}
	return string(all)
}
