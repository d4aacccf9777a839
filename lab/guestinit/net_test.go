package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAddress(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cmdline")
	for line, want := range map[string]string{
		"console=hvc0 lab.ip=10.77.0.101/24 quiet": "10.77.0.101/24",
		"console=hvc0": "", "lab.ip=": "error", "lab.ip=10.77.0.101": "error", "lab.ip=fd00::1/64": "error",
	} {
		if err := os.WriteFile(file, []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
		p, ok, err := address(file)
		if (err != nil) != (want == "error") || ok != (want != "" && want != "error") || ok && p.String() != want {
			t.Errorf("%q: %v %v %v", line, p, ok, err)
		}
	}
	for bits, want := range map[int][4]byte{0: {}, 20: {255, 255, 240}, 24: {255, 255, 255}, 32: {255, 255, 255, 255}} {
		if got := mask(bits); got != want {
			t.Errorf("/%d: %v", bits, got)
		}
	}
}
