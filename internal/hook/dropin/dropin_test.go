package dropin_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/hostd/cards/libvirthook"
	"github.com/gpuctl/gpuctl/internal/hook/dropin"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// machine is a host's files with a GPU of two functions at 65:00, a network
// card at 66:00 and a mediated device of the GPU.
type machine struct {
	t    *testing.T
	root string
}

// quick is for who waits in vain.
const quick = "timeout: 150ms\nnotify-timeout: 150ms\n"

const uuid = "4b20d080-1b54-4048-85b3-a6a62d165c01"

func newMachine(t *testing.T, config string) machine {
	t.Helper()
	m := machine{t, t.TempDir()}
	m.write("etc/gpuctl/hook.yaml", "socket: "+m.socket()+"\n"+config)
	m.write("sys/bus/pci/devices/0000:65:00.0/class", "0x030200\n")
	m.write("sys/bus/pci/devices/0000:65:00.1/class", "0x040300\n")
	m.write("sys/bus/pci/devices/0000:66:00.0/class", "0x020000\n")
	m.write("sys/bus/pci/devices/0000:67:00.0/class", "0x120000\n")
	for id, parent := range map[string]string{uuid: "0000:65:00.0", "other": "0000:66:00.0"} {
		link := filepath.Join(m.root, "sys/bus/mdev/devices", id)
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("../../../devices/pci0000:64/"+parent+"/"+id, link); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func (m machine) socket() string { return filepath.Join(m.root, "hook.sock") }

func (m machine) write(name, content string) {
	m.t.Helper()
	path := filepath.Join(m.root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		m.t.Fatal(err)
	}
}

func (m machine) serve(h libvirthook.HandlerFunc, options ...libvirthook.Option) {
	m.t.Helper()
	l, err := libvirthook.Listen(m.root)
	if err != nil {
		m.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	s := libvirthook.New(h, append([]libvirthook.Option{libvirthook.WithUser(os.Getuid())}, options...)...)
	go func() { ended <- s.Serve(ctx, l) }()
	m.t.Cleanup(func() { stop(); <-ended })
}

// call is libvirt's.
func (m machine) call(driver, operation, xml string) (status int, out, said string) {
	return m.callWith(driver, operation, strings.NewReader(xml))
}

func (m machine) callWith(driver, operation string, in io.Reader) (status int, out, said string) {
	var stdout, stderr bytes.Buffer
	program := filepath.Join(m.root, "etc/libvirt/hooks", driver+".d/50-gpuctl")
	status = dropin.Run([]string{program, "vm1", operation, "begin", "-"}, in, &stdout, &stderr)
	return status, stdout.String(), stderr.String()
}

func domain(devices string) string {
	return `<domain type='xen'><name>vm1</name><devices>` + devices + `</devices></domain>`
}

func pciDevice(bus, function string) string {
	return `<hostdev mode='subsystem' type='pci' managed='yes'><source><address domain='0x0000' bus='` + bus + `' slot='0x00' function='` + function + `'/></source></hostdev>`
}

var (
	withGPU   = domain(pciDevice("0x65", "0x0"))
	withAudio = domain(pciDevice("0x65", "0x1"))
	withNIC   = domain(pciDevice("0x66", "0x0"))
	without   = domain(`<disk type='file'><source file='/x'/></disk>`)
)

// With nobody there, only what could give a GPU two owners is stopped, and what
// runs is left alone whatever is configured.
func TestUnreachable(t *testing.T) {
	for policy, refused := range map[string]func(op, xml string) bool{
		"allow": func(string, string) bool { return false },
		"deny":  func(op, _ string) bool { return op == wire.Prepare || op == wire.Start },
		"deny-managed": func(op, xml string) bool {
			return (op == wire.Prepare || op == wire.Start) && xml != without && xml != withNIC && xml != ""
		},
	} {
		m := newMachine(t, quick+"on-unreachable: "+policy+"\n")
		for _, driver := range wire.Drivers() {
			for _, op := range append(wire.Operations(driver), "future") {
				for _, xml := range []string{withGPU, withAudio, withNIC, without, ""} {
					want := 0
					if refused(op, xml) {
						want = 1
					}
					status, out, said := m.call(driver, op, xml)
					if status != want || out != "" {
						t.Errorf("%s: %s %s of %.90q: status %d, want %d; out %q, said %q", policy, driver, op, xml, status, want, out, said)
					}
				}
			}
		}
	}
}

// A VM that a migration brings gets its parts of mediated GPUs before it runs. If nobody can give
// them, it goes on where it was. Of the others that are said to have started, none is ended.
func TestArrivalWithoutHostd(t *testing.T) {
	domain := func(id string) string {
		return `<domain type='xen'><name>vm1</name><uuid>` + id + `</uuid></domain>`
	}
	const other = "5c31e191-2c65-4159-96c4-b7b73e276d12"
	for policy, want := range map[string]int{"allow": 0, "deny": 1, "deny-managed": 1} {
		m := newMachine(t, quick+"on-unreachable: "+policy+"\n")
		m.write("hook.parts", uuid+"\n"+other+"\n")
		m.write("hook.arrivals", uuid+"\n")
		if status, _, said := m.call(wire.LibXL, wire.Started, domain(uuid)); status != want || want == 1 && !strings.Contains(said, "which arrives") {
			t.Errorf("%s: status %d, want %d: %s", policy, status, want, said)
		}
		for _, xml := range []string{domain(other), "", "hello"} {
			if status, _, said := m.call(wire.LibXL, wire.Started, xml); status != 0 {
				t.Errorf("%s: a VM that runs is ended: %s", policy, said)
			}
		}
	}
}

// hostd is just being started when a domain with a GPU starts.
func TestWaitsForHostd(t *testing.T) {
	m := newMachine(t, "")
	m.write("etc/gpuctl/hook.yaml", "socket: "+m.socket()+"\ntimeout: 20s\n")
	type result struct {
		status int
		said   string
	}
	done := make(chan result)
	go func() {
		status, _, said := m.call(wire.LibXL, wire.Prepare, withGPU)
		done <- result{status, said}
	}()
	testkit.Parked(t, "dropin.hook.ask", 1)
	m.serve(func(context.Context, libvirthook.Event) (libvirthook.Answer, error) { return libvirthook.Answer{}, nil })
	if r := <-done; r.status != 0 || r.said != "" {
		t.Errorf("status %d: %s", r.status, r.said)
	}
	// Those without do not wait.
	m = newMachine(t, "timeout: 20s\nnotify-timeout: 20s\n")
	began := time.Now()
	if status, _, _ := m.call(wire.LibXL, wire.Prepare, without); status != 0 || time.Since(began) > 4*time.Second {
		t.Errorf("status %d after %v", status, time.Since(began))
	}
}

func TestWhatIsManaged(t *testing.T) {
	m := newMachine(t, quick)
	m.write("hook.ids", "1b36:0010\n")
	for device, id := range map[string]string{"0000:68:00.0": "0x0010", "0000:68:02.1": "0x0011", "0000:69:00.0": "0x0011"} {
		m.write("sys/bus/pci/devices/"+device+"/class", "0x010802\n")
		m.write("sys/bus/pci/devices/"+device+"/vendor", "0x1b36\n")
		m.write("sys/bus/pci/devices/"+device+"/device", id+"\n")
	}
	if err := os.Symlink("../0000:68:00.0", filepath.Join(m.root, "sys/bus/pci/devices/0000:68:02.1/physfn")); err != nil {
		t.Fatal(err)
	}
	mdev := func(id string) string {
		return domain(`<hostdev mode='subsystem' type='mdev' model='vfio-pci'><source><address uuid='` + id + `'/></source></hostdev>`)
	}
	for name, c := range map[string]struct {
		xml     string
		refused bool
	}{
		"GPU":                     {withGPU, true},
		"its audio function":      {withAudio, true},
		"accelerator":             {domain(pciDevice("0x67", "0x0")), true},
		"in decimal, zeros left":  {domain(`<hostdev type="pci"><source><address bus="101"/></source></hostdev>`), true},
		"by its id":               {domain(pciDevice("0x68", "0x0")), true},
		"virtual function":        {domain(`<hostdev type='pci'><source><address bus='0x68' slot='2' function='1'/></source></hostdev>`), true},
		"neither":                 {domain(pciDevice("0x69", "0x0")), false},
		"network card":            {withNIC, false},
		"not there":               {domain(pciDevice("0x70", "0x0")), false},
		"mediated, of the GPU":    {mdev(uuid), true},
		"the same in capitals":    {mdev(strings.ToUpper(uuid)), true},
		"mediated, of another":    {mdev("other"), false},
		"mediated, not there":     {mdev("none"), false},
		"mediated, a path":        {mdev("../../../bus/pci/devices/0000:65:00.0"), false},
		"as a network interface":  {domain(`<interface type='hostdev'><source><address type='pci' bus='0x65' slot='0' function='0'/></source></interface>`), true},
		"a guest's own address":   {domain(`<disk><address type='pci' bus='0x65' slot='0' function='0'/></disk>`), false},
		"where the guest sees it": {domain(`<hostdev type='pci'><address type='pci' bus='0x65'/></hostdev>`), false},
		"not below devices":       {`<domain><metadata><hostdev type='pci'><source><address bus='0x65'/></source></hostdev></metadata></domain>`, false},
		"USB":                     {domain(`<hostdev type='usb'><source><address bus='0x65' device='0'/></source></hostdev>`), false},
		"cut off behind it":       {withGPU[:len(withGPU)-20], true},
		"cut off before it":       {withGPU[:70], true},
		"no XML, no device":       {"hello <&", false},
		"an impossible address":   {domain(pciDevice("0x165", "0x0")), true},
		"too deep":                {domain("<hostdev>" + strings.Repeat("<a>", 200) + strings.Repeat("</a>", 200) + "</hostdev>"), true},
	} {
		status, _, said := m.call(wire.LibXL, wire.Prepare, c.xml)
		if (status != 0) != c.refused {
			t.Errorf("%s: status %d: %s", name, status, said)
		}
	}
}

// What the operator sees in virsh says what is wrong, which device, what to do.
func TestMessages(t *testing.T) {
	m := newMachine(t, quick)
	_, _, said := m.call(wire.LibXL, wire.Prepare, withGPU)
	want := "gpuctl: hostd does not answer: no such file or directory, and domain vm1 has GPU 0000:65:00.0: start hostd, or set on-unreachable: allow in /etc/gpuctl/hook.yaml\n"
	if said != want {
		t.Errorf("got  %swant %s", said, want)
	}
	m.write("etc/gpuctl/hook.yaml", "socket: "+m.socket()+"\n")
	m.serve(func(context.Context, libvirthook.Event) (libvirthook.Answer, error) {
		return libvirthook.Answer{}, errors.New("GPU 0000:65:00.0 is vm2's\nuntil \x1b[31mit ends; gpuctl get claims" + strings.Repeat("x", 3000))
	})
	status, _, said := m.call(wire.LibXL, wire.Prepare, withGPU)
	if status != 1 || !strings.HasPrefix(said, "gpuctl: GPU 0000:65:00.0 is vm2's until  [31mit ends; gpuctl get claims") || strings.Count(said, "\n") != 1 || len(said) > 600 {
		t.Errorf("status %d: %q", status, said)
	}
}

// A refusal counts where a domain does not run yet, and nowhere else.
func TestRefusal(t *testing.T) {
	m := newMachine(t, "on-unreachable: allow\n")
	m.serve(func(context.Context, libvirthook.Event) (libvirthook.Answer, error) {
		return libvirthook.Answer{}, errors.New("no")
	})
	for _, driver := range wire.Drivers() {
		for _, op := range wire.Operations(driver) {
			want := map[string]int{wire.Prepare: 1, wire.Start: 1, wire.Started: 1, wire.Migrate: 1, wire.Restore: 1}[op]
			if status, out, said := m.call(driver, op, without); status != want || out != "" || !strings.Contains(said, "no") {
				t.Errorf("%s %s: status %d, want %d (%q, %q)", driver, op, status, want, out, said)
			}
		}
	}
}

func TestXMLOfMigrations(t *testing.T) {
	m := newMachine(t, "")
	m.serve(func(_ context.Context, e libvirthook.Event) (libvirthook.Answer, error) {
		if len(e.XML) == 0 {
			return libvirthook.Answer{}, nil // libxl of libvirt 9.0
		}
		return libvirthook.Answer{XML: bytes.ReplaceAll(e.XML, []byte("0x65"), []byte("0x67"))}, nil
	})
	changed := strings.ReplaceAll(withGPU, "0x65", "0x67")
	for _, c := range []struct{ driver, op, in, out string }{
		{wire.QEMU, wire.Migrate, withGPU, changed},
		{wire.QEMU, wire.Restore, withGPU, changed},
		{wire.LibXL, wire.Migrate, withGPU, changed},
		{wire.LibXL, wire.Migrate, "", ""},
		{wire.QEMU, wire.Prepare, withGPU, ""}, // libvirt does not want it
		{wire.LibXL, wire.Restore, withGPU, ""},
	} {
		if status, out, said := m.call(c.driver, c.op, c.in); status != 0 || out != c.out || said != "" {
			t.Errorf("%s %s: status %d, said %q, out %q", c.driver, c.op, status, said, out)
		}
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

func TestXMLThatCannotBeHandedOver(t *testing.T) {
	m := newMachine(t, "")
	m.serve(func(_ context.Context, e libvirthook.Event) (libvirthook.Answer, error) {
		return libvirthook.Answer{XML: e.XML}, nil
	})
	program := filepath.Join(m.root, "etc/libvirt/hooks/qemu.d/50-gpuctl")
	if status := dropin.Run([]string{program, "vm1", wire.Migrate, "begin", "-"}, strings.NewReader(withGPU), brokenWriter{}, io.Discard); status != 1 {
		t.Errorf("status %d", status)
	}
}

// hostd hangs: libvirtd does not, and domains without GPUs wait less.
func TestTooSlow(t *testing.T) {
	m := newMachine(t, "timeout: 1s\nnotify-timeout: 400ms\n")
	m.serve(func(ctx context.Context, _ libvirthook.Event) (libvirthook.Answer, error) {
		<-ctx.Done()
		return libvirthook.Answer{}, ctx.Err()
	})
	for _, c := range []struct {
		op, xml     string
		status      int
		least, most time.Duration
	}{
		{wire.Prepare, withGPU, 1, 450 * time.Millisecond, 10 * time.Second},
		{wire.Prepare, without, 0, 150 * time.Millisecond, 5 * time.Second},
		{wire.Reconnect, withGPU, 0, 150 * time.Millisecond, 5 * time.Second},
		{wire.Migrate, "", 0, 450 * time.Millisecond, 10 * time.Second},
	} {
		began := time.Now()
		status, out, said := m.call(wire.LibXL, c.op, c.xml)
		if took := time.Since(began); status != c.status || out != "" || took < c.least || took > c.most {
			t.Errorf("%s: status %d after %v: %s", c.op, status, took, said)
		}
		if c.status != 0 && !strings.Contains(said, "did not finish within") {
			t.Errorf("said %q", said)
		}
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("bad file descriptor") }

// libvirt need not give standard input, nor close it, nor be brief.
func TestStandardInput(t *testing.T) {
	m := newMachine(t, quick)
	if status, _, said := m.callWith(wire.LibXL, wire.Prepare, errReader{}); status != 0 {
		t.Errorf("closed: status %d: %s", status, said)
	}
	long := io.MultiReader(strings.NewReader(withGPU), io.LimitReader(zeros{}, wire.MaxXML))
	if status, _, said := m.callWith(wire.LibXL, wire.Prepare, long); status != 1 || !strings.Contains(said, "more than 4194304 bytes") {
		t.Errorf("long: status %d: %s", status, said)
	}
	r, w := io.Pipe()
	defer w.Close()
	began := time.Now()
	status, _, said := m.callWith(wire.LibXL, wire.Reconnect, r)
	if took := time.Since(began); status != 0 || took > 10*time.Second || !strings.Contains(said, "did not come") {
		t.Errorf("open: status %d after %v: %s", status, took, said)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestWrongConfigurationCountsAsNone(t *testing.T) {
	t.Parallel() // it waits as long as the defaults say
	m := newMachine(t, "on-unreachable: maybe\n")
	status, _, said := m.call(wire.QEMU, wire.Prepare, withGPU)
	if status != 1 || !strings.Contains(said, "maybe") {
		t.Errorf("status %d: %s", status, said)
	}
}

func TestCalledOtherwise(t *testing.T) {
	var out, err bytes.Buffer
	if status := dropin.Run([]string{"gpuctl-hook", "--version"}, nil, &out, &err); status != 0 || !strings.HasPrefix(out.String(), "gpuctl-hook ") {
		t.Errorf("%d %q", status, out.String())
	}
	if status := dropin.Run([]string{"gpuctl-hook"}, nil, &out, &err); status != 2 || !strings.Contains(err.String(), "gpuctl hook install") {
		t.Errorf("%d %q", status, err.String())
	}
	// In the folder of a driver that we know nothing of.
	if status := dropin.Run([]string{"/etc/libvirt/hooks/lxc.d/50-gpuctl", "d", "prepare", "begin", "-"}, strings.NewReader(""), &out, &err); status != 0 {
		t.Error(status)
	}
}

func TestDriver(t *testing.T) {
	for in, want := range map[string]string{
		"/etc/libvirt/hooks/libxl.d/50-gpuctl": "libxl", "/etc/libvirt/hooks/qemu.d/50-gpuctl": "qemu", "/etc/libvirt/hooks/qemu": "qemu",
		"/etc/libvirt/hooks/lxc.d/50-gpuctl": "", "50-gpuctl": "", "": "",
	} {
		if got := dropin.Driver(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}

func TestParseConfig(t *testing.T) {
	full := dropin.Config{OnUnreachable: dropin.Allow, Timeout: time.Minute, NotifyTimeout: 1500 * time.Millisecond, Socket: "/run/x y.sock"}
	for _, c := range []struct {
		in   string
		want dropin.Config
	}{
		{"", dropin.DefaultConfig()},
		{"---\n# nothing\n\n", dropin.DefaultConfig()},
		{"on-unreachable: allow # for now\ntimeout: '1m'\r\nnotify-timeout: \"1.5s\"\nsocket: /run/x y.sock\n", full},
	} {
		got, err := dropin.ParseConfig(c.in)
		if got != c.want || err != nil {
			t.Errorf("%q: %+v, %v", c.in, got, err)
		}
	}
	for in, part := range map[string]string{
		"allow": "key: value", "timeout:": "key: value", "timeout: 5": "no time", "timeout: 0s": "no time", "timeout: 1h": "no time", "colour: red": "colour",
		"timeout: 1s\n\ntimeout: 2s": "line 3: timeout comes twice", "socket: run/x": "absolute", "on-unreachable: [allow]": "allow, deny",
	} {
		if c, err := dropin.ParseConfig(in); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q: %+v, %v", in, c, err)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add("on-unreachable: allow # x\ntimeout: 1s\n")
	f.Fuzz(func(t *testing.T, text string) {
		if c, err := dropin.ParseConfig(text); err == nil && (c.Timeout <= 0 || c.NotifyTimeout <= 0 || c.OnUnreachable == "") {
			t.Fatal(fmt.Sprint(c))
		}
	})
}
