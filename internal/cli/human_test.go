package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/internal/cli/clitest"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Hour: "0 s", 119 * time.Second: "119 s", 2 * time.Minute: "2 min", 119 * time.Minute: "119 min", 2 * time.Hour: "2 h", 47 * time.Hour: "47 h",
		48 * time.Hour: "2 d", 1000 * 24 * time.Hour: "1000 d",
	} {
		if got := span(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}

func TestLabelWords(t *testing.T) {
	for name, want := range map[string]string{
		"id": "ID", "pci_address": "PCI address", "joined_unix_ms": "Joined", "numa_nodes": "NUMA nodes", "gpus": "GPUs", "vgpu": "VGPU", "stopped_ns": "Stopped",
		"free_memory": "Free memory", "nics": "NICs", "": "",
	} {
		if got := label(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

func TestParseLabels(t *testing.T) {
	for _, c := range []struct {
		args   string
		set    map[string]string
		remove []string
		wrong  bool
	}{
		{"a=b c-", map[string]string{"a": "b"}, []string{"c"}, false},
		{"a=b=c a-b=-", map[string]string{"a": "b=c", "a-b": "-"}, nil, false},
		{"a=", map[string]string{"a": ""}, nil, false},
		{"a--", map[string]string{}, []string{"a-"}, false},
		{"a", nil, nil, true},
		{"=b", nil, nil, true},
		{"-", nil, nil, true},
		{"a=1 a=2", nil, nil, true},
		{"a- a-", nil, nil, true},
	} {
		set, remove, err := parseLabels(strings.Fields(c.args))
		if (err != nil) != c.wrong || !c.wrong && (!reflect.DeepEqual(set, c.set) || !reflect.DeepEqual(remove, c.remove)) {
			t.Errorf("%q: %v, %v, %v", c.args, set, remove, err)
		}
	}
}

// A picture never has more lines than the screen, nor wider ones.
func TestPictureFits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lines, columns := rapid.IntRange(4, 30).Draw(t, "lines"), rapid.IntRange(20, 60).Draw(t, "columns")
		text := strings.Join(rapid.SliceOfN(rapid.StringMatching(`[a-zä ]{0,80}`), 0, 50).Draw(t, "text"), "\n")
		got := string(picture(text, lines, columns))
		got = strings.TrimSuffix(strings.TrimPrefix(got, "\x1b[H"), "\x1b[J")
		drawn := strings.Split(strings.TrimSuffix(got, "\r\n"), "\r\n")
		if len(drawn) >= lines {
			t.Fatalf("%d lines on %d", len(drawn), lines)
		}
		for _, line := range drawn {
			if n := len([]rune(strings.TrimSuffix(line, "\x1b[K"))); n > columns {
				t.Fatalf("%d columns on %d", n, columns)
			}
		}
	})
}

// However often the stream breaks, who adds up the printed changes knows what
// there is.
func TestWatchAddsUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var out bytes.Buffer
		a := &app{Stdio: cmdutil.Stdio{Out: &out, Err: io.Discard}, output: "name", now: time.Now}
		k := a.must(clusterv1.Kind_KIND_HOST)
		w := &watcher{a: a, k: k, known: map[string]proto.Message{}}
		truth, shown := map[string]uint64{}, map[string]bool{}
		var revision uint64
		names := []string{"a", "b", "c"}
		for first := true; len(truth) < 9 && revision < 60; first = false {
			// What happened while there was no stream, or as one.
			for range rapid.IntRange(1, 5).Draw(t, "changes") {
				revision++
				name := rapid.SampledFrom(names).Draw(t, "name")
				gone := rapid.Bool().Draw(t, "gone")
				if gone {
					delete(truth, name)
				} else {
					truth[name] = revision
				}
				if !first && rapid.Bool().Draw(t, "seen") {
					w.learn(&clusterv1.Host{Name: name, Revision: revision}, gone, revision, false)
				}
			}
			// A new stream tells all there is.
			listed := map[string]bool{}
			for name, rev := range truth {
				listed[name] = true
				w.learn(&clusterv1.Host{Name: name, Revision: rev}, false, revision, first)
			}
			for name, o := range w.known {
				if !listed[name] {
					w.learn(o, true, revision, false)
				}
			}
			if err := w.flush(); err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(out.String()) {
				what, name, _ := strings.Cut(strings.TrimSpace(line), " host/")
				if (what == "added" || what == "present") == shown[name] {
					t.Fatalf("%s when it was shown: %v", line, shown[name])
				}
				if what == "gone" {
					delete(shown, name)
				} else {
					shown[name] = true
				}
			}
			out.Reset()
			if len(shown) != len(truth) {
				t.Fatalf("shown %v, there is %v", shown, truth)
			}
			for name := range truth {
				if !shown[name] {
					t.Fatalf("%s is not shown", name)
				}
			}
		}
	})
}

type fullDisk struct{}

var errFull = errors.New("no space left")

func (fullDisk) Write([]byte) (int, error) { return 0, errFull }

// An output that cannot be written to ends a stream; it is not tried again.
func TestWatchEndsWithItsOutput(t *testing.T) {
	server := httptest.NewServer(clitest.New(func(clusterv1.Kind, string) (func(*clusterv1.Object) (bool, error), error) {
		return func(*clusterv1.Object) (bool, error) { return true, nil }, nil
	}).Handler())
	defer server.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	a := &app{Stdio: cmdutil.Stdio{Out: fullDisk{}, Err: io.Discard}, output: "json", now: time.Now}
	c := clusterv1connect.NewClusterServiceClient(server.Client(), server.URL)
	begin := time.Now()
	if err := a.watch(ctx, c, a.must(clusterv1.Kind_KIND_HOST), "", nil); !errors.Is(err, errFull) {
		t.Errorf("watch: %v", err)
	}
	if time.Since(begin) > 2*time.Second {
		t.Error("it was tried again")
	}
}
