package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/simulate"
)

func TestDemonstrationEndsWell(t *testing.T) {
	var out strings.Builder
	if err := run(&out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if n := strings.Count(out.String(), "all right"); n != 3 {
		t.Errorf("%d modes were shown", n)
	}
}

// TestVerdictSeesWhatWentWrong: a demonstration whose verdict is always good shows
// nothing.
func TestVerdictSeesWhatWentWrong(t *testing.T) {
	for name, c := range map[string]struct {
		harm func(*stage)
		want error
	}{
		"a violation":         {func(s *stage) { s.m.Violations = append(s.m.Violations, nvc0.Violation{}) }, errIsolation},
		"a changed memory":    {func(s *stage) { access(s.m, honestVM, 0, 0x700000+secretAt&0xffff, 8, 1) }, errIsolation},
		"nothing was checked": {func(s *stage) { s.honest.checked = 0 }, errResults},
		"no attack":           {func(*stage) {}, errTame},
		"a wrong result":      {func(s *stage) { s.honest.data[0]++ }, errResults},
		"too small a share": {func(s *stage) {
			s.shares = []float64{0.1}
			for i := range uint8(7) {
				s.m.Router.Read(mmio.Access{VM: hostileVM, BAR: i, Size: i, Offset: 1 << 40})
				s.m.Router.Read(mmio.Access{VM: hostileVM, Size: 4, Offset: 0x1718 + 0x1000*uint64(i)})
			}
			s.hostile.set(0x1700, 1<<24)
			s.hostile.set(nvc0.RegKick, 99)
		}, errShare},
	} {
		m, err := simulate.New(24*simulate.MiB, 8*simulate.MiB, timeshare.DefaultConfig(timeshare.Fair), nil)
		if err != nil {
			t.Fatal(err)
		}
		s := &stage{out: &strings.Builder{}, m: m}
		if s.honest, err = newHonest(m, mediate.Lazy); err != nil {
			t.Fatal(err)
		}
		if s.hostile, err = newHostile(m); err != nil {
			t.Fatal(err)
		}
		if err := s.honest.act(); err != nil {
			t.Fatal(err)
		}
		m.Settle()
		if err := s.honest.check(); err != nil {
			t.Fatal(err)
		}
		c.harm(s)
		if err = s.verdict(); name == "a wrong result" {
			err = s.honest.check()
		}
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}
