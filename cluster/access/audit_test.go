package access

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func openAudit(t *testing.T, c AuditConfig) *AuditLog {
	t.Helper()
	if c.Path == "" {
		c.Path = filepath.Join(t.TempDir(), "audit.log")
	}
	c.Log, c.Retry = slog.New(slog.DiscardHandler), 5*time.Millisecond
	a, err := OpenAudit(c)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// entries are all whole lines of the trail, oldest file first.
func entries(t *testing.T, path string) (out []Entry) {
	t.Helper()
	files := []string{path}
	for n := 1; ; n++ {
		name := fmt.Sprintf("%s.%d", path, n)
		if _, err := os.Stat(name); err != nil {
			break
		}
		files = append([]string{name}, files...)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(data) {
			var e Entry
			if err := json.Unmarshal(line, &e); err != nil || line[len(line)-1] != '\n' {
				t.Fatalf("%s: %q: %v", file, line, err)
			}
			out = append(out, e)
		}
	}
	return out
}

func TestLinesReachTheFileByThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := openAudit(t, AuditConfig{})
		defer a.Close()
		a.Append(Entry{Procedure: "p"})
		time.Sleep(time.Second)
		synctest.Wait()
		if len(entries(t, a.Path)) == 0 {
			t.Error("nothing is there after a second")
		}
	})
}

func TestRotationLosesNothing(t *testing.T) {
	a := openAudit(t, AuditConfig{Size: 4 << 10, Keep: 100, Sync: time.Millisecond})
	var wait sync.WaitGroup
	for w := range 4 {
		wait.Go(func() {
			for i := range 100 {
				a.Append(Entry{Caller: fmt.Sprint(w), Object: fmt.Sprint(i)})
				if i%10 == 0 {
					a.Flush()
				}
			}
		})
	}
	wait.Wait()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	next := map[string]int{}
	all := entries(t, a.Path)
	for _, e := range all {
		if e.Object != fmt.Sprint(next[e.Caller]) {
			t.Fatalf("caller %s: %s after %d", e.Caller, e.Object, next[e.Caller]-1)
		}
		next[e.Caller]++
	}
	files, _ := filepath.Glob(a.Path + "*")
	if len(all) != 400 || len(files) < 5 || a.Counts() != (AuditCounts{Lines: 400}) {
		t.Errorf("%d lines in %d files, %+v", len(all), len(files), a.Counts())
	}
}

func TestOnlySoManyFilesAreKept(t *testing.T) {
	a := openAudit(t, AuditConfig{Size: 200, Keep: 3})
	for i := range 20 {
		a.Append(Entry{Object: fmt.Sprint(i), Message: strings.Repeat("x", 100)})
		if err := a.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	a.Close()
	files, _ := filepath.Glob(a.Path + "*")
	all := entries(t, a.Path)
	if len(files) != 4 || all[len(all)-1].Object != "19" || len(all) != 4 {
		t.Errorf("files %v, %d lines", files, len(all))
	}
}

func TestACutLineDoesNotSpoilTheNext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte(`{"caller":"a"`), 0o644); err != nil {
		t.Fatal(err)
	}
	a := openAudit(t, AuditConfig{Path: path})
	a.Append(Entry{Caller: "b"})
	a.Close()
	data, _ := os.ReadFile(path)
	lines := strings.Split(string(data), "\n")
	if len(lines) != 3 || lines[0] != `{"caller":"a"` || !json.Valid([]byte(lines[1])) {
		t.Errorf("%q", data)
	}
	if info, _ := os.Stat(path); info.Mode().Perm() != 0o600 {
		t.Errorf("mode %o", info.Mode().Perm())
	}
}

func TestItIsNotWrittenThroughALink(t *testing.T) {
	dir := t.TempDir()
	os.WriteFile(filepath.Join(dir, "other"), nil, 0o600)
	os.Symlink(filepath.Join(dir, "other"), filepath.Join(dir, "audit.log"))
	if _, err := OpenAudit(AuditConfig{Path: filepath.Join(dir, "audit.log"), Log: slog.New(slog.DiscardHandler)}); err == nil {
		t.Error("it is")
	}
}

