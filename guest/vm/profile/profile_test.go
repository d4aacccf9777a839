package profile_test

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/gpuctl/gpuctl/guest/vm/profile"
)

const display, audio, none = 0x030000, 0x040300, 0x00ff00

func load(t *testing.T, o profile.Options) *profile.Set {
	t.Helper()
	s, err := profile.Load(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestLookup(t *testing.T) {
	mine := profile.File{Name: "mine", Data: []byte(`
version: 1
profiles:
  - {name: all-mine, match: ["10DE:*"], libraries: [libmine.so], device: order}
  - {name: one, match: ["10de:1eb1", "1002:ab30"], libraries: [/opt/one.so], device: 3}
  - {name: very, match: ["10de:1eb1:1028:129f"], libraries: [very.so], drivers: [nvidia, nouveau]}
`)}
	plain, emulated, extra := load(t, profile.Options{}), load(t, profile.Options{Emulated: true}), load(t, profile.Options{Extra: []profile.File{mine}})
	for _, c := range []struct {
		name string
		set  *profile.Set
		id   profile.ID
		want string
	}{
		{"NVIDIA", plain, profile.ID{Vendor: 0x10de, Device: 0x2236, Class: display}, "nvidia"},
		{"NVIDIA's sound", plain, profile.ID{Vendor: 0x10de, Device: 0x10f8, Class: audio}, ""},
		{"AMD", plain, profile.ID{Vendor: 0x1002, Device: 0x744c, Class: 0x120000}, "amd"},
		{"Intel", plain, profile.ID{Vendor: 0x8086, Device: 0x56a0, Class: display}, "intel"},
		{"emulated, not asked for", plain, profile.ID{Vendor: 0x1234, Device: 0x1111, Class: display}, ""},
		{"emulated VGA", emulated, profile.ID{Vendor: 0x1234, Device: 0x1111, Class: display}, "emulated-vga"},
		{"emulated edu has no class", emulated, profile.ID{Vendor: 0x1234, Device: 0x11e8, Class: none}, "emulated-edu"},
		{"emulated virtio", emulated, profile.ID{Vendor: 0x1af4, Device: 0x1050, Class: display}, "emulated-virtio"},
		{"virtio disk", emulated, profile.ID{Vendor: 0x1af4, Device: 0x1001, Class: 0x010000}, ""},
		{"the later file wins", extra, profile.ID{Vendor: 0x10de, Device: 0x2236, Class: display}, "all-mine"},
		{"an id wins over a star", extra, profile.ID{Vendor: 0x10de, Device: 0x1eb1, Class: display}, "one"},
		{"a subsystem wins over an id", extra, profile.ID{Vendor: 0x10de, Device: 0x1eb1, SubVendor: 0x1028, SubDevice: 0x129f, Class: display}, "very"},
		{"an id counts for any class", extra, profile.ID{Vendor: 0x1002, Device: 0xab30, Class: audio}, "one"},
	} {
		p, ok := c.set.Lookup(c.id)
		if ok != (c.want != "") || ok && p.Name != c.want {
			t.Errorf("%s: %+v, want %q", c.name, p, c.want)
		}
	}
	p, _ := extra.Lookup(profile.ID{Vendor: 0x10de, Device: 0x1eb1, Class: display})
	if p.How != profile.ByNumber || p.Number != 3 || !p.Binds("") || p.Runtimes()[0].Library != "/opt/one.so" {
		t.Errorf("profile %+v", p)
	}
	very, _ := extra.Lookup(profile.ID{Vendor: 0x10de, Device: 0x1eb1, SubVendor: 0x1028, SubDevice: 0x129f})
	if very.How != profile.ByAddress || very.Binds("") || !very.Binds("nouveau") {
		t.Errorf("profile %+v", very)
	}
}

// The emulated devices have to differ, or a laboratory's upgrade is none.
func TestEmulatedDiffer(t *testing.T) {
	s := load(t, profile.Options{Emulated: true})
	seen := map[string]bool{}
	for _, id := range []profile.ID{{Vendor: 0x1234, Device: 0x1111}, {Vendor: 0x1234, Device: 0x11e8}, {Vendor: 0x1af4, Device: 0x1050}} {
		p, ok := s.Lookup(id)
		if !ok {
			t.Fatalf("%x:%x has no profile", id.Vendor, id.Device)
		}
		key := p.Libraries[0] + p.Env["OCLGRIND_GLOBAL_MEM_SIZE"] + p.Env["POCL_MEMORY_LIMIT"]
		if seen[key] || p.Model == "" {
			t.Errorf("profile %+v is like another", p)
		}
		seen[key] = true
	}
}

func TestLoadIsStrict(t *testing.T) {
	const ok = "version: 1\nprofiles: [{name: a, match: ['10de:*'], libraries: [l.so]"
	for in, want := range map[string]string{
		"":                            "EOF",
		"version: 2":                  "version 2",
		"version: 1\nprofile: []":     "field profile not found",
		"version: 1\n---\nversion: 1": "more than one document",
		ok + ", colour: red}]":        "field colour not found",
		ok + "}, {name: a, match: ['1:2'], libraries: [l.so]}]":    "two of that name",
		ok + "}, {name: b, match: ['10DE:*'], libraries: [l.so]}]": "in profile a, too",
		ok + ", device: 64}]":          "device",
		ok + ", device: first}]":       "device",
		ok + ", env: {A-B: c}}]":       "no variable's name",
		ok + ", env: {A: \"b\\0c\"}}]": "control characters",
		ok + ", drivers: [a/b]}]":      "no driver's name",
		"version: 1\nprofiles: [{name: A, match: ['10de:*'], libraries: [l]}]":       "name",
		"version: 1\nprofiles: [{name: a, match: [], libraries: [l]}]":               "match",
		"version: 1\nprofiles: [{name: a, match: ['10de:20'], libraries: [l]}]":      "vendor:device",
		"version: 1\nprofiles: [{name: a, match: ['*:*'], libraries: [l]}]":          "vendor:device",
		"version: 1\nprofiles: [{name: a, match: ['10de:*']}]":                       "libraries",
		"version: 1\nprofiles: [{name: a, match: ['10de:*'], libraries: [../l.so]}]": "whole path",
		strings.Repeat("#", 1<<20) + "\nversion: 1":                                  "larger",
	} {
		_, err := profile.Load(profile.Options{Extra: []profile.File{{Name: "mine.yaml", Data: []byte(in)}}})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "mine.yaml") {
			t.Errorf("%.80q: %v, want %q", in, err, want)
		}
	}
}

func TestReadDir(t *testing.T) {
	files, err := profile.ReadDir(fstest.MapFS{
		"p/20.yaml": {Data: []byte("b")}, "p/10.yaml": {Data: []byte("a")}, "p/note.txt": {}, "p/.10.yaml": {}, "p/x.yaml/y": {},
	}, "p")
	if err != nil || len(files) != 2 || files[0].Name != "10.yaml" || string(files[1].Data) != "b" {
		t.Errorf("%v, %v", files, err)
	}
	if files, err := profile.ReadDir(fstest.MapFS{}, "p"); err != nil || files != nil {
		t.Errorf("%v, %v", files, err)
	}
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte("version: 1\nprofiles: [{name: a, match: ['10de:*', '1:2'], libraries: [l.so], device: 1, env: {A: b}}]"))
	f.Add([]byte("version: 1\nprofiles: [{name: a, match: ['10de:1eb1:1028:129f'], libraries: [/l.so], drivers: [d]}]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := profile.Load(profile.Options{Extra: []profile.File{{Name: "f", Data: data}}})
		if err != nil {
			return
		}
		if p, ok := s.Lookup(profile.ID{Vendor: 0x10de, Device: 0x1eb1, SubVendor: 0x1028, SubDevice: 0x129f, Class: display}); !ok || len(p.Runtimes()) == 0 {
			t.Fatal("nothing serves an NVIDIA GPU any more")
		}
	})
}
