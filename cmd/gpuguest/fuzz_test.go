package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuctl/gpuctl/guest/vm/agent"
)

// FuzzConfig reads a gpuguest.yaml. A configuration that is accepted is valid.
func FuzzConfig(f *testing.F) {
	packaged, err := os.ReadFile("../../packaging/deb/gpuguest.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(packaged)
	f.Add([]byte("version: 1\nrunDir: /run/x\nappMode: \"0660\"\nappGroup: render\nwait: 30s\nemulatedDevices: true\n"))
	f.Add([]byte("version: 1\na: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		o, err := parseVM(in)
		if err != nil {
			return
		}
		for _, path := range []string{o.RunDir, o.AppSocket, o.Profiles} {
			if !filepath.IsAbs(path) || filepath.Clean(path) != path {
				t.Errorf("path %q", path)
			}
		}
		if o.mode&^0o777 != 0 || o.mode&0o600 != 0o600 || o.wait < 0 && o.wait != agent.Forever || o.MaxSessions < 0 || o.Version != configVersion {
			t.Errorf("%+v", o)
		}
	})
}
