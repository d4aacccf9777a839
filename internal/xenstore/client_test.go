package xenstore_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/xenstore"
	"github.com/gpuctl/gpuctl/internal/xenstore/xenstoretest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// everyStore runs a test against the fake, against the fake that answers as the
// kernel's device does, and against what XENSTORE_TEST names (a xenstored's
// socket or a xenbus device on a Xen host). It works below base.
func everyStore(t *testing.T, test func(t *testing.T, c *xenstore.Client, base string)) {
	run := func(name, path string) {
		t.Run(name, func(t *testing.T) {
			c := dial(t, path)
			base := fmt.Sprintf("/tool/gpuctl-test-%d", os.Getpid())
			if err := c.Mkdir(t.Context(), base); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := c.Remove(t.Context(), base); err != nil {
					t.Error(err)
				}
			}()
			test(t, c, base)
		})
	}
	run("fake", xenstoretest.New(t).Path())
	device := xenstoretest.New(t)
	device.AnswerWatchesAsKernel()
	run("device", device.Path())
	long := xenstoretest.New(t)
	long.AnswerAsOxenstored()
	run("oxenstored", long.Path())
	for path := range strings.FieldsSeq(os.Getenv("XENSTORE_TEST")) {
		run(path, path)
	}
}

func dial(t *testing.T, path string, opts ...xenstore.Option) *xenstore.Client {
	t.Helper()
	c, err := xenstore.Dial(t.Context(), path, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestNodes(t *testing.T) {
	everyStore(t, func(t *testing.T, c *xenstore.Client, base string) {
		ctx := t.Context()
		check := func(what string, err, want error) {
			t.Helper()
			if !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", what, err, want)
			}
		}
		check("write", c.Write(ctx, base+"/a/b", "one\x00two\n"), nil)
		check("write nothing", c.Write(ctx, base+"/a/empty", ""), nil)
		check("mkdir", c.Mkdir(ctx, base+"/a/dir"), nil)
		check("mkdir again", c.Mkdir(ctx, base+"/a/b"), nil)
		for path, want := range map[string]string{"/a/b": "one\x00two\n", "/a/empty": "", "/a/dir": "", "/a": ""} {
			if got, err := c.Read(ctx, base+path); err != nil || got != want {
				t.Errorf("%s: %q, %v; want %q", path, got, err, want)
			}
		}
		names, err := c.List(ctx, base+"/a")
		slices.Sort(names)
		if d := cmp.Diff([]string{"b", "dir", "empty"}, names); d != "" || err != nil {
			t.Error(d, err)
		}
		if names, err := c.List(ctx, base+"/a/dir"); err != nil || len(names) != 0 {
			t.Errorf("an empty node has %q (%v)", names, err)
		}
		_, err = c.Read(ctx, base+"/none")
		check("read of nothing", err, fs.ErrNotExist)
		var answer *xenstore.Error
		if !errors.As(err, &answer) || answer.Path != base+"/none" || answer.Error() != `xenstore: read "`+base+`/none": no such file or directory` {
			t.Errorf("got %v", err)
		}
		_, err = c.List(ctx, base+"/none")
		check("list of nothing", err, fs.ErrNotExist)
		check("remove", c.Remove(ctx, base+"/a"), nil)
		_, err = c.Read(ctx, base+"/a/b")
		check("read of what was removed", err, syscall.ENOENT)
		check("remove again", c.Remove(ctx, base+"/a"), nil)
		check("remove far from anything", c.Remove(ctx, base+"/x/y/z"), syscall.ENOENT)
		check("a name that is not allowed", c.Write(ctx, base+"/0000:65:00.0", "x"), syscall.EINVAL)
		check("too much", c.Write(ctx, base+"/big", strings.Repeat("x", xenstore.MaxPayload)), syscall.E2BIG)
		for _, path := range []string{"", "//", "/a//b", "/a/", "/a\x00b", "/" + strings.Repeat("x", 4000), strings.Repeat("x", 2049)} {
			_, err := c.Read(ctx, path)
			check(fmt.Sprintf("path %.20q", path), err, xenstore.ErrPath)
		}
	})
}

func TestPermissions(t *testing.T) {
	everyStore(t, func(t *testing.T, c *xenstore.Client, base string) {
		if err := c.Write(t.Context(), base+"/p", "x"); err != nil {
			t.Fatal(err)
		}
		want := []xenstore.Permission{{Domain: 0, Access: xenstore.AccessNone}, {Domain: 7, Access: xenstore.AccessRead}}
		if err := c.SetPermissions(t.Context(), base+"/p", want...); err != nil {
			t.Fatal(err)
		}
		got, err := c.Permissions(t.Context(), base+"/p")
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Error(d, err)
		}
	})
}

