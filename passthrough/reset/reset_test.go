package reset_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/reset"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const dir = "sys/bus/pci/devices/"

func addr(t testing.TB, s string) pci.Address {
	t.Helper()
	a, err := pci.ParseAddress(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// accelerator is a machine with a card of one function below a root port.
func accelerator(m *sysfstest.Machine) {
	addAccelerator(m)
}

// addAccelerator gives the card BARs, which its configuration space has not.
func addAccelerator(m *sysfstest.Machine, resource ...string) {
	m.Add(pcitest.Port("0000:00:01.0", "", -1, pci.PortRoot, pcitest.FullACS()))
	card := pcitest.SRIOVAccelerator("0000:65", "0000:00:01.0", -1, 0, 16, 0)
	card[0].Driver, card[0].Resource = "", resource
	m.Add(card...)
}

// workstation is one with a card of four functions.
func workstation(m *sysfstest.Machine) {
	m.Add(pcitest.Port("0000:00:01.0", "", -1, pci.PortRoot, pcitest.FullACS()))
	card := pcitest.NVIDIACard("0000:65:00", "0000:00:01.0", -1, 0)
	for i := range card {
		card[i].Driver = ""
	}
	m.Add(card...)
}

func scan(t testing.TB, root fs.FS) *pci.Card {
	t.Helper()
	cards, err := pci.Scan(root)
	if err != nil || len(cards) == 0 {
		t.Fatalf("scan: %v, %v", cards, err)
	}
	return cards[len(cards)-1]
}

// tries says what was tried, and with ! what failed; what was left out is not.
func tries(r reset.Result) string {
	var out []string
	for _, a := range r.Attempts {
		switch {
		case a.Skipped:
		case a.Err != nil:
			out = append(out, string(a.Method)+"!")
		default:
			out = append(out, string(a.Method))
		}
	}
	return strings.Join(out, " ")
}

func why(r reset.Result, m reset.Method) string {
	for _, a := range r.Attempts {
		if a.Method == m && a.Err != nil {
			return a.Err.Error()
		}
	}
	return ""
}

var graphics = "0000:65:00.0"

func neighbour(driver string) func(*testing.T, *sysfstest.Machine) {
	return func(_ *testing.T, m *sysfstest.Machine) {
		m.Add(pcitest.Function{Address: "0000:65:01.0", Parent: "0000:00:01.0", Vendor: 0x8086, Device: 0x1533, Class: 0x020000, Driver: driver, IOMMUGroup: -1})
	}
}

func onReset(method string, o sysfstest.Outcome) func(*testing.T, *sysfstest.Machine) {
	return func(t *testing.T, m *sysfstest.Machine) { m.OnReset(addr(t, graphics), method, o) }
}

func hook(ok bool, err error) reset.Option {
	return reset.WithVendor(func(context.Context, *pci.Card) (bool, error) { return ok, err })
}

// ladders are the cases of TestLadder.
var ladders = []struct {
	name    string
	machine func(*sysfstest.Machine)
	change  func(*testing.T, *sysfstest.Machine)
	opts    []reset.Option
	avoid   []reset.Avoid
	tries   string
	by      reset.Method
	err     error
	because map[reset.Method]string // parts of errors
}{
	{name: "FLR works", machine: accelerator, tries: "flr", by: reset.FLR},
	{
		name: "FLR is refused, then the bus", machine: accelerator, change: onReset("flr", sysfstest.Outcome{Err: syscall.ENOTTY}),
		tries: "flr! bus", by: reset.Bus, because: map[reset.Method]string{reset.FLR: "inappropriate ioctl", reset.PM: "the kernel has no pm"},
	},
	{
		name: "FLR kills it", machine: accelerator, change: onReset("flr", sysfstest.Outcome{Kills: true}),
		tries: "flr! bus!", err: reset.ErrDead, because: map[reset.Method]string{reset.FLR: "reads all ones"},
	},
	{
		name: "dead before, a bus reset wakes it", machine: accelerator,
		change: func(t *testing.T, m *sysfstest.Machine) { m.FallOff(addr(t, graphics), "bus") },
		tries:  "bus", by: reset.Bus, because: map[reset.Method]string{reset.FLR: "does not answer", reset.PM: "does not answer"},
	},
	{
		name: "dead before, only power wakes it", machine: accelerator,
		change: func(t *testing.T, m *sysfstest.Machine) {
			m.FallOff(addr(t, graphics), "d3cold")
			m.PowersOff(addr(t, graphics))
		},
		tries: "bus! d3cold", by: reset.D3cold,
	},
	{
		name: "dead for good", machine: accelerator,
		change: func(t *testing.T, m *sysfstest.Machine) {
			m.FallOff(addr(t, graphics))
			m.PowersOff(addr(t, graphics))
		},
		tries: "bus! d3cold!", err: reset.ErrDead,
	},
	{
		name: "the model hangs on FLR and bus", machine: accelerator,
		change: func(t *testing.T, m *sysfstest.Machine) { m.PowersOff(addr(t, graphics)) },
		avoid:  []reset.Avoid{{Method: reset.FLR, Why: "ACME hangs"}, {Method: reset.Bus, Why: "ACME sleeps"}},
		tries:  "d3cold", by: reset.D3cold, because: map[reset.Method]string{reset.FLR: "ACME hangs", reset.Bus: "ACME sleeps"},
	},
	{
		name: "a neighbour at work", machine: accelerator, change: neighbour("igb"), avoid: []reset.Avoid{{Method: reset.FLR, Why: "x"}},
		err:     reset.ErrNoMethod,
		because: map[reset.Method]string{reset.Bus: "0000:65:01.0 (driver igb) is below the bridge 0000:00:01.0", reset.D3cold: "0000:65:01.0 (driver igb)"},
	},
	{
		name: "a neighbour at rest", machine: accelerator, change: neighbour(""), avoid: []reset.Avoid{{Method: reset.FLR, Why: "x"}},
		err:     reset.ErrNoMethod,
		because: map[reset.Method]string{reset.Bus: "since Linux 6.13", reset.D3cold: "would keep its power on"},
	},
	{
		name: "several functions, an old bridge", machine: workstation,
		change: func(t *testing.T, m *sysfstest.Machine) { m.PowersOff(addr(t, graphics)) },
		tries:  "d3cold", by: reset.D3cold, because: map[reset.Method]string{reset.Bus: "since Linux 6.13"},
	},
	{
		name: "several functions, a new bridge", machine: workstation,
		change: func(_ *testing.T, m *sysfstest.Machine) {
			m.Attr("sys/devices/pci0000:00/0000:00:01.0/reset_subordinate", nil, func(s string) error {
				if s != "1" {
					return syscall.EINVAL
				}
				return nil
			})
		},
		tries: "bus", by: reset.Bus,
	},
	{
		name: "a new bridge that fails", machine: workstation,
		change: func(_ *testing.T, m *sysfstest.Machine) {
			m.Attr("sys/devices/pci0000:00/0000:00:01.0/reset_subordinate", nil, func(string) error { return syscall.ENOTTY })
		},
		tries: "bus!", err: reset.ErrDead,
	},
	{
		name: "power may not be switched", machine: workstation,
		change: func(t *testing.T, m *sysfstest.Machine) {
			m.PowersOff(addr(t, graphics))
			if err := m.Write(t.Context(), dir+graphics+"/d3cold_allowed", "0"); err != nil {
				t.Fatal(err)
			}
		},
		err: reset.ErrNoMethod, because: map[reset.Method]string{reset.D3cold: "d3cold_allowed of 0000:65:00.0 is not 1"},
	},
	{
		name: "nothing to be done", err: reset.ErrNoMethod,
		machine: func(m *sysfstest.Machine) {
			m.Add(pcitest.Function{Address: graphics, Vendor: 0x1234, Device: 0x1111, Class: 0x030000, IOMMUGroup: -1})
		},
		because: map[reset.Method]string{reset.Bus: "root bus", reset.Vendor: "no device_specific", reset.D3cold: "no bridge above"},
	},
	{
		name: "the operator's own", machine: workstation, opts: []reset.Option{hook(true, nil)}, tries: "vendor", by: reset.Vendor,
	},
	{
		name: "the operator's own fails", machine: workstation, opts: []reset.Option{hook(true, errors.New("no tool"))},
		tries: "vendor!", err: reset.ErrDead, because: map[reset.Method]string{reset.Vendor: "no tool"},
	},
	{
		name: "the maker's module", tries: "vendor", by: reset.Vendor,
		machine: func(m *sysfstest.Machine) {
			m.Add(pcitest.Function{Address: graphics, Vendor: 0x1002, Device: 0x731f, Class: 0x030000, IOMMUGroup: -1, Reset: "device_specific bus"})
		},
		opts: []reset.Option{hook(false, nil)}, avoid: []reset.Avoid{{Method: reset.Bus, Why: "x"}},
	},
	{
		name: "firmware", tries: "acpi", by: reset.ACPI,
		machine: func(m *sysfstest.Machine) {
			m.Add(pcitest.Function{Address: graphics, Vendor: 0x8086, Device: 0x56c0, Class: 0x038000, IOMMUGroup: -1, Reset: "acpi"})
		},
	},
	{
		name: "power management", tries: "pm", by: reset.PM,
		machine: func(m *sysfstest.Machine) {
			m.Add(pcitest.Function{Address: graphics, Vendor: 0x8086, Device: 0x56c0, Class: 0x038000, IOMMUGroup: -1, Reset: "pm"})
		},
	},
	{
		name: "virtual functions are out", machine: accelerator, err: reset.ErrInUse,
		change: func(t *testing.T, m *sysfstest.Machine) {
			m.Load(sysfstest.Driver{Name: "nvidia", IDs: []sysfstest.ID{{Vendor: 0x10de, Device: 0x2236}}, SRIOV: true})
			if err := m.Write(t.Context(), dir+graphics+"/sriov_numvfs", "2"); err != nil {
				t.Fatal(err)
			}
		},
	},
}

func TestLadder(t *testing.T) {
	for _, c := range ladders {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := sysfstest.New()
				c.machine(m)
				if c.change != nil {
					c.change(t, m)
				}
				before, _ := m.ReadFile(dir + graphics + "/reset_method")
				result, err := reset.New(m, c.opts...).Reset(t.Context(), scan(t, m), c.avoid)
				if !errors.Is(err, c.err) || result.By != c.by || tries(result) != c.tries {
					t.Errorf("by %q, tried %q, %v; want %q, %q, %v", result.By, tries(result), err, c.by, c.tries, c.err)
				}
				for method, part := range c.because {
					if got := why(result, method); !strings.Contains(got, part) {
						t.Errorf("%s: %q does not say %q", method, got, part)
					}
				}
				if after, _ := m.ReadFile(dir + graphics + "/reset_method"); string(after) != string(before) {
					t.Errorf("reset_method is %q, it was %q", after, before)
				}
				if control, _ := m.ReadFile(dir + graphics + "/power/control"); string(control) != "on\n" {
					t.Errorf("power/control is %q", control)
				}
				if v := m.Violations(); len(v) > 0 {
					t.Errorf("%v", v)
				}
			})
		})
	}
}

