package systemd_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const unit = "gpuctl-hostd.service"

// settings of the unit, by name; one that is given again adds to it.
func settings(t *testing.T) map[string]string {
	t.Helper()
	data, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == '[' {
			continue
		}
		name, value, ok := strings.Cut(line, "=")
		if !ok {
			t.Fatalf("line %q", line)
		}
		all[name] = strings.TrimSpace(all[name] + " " + value)
	}
	return all
}

// What the daemon's life depends on must not be lost while it is sandboxed.
func TestSettings(t *testing.T) {
	s := settings(t)
	for name, want := range map[string]string{
		"Type": "notify", "ExecStart": "/usr/bin/hostd --config /etc/gpuctl/hostd.yaml", "ExecReload": "/bin/kill -HUP $MAINPID",
		"Restart": "on-failure", "RestartPreventExitStatus": "2",
		"KillMode":                 "process",     // sessions outlive hostd,
		"RuntimeDirectoryPreserve": "yes",         // with their sockets
		"PrivateTmp":               "no",          // and their temporary files
		"ExecPaths":                "/run/gpuctl", // where runtimes load what they have compiled
		"RuntimeDirectory":         "gpuctl", "StateDirectory": "gpuctl", "ProtectSystem": "strict",
		"RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK AF_VSOCK",
		"NoNewPrivileges":         "no", "ProtectClock": "no", "MemoryDenyWriteExecute": "no", "ProtectKernelTunables": "no", "PrivateDevices": "no",
		"AmbientCapabilities": "",
	} {
		if got, ok := s[name]; !ok || got != want {
			t.Errorf("%s=%q, want %q", name, got, want)
		}
	}
	for _, order := range []struct {
		how    string
		others []string
	}{
		{"Before", []string{"libvirtd.service", "virtxend.service", "virtqemud.service"}}, // their hooks ask hostd
		{"After", []string{"network-online.target", "xen.service", "xenstored.service", "libvirtd.socket"}},
	} {
		for _, other := range order.others {
			if !slices.Contains(strings.Fields(s[order.how]), other) {
				t.Errorf("the unit is not ordered %s=%s", order.how, other)
			}
		}
	}
	if _, ok := s["DeviceAllow"]; ok {
		t.Error("DeviceAllow= forbids all devices that it does not name")
	}
	writable := strings.Fields(s["ReadWritePaths"])
	for _, path := range []string{"/sys/bus", "/sys/devices", "/tmp"} {
		if !slices.Contains(writable, path) {
			t.Errorf("%s is not writable", path)
		}
	}
	have := strings.Fields(s["CapabilityBoundingSet"])
	for _, c := range []string{"CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_SYS_PTRACE", "CAP_KILL", "CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_NET_ADMIN"} {
		if !slices.Contains(have, c) {
			t.Errorf("%s is missing", c)
		}
	}
	for _, c := range []string{"CAP_SYS_MODULE", "CAP_SYS_TIME", "CAP_SYS_BOOT", "CAP_SYS_RAWIO"} {
		if slices.Contains(have, c) {
			t.Errorf("%s is there", c)
		}
	}
}

// installed is a copy of the unit in a folder of its own, with a program that
// exists in place of hostd, which need not be installed here.
func installed(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	data, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(data), "ExecStart=/usr/bin/hostd", "ExecStart="+program, 1)
	if text == string(data) {
		t.Fatal("the unit does not start hostd")
	}
	path := filepath.Join(t.TempDir(), unit)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSystemdAcceptsTheUnit(t *testing.T) {
	path := installed(t)
	// Other units of this machine may be wrong; what is said of ours counts.
	out, err := exec.Command("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", path).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, unit) {
			t.Error(strings.TrimSpace(line))
		}
	}
	if err != nil && len(out) == 0 {
		t.Fatal(err)
	}
	// It would say so if something were wrong.
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(data), "KillMode=process", "KillMode=some", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	out, _ = exec.Command("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", path).CombinedOutput()
	if !strings.Contains(string(out), "kill mode") {
		t.Errorf("systemd-analyze did not notice a mistake: %s", out)
	}
}

// mostExposed is what systemd makes of the unit: 10 is a service without any
// sandbox. Lower it when the unit gets better.
const mostExposed = 5.5

func TestUnitIsSandboxed(t *testing.T) {
	out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--no-pager", installed(t)).CombinedOutput()
	m := regexp.MustCompile(`exposure level for \S+: ([0-9.]+)`).FindSubmatch(out)
	if m == nil {
		t.Skipf("this systemd-analyze cannot judge a file: %v: %.200s", err, out)
	}
	level, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil || level > mostExposed {
		t.Errorf("exposure %v (%v), want at most %v:\n%s", level, err, mostExposed, out)
	}
	t.Logf("exposure %v", level)
}