// A list that is longer than a message.
func TestLongLists(t *testing.T) {
	everyStore(t, func(t *testing.T, c *xenstore.Client, base string) {
		var want []string
		for i := range 300 {
			name := fmt.Sprintf("%03d-%s", i, strings.Repeat("x", 40))
			want = append(want, name)
			if err := c.Write(t.Context(), base+"/many/"+name, ""); err != nil {
				t.Fatal(err)
			}
		}
		got, err := c.List(t.Context(), base+"/many")
		if errors.Is(err, syscall.ENOSYS) && strings.HasPrefix(t.Name(), "TestLongLists//") {
			t.Skip(err) // oxenstored
		}
		slices.Sort(got)
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Error(err, d)
		}
	})
}

func TestWatches(t *testing.T) {
	everyStore(t, func(t *testing.T, c *xenstore.Client, base string) {
		w, err := c.Watch(t.Context(), base+"/w")
		if err != nil {
			t.Fatal(err)
		}
		other, err := c.Watch(t.Context(), base+"/other")
		if err != nil {
			t.Fatal(err)
		}
		expect := func(w *xenstore.Watch, want ...string) {
			t.Helper()
			for _, path := range want {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				got, err := w.Next(ctx)
				cancel()
				if err != nil || got != path {
					t.Fatalf("got %q, %v; want %q", got, err, path)
				}
			}
		}
		expect(w, base+"/w")
		expect(other, base+"/other")
		if err := c.Write(t.Context(), base+"/w/a/b", "1"); err != nil {
			t.Fatal(err)
		}
		expect(w, base+"/w/a/b")
		if err := c.Remove(t.Context(), base+"/w"); err != nil {
			t.Fatal(err)
		}
		expect(w, base+"/w")
		if err := w.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Next(t.Context()); !errors.Is(err, xenstore.ErrClosed) {
			t.Errorf("a closed watch: %v", err)
		}
		if err := w.Close(t.Context()); err != nil {
			t.Errorf("closed twice: %v", err)
		}
		quiet, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if path, err := other.Next(quiet); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a watch told of %q (%v), which is not below it", path, err)
		}
		special, err := c.Watch(t.Context(), "@releaseDomain")
		if err != nil {
			t.Fatal(err)
		}
		expect(special, "@releaseDomain")
	})
}

