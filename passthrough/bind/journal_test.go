package bind_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/passthrough/bind"
)

const goodJournal = `{"version":1,"records":[
 {"function":"0000:65:00.0","vendor":4318,"device":7857,"native":"nvidia","override":"x","slot":true,"phase":"taking","driver":"vfio-pci","before":"pciback","boot":"b"},
 {"function":"0000:65:00.1","vendor":4318,"device":4344,"phase":"returning","driver":"pciback","boot":"b"}
]}`

func TestJournalOnDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bind")
	j, err := bind.OpenJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bind.OpenJournal(dir); !errors.Is(err, bind.ErrJournalBusy) {
		t.Errorf("a second process: %v", err)
	}
	b := bind.New(newMachine(), j)
	if err := b.Take(t.Context(), gpuCard, bind.VFIOPCI); err != nil {
		t.Fatal(err)
	}
	want := j.Records()
	j.Close()
	// A process that died while it wrote leaves this.
	if err := os.WriteFile(filepath.Join(dir, "bindings.json.new"), []byte(strings.Repeat("x", 10000)), 0o600); err != nil {
		t.Fatal(err)
	}
	j, err = bind.OpenJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if d := cmp.Diff(want, j.Records()); d != "" || len(want) != 4 || want[0].Native != "nvidia" || want[0].Phase != bind.Held {
		t.Errorf("%+v: %s", want, d)
	}
	info, err := os.Stat(filepath.Join(dir, "bindings.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// A journal that cannot be written lets nothing change.
func TestJournalThatCannotBeWritten(t *testing.T) {
	dir := t.TempDir()
	j, err := bind.OpenJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if err := os.Mkdir(filepath.Join(dir, "bindings.json.new"), 0o700); err != nil {
		t.Fatal(err)
	}
	m := newMachine()
	before := places(m)
	if err := bind.New(m, j).Take(t.Context(), gpuCard, bind.VFIOPCI); err == nil {
		t.Error("taken without a record")
	}
	if d := cmp.Diff(before, places(m)); d != "" || len(m.Writes()) > 0 {
		t.Error(d)
	}
}

func TestBadJournals(t *testing.T) {
	for name, data := range map[string]string{
		"nothing":             "",
		"not JSON":            "x",
		"a list":              "[]",
		"two":                 `{"version":1,"records":[]}{}`,
		"another version":     `{"version":2,"records":[]}`,
		"a field of tomorrow": `{"version":1,"records":[],"epoch":1}`,
		"a bad address":       `{"version":1,"records":[{"function":"x","phase":"held","driver":"d","boot":""}]}`,
		"twice":               `{"version":1,"records":[{"function":"0:1.0","phase":"held","driver":"d"},{"function":"65:00.0","phase":"held","driver":"d"},{"function":"65:00.0","phase":"held","driver":"d"}]}`,
		"same":                `{"version":1,"records":[{"function":"65:00.0","phase":"held","driver":"d"},{"function":"0000:65:00.0","phase":"held","driver":"d"}]}`,
		"no phase":            `{"version":1,"records":[{"function":"65:00.0","driver":"d"}]}`,
		"a path":              `{"version":1,"records":[{"function":"65:00.0","phase":"held","driver":"../d"}]}`,
		"a native path":       `{"version":1,"records":[{"function":"65:00.0","phase":"held","driver":"d","native":".."}]}`,
		"two lines":           `{"version":1,"records":[{"function":"65:00.0","phase":"held","driver":"d","override":"a\nb"}]}`,
		"before when held":    `{"version":1,"records":[{"function":"65:00.0","phase":"held","driver":"d","before":"e"}]}`,
	} {
		dir := t.TempDir()
		file := filepath.Join(dir, "bindings.json")
		if err := os.WriteFile(file, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := bind.OpenJournal(dir); !errors.Is(err, bind.ErrJournal) || !strings.Contains(err.Error(), "repair it") {
			t.Errorf("%s: %v", name, err)
		}
		if left, err := os.ReadFile(file); err != nil || string(left) != data {
			t.Errorf("%s: the file is not as it was: %q, %v", name, left, err)
		}
	}
	if records, err := bind.ParseJournal([]byte(goodJournal)); err != nil || len(records) != 2 {
		t.Errorf("%v, %v", records, err)
	}
}

func FuzzParseJournal(f *testing.F) {
	f.Add([]byte(goodJournal))
	f.Add([]byte(`{"version":1,"records":[]}`))
	f.Add([]byte(`{"version":1,"records":[{"function":"65:00.0","phase":"held","driver":"../d"}]}`))
	f.Add([]byte(`{"version":1,"records":null}`))
	f.Add([]byte("\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		records, err := bind.ParseJournal(data)
		if err != nil {
			if !errors.Is(err, bind.ErrJournal) || records != nil {
				t.Fatalf("%v with %v", records, err)
			}
			return
		}
		var list []bind.Record
		for a, r := range records {
			for _, name := range []string{r.Driver, r.Native, r.Before} {
				if strings.Contains(name, "/") || name == ".." || name == "." {
					t.Fatalf("%q would lead elsewhere", name)
				}
			}
			if a != r.Function || strings.ContainsAny(r.Override, "\n\x00") {
				t.Fatalf("%+v", r)
			}
			list = append(list, r)
		}
		// What was read can be written and read.
		again, err := json.Marshal(map[string]any{"version": 1, "records": list})
		if err != nil {
			t.Fatal(err)
		}
		got, err := bind.ParseJournal(again)
		if d := cmp.Diff(records, got); err != nil || d != "" {
			t.Fatalf("%v: %s", err, d)
		}
	})
}
