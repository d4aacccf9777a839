package mmiotest

import (
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/simulate"
)

// TestEndureNoticesOneWrongBit in anything that it relies on from one round to the next.
func TestEndureNoticesOneWrongBit(t *testing.T) {
	// The buffers' pages in the order in which the driver takes them: state, the other state,
	// factors, ballast. After an even number of launches the state is in the first again.
	const first, page = 0x100000, 0x1000
	for name, c := range map[string]struct {
		at   uint64 // 0: nothing
		said string // of the error; empty: none
	}{
		"nothing":   {},
		"state":     {first, "round 3: it has computed"},
		"factors":   {first + 2*page, "round 3: it has computed"},
		"ballast":   {first + 3*page + 40, "after 6 rounds: what lay in its memory"},
		"elsewhere": {first + 64*page, ""},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := simulate.New(16*simulate.MiB, 8*simulate.MiB, timeshare.DefaultConfig(timeshare.Fair), func(mediate.Event) {})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := m.Add(mediate.Request{VM: 1, Name: "vm", Memory: 4 * simulate.MiB, Channels: 2, Weight: 1, Mode: mediate.Lazy, Tables: 512}); err != nil {
				t.Fatal(err)
			}
			rounds := 0
			err = Endure(guestdriver.Options{VM: 1, Device: &m.Router, Idle: m.Tick}, 7, 8, func(right int) bool {
				if rounds = right; right == 3 && c.at != 0 { // through the window of BAR0
					m.Router.Write(mmio.Access{VM: 1, Size: 4, Offset: 0x1700, Write: true, Data: c.at >> 16})
					a := mmio.Access{VM: 1, Size: 4, Offset: 0x700000 + c.at&0xffff}
					a.Data = m.Router.Read(a) ^ 1<<7
					a.Write = true
					m.Router.Write(a)
				}
				return right < 6
			})
			switch {
			case c.said == "" && (err != nil || rounds != 6):
				t.Errorf("%d rounds, %v", rounds, err)
			case c.said != "" && (err == nil || !strings.Contains(err.Error(), c.said)):
				t.Errorf("%v, want %q", err, c.said)
			}
		})
	}
}