// Watches come and go while others ask: on Linux's device that takes care.
func TestWatchesAmongRequests(t *testing.T) {
	everyStore(t, func(t *testing.T, c *xenstore.Client, base string) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		var askers sync.WaitGroup
		over := make(chan struct{})
		for range 4 {
			askers.Go(func() {
				for {
					select {
					case <-over:
						return
					default:
					}
					if err := c.Write(ctx, base+"/asked", "x"); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		for range 30 {
			w, err := c.Watch(ctx, base)
			if err != nil {
				t.Error(err)
				break
			}
			if _, err := w.Next(ctx); err != nil {
				t.Error(err)
			}
			if err := w.Close(ctx); err != nil {
				t.Error(err)
			}
		}
		close(over)
		askers.Wait()
	})
}

func TestTransactions(t *testing.T) {
	everyStore(t, func(t *testing.T, c *xenstore.Client, base string) {
		ctx := t.Context()
		seen := func(path string) string {
			s, err := c.Read(ctx, base+path)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			return s
		}
		err := c.Transaction(ctx, func(tx xenstore.Tx) error {
			if err := tx.Write(ctx, base+"/a", "1"); err != nil {
				return err
			}
			if s := seen("/a"); s != "" {
				t.Errorf("seen outside before its end: %q", s)
			}
			if s, err := tx.Read(ctx, base+"/a"); s != "1" {
				t.Errorf("not seen inside: %q, %v", s, err)
			}
			return tx.Write(ctx, base+"/b", "2")
		})
		if err != nil || seen("/a") != "1" || seen("/b") != "2" {
			t.Fatalf("%v: %q %q", err, seen("/a"), seen("/b"))
		}
		stop := errors.New("stop")
		if err := c.Transaction(ctx, func(tx xenstore.Tx) error { return errors.Join(tx.Write(ctx, base+"/a", "9"), stop) }); !errors.Is(err, stop) {
			t.Error(err)
		}
		if seen("/a") != "1" {
			t.Error("a transaction that failed took effect")
		}
		// Somebody else writes what it has read, once.
		tries := 0
		err = c.Transaction(ctx, func(tx xenstore.Tx) error {
			tries++
			old, err := tx.Read(ctx, base+"/a")
			if err != nil {
				return err
			}
			if tries == 1 {
				if err := c.Write(ctx, base+"/a", "changed"); err != nil {
					return err
				}
			}
			return tx.Write(ctx, base+"/a", old+"+")
		})
		if err != nil || tries != 2 || seen("/a") != "changed+" {
			t.Errorf("%d tries: %q (%v)", tries, seen("/a"), err)
		}
		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		err = c.Transaction(short, func(tx xenstore.Tx) error {
			tries++ // oxenstored takes what changes nothing for no conflict
			_, err := tx.Read(short, base+"/a")
			return errors.Join(err, c.Write(ctx, base+"/a", fmt.Sprint(tries)), tx.Write(short, base+"/c", ""))
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a transaction that never gets through: %v", err)
		}
	})
}

// Goroutines count up one node: no increment is lost.
func TestTransactionsAreAtomic(t *testing.T) {
	server := xenstoretest.New(t)
	server.Set("/tool/n", "")
	var wg sync.WaitGroup
	for range 4 {
		c := dial(t, server.Path())
		wg.Go(func() {
			for range 10 {
				err := c.Transaction(t.Context(), func(tx xenstore.Tx) error {
					s, err := tx.Read(t.Context(), "/tool/n")
					if err != nil {
						return err
					}
					return tx.Write(t.Context(), "/tool/n", s+"x")
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if s, _ := server.Get("/tool/n"); len(s) != 40 {
		t.Errorf("%d of 40 increments", len(s))
	}
}

func TestDomains(t *testing.T) {
	server := xenstoretest.New(t)
	c := dial(t, server.Path())
	if p, err := c.DomainPath(t.Context(), 7); err != nil || p != "/local/domain/7" {
		t.Errorf("%q, %v", p, err)
	}
	guest := dial(t, server.PathOf(7))
	for domain, want := range map[uint16]bool{0: true, 7: true, 8: false} {
		if got, err := c.Introduced(t.Context(), domain); err != nil || got != want {
			t.Errorf("domain %d: %v, %v", domain, got, err)
		}
	}
	// A guest's paths are relative to its own node, and it sees nobody else's.
	if err := guest.Write(t.Context(), "data/gpu", "gone"); err != nil {
		t.Fatal(err)
	}
	if s, _ := server.Get("/local/domain/7/data/gpu"); s != "gone" {
		t.Errorf("got %q", s)
	}
	if err := guest.Write(t.Context(), "/local/domain/0/x", ""); !errors.Is(err, syscall.EACCES) {
		t.Errorf("a guest wrote to the control domain's node: %v", err)
	}
	server.Set("/local/domain/0/secret", "x")
	if _, err := guest.Read(t.Context(), "/local/domain/0/secret"); !errors.Is(err, syscall.EACCES) {
		t.Errorf("a guest read the control domain's node: %v", err)
	}
	w, err := guest.Watch(t.Context(), "device/pci")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if p, err := w.Next(t.Context()); err != nil || !strings.HasPrefix(p, "device/pci") {
			t.Errorf("got %q, %v", p, err)
		}
		server.Set("/local/domain/7/device/pci/0/state", "4")
	}
}

// A connection that breaks takes calls and transactions with it, and not the
// client and its watches.
func TestReconnects(t *testing.T) {
	server := xenstoretest.New(t)
	c := dial(t, server.Path())
	w, err := c.Watch(t.Context(), "/tool/w")
	if err != nil {
		t.Fatal(err)
	}
	next := func() string {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		path, err := w.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	next()
	err = c.Transaction(t.Context(), func(tx xenstore.Tx) error {
		server.Kick()
		return tx.Write(t.Context(), "/tool/x", "")
	})
	if !errors.Is(err, xenstore.ErrConnection) {
		t.Errorf("a transaction over a broken connection: %v", err)
	}
	if p := next(); p != "/tool/w" {
		t.Errorf("after a new connection the watch tells of %q", p)
	}
	server.Stop()
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	for { // it may not have noticed yet
		_, err := c.Read(short, "/tool")
		if err == nil {
			continue
		}
		if !errors.Is(err, xenstore.ErrConnection) {
			t.Errorf("a call without a store: %v", err)
		}
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	server.Start()
	if _, err := c.Read(t.Context(), "/tool"); err != nil {
		t.Errorf("after its return: %v", err)
	}
	testkit.Until(t, "the watch is there again", func() error { return testkit.Want(server.Watches() > 0) })
	server.Set("/tool/w/a", "")
	for next() != "/tool/w/a" {
	}
}

// A store that does not answer holds nobody up beyond the deadline, and nothing
// that was given up stays in it.
func TestHungStore(t *testing.T) {
	server := xenstoretest.New(t)
	c := dial(t, server.Path(), xenstore.WithTimeout(50*time.Millisecond))
	server.Hang(true)
	for range 100 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		if _, err := c.Read(ctx, "/tool"); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		cancel()
	}
	if _, err := c.Read(t.Context(), "/tool"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no deadline: %v", err)
	}
	server.Hang(false)
	// Late answers to calls that nobody waits for are dropped.
	patient, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for i := range 20 {
		if err := c.Write(patient, "/tool/x", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	server.Hang(true)
	if _, err := c.Watch(t.Context(), "/tool/w"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("watch: %v", err)
	}
	if err := c.Transaction(t.Context(), func(xenstore.Tx) error { return nil }); err == nil {
		t.Error("transaction: no error")
	}
	server.Hang(false)
	testkit.Until(t, "no watch and no transaction is left", func() error {
		n, m := server.Watches(), server.Transactions()
		return testkit.Want(n+m == 0, n, m)
	})
	if _, err := c.Read(patient, "/tool/x"); err != nil {
		t.Error(err)
	}
}

// An owner that does not look gets one event of each node, and when that is too
// much, that of the watch.
func TestSlowWatcher(t *testing.T) {
	server := xenstoretest.New(t)
	c := dial(t, server.Path())
	w, err := c.Watch(t.Context(), "/tool")
	if err != nil {
		t.Fatal(err)
	}
	sync := func() { // events come before the answer to what is asked later
		if _, err := c.Read(t.Context(), "/tool"); err != nil {
			t.Fatal(err)
		}
	}
	drain := func() (n int, all bool) {
		for {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			path, err := w.Next(ctx)
			cancel()
			if err != nil {
				return n, all
			}
			n++
			all = all || path == "/tool"
		}
	}
	for range 500 {
		server.Set("/tool/one", "x")
	}
	sync()
	if n, _ := drain(); n > 2 {
		t.Errorf("%d events of one node", n)
	}
	for i := range 3000 {
		server.Set(fmt.Sprintf("/tool/n%d", i), "x")
	}
	sync()
	if n, all := drain(); n > 1100 || !all {
		t.Errorf("%d events; of everything: %v", n, all)
	}
}

// What does not keep to the protocol ends the connection, and not the process.
func TestHostileStore(t *testing.T) {
	answer := func(m xenstore.Message) []byte { return m.Encode() }
	for name, reply := range map[string]func(m xenstore.Message) []byte{
		"a length beyond all bounds": func(m xenstore.Message) []byte {
			b := answer(m)
			copy(b[12:], "\xff\xff\xff\xff")
			return b
		},
		"another's number": func(m xenstore.Message) []byte { m.Request += 1000; return answer(m) },
		"another type":     func(m xenstore.Message) []byte { m.Op = xenstore.OpRm; return answer(m) },
		"an event without token": func(xenstore.Message) []byte {
			return answer(xenstore.Message{Op: xenstore.OpWatchEvent, Payload: []byte("x\x00")})
		},
		"half a message": func(m xenstore.Message) []byte { return answer(m)[:10] },
	} {
		t.Run(name, func(t *testing.T) {
			c := dial(t, peer(t, reply))
			if _, err := c.Read(t.Context(), "/tool"); !errors.Is(err, xenstore.ErrConnection) {
				t.Errorf("got %v", err)
			}
		})
	}
	for name, body := range map[string]string{
		"no end": "1\x00a", "nothing": "", "no generation": "\x00a\x00", "an empty name": "1\x00\x00a\x00", "never the end": "1\x00a\x00", "only a generation": "1\x00",
	} {
		t.Run("a list with "+name, func(t *testing.T) {
			c := dial(t, peer(t, func(m xenstore.Message) []byte {
				m.Payload = []byte(body)
				if m.Op == xenstore.OpDirectory {
					m.Op, m.Payload = xenstore.OpError, []byte("E2BIG\x00")
				}
				return answer(m)
			}))
			if names, err := c.List(t.Context(), "/tool"); !errors.Is(err, xenstore.ErrProtocol) {
				t.Errorf("got %d names, %v", len(names), err)
			}
		})
	}
	t.Run("a transaction without number", func(t *testing.T) {
		c := dial(t, peer(t, func(m xenstore.Message) []byte { m.Payload = []byte("0\x00"); return answer(m) }))
		if err := c.Transaction(t.Context(), func(xenstore.Tx) error { return nil }); !errors.Is(err, xenstore.ErrProtocol) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no permissions", func(t *testing.T) {
		for _, body := range []string{"", "x0\x00", "r99999\x00", "r\x00"} {
			c := dial(t, peer(t, func(m xenstore.Message) []byte { m.Payload = []byte(body); return answer(m) }))
			if p, err := c.Permissions(t.Context(), "/tool"); !errors.Is(err, xenstore.ErrProtocol) {
				t.Errorf("%q: %v, %v", body, p, err)
			}
		}
	})
}

// peer answers each request on its socket as reply says.
func peer(t *testing.T, reply func(xenstore.Message) []byte) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "xs")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
		os.RemoveAll(dir)
	})
	wg.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer nc.Close()
				for {
					m, err := xenstore.ReadMessage(nc, xenstore.MaxPayload)
					if err != nil {
						return
					}
					b := reply(m)
					if _, err := nc.Write(b); err != nil || len(b) < 16 {
						return
					}
				}
			})
		}
	})
	return path
}

func TestDialWhatIsNoStore(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, file + "-not"} {
		if _, err := xenstore.Dial(t.Context(), path); !errors.Is(err, xenstore.ErrConnection) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestClose(t *testing.T) {
	server := xenstoretest.New(t)
	c := dial(t, server.Path())
	w, err := c.Watch(t.Context(), "/tool")
	if err != nil {
		t.Fatal(err)
	}
	server.Hang(true)
	errs := make(chan error)
	go func() {
		_, err := c.Read(t.Context(), "/tool")
		errs <- err
	}()
	testkit.Parked(t, "xenstore.(*Client).Read", 1)
	c.Close()
	c.Close()
	if err := <-errs; !errors.Is(err, xenstore.ErrClosed) {
		t.Errorf("a call under way: %v", err)
	}
	if _, err := c.Read(t.Context(), "/tool"); !errors.Is(err, xenstore.ErrClosed) {
		t.Errorf("a call: %v", err)
	}
	for {
		if _, err := w.Next(t.Context()); err != nil {
			if !errors.Is(err, xenstore.ErrClosed) {
				t.Errorf("a watch: %v", err)
			}
			break
		}
	}
	if _, err := c.Watch(t.Context(), "/tool"); !errors.Is(err, xenstore.ErrClosed) {
		t.Errorf("a new watch: %v", err)
	}
	if err := w.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func FuzzReadMessage(f *testing.F) {
	f.Add(xenstore.Message{Op: xenstore.OpRead, Request: 1, Payload: []byte("/tool\x00")}.Encode())
	f.Add(xenstore.Message{Op: xenstore.OpError, Payload: []byte("ENOENT\x00")}.Encode())
	f.Add([]byte{2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := strings.NewReader(string(data))
		m, err := xenstore.ReadMessage(r, xenstore.MaxPayload)
		if err != nil {
			if errors.Is(err, io.EOF) && len(data) > 0 {
				t.Fatalf("the end of the stream inside of a message")
			}
			return
		}
		if len(m.Payload) > xenstore.MaxPayload || string(m.Encode()) != string(data[:len(data)-r.Len()]) {
			t.Fatalf("%q was read as %+v", data, m)
		}
		xenstore.Strings(m.Payload)
		if e := xenstore.ParseErrno(m.Payload); e == 0 {
			t.Fatal("an error without a number")
		}
		for _, s := range xenstore.Strings(m.Payload) {
			if p, err := xenstore.ParsePermission(s); err == nil {
				if again, err := xenstore.ParsePermission(p.String()); err != nil || again != p {
					t.Fatalf("%q, %v, %v", s, p, again)
				}
			}
		}
	})
}