// Each function is reset in its own way; what has none is said.
func TestFunctionsOfACard(t *testing.T) {
	m := sysfstest.New()
	for i, way := range []string{"flr bus", "pm", ""} {
		m.Add(pcitest.Function{
			Address: "0000:65:00." + string(rune('0'+i)), Vendor: 0x8086, Device: uint16(0x56a0 + i), Class: 0x030000, IOMMUGroup: -1, Reset: way,
			Config: pcitest.ConfigSpace{Vendor: 0x8086, Device: uint16(0x56a0 + i), Class: 0x030000, Multifunction: true}.Bytes(),
		})
	}
	result, err := reset.New(m).Reset(t.Context(), scan(t, m), nil)
	if err != nil || result.By != reset.FLR {
		t.Fatalf("%+v, %v", result, err)
	}
	if left := result.Attempts[0].Left; !slices.Equal(left, []pci.Address{addr(t, "0000:65:00.2")}) {
		t.Errorf("left %v", left)
	}
	if a, b := m.Resets(addr(t, "0000:65:00.0")), m.Resets(addr(t, "0000:65:00.1")); !slices.Equal(a, []string{"flr"}) || !slices.Equal(b, []string{"pm"}) {
		t.Errorf("reset by %v and %v", a, b)
	}
}

// Nothing that is done for a virtual function may hit the card that it is of,
// nor may the registers that it has not be missed.
func TestVirtualFunction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := sysfstest.New()
		m.Add(pcitest.Port("0000:00:01.0", "", -1, pci.PortRoot, pcitest.FullACS()))
		functions := pcitest.SRIOVAccelerator("0000:65", "0000:00:01.0", -1, 0, 16, 2)
		functions[0].Driver = ""
		for i := range functions[1:] {
			functions[i+1].Config = pcitest.ConfigSpace{Vendor: 0xffff, Device: 0xffff, Class: pci.Class3D << 8, FLR: true}.Bytes()
		}
		m.Add(functions...)
		m.Attr("sys/devices/pci0000:00/0000:00:01.0/reset_subordinate", nil, func(string) error {
			t.Error("the bus was reset")
			return nil
		})
		whole := scan(t, m)
		vf := whole.VFs[1]
		card := &pci.Card{Address: vf.Address, Functions: []*pci.Device{vf}}
		for _, c := range []struct {
			name  string
			avoid []reset.Avoid
			by    reset.Method
			err   error
		}{
			{"FLR", nil, reset.FLR, nil},
			{"not even FLR", []reset.Avoid{{Method: reset.FLR, Why: "x"}}, "", reset.ErrNoMethod},
		} {
			result, err := reset.New(m, reset.WithRecords(t.TempDir())).Reset(t.Context(), card, c.avoid)
			if result.By != c.by || !errors.Is(err, c.err) {
				t.Errorf("%s: %s, %v", c.name, result, err)
			}
		}
		for _, a := range []pci.Address{whole.Address, whole.VFs[0].Address} {
			if r := m.Resets(a); len(r) > 0 {
				t.Errorf("%s was reset by %v", a, r)
			}
		}
		m.FallOff(vf.Address)
		if result, err := reset.New(m).Reset(t.Context(), card, nil); !errors.Is(err, reset.ErrDead) {
			t.Errorf("%s, %v", result, err)
		}
	})
}

