package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestFindPort(t *testing.T) {
	class := t.TempDir()
	for port, name := range map[string]string{"vport1p1": "org.gpuctl.guest.0\n", "vport1p2": "lab\n"} {
		if err := os.Mkdir(filepath.Join(class, port), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(class, port, "name"), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got := findPort(class, "lab"); got != "vport1p2" {
		t.Errorf("lab is %q", got)
	}
	if got := findPort(class, "la"); got != "" {
		t.Errorf("la is %q", got)
	}
	if got := findPort(filepath.Join(class, "absent"), "lab"); got != "" {
		t.Errorf("without ports, lab is %q", got)
	}
}
