package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestDigest(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/a/one", "1")
	write(t, dir+"/a/b/two", "2")
	write(t, dir+"/c", "3")
	key := func(paths ...string) string {
		t.Helper()
		k, err := digest(dir, paths...)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	before := key("a")
	write(t, dir+"/c", "4")
	if key("a") != before {
		t.Error("it changed with a file that does not belong to it")
	}
	write(t, dir+"/a/b/two", "x")
	changed := key("a")
	if changed == before {
		t.Error("it did not change with a file")
	}
	if err := os.Chmod(dir+"/a/one", 0o755); err != nil {
		t.Fatal(err)
	}
	if key("a") == changed {
		t.Error("it did not change when a file became a program")
	}
	if _, err := digest(dir, "absent"); err == nil {
		t.Error("an absent file has a digest")
	}
}

// fakeQEMU speaks enough of QMP: it greets, sends an event before each answer
// and answers what answers says by command.
func fakeQEMU(t *testing.T, answers map[string]string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qmp")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = conn.Write([]byte(`{"QMP": {"version": {}}}` + "\n"))
		in := bufio.NewScanner(conn)
		for in.Scan() {
			for command, answer := range answers {
				if strings.Contains(in.Text(), `"`+command+`"`) {
					_, _ = conn.Write([]byte(`{"event": "STOP"}` + "\n" + answer + "\n"))
				}
			}
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return path
}

func TestQMP(t *testing.T) {
	path := fakeQEMU(t, map[string]string{
		"qmp_capabilities":      `{"return": {}}`,
		"set_link":              `{"return": {}}`,
		"device_add":            `{"error": {"class": "GenericError", "desc": "no such bus"}}`,
		"human-monitor-command": `{"return": "Error: State blocked\r\n"}`,
	})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	q, err := dialQMP(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	defer q.close()
	if _, err := q.do(ctx, "set_link", map[string]any{"name": "net-lan", "up": false}); err != nil {
		t.Error(err)
	}
	var refused *qmpError
	if _, err := q.do(ctx, "device_add", nil); !errors.As(err, &refused) || refused.Desc != "no such bus" {
		t.Errorf("a refusal: %v", err)
	}
	if err := q.monitor(ctx, "savevm ready"); err == nil || !strings.Contains(err.Error(), "State blocked") {
		t.Errorf("what the monitor complains of: %v", err)
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := q.do(short, "never", nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
}

func FuzzQMP(f *testing.F) {
	f.Add([]byte("{\"return\": {}}\n"))
	f.Add([]byte("{\"error\": null}\n{\"event\": 1}\n[]\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		here, there := net.Pipe()
		go func() {
			_, _ = there.Write(in)
			there.Close()
		}()
		defer here.Close()
		q := &qmp{conn: here, in: bufio.NewReader(here)}
		for range 10 {
			if _, err := q.read(t.Context()); err != nil {
				return
			}
		}
	})
}

// A host is up only while the very process that was started runs.
func TestAlive(t *testing.T) {
	h := &Host{Name: "xena", dir: t.TempDir()}
	if h.Alive() {
		t.Error("it is up before it was started")
	}
	c := exec.Command("sleep", "60")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	started, err := startTime(c.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	save := func(started string) {
		write(t, h.statePath(), `{"pid": `+strconv.Itoa(c.Process.Pid)+`, "started": "`+started+`"}`)
	}
	save(started)
	if !h.Alive() {
		t.Error("it is down")
	}
	save(started + "1")
	if h.Alive() {
		t.Error("another process of that number counts as the host")
	}
	if err := h.kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := startTime(c.Process.Pid); err != nil {
		t.Fatal("a process that is not the host's was ended")
	}
	save(started)
	if err := h.kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	if _, err := h.current(); !errors.Is(err, ErrDown) {
		t.Errorf("after its end: %v", err)
	}
}

// QEMU splits initrd modules at commas, so dom0's command line has none; and
// the two hosts differ in whatever must not be the same.
func TestArguments(t *testing.T) {
	l := &Lab{}
	hosts := []*Host{{Name: "xena", lab: l}, {Name: "xenb", lab: l, index: 1}}
	var all [][]string
	for _, h := range hosts {
		args := h.arguments(image{"/images/x"}, 2222, "127.7.7.")
		all = append(all, args)
		for i, a := range args {
			if a == "-initrd" {
				if n := strings.Count(args[i+1], ","); n != 1 || !strings.HasPrefix(args[i+1], "/images/x/vmlinuz ") || !strings.HasSuffix(args[i+1], ",/images/x/initrd.img") {
					t.Errorf("%s: %s", h.Name, args[i+1])
				}
			}
		}
	}
	for _, unique := range []string{"-uuid", "-initrd", "-name"} {
		for i, a := range all[0] {
			if a == unique && all[0][i+1] == all[1][i+1] {
				t.Errorf("both hosts have %s %s", unique, all[0][i+1])
			}
		}
	}
}

func TestProgress(t *testing.T) {
	var out bytes.Buffer
	p := NewProgress(&out)
	p.Start("quick")(nil)
	p.Start("broken")(errors.New("no"))
	if s := out.String(); !strings.Contains(s, "quick: 0.0 s") || !strings.Contains(s, "broken failed") {
		t.Errorf("%q", s)
	}
	var none *Progress
	none.Start("silent")(nil)
}

func TestQuote(t *testing.T) {
	for _, s := range []string{"", "a b", "it's", "$(reboot)", "a\nb", "`x`\\"} {
		out, err := exec.Command("sh", "-c", "printf %s "+Quote(s)).Output()
		if err != nil || string(out) != s {
			t.Errorf("%q came out as %q: %v", s, out, err)
		}
	}
}
