package throttle_test

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/throttle"
)

func TestFloodIsCountedAndNotLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out testkit.Log
		log := throttle.Logger(slog.New(slog.NewTextHandler(&out, nil)), 3, time.Second)
		lines := func() []string {
			synctest.Wait()
			return strings.Split(strings.TrimSuffix(out.Take(), "\n"), "\n")
		}
		for range 100000 {
			log.With("pid", 1).Warn("refused")
		}
		if l := lines(); len(l) != 3 || strings.Contains(l[2], "left_out") {
			t.Errorf("%q", l)
		}
		time.Sleep(time.Second) // nobody logs any more: the rest is still told
		if l := lines(); len(l) != 1 || !strings.Contains(l[0], "left_out=99997") {
			t.Errorf("%q", l)
		}
		time.Sleep(time.Minute)
		if l := lines(); l[0] != "" {
			t.Errorf("%q", l)
		}
		for range 5 {
			log.Warn("refused")
		}
		if l := lines(); len(l) != 3 {
			t.Errorf("after a quiet minute: %q", l)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		log.Warn("refused")
		time.Sleep(time.Second)
		log.Warn("refused")
		if l := lines(); !strings.Contains(l[0], "left_out=2") || strings.Contains(l[len(l)-1], "left_out=2") {
			t.Errorf("%q", l)
		}
		time.Sleep(time.Hour)
	})
}