// A kernel before 5.15 chooses by itself: only the way that it will choose
// counts, with what is known against it.
func TestOldKernel(t *testing.T) {
	for _, c := range []struct {
		name  string
		avoid []reset.Avoid
		by    reset.Method
		err   error
	}{
		{"FLR", nil, reset.FLR, nil},
		{"FLR is bad", []reset.Avoid{{Method: reset.FLR, Why: "x"}}, "", reset.ErrNoMethod},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := sysfstest.New()
			accelerator(m)
			m.Remove("sys/devices/pci0000:00/0000:00:01.0/0000:65:00.0/reset_method")
			result, err := reset.New(m).Reset(t.Context(), scan(t, m), c.avoid)
			if result.By != c.by || !errors.Is(err, c.err) {
				t.Errorf("%s: %s, %v", c.name, result, err)
			}
			if n := len(m.Resets(addr(t, "0000:65:00.0"))); (n == 1) != (c.by != "") {
				t.Errorf("%s: %d resets", c.name, n)
			}
		})
	}
}

// A driver that hangs holds the device's lock: nothing else may be tried.
func TestHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := sysfstest.New()
		accelerator(m)
		a := addr(t, "0000:65:00.0")
		m.PowersOff(a)
		m.OnReset(a, "flr", sysfstest.Outcome{Hangs: true})
		start := time.Now()
		result, err := reset.New(m, reset.WithTimes(time.Second, 3*time.Second, time.Second)).Reset(t.Context(), scan(t, m), nil)
		if !errors.Is(err, reset.ErrDead) || !errors.Is(err, sysfs.ErrStuck) || !result.Stuck() || tries(result) != "flr!" {
			t.Errorf("%s, %v", result, err)
		}
		if took := time.Since(start); took > 15*time.Second {
			t.Errorf("it took %v", took)
		}
		m.OnReset(a, "flr", sysfstest.Outcome{}) // goes on
		synctest.Wait()
		if r := m.Resets(a); !slices.Equal(r, []string{"flr"}) {
			t.Errorf("reset by %v", r)
		}
	})
}

