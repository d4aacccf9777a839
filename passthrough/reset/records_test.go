package reset_test

import (
	"maps"
	"os"
	"path"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuctl/gpuctl/passthrough/reset"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

// Wherever the process dies or a write fails, Recover brings everything back.
func TestCrashes(t *testing.T) {
	faults := map[string]func(*sysfstest.Machine, int){
		"crash before": (*sysfstest.Machine).CrashBefore,
		"crash after":  (*sysfstest.Machine).CrashAfter,
		"fail":         func(m *sysfstest.Machine, n int) { m.FailWrite(n, syscall.EIO) },
	}
	for name, set := range maps.Clone(faults) {
		faults[name+" bus"] = set
	}
	for name, set := range faults {
		for n := 1; ; n++ {
			avoid := []reset.Avoid{{Method: reset.Bus, Why: "x"}}
			if strings.HasSuffix(name, "bus") {
				avoid = []reset.Avoid{{Method: reset.D3cold, Why: "x"}}
			}
			records := t.TempDir()
			ended := false
			synctest.Test(t, func(t *testing.T) {
				s := newSlot(t)
				card := scan(t, s)
				writes := len(s.Writes())
				set(s.Machine, n)
				r := reset.New(s, reset.WithRecords(records), reset.WithTimes(time.Second, 5*time.Second, time.Second))
				_, err := r.Reset(t.Context(), card, avoid)
				if !s.Crashed() && len(s.Writes())-writes < n {
					if ended = true; err != nil {
						t.Errorf("%s %d, which did not come: %v", name, n, err)
					}
				}
				s.Restart()
				after := reset.New(s, reset.WithRecords(records))
				if _, err := after.Recover(t.Context()); err != nil {
					t.Errorf("%s %d: recover: %v", name, n, err)
				}
				if wrong := s.right(); len(wrong) > 0 {
					t.Errorf("%s %d: left behind: %v\n%s", name, n, wrong, strings.Join(s.Writes()[writes:], "\n"))
				}
				if again, err := after.Recover(t.Context()); err != nil || len(again) > 0 {
					t.Errorf("%s %d: recover finds more: %v, %v", name, n, again, err)
				}
			})
			if ended || t.Failed() {
				// autoprobe, the bridge, four functions away and back, with their drivers
				if n < 16 {
					t.Errorf("%s: only %d writes", name, n)
				}
				break
			}
			if n > 100 {
				t.Fatal("it never ends")
			}
		}
	}
}

// The same for the kernel's choice of a method.
func TestCrashesWithAChoice(t *testing.T) {
	for n := 1; n <= 4; n++ {
		records := t.TempDir()
		m := sysfstest.New()
		accelerator(m)
		card := scan(t, m)
		m.CrashBefore(n)
		_, err := reset.New(m, reset.WithRecords(records), reset.WithTimes(time.Millisecond, 0, time.Millisecond)).Reset(t.Context(), card, nil)
		if (n <= 3) != m.Crashed() {
			t.Fatalf("%d: crashed %v, %v", n, m.Crashed(), err)
		}
		m.Restart()
		found, err := reset.New(m, reset.WithRecords(records)).Recover(t.Context())
		if err != nil || len(found) != min(1, 4-n) {
			t.Errorf("%d: recover: %v, %v", n, found, err)
		}
		if got, _ := m.ReadFile(dir + "0000:65:00.0/reset_method"); string(got) != "flr bus\n" {
			t.Errorf("%d: reset_method is %q", n, got)
		}
	}
}

// After another boot nothing that a record says is so.
func TestRecordsOfAnotherBoot(t *testing.T) {
	records := t.TempDir()
	m := sysfstest.New()
	accelerator(m)
	m.CrashBefore(2)
	_, _ = reset.New(m, reset.WithRecords(records), reset.WithTimes(time.Millisecond, 0, time.Millisecond)).Reset(t.Context(), scan(t, m), nil)
	m.Reboot()
	before := len(m.Writes())
	if _, err := reset.New(m, reset.WithRecords(records)).Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w := m.Writes()[before:]; len(w) > 0 {
		t.Errorf("writes %v", w)
	}
	if left, _ := os.ReadDir(records); len(left) > 0 {
		t.Errorf("records remain: %v", left)
	}
}

func TestDamagedRecords(t *testing.T) {
	records := t.TempDir()
	for name, data := range map[string]string{
		"0000:65:00.0.reset.json": "{", "0000:66:00.0.reset.json": `{"choices":{"../../x":"flr"}}`, "0000:67:00.0.reset.json": `{"functions":[{"address":"0000:67:00.0"}]}`,
		"notes.txt": "x", "x.reset.json": "{}",
	} {
		if err := os.WriteFile(path.Join(records, name), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := sysfstest.New()
	found, err := reset.New(m, reset.WithRecords(records)).Recover(t.Context())
	if err == nil || len(found) != 0 || len(m.Writes()) != 0 {
		t.Fatalf("%v, %v, writes %v", found, err, m.Writes())
	}
	for _, a := range []string{"0000:65:00.0", "0000:66:00.0", "0000:67:00.0"} {
		if !strings.Contains(err.Error(), "reset of "+a) {
			t.Errorf("%v does not name %s", err, a)
		}
	}
}
