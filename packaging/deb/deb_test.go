package deb

import (
	"bytes"
	"crypto/sha256"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, &stderr)
	}
	return string(out)
}

func build(t *testing.T) string {
	t.Helper()
	for _, need := range []string{"dpkg-deb", "dpkg-shlibdeps", "gcc"} {
		if _, err := exec.LookPath(need); err != nil {
			t.Fatalf("%s is not installed: make setup", need)
		}
	}
	dir := t.TempDir()
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	return strings.TrimSpace(command(t, "./build.sh", "1.2.3", dir))
}

func TestPackage(t *testing.T) {
	deb := build(t)
	if name := filepath.Base(deb); !strings.HasPrefix(name, "gpuguest_1.2.3_") {
		t.Errorf("name %s", name)
	}
	list := command(t, "dpkg-deb", "-c", deb)
	for _, want := range []string{
		`-rwxr-xr-x root/root +\d+ 2023-11-14 \d\d:\d\d ./usr/bin/gpuguest`,
		`-rw-r--r-- root/root +\d+ \S+ \S+ ./usr/lib/gpuctl/libgpuctl-opencl.so`,
		`-rw-r--r-- root/root +\d+ \S+ \S+ ./etc/OpenCL/vendors/gpuctl.icd`,
		`-rw-r--r-- root/root +\d+ \S+ \S+ ./etc/gpuctl/gpuguest.yaml`,
		`drwxr-xr-x root/root +\d+ \S+ \S+ ./etc/gpuctl/profiles.d/`,
		`-rw-r--r-- root/root +\d+ \S+ \S+ ./lib/systemd/system/gpuguest.service`,
		`-rw-r--r-- root/root +\d+ \S+ \S+ ./lib/systemd/system/gpuctl-sessions.service`,
		`-rw-r--r-- root/root +\d+ \S+ \S+ ./usr/share/man/man8/gpuguest.8.gz`,
	} {
		if !regexp.MustCompile(`(?m)^` + want + `$`).MatchString(list) {
			t.Errorf("no %s in\n%s", want, list)
		}
	}
	tree := t.TempDir()
	command(t, "dpkg-deb", "--extract", deb, tree)
	control := t.TempDir()
	command(t, "dpkg-deb", "--control", deb, control)

	// The program runs, and the library is one that a loader takes.
	if out := command(t, filepath.Join(tree, "usr/bin/gpuguest"), "serve", "--help"); !strings.Contains(out, "--vm") {
		t.Errorf("gpuguest says %s", out)
	}
	icd, err := os.ReadFile(filepath.Join(tree, "etc/OpenCL/vendors/gpuctl.icd"))
	if err != nil {
		t.Fatal(err)
	}
	library := filepath.Join(tree, strings.TrimSpace(string(icd)))
	if symbols := command(t, "nm", "-D", "--defined-only", library); !strings.Contains(symbols, "clGetExtensionFunctionAddress") {
		t.Errorf("%s has %s", library, symbols)
	}
	fields := command(t, "dpkg-deb", "-f", deb, "Package", "Version", "Depends")
	for _, want := range []string{"Package: gpuguest", "Version: 1.2.3", "libc6 (>= ", "libopencl1"} {
		if !strings.Contains(fields, want) {
			t.Errorf("no %q in %s", want, fields)
		}
	}
	files, err := os.ReadFile(filepath.Join(control, "conffiles"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range strings.Fields(string(files)) {
		if _, err := os.Stat(filepath.Join(tree, f)); err != nil {
			t.Errorf("conffiles: %v", err)
		}
	}
	sums := exec.Command("md5sum", "--check", "--quiet", filepath.Join(control, "md5sums"))
	sums.Dir = tree
	if out, err := sums.CombinedOutput(); err != nil {
		t.Errorf("md5sums: %v\n%s", err, out)
	}
	for _, script := range []string{"postinst", "prerm", "postrm"} {
		command(t, "sh", "-n", filepath.Join(control, script))
	}
	for _, file := range []string{"usr/bin/gpuguest", strings.TrimPrefix(strings.TrimSpace(string(icd)), "/")} {
		data, err := os.ReadFile(filepath.Join(tree, file))
		if err != nil {
			t.Fatal(err)
		}
		if here, _ := filepath.Abs("../.."); bytes.Contains(data, []byte(here+"/")) {
			t.Errorf("%s names the folder that it was built in", file)
		}
	}
}

func TestPackageIsReproducible(t *testing.T) {
	if testing.Short() {
		t.Skip("builds twice")
	}
	var sums [2][32]byte
	for i := range sums {
		data, err := os.ReadFile(build(t))
		if err != nil {
			t.Fatal(err)
		}
		sums[i] = sha256.Sum256(data)
	}
	if sums[0] != sums[1] {
		t.Error("two builds differ")
	}
}

const unit = "gpuguest.service"

func TestUnit(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	data, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	// What sessions and the channel depend on.
	lines := strings.Split(string(data), "\n")
	for _, want := range []string{
		"KillMode=process", "RuntimeDirectory=gpuctl-guest", "RuntimeDirectoryPreserve=yes", "ExecPaths=/run/gpuctl-guest", "PrivateTmp=no", "PrivateDevices=no",
		"ReadWritePaths=/sys/bus /sys/devices", "RestrictAddressFamilies=AF_UNIX AF_NETLINK AF_INET AF_INET6 AF_VSOCK", "Type=notify",
		"ExecStart=/usr/bin/gpuguest serve --vm --config /etc/gpuctl/gpuguest.yaml",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("no %s", want)
		}
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), unit)
	text := strings.Replace(string(data), "ExecStart=/usr/bin/gpuguest", "ExecStart="+program, 1)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	// Other units of this machine may be wrong; what is said of ours counts.
	out, _ := exec.Command("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", path).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, unit) {
			t.Error(strings.TrimSpace(line))
		}
	}
}