func TestCancelledBefore(t *testing.T) {
	m := sysfstest.New()
	accelerator(m)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	result, err := reset.New(m).Reset(ctx, scan(t, m), nil)
	if !errors.Is(err, context.Canceled) || errors.Is(err, reset.ErrDead) || len(m.Writes()) != 0 {
		t.Errorf("%s, %v, writes %v", result, err, m.Writes())
	}
}

// device is a machine in which one function's configuration space does what a
// test says.
type device struct {
	*sysfstest.Machine
	config  []byte
	onReset func(d *device)                 // after the kernel's
	reads   func(d *device, n int) []byte   // the nth after it; nil: config
	write   func(d *device, s string) error // nil: as the registers are
	n       int
}

const configFile = dir + "0000:65:00.0/config"

func (d *device) Open(name string) (fs.File, error) {
	if name != configFile {
		return d.Machine.Open(name)
	}
	data := d.config
	if d.reads != nil {
		d.n++
		if b := d.reads(d, d.n); b != nil {
			data = b
		}
	}
	return fstest.MapFS{"config": {Data: slices.Clone(data)}}.Open("config")
}

func (d *device) ReadFile(name string) ([]byte, error) {
	if name == configFile {
		return slices.Clone(d.config), nil
	}
	return d.Machine.ReadFile(name)
}

