package timeshare_test

import (
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
)

// Two owners: one with a command of 1 ms, which submits its next one 0.1 ms after
// it has ended, and one with commands of 10 ms.
func Example() {
	s, err := timeshare.New(timeshare.DefaultConfig(timeshare.Fair))
	if err != nil {
		fmt.Println(err)
		return
	}
	tell := func(err error) {
		if err != nil {
			fmt.Println(err)
		}
	}
	length := map[timeshare.OwnerID]time.Duration{"short": time.Millisecond, "long": 10 * time.Millisecond}
	now, comes := time.Duration(0), time.Duration(0)
	tell(s.Join(now, "short", 1))
	tell(s.Join(now, "long", 1))
	tell(s.Submit(now, "long", 0, 100))
	absent, ran := true, map[timeshare.OwnerID]time.Duration{}
	for now < 500*time.Millisecond {
		if absent && now >= comes {
			tell(s.Submit(now, "short", 0, 1))
			absent = false
		}
		switch d := s.Next(now); d.Action {
		case timeshare.Run:
			tell(s.Start(now, d.Owner))
			now += length[d.Owner]
			tell(s.End(now, d.Owner, length[d.Owner]))
			ran[d.Owner] += length[d.Owner]
			if d.Owner == "short" {
				absent, comes = true, now+100*time.Microsecond
			}
		case timeshare.Wait:
			now = min(d.Until, comes)
		}
	}
	fmt.Println(ran["short"].Round(10*time.Millisecond), ran["long"].Round(10*time.Millisecond), s.Totals().Waited.Round(10*time.Millisecond))
	// Output: 230ms 250ms 20ms
}
