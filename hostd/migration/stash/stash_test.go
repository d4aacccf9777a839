package stash

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/statestream"
)

const (
	vm  = "6d696772-6174-4000-8000-000000000001"
	vm2 = "6d696772-6174-4000-8000-000000000002"
)

func fixed(n uint64) func(uint64) (uint64, error) {
	return func(uint64) (uint64, error) { return n, nil }
}

func open(t *testing.T, dir string, limit uint64) *Stash {
	t.Helper()
	s, err := Open(Config{Dir: dir, Limit: fixed(limit), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// chunks is a state of n bytes.
func chunks(id string, n int) (all []*gpuctlv1.StateChunk, data []byte) {
	data = make([]byte, n)
	r := rand.New(rand.NewPCG(uint64(n), uint64(len(id))))
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	w := statestream.NewWriter(func(c *gpuctlv1.StateChunk) error { all = append(all, proto.CloneOf(c)); return nil })
	_, _ = w.Write(data)
	_, _ = w.End(id)
	return all, data
}

func keep(t *testing.T, s *Stash, machine, session, migration, id string, n int) []byte {
	t.Helper()
	all, data := chunks(id, n)
	w, err := s.Begin(machine, session, migration, id, uint64(n))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for i, c := range all {
		kept, err := w.Take(c)
		if err != nil || kept != (i == len(all)-1) {
			t.Fatal(kept, err)
		}
	}
	return data
}

func load(s *Stash, machine, session string) ([]byte, error) {
	state, err := s.Find(machine, session)
	if err != nil {
		return nil, err
	}
	var all []*gpuctlv1.StateChunk
	if err := s.Send(state, func(c *gpuctlv1.StateChunk) error { all = append(all, proto.CloneOf(c)); return nil }); err != nil {
		return nil, err
	}
	return io.ReadAll(statestream.NewReader(func() (*gpuctlv1.StateChunk, error) {
		if len(all) == 0 {
			return nil, io.EOF
		}
		c := all[0]
		all = all[1:]
		return c, nil
	}))
}

// files are all below a folder.
func files(t *testing.T, dir string) (out []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if path != dir {
			out = append(out, strings.TrimPrefix(path, dir+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestKeptOverARestart(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, 1<<30)
	want := keep(t, s, vm, "s-1", "m-1", "a1", 300000)
	other := keep(t, s, vm2, "s-1", "m-2", "b1", 17)
	// hostd is killed while the next one comes.
	w, err := s.Begin(vm, "s-1", "m-1", "a2", 100)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Take(&gpuctlv1.StateChunk{Data: []byte("half of it")}); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, 1<<30)
	for _, c := range []struct {
		vm   string
		want []byte
	}{{vm, want}, {vm2, other}} {
		if got, err := load(s, c.vm, "s-1"); err != nil || !bytes.Equal(got, c.want) {
			t.Errorf("%s: %d bytes, %v", c.vm, len(got), err)
		}
	}
	if got := files(t, dir); len(got) != 8 {
		t.Errorf("%v", got)
	}
	// The newest is the one that is kept.
	newer := keep(t, s, vm, "s-1", "m-1", "a3", 1000)
	if got, err := load(s, vm, "s-1"); err != nil || !bytes.Equal(got, newer) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if got := files(t, dir); len(got) != 8 {
		t.Errorf("%v", got)
	}
	for _, m := range []string{"m-2", "m-1"} {
		for _, v := range []string{vm, vm2} {
			if err := s.Forget(v, m); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := files(t, dir); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
	if _, err := load(s, vm, "s-1"); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

// Whatever happens to the files, nothing is read back but what was kept.
func TestDamagedFiles(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"shorter": func(dir string) error { return os.Truncate(filepath.Join(dir, "a1.state"), 10) },
		"gone":    func(dir string) error { return os.Remove(filepath.Join(dir, "a1.state")) },
		"no mark": func(dir string) error { return os.Remove(filepath.Join(dir, metaFile)) },
		"garbage": func(dir string) error { return os.WriteFile(filepath.Join(dir, metaFile), []byte("{]"), 0o600) },
		"leads out": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, metaFile), []byte(`{"machine":"`+vm+`","session":"s-1","id":"../../x","size":1000,"digest":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}`), 0o600)
		},
		"another's": func(dir string) error {
			b, err := os.ReadFile(filepath.Join(dir, metaFile))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, metaFile), bytes.Replace(b, []byte(vm), []byte(vm2), 1), 0o600)
		},
		"a link": func(dir string) error {
			body := filepath.Join(dir, "a1.state")
			if err := os.Rename(body, filepath.Join(dir, "..", "x")); err != nil {
				return err
			}
			return os.Symlink("../x", body)
		},
	} {
		dir := t.TempDir()
		keep(t, open(t, dir, 1<<30), vm, "s-1", "m-1", "a1", 1000)
		if err := damage(filepath.Join(dir, vm, "s-1")); err != nil {
			t.Fatal(err)
		}
		if _, err := open(t, dir, 1<<30).Find(vm, "s-1"); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	dir := t.TempDir()
	s := open(t, dir, 1<<30)
	data := keep(t, s, vm, "s-1", "m-1", "a1", 1000)
	data[500] ^= 1
	if err := os.WriteFile(filepath.Join(dir, vm, "s-1", "a1.state"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := load(s, vm, "s-1"); !errors.Is(err, statestream.ErrCorrupt) {
		t.Errorf("a wrong byte: %v", err)
	}
}

func TestNotWhole(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, 1<<30)
	want := keep(t, s, vm, "s-1", "m-1", "a0", 100)
	for name, change := range map[string]func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk{
		"cut off":   func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return a[:2] },
		"reordered": func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { a[0], a[1] = a[1], a[0]; return a },
		"stale": func([]*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk {
			all, _ := chunks("a0", 400000)
			return all
		},
		"nothing": func([]*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return nil },
	} {
		all, _ := chunks("a1", 400000)
		w, err := s.Begin(vm, "s-1", "m-1", "a1", 400000)
		if err != nil {
			t.Fatal(name, err)
		}
		for _, c := range change(all) {
			if kept, err := w.Take(c); kept {
				t.Errorf("%s: it is kept", name)
			} else if err != nil {
				break
			}
		}
		w.Abort()
		if got, err := load(s, vm, "s-1"); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: the one before has %d bytes, %v", name, len(got), err)
		}
		if got := files(t, dir); len(got) != 4 {
			t.Errorf("%s: left %v", name, got)
		}
	}
	if room, err := s.Room(); err != nil || room < 1<<30-100 && room < 1<<20 {
		t.Errorf("%d bytes of room after all, %v", room, err)
	}
}

func TestFull(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, 10<<20)
	keep(t, s, vm, "s-1", "m-1", "a1", 4<<20)
	if room, err := s.Room(); err != nil || room != 6<<20 {
		t.Fatal(room, err)
	}
	w, err := s.Begin(vm, "s-2", "m-1", "b1", 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	if room, _ := s.Room(); room != 2<<20 {
		t.Errorf("%d bytes of room while 4 MiB are set aside", room)
	}
	if _, err := s.Begin(vm2, "s-1", "m-2", "c1", 3<<20); !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "needs 3 MiB more, and 2 MiB is left") {
		t.Errorf("%v", err)
	}
	// One that is larger than it was said is cut off at the limit.
	all, _ := chunks("b1", 9<<20)
	for _, c := range all {
		if _, err = w.Take(c); err != nil {
			break
		}
	}
	if !errors.Is(err, ErrFull) {
		t.Errorf("9 MiB beside 4 in 10: %v", err)
	}
	if _, again := w.Take(all[0]); !errors.Is(again, ErrFull) {
		t.Errorf("after that: %v", again)
	}
	if room, err := s.Room(); err != nil || room != 6<<20 {
		t.Errorf("%d bytes of room after that, %v", room, err)
	}
	if got := files(t, dir); len(got) != 4 {
		t.Errorf("left %v", got)
	}
	if s.Keeps() != true || open(t, t.TempDir(), 0).Keeps() {
		t.Error("a limit of 0 keeps something, or another nothing")
	}
}

func TestNames(t *testing.T) {
	s := open(t, t.TempDir(), 1<<30)
	for _, c := range [][3]string{{"..", "s", "a"}, {vm, "../x", "a"}, {vm, "s", "a/b"}, {vm, "", "a"}, {vm, "s", ".a"}, {vm, strings.Repeat("s", 65), "a"}, {vm, "s", "a\x00"}} {
		if w, err := s.Begin(c[0], c[1], "m", c[2], 1); !errors.Is(err, errName) {
			t.Errorf("%q: %v %v", c, w, err)
		}
	}
}

// A sender that has gone, unnoticed, does not keep its successor out.
func TestReplaced(t *testing.T) {
	s := open(t, t.TempDir(), 1<<30)
	first, err := s.Begin(vm, "s-1", "m-1", "a1", 1000)
	if err != nil {
		t.Fatal(err)
	}
	want := keep(t, s, vm, "s-1", "m-1", "a1", 1000)
	if _, err := first.Take(&gpuctlv1.StateChunk{Data: []byte("x")}); !errors.Is(err, errReplaced) {
		t.Error(err)
	}
	first.Abort()
	if got, err := load(s, vm, "s-1"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestSweep(t *testing.T) {
	now := time.Now()
	s, err := Open(Config{Dir: t.TempDir(), Limit: fixed(1 << 30), Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []string{"runs", "ended", "unknown"} {
		keep(t, s, vm, "s-"+m, m, "a1", 10)
	}
	coming, err := s.Begin(vm, "s-ended", "runs", "a2", 10)
	if err != nil {
		t.Fatal(err)
	}
	ended := func(m string) (bool, bool) { return m == "ended", m != "unknown" }
	left := func() (out []string) {
		if err := s.Sweep(ended); err != nil {
			t.Fatal(err)
		}
		for k := range s.states {
			out = append(out, k.session)
		}
		slices.Sort(out)
		return out
	}
	if got := left(); !slices.Equal(got, []string{"s-runs", "s-unknown"}) {
		t.Error(got)
	}
	now = now.Add(forgotten + time.Second)
	if got := left(); !slices.Equal(got, []string{"s-runs"}) {
		t.Error(got)
	}
	all, _ := chunks("a2", 10)
	for _, c := range all {
		if _, err := coming.Take(c); err != nil {
			t.Fatalf("what is on its way was swept: %v", err)
		}
	}
}

// States of many sessions come and go at once.
func TestConcurrent(t *testing.T) {
	s := open(t, t.TempDir(), 1<<30)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			session := "s-" + string(rune('a'+i/2)) // two for each
			for n := range 20 {
				all, _ := chunks("x", 1000+n)
				w, err := s.Begin(vm, session, "m", "x", 100)
				if err != nil {
					t.Error(err)
					return
				}
				for _, c := range all {
					if _, err := w.Take(c); err != nil && !errors.Is(err, errReplaced) && !errors.Is(err, errForgotten) {
						t.Error(err)
					}
				}
				w.Abort()
				if _, err := load(s, vm, session); err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, statestream.ErrCorrupt) {
					t.Error(err)
				}
				if n%5 == 0 {
					if err := s.Forget(vm, "m"); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	if err := s.Forget(vm, "m"); err != nil {
		t.Error(err)
	}
	if n, aside := s.used(); n != 0 || aside != 0 {
		t.Errorf("%d bytes, %d set aside", n, aside)
	}
}

// A session whose state came back may have to leave again, as when a migration is taken back. What
// it has left behind, which the new state replaces, must not keep it.
func TestNewerStateOfASessionHasTheRoomOfTheOlder(t *testing.T) {
	s := open(t, t.TempDir(), 10<<20)
	old := keep(t, s, vm, "s-1", "m-1", "a1", 8<<20)
	if _, err := s.Begin(vm, "s-2", "m-1", "b1", 8<<20); !errors.Is(err, ErrFull) {
		t.Fatalf("of another session: %v", err)
	}
	w, err := s.Begin(vm, "s-1", "m-1", "a2", 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Begin(vm, "s-2", "m-1", "b1", 1<<20); !errors.Is(err, ErrFull) {
		t.Fatalf("of another session, beside both: %v", err)
	}
	if got, err := load(s, vm, "s-1"); err != nil || !bytes.Equal(got, old) {
		t.Fatalf("the older one, before the newer one is complete: %v", err)
	}
	w.Abort()
	if got, err := load(s, vm, "s-1"); err != nil || !bytes.Equal(got, old) {
		t.Fatalf("the older one, after the newer one was given up: %v", err)
	}
	newer := keep(t, s, vm, "s-1", "m-1", "a3", 9<<20)
	if got, err := load(s, vm, "s-1"); err != nil || !bytes.Equal(got, newer) {
		t.Fatalf("the newer one: %v", err)
	}
	if _, err := s.Begin(vm, "s-1", "m-1", "a4", 11<<20); !errors.Is(err, ErrFull) {
		t.Fatalf("more than is allowed: %v", err)
	}
}
