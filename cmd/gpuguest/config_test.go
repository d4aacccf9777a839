package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/vm/agent"
)

func TestVMConfig(t *testing.T) {
	o, err := loadVM(filepath.Join(t.TempDir(), "none"), false)
	if err != nil || o.AppSocket != "/run/gpuctl-guest/app.sock" || o.mode != 0o666 || o.wait != agent.Forever || o.Emulated {
		t.Errorf("%+v, %v", o, err)
	}
	if _, err := loadVM(filepath.Join(t.TempDir(), "none"), true); err == nil {
		t.Error("a file that was asked for may be missing")
	}
	o, err = parseVM([]byte("version: 1\nrunDir: /run/x\nappMode: \"0660\"\nappGroup: render\nwait: 30s\nemulatedDevices: true\n"))
	if err != nil || o.AppSocket != "/run/x/app.sock" || o.mode != 0o660 || o.wait != 30*time.Second || !o.Emulated {
		t.Errorf("%+v, %v", o, err)
	}
	for _, at := range []string{"192.0.2.1:7651", ":7651", "\"[2001:db8::1]:7651\""} {
		if _, err := parseVM([]byte("version: 1\nlend: " + at)); err != nil {
			t.Error(err)
		}
	}
	for in, want := range map[string]string{
		"":                                       "empty",
		"wait: no":                               "version",
		"version: 1\nwayt: no":                   "wayt",
		"version: 1\n---\nversion: 1":            "document",
		"version: 1\nwait: -3s":                  "wait",
		"version: 1\nappMode: \"0068\"":          "appMode",
		"version: 1\nappMode: \"0060\"":          "appMode",
		"version: 1\nrunDir: here":               "runDir",
		"version: 1\nchannel: a/b":               "channel",
		"version: 1\nmaxSessions: -1":            "maxSessions",
		"version: 1\nexecutorUsers: 0-9999":      "executorUsers",
		"version: 1\nexecutorUsers: 65000-70000": "executorUsers",
		"version: 1\nexecutorMemory: much":       "executorMemory",
		"version: 1\nlend: 192.0.2.1":            "lend",
		"version: 1\nlend: gpuvm:7651":           "lend",
		"version: 1\nlend: 192.0.2.1:0":          "lend",
		"version: 1\nlend: 192.0.2.1:lend":       "lend",
	} {
		if _, err := parseVM([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", in, err, want)
		}
	}
}

// The file that the package installs has the program's defaults.
func TestPackagedConfig(t *testing.T) {
	data, err := os.ReadFile("../../packaging/deb/gpuguest.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseVM(data)
	if err != nil {
		t.Fatal(err)
	}
	want := defaultVM()
	if err := want.check(); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// The OpenCL library has the same name for the socket.
func TestLibraryKnowsTheSocket(t *testing.T) {
	source, err := os.ReadFile("../../guest/opencl/icd/shm.c")
	if err != nil {
		t.Fatal(err)
	}
	o := defaultVM()
	if err := o.check(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(source), `#define GX_VM_SOCKET "`+o.AppSocket+`"`) {
		t.Errorf("guest/opencl/icd/shm.c does not look for %s", o.AppSocket)
	}
}