func (d *device) Write(ctx context.Context, name, data string) error {
	if name == configFile {
		if d.write != nil {
			return d.write(d, data)
		}
		d.store([]byte(data))
		return nil
	}
	err := d.Machine.Write(ctx, name, data)
	if path.Base(name) == "reset" && err == nil && d.onReset != nil {
		d.onReset(d)
	}
	return err
}

// store writes registers as the standard has them.
func (d *device) store(b []byte) {
	for at := range b {
		switch {
		case at >= 0x04 && at < 0x06, at == 0x0c, at == 0x0d, at == 0x3c:
			d.config[at] = b[at]
		case at == 0x06 || at == 0x07:
			d.config[at] &^= b[at] // cleared by ones
		case at >= 0x10 && at < 0x28:
			if at%4 == 0 {
				d.config[at] = b[at]&0xf0 | d.config[at]&0x0f
			} else {
				d.config[at] = b[at]
			}
		}
	}
}

func newDevice(t *testing.T) *device {
	t.Helper()
	m := sysfstest.New()
	addAccelerator(m, "0x00000000d0000000 0x00000000d0ffffff 0x0000000000040200", "0x0000206000000000 0x0000206fffffffff 0x000000000014220c")
	data, err := m.ReadFile(configFile)
	if err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	le.PutUint16(data[4:], 0x0406)
	le.PutUint32(data[0x10:], 0xd0000000)
	le.PutUint32(data[0x14:], 0x0000000c)
	le.PutUint32(data[0x18:], 0x00002060)
	return &device{Machine: m, config: data}
}

var le = binary.LittleEndian

func lose(d *device) {
	le.PutUint16(d.config[4:], 0)
	le.PutUint32(d.config[0x10:], 0)
	le.PutUint32(d.config[0x14:], 0xc)
	le.PutUint32(d.config[0x18:], 0)
}