// The kernel takes a part of a write and then no more, as a full disk does.
func TestAFullDisk(t *testing.T) {
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	signal.Ignore(syscall.SIGXFSZ)
	full := func(size uint64) {
		limit := was
		if size > 0 {
			limit.Cur = size
		}
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
			t.Fatal(err)
		}
	}
	defer full(0)
	a := openAudit(t, AuditConfig{Sync: time.Hour}) // it is flushed here alone
	for i := range 10 {
		a.Append(Entry{Object: fmt.Sprint(i)})
	}
	if err := a.Flush(); err != nil {
		t.Fatal(err)
	}
	info, _ := os.Stat(a.Path)
	full(uint64(info.Size()) + 300) // room for a line and a half
	for i := range 10 {
		a.Append(Entry{Object: fmt.Sprint(10 + i)})
	}
	for range 3 {
		if a.Flush() == nil {
			t.Fatal("the disk takes it all")
		}
	}
	if got := len(entries(t, a.Path)); got != 10 { // whole lines, checked by entries
		t.Errorf("%d lines while it is full", got)
	}
	const flood = auditMemory + 500
	for i := range flood {
		a.Append(Entry{Object: fmt.Sprint(20 + i)})
	}
	if a.Flush() == nil || a.Counts().Errors != 4 {
		t.Errorf("%+v", a.Counts())
	}
	full(0)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	all := entries(t, a.Path)
	c := a.Counts()
	last := all[len(all)-1].Object
	if all[10].Outcome != "lost" || !strings.Contains(all[10].Message, fmt.Sprint(c.Lost)) || last != fmt.Sprint(20+flood-1) {
		t.Errorf("after the first ten %+v, last %s", all[10], last)
	}
	if got := len(all) - 1 + int(c.Lost); got != 20+flood {
		t.Errorf("%d lines and %d lost of %d", len(all)-1, c.Lost, 20+flood)
	}
}

func TestANilTrailTakesEverything(t *testing.T) {
	var a *AuditLog
	a.Append(Entry{})
	if a.Flush() != nil || a.Close() != nil || a.Counts() != (AuditCounts{}) {
		t.Error("it minds")
	}
}

// Whatever a request holds, its secrets are not in the trail, and what is
// there is not long.
func TestSummariesHideSecrets(t *testing.T) {
	const plain, secretText = "plain-text", "s3cret"
	var fill func(m protoreflect.Message, depth int)
	fill = func(m protoreflect.Message, depth int) {
		value := func(fd protoreflect.FieldDescriptor) (protoreflect.Value, bool) {
			text := plain
			for _, part := range []string{"token", "secret", "csr", "key"} {
				if strings.Contains(string(fd.Name()), part) && fd.Name() != "token_id" {
					text = secretText
				}
			}
			switch fd.Kind() {
			case protoreflect.StringKind:
				return protoreflect.ValueOfString(text), true
			case protoreflect.BytesKind:
				return protoreflect.ValueOfBytes([]byte(secretText)), true
			}
			return protoreflect.Value{}, false
		}
		fields := m.Descriptor().Fields()
		for i := range fields.Len() {
			fd := fields.Get(i)
			switch {
			case fd.IsMap():
				if v, ok := value(fd.MapValue()); ok && fd.MapKey().Kind() == protoreflect.StringKind {
					m.Mutable(fd).Map().Set(protoreflect.ValueOfString("k").MapKey(), v)
				}
			case fd.IsList() && fd.Message() != nil:
				for range 40 {
					if depth > 0 {
						fill(m.Mutable(fd).List().AppendMutable().Message(), depth-1)
					}
				}
			case fd.IsList():
				if v, ok := value(fd); ok {
					m.Mutable(fd).List().Append(v)
				}
			case fd.Message() != nil:
				if depth > 0 {
					fill(m.Mutable(fd).Message(), depth-1)
				}
			default:
				if v, ok := value(fd); ok {
					m.Set(fd, v)
				}
			}
		}
	}
	sawPlain, sawHidden := 0, 0
	for _, s := range services() {
		for i := range s.Methods().Len() {
			m := dynamicpb.NewMessage(s.Methods().Get(i).Input())
			fill(m, 4)
			line, err := json.Marshal(Entry{Args: summary(m), Object: object(m)})
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(line, []byte(secretText)) || bytes.Contains(line, []byte("czNjcmV0")) {
				t.Errorf("%s: %s", s.Methods().Get(i).FullName(), line)
			}
			if len(line) > 16<<10 {
				t.Errorf("%s: %d bytes", s.Methods().Get(i).FullName(), len(line))
			}
			sawPlain += bytes.Count(line, []byte(plain))
			sawHidden += bytes.Count(line, []byte(hidden))
		}
	}
	if sawPlain < 20 || sawHidden < 3 {
		t.Errorf("%d plain fields, %d hidden", sawPlain, sawHidden)
	}
	if summary(nil) != nil || object(proto.Message(nil)) != "" {
		t.Error("of nothing")
	}
}

// Lines that could not be written come by themselves when that works again.
func TestTheTrailComesBack(t *testing.T) {
	a := openAudit(t, AuditConfig{Sync: time.Millisecond})
	a.writing.Lock()
	broken, err := os.Open(a.Path) // for reading alone
	if err != nil {
		t.Fatal(err)
	}
	a.file.Close()
	a.file = broken
	a.writing.Unlock()
	a.Append(Entry{Caller: "a"})
	testkit.Until(t, "a line is in the file", func() error { return testkit.Want(len(entries(t, a.Path)) > 0) })
	if a.Counts().Errors == 0 {
		t.Error("no error is counted")
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}
