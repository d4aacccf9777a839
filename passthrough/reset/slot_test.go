package reset_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/reset"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

// slot is a machine whose root port cuts the power of an empty slot.
type slot struct {
	*sysfstest.Machine
	t         testing.TB
	port      string
	functions []string
	dead      bool // switch does not work
	locked    bool // the kernel is locked down: no writing of registers
	cut       int  // times
	bridge    []byte
	hot       int // resets of the bus
}

func (s *slot) config() string { return dir + s.port + "/config" }

func (s *slot) Open(name string) (fs.File, error) {
	if name == s.config() && !s.Crashed() {
		return fstest.MapFS{"config": {Data: slices.Clone(s.bridge)}}.Open("config")
	}
	return s.Machine.Open(name)
}

func (s *slot) inReset() bool { return s.bridge[0x3e]&0x40 != 0 }

func (s *slot) Write(ctx context.Context, name, data string) error {
	switch {
	case name == s.config():
		if err := s.Step(name); err != nil {
			return err
		}
		if s.locked {
			return syscall.EPERM
		}
		was := s.inReset()
		b := []byte(data)
		for at := range b {
			if at == 0x06 || at == 0x07 || at == 0x1e || at == 0x1f {
				if b[at] != 0 {
					s.t.Errorf("status is cleared")
				}
				b[at] = s.bridge[at]
			}
		}
		copy(s.bridge, b)
		if now := s.inReset(); now && !was {
			s.hot++
			for _, f := range s.functions {
				if _, err := s.Machine.Lstat(dir + f); err == nil {
					s.t.Errorf("%s was on the bus during its reset", f)
				}
			}
		}
		return nil
	case path.Base(name) == "rescan" && s.inReset():
		return s.Step(name) // nobody answers
	}
	return s.Machine.Write(ctx, name, data)
}

const port = "0000:00:01.0"

func newSlot(t testing.TB) *slot {
	m := sysfstest.New()
	m.Load(sysfstest.Pciback())
	s := addSlot(t, m, port, "0000:65:00")
	m.Load(nvidia())
	return s
}

func nvidia() sysfstest.Driver {
	return sysfstest.Driver{Name: "nvidia", IDs: []sysfstest.ID{{Vendor: 0x10de, Device: sysfstest.Any}}}
}

// addSlot adds a slot with a card below a root port.
func addSlot(t testing.TB, m *sysfstest.Machine, port, at string) *slot {
	m.Add(pcitest.Port(port, "", -1, pci.PortRoot, pcitest.FullACS()))
	card := pcitest.NVIDIACard(at, port, -1, 0)
	s := &slot{Machine: m, t: t, port: port}
	for i := range card {
		card[i].Driver, card[i].DriverOverride, card[i].Reset = "pciback", "pciback", ""
		s.functions = append(s.functions, card[i].Address)
	}
	m.Add(card...)
	data, err := m.ReadFile(s.config())
	if err != nil {
		t.Fatal(err)
	}
	s.bridge = data
	s.bridge[7], s.bridge[0x1f] = 0x20, 0x20
	return s
}

func (s *slot) state() string {
	control, err := s.Machine.ReadFile(dir + s.port + "/power/control")
	if err != nil {
		return ""
	}
	for _, f := range s.functions {
		if _, err := s.Machine.Lstat(dir + f); err == nil {
			return "D0\n"
		}
	}
	if string(control) != "auto\n" || s.dead {
		return "D0\n"
	}
	return "D3cold\n"
}

func (s *slot) ReadFile(name string) ([]byte, error) {
	if name == dir+s.port+"/power_state" {
		state := s.state()
		if state == "D3cold\n" {
			s.cut++
		}
		return []byte(state), nil
	}
	return s.Machine.ReadFile(name)
}

func (s *slot) right() (wrong []string) {
	for _, f := range s.functions {
		a := addr(s.t, f)
		if _, err := s.Lstat(dir + f); err != nil {
			wrong = append(wrong, f+" is off the bus")
			continue
		}
		if s.Driver(a) != "pciback" || s.Override(a) != "pciback" {
			wrong = append(wrong, f+" has driver "+s.Driver(a)+" and override "+s.Override(a))
		}
	}
	if s.inReset() {
		wrong = append(wrong, "the bus is in reset")
	}
	for name, want := range map[string]string{"sys/bus/pci/drivers_autoprobe": "1\n", dir + s.port + "/power/control": "on\n"} {
		if got, _ := s.ReadFile(name); string(got) != want {
			wrong = append(wrong, name+" is "+string(got))
		}
	}
	return append(wrong, s.Violations()...)
}