// verdicts are the cases of TestVerify.
var verdicts = []struct {
	name     string
	set      func(*device)
	by       reset.Method
	restored bool
	why      string // of FLR
	longest  time.Duration
}{
	{name: "all is as it was", set: func(*device) {}, by: reset.FLR},
	{name: "registers are written back", set: func(d *device) { d.onReset = lose }, by: reset.FLR, restored: true},
	{
		name: "registers stay lost", why: "lost BAR 0 (0x0, it was 0xd0000000), also after it was written back",
		set: func(d *device) {
			d.onReset = lose
			d.write = func(*device, string) error { return nil }
		},
	},
	{
		name: "registers may not be written", why: "lost BAR 0 (0x0, it was 0xd0000000), and cannot be written back: operation not permitted",
		set: func(d *device) {
			d.onReset = lose
			d.write = func(*device, string) error { return syscall.EPERM }
		},
	},
	{
		name: "it dies of the writing", why: "stopped answering when its registers",
		set: func(d *device) {
			d.onReset = lose
			d.write = func(d *device, _ string) error { copy(d.config, strings.Repeat("\xff", len(d.config))); return nil }
		},
	},
	{
		name: "only the command register", by: reset.FLR, restored: true,
		set: func(d *device) { d.onReset = func(d *device) { le.PutUint16(d.config[4:], 0) } },
	},
	{
		name: "another device", why: "is another device: 10de:1eb8, it was 10de:2236",
		set: func(d *device) { d.onReset = func(d *device) { le.PutUint16(d.config[2:], 0x1eb8) } },
	},
	{
		name: "another class", why: "class, revision or subsystem",
		set: func(d *device) { d.onReset = func(d *device) { d.config[0x0b] = 1 } },
	},
	{
		name: "status errors", why: "reports errors: status 0x4000",
		set: func(d *device) { d.onReset = func(d *device) { d.config[7] |= 0x40 } },
	},
	{
		name: "status errors that it had", by: reset.FLR,
		set: func(d *device) { d.config[7] |= 0x40 },
	},
	{
		name: "a fatal error", why: "reports a fatal error",
		set: func(d *device) { d.onReset = func(d *device) { d.config[0x60+0x0a] |= 4 } },
	},
	{
		name: "what peers answered is not its fault", by: reset.FLR,
		set: func(d *device) { d.onReset = func(d *device) { d.config[7] |= 0x30 } },
	},
	{
		name: "it asks for patience", by: reset.FLR, longest: 30 * time.Second,
		set: func(d *device) {
			d.reads = func(d *device, n int) []byte {
				if n < 3 || n > 30 {
					return nil
				}
				b := []byte(strings.Repeat("\xff", len(d.config)))
				b[0], b[1] = 1, 0
				return b
			}
		},
	},
	{
		name: "it asks for ever", why: "still asks for patience after 1m0s", longest: 4 * time.Minute,
		set: func(d *device) {
			d.onReset = func(d *device) {
				copy(d.config, strings.Repeat("\xff", len(d.config)))
				d.config[0], d.config[1] = 1, 0
			}
		},
	},
	{
		name: "it is gone", why: "does not answer: it reads all ones", longest: 4 * time.Minute,
		set: func(d *device) {
			d.onReset = func(d *device) { copy(d.config, strings.Repeat("\xff", len(d.config))) }
		},
	},
	{
		name: "the file is cut off", why: "cannot be read", longest: 4 * time.Minute,
		set: func(d *device) { d.onReset = func(d *device) { d.config = d.config[:40] } },
	},
}

func TestVerify(t *testing.T) {
	for _, c := range verdicts {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDevice(t)
				card := scan(t, d)
				c.set(d)
				start := time.Now()
				result, err := reset.New(d).Reset(t.Context(), card, []reset.Avoid{{Method: reset.Bus, Why: "x"}})
				if result.By != c.by || (err == nil) != (c.by != "") || !strings.Contains(why(result, reset.FLR), c.why) {
					t.Errorf("%s, %v; want %q because of %q", result, err, c.by, c.why)
				}
				if c.by == "" && (!errors.Is(err, reset.ErrDead) || !errors.Is(result.Attempts[0].Err, reset.ErrVerify)) {
					t.Errorf("%v", err)
				}
				if result.Attempts[0].Restored != (c.restored || strings.Contains(c.why, "written back") && !strings.Contains(c.why, "cannot") || strings.Contains(c.why, "stopped")) {
					t.Errorf("restored: %v", result.Attempts[0].Restored)
				}
				if took := time.Since(start); took > max(c.longest, 30*time.Second) {
					t.Errorf("it took %v", took)
				}
				if c.restored && (le.Uint16(d.config[4:]) != 0x0406 || le.Uint32(d.config[0x10:]) != 0xd0000000 || le.Uint32(d.config[0x18:]) != 0x2060) {
					t.Errorf("registers are % x", d.config[:0x20])
				}
			})
		})
	}
}

// A device that was dead has no registers to compare with but the scan's.
func TestVerifyOfOneThatWasDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDevice(t)
		card := scan(t, d)
		good := slices.Clone(d.config)
		clear(good[0x10:0x28])
		good[0x14] = 0xc
		d.config = []byte(strings.Repeat("\xff", 4096))
		d.onReset = func(d *device) { d.config = good }
		result, err := reset.New(d).Reset(t.Context(), card, nil)
		if err != nil || result.By != reset.Bus || !result.Attempts[2].Restored {
			t.Fatalf("%s, %v", result, err)
		}
		if le := binary.LittleEndian; le.Uint32(d.config[0x10:]) != 0xd0000000 || le.Uint32(d.config[0x14:]) != 0xc || le.Uint32(d.config[0x18:]) != 0x2060 {
			t.Errorf("BARs are % x", d.config[0x10:0x28])
		}
	})
}
