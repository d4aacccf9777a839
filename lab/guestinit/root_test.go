package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestRootDisks(t *testing.T) {
	for line, want := range map[string][]string{
		"console=hvc0 panic=1":     nil,
		"":                         nil,
		"lab.root= x":              nil,
		"notlab.root=/dev/xvde":    nil,
		"a lab.root=/dev/xvde b\n": {"/dev/xvde"},
		"console=hvc0 lab.root=/dev/xvde,/dev/xvdf quiet\n": {"/dev/xvde", "/dev/xvdf"},
	} {
		file := filepath.Join(t.TempDir(), "cmdline")
		if err := os.WriteFile(file, []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := rootDisks(file); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %q %v, want %q", line, got, err, want)
		}
	}
	if _, err := rootDisks(filepath.Join(t.TempDir(), "absent")); err == nil {
		t.Error("no command line at all is no error")
	}
}

func TestWaitFor(t *testing.T) {
	file := filepath.Join(t.TempDir(), "disk")
	made := make(chan error, 1)
	go func() { made <- os.WriteFile(file, nil, 0o600) }()
	if err := waitFor(file); err != nil {
		t.Error(err)
	}
	if err := <-made; err != nil {
		t.Error(err)
	}
	if err := waitFor(filepath.Join(file, "below a file")); err == nil {
		t.Error("found what cannot be there")
	}
}
