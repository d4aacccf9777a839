package throttle

import (
	"fmt"
	"testing"
	"time"
)

func TestOneAnInterval(t *testing.T) {
	now := time.Unix(1000, 0)
	th := New(10*time.Second, func() time.Time { return now })
	allowed, told := 0, uint64(0)
	for range 100 {
		n, ok := th.Allow("a")
		if ok {
			allowed++
			told += n
		}
		now = now.Add(time.Second)
	}
	if allowed != 10 || told != 81 {
		t.Errorf("%d let through, %d told of", allowed, told)
	}
	if _, ok := th.Allow("b"); !ok {
		t.Error("another kind waits")
	}
	now = now.Add(-time.Hour)
	if _, ok := th.Allow("a"); !ok {
		t.Error("it waits for a clock that was set back")
	}
}

func TestManyKindsTakeNoMoreMemory(t *testing.T) {
	now := time.Unix(1000, 0)
	th := New(10*time.Second, func() time.Time { return now })
	allowed := 0
	for i := range 10 * maxKeys {
		if _, ok := th.Allow(fmt.Sprint(i)); ok {
			allowed++
		}
	}
	if len(th.seen) > maxKeys+1 || allowed > maxKeys+1 {
		t.Errorf("%d kinds kept, %d let through", len(th.seen), allowed)
	}
	now = now.Add(time.Minute)
	if _, ok := th.Allow("new"); !ok || len(th.seen) > 2 {
		t.Errorf("%d kinds kept", len(th.seen))
	}
}
