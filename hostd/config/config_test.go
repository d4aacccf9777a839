package config

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheExampleIsValidAndDumpsAsIs(t *testing.T) {
	c, err := Load("../../packaging/hostd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "example.golden", c)
}

func TestDefault(t *testing.T) { golden(t, "default.golden", Default()) }

func golden(t *testing.T, name string, c Config) {
	t.Helper()
	got, err := c.Dump()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", name)
	if f := flag.Lookup("update"); f != nil && f.Value.String() == "true" {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("%s (run with -update to accept): %s", name, d)
	}
	again, err := Parse(got)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(c, again); d != "" {
		t.Errorf("read again: %s", d)
	}
}

func TestMain(m *testing.M) {
	flag.Bool("update", false, "rewrite the golden files")
	os.Exit(m.Run())
}

func TestWhatIsWrongIsRefusedByName(t *testing.T) {
	for text, part := range map[string]string{
		"":                                        "empty",
		"version: 2":                              "version: 2",
		"discover: true":                          "version: 0",
		"version: 1\ndiscver: no":                 "discver",
		"version: 1\n---\nversion: 1":             "more than one document",
		"version: 1\nnetwork: {vfs: []}":          "line 2: field network not found",
		"version: 1\nversion: 1":                  "already defined",
		"version: 1\nvirtualDevice: {type: tpu}":  "virtualDevice.type",
		"version: 1\ngpus: [{id: A, library: x}]": "gpus[0].id",
		"version: 1\ngpus: [{id: a}]":             "either library or runtime",
		"version: 1\ngpus: [{id: a, library: x, runtime: pocl}]":                 "either library or runtime",
		"version: 1\ngpus: [{id: a, runtime: x}, {id: a, runtime: x}]":           "declared twice",
		"version: 1\ngpus: [{id: a, runtime: x, env: {\"A=B\": c}}]":             "not a variable",
		"version: 1\ngpus: [{id: a, runtime: x, devices: [1, 1]}]":               "device 1 twice",
		"version: 1\ngpus: [{id: a, runtime: x, env: {POCL_MEMORY_LIMIT: 1.5}}]": "POCL_MEMORY_LIMIT",
		"version: 1\nmodels: [{name: a}, {name: a}]":                             "twice",
		"version: 1\nvendorDirs: [vendors]":                                      "absolute",
		"version: 1\ndevices: {stash: much}":                                     "devices.stash",
		"version: 1\ncluster: {raftMultiplier: 11}":                              "cluster.raftMultiplier",
	} {
		_, err := Parse([]byte(text))
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), part) {
			t.Errorf("%q: %v; want %q in it", text, err, part)
		}
	}
}

func TestStashLimit(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		stash      string
		used, free uint64
		err        error
		want       uint64
	}{
		{"", 0, 400, nil, 100}, {"", 100, 300, nil, 100}, {"", 0, 0, broken, 0}, {"0", 5, 400, broken, 0}, {"2MiB", 5, 0, broken, 2 << 20},
	} {
		got, err := Devices{Stash: c.stash}.StashLimit(c.used, func() (uint64, error) { return c.free, c.err })
		if got != c.want || c.stash == "" && !errors.Is(err, c.err) || c.stash != "" && err != nil {
			t.Errorf("%+v: %d, %v", c, got, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	example, err := os.ReadFile("../../packaging/hostd.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(example)
	f.Add([]byte("version: 1\ngpus: [{id: a, library: b, devices: [0, 3]}]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data)
		if err != nil {
			return
		}
		text, err := c.Dump()
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse(text)
		if err != nil {
			t.Fatalf("what Dump wrote is refused: %v\n%s", err, text)
		}
		if again.Version != c.Version || len(again.GPUs) != len(c.GPUs) || again.VirtualDevice != c.VirtualDevice {
			t.Fatalf("changed on the way:\n%+v\n%+v", c, again)
		}
	})
}