func TestCardWhoseDriverKeepsItAwake(t *testing.T) {
	noBus := []reset.Avoid{{Method: reset.Bus, Why: "x"}}
	for _, c := range []struct {
		name    string
		records bool
		avoid   []reset.Avoid
		set     func(*slot)
		by      reset.Method
		err     error
		why     map[reset.Method]string
	}{
		{name: "the bus is reset by its bridge", records: true, by: reset.Bus},
		{
			name: "registers cannot be written", records: true, by: reset.D3cold, set: func(s *slot) { s.locked = true },
			why: map[reset.Method]string{reset.Bus: "operation not permitted"},
		},
		{name: "the slot's power is switched", records: true, avoid: noBus, by: reset.D3cold},
		{
			name: "the platform does not", records: true, avoid: noBus, set: func(s *slot) { s.dead = true }, err: reset.ErrDead,
			why: map[reset.Method]string{reset.D3cold: "does not switch this slot's power"},
		},
		{
			name: "no folder for records", err: reset.ErrNoMethod,
			why: map[reset.Method]string{reset.Bus: "no folder for records", reset.D3cold: "no folder for records"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			records := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				s := newSlot(t)
				if c.set != nil {
					c.set(s)
				}
				var opts []reset.Option
				if c.records {
					opts = append(opts, reset.WithRecords(records))
				}
				result, err := reset.New(s, opts...).Reset(t.Context(), scan(t, s.Machine), c.avoid)
				if result.By != c.by || !errors.Is(err, c.err) {
					t.Errorf("%s, %v", result, err)
				}
				for method, part := range c.why {
					if got := why(result, method); !strings.Contains(got, part) {
						t.Errorf("%s: %q does not say %q", method, got, part)
					}
				}
				if wrong := s.right(); len(wrong) > 0 {
					t.Errorf("left behind: %v", wrong)
				}
				if (s.cut > 0) != (c.by == reset.D3cold) || (s.hot > 0) != (c.by == reset.Bus) {
					t.Errorf("power was cut %d times, the bus was reset %d times", s.cut, s.hot)
				}
				if left, _ := os.ReadDir(records); len(left) > 0 {
					t.Errorf("records remain: %v", left)
				}
			})
		})
	}
}

// slots is a machine with two of them. found is called when the card in the first is on the bus again.
type slots struct {
	*slot
	second *slot
	found  func()
}

func (s slots) of(name string) *slot {
	if strings.HasPrefix(name, dir+s.second.port+"/") {
		return s.second
	}
	return s.slot
}

func (s slots) Open(name string) (fs.File, error)    { return s.of(name).Open(name) }
func (s slots) ReadFile(name string) ([]byte, error) { return s.of(name).ReadFile(name) }

func (s slots) Write(ctx context.Context, name, data string) error {
	err := s.of(name).Write(ctx, name, data)
	if name == dir+port+"/rescan" {
		s.found()
	}
	return err
}

// A VM with two cards has stopped. The first card that has its drivers again must not let the
// kernel bind others to the second one, which is off the bus just then.
func TestTwoCardsThatAreOffTheBusAtTheSameTimeKeepTheirDrivers(t *testing.T) {
	records := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		m := sysfstest.New()
		m.Load(nvidia()) // the kernel asks it first
		m.Load(sysfstest.Pciback())
		s := slots{slot: addSlot(t, m, port, "0000:65:00"), second: addSlot(t, m, "0000:00:02.0", "0000:66:00")}
		cards, err := pci.Scan(m)
		if err != nil || len(cards) != 2 {
			t.Fatal(cards, err)
		}
		var wg sync.WaitGroup
		var r *reset.Resetter
		do := func(card *pci.Card) {
			if result, err := r.Reset(t.Context(), card, nil); err != nil || result.By != reset.Bus {
				t.Errorf("%s: %s, %v", card.Address, result, err)
			}
		}
		s.found = sync.OnceFunc(func() {
			wg.Go(func() { do(cards[1]) })
			time.Sleep(5 * time.Millisecond) // it has left the bus
		})
		r = reset.New(s, reset.WithRecords(records))
		do(cards[0])
		wg.Wait()
		if wrong := append(s.slot.right(), s.second.right()...); len(wrong) > 0 {
			t.Errorf("left behind: %v", wrong)
		}
		if left, _ := os.ReadDir(records); len(left) > 0 {
			t.Errorf("records remain: %v", left)
		}
	})
}

// dead is a slot whose card does not come back when it was off the bus.
type dead struct{ *slot }

func (d dead) Write(ctx context.Context, name, data string) error {
	if err := ctx.Err(); err != nil {
		return err // as the kernel's files do
	}
	if strings.HasSuffix(name, "/rescan") {
		return nil
	}
	return d.slot.Write(ctx, name, data)
}

// A card that does not come back keeps neither drivers from the host's other devices, nor the next
// hostd from starting.
func TestCardThatDoesNotComeBackKeepsNoDriversOff(t *testing.T) {
	records := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := dead{newSlot(t)}
		probes := func(when string) {
			t.Helper()
			if got, _ := s.ReadFile("sys/bus/pci/drivers_autoprobe"); string(got) != "1\n" {
				t.Errorf("%s: drivers_autoprobe is %q", when, got)
			}
		}
		_, err := reset.New(s, reset.WithRecords(records)).Reset(t.Context(), scan(t, s.Machine), []reset.Avoid{{Method: reset.D3cold, Why: "x"}})
		if !errors.Is(err, reset.ErrDead) {
			t.Errorf("%v", err)
		}
		probes("after the reset")
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		if _, err := reset.New(s, reset.WithRecords(records)).Recover(ctx); err == nil || !strings.Contains(err.Error(), "has not found it") {
			t.Errorf("%v", err)
		}
		if took := time.Since(began); took > 5*time.Minute {
			t.Errorf("the next hostd has waited for %v", took)
		}
		probes("after the next start")
	})
}
