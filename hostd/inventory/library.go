package inventory

import (
	"bufio"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Library is a vendor's OpenCL runtime.
type Library struct {
	Path    string // absolute path, or a name for the dynamic linker
	Runtime string // pocl, oclgrind, nvidia, …
}

// ownLibrary is the part of the file name by which gpuctl's own ICD is recognized.
const ownLibrary = "libgpuctl-opencl"

// Libraries lists the runtimes that are installed: those registered in
// /etc/OpenCL/vendors or one of the extra folders, and some that distributions install
// without registering them.
func Libraries(root fs.FS, extra []string) []Library {
	var out []Library
	seen := map[string]bool{}
	add := func(name string) {
		lib := resolve(root, name)
		base := path.Base(lib)
		if strings.HasPrefix(base, ownLibrary) || seen[lib] {
			return
		}
		seen[lib] = true
		out = append(out, Library{lib, runtimeName(base)})
	}
	for _, dir := range append([]string{"/etc/OpenCL/vendors"}, extra...) {
		files, _ := fs.Glob(root, inside(dir)+"/*.icd")
		slices.Sort(files)
		for _, file := range files {
			if name := firstLine(root, file); name != "" {
				add(name)
			}
		}
	}
	for _, pattern := range []string{
		"usr/lib/oclgrind/liboclgrind-rt-icd.so",
		"usr/lib/*/libpocl.so.2", "usr/lib64/libpocl.so.2",
		"usr/lib/*/libnvidia-opencl.so.1", "usr/lib64/libnvidia-opencl.so.1",
		"usr/lib/*/intel-opencl/libigdrcl.so",
		"usr/lib/*/libRusticlOpenCL.so.1",
		"opt/rocm/lib/libamdocl64.so",
	} {
		files, _ := fs.Glob(root, pattern)
		slices.Sort(files)
		for _, file := range files {
			add("/" + file)
		}
	}
	// A link and its target are one runtime. So are two registrations of the same
	// library.
	return slices.CompactFunc(sorted(out), func(a, b Library) bool {
		return a.Runtime == b.Runtime && soName(a.Path) == soName(b.Path)
	})
}

func sorted(libs []Library) []Library {
	slices.SortStableFunc(libs, func(a, b Library) int {
		if c := strings.Compare(a.Runtime, b.Runtime); c != 0 {
			return c
		}
		return strings.Compare(soName(a.Path), soName(b.Path))
	})
	return libs
}

// soName returns a library's path without its version.
func soName(p string) string {
	name, _, _ := strings.Cut(p, ".so")
	return name
}

// resolve returns the path of a bare library name. It searches the folders of the dynamic
// linker. If the library is not found, the name is returned.
func resolve(root fs.FS, name string) string {
	if strings.Contains(name, "/") {
		return path.Clean(name)
	}
	for _, pattern := range []string{"usr/local/lib", "usr/lib/*-linux-gnu*", "lib/*-linux-gnu*", "usr/lib64", "lib64", "usr/lib", "lib"} {
		found, _ := fs.Glob(root, pattern+"/"+escape(name))
		if len(found) > 0 {
			return "/" + found[0]
		}
	}
	return name
}

func escape(name string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(name)
}

func inside(dir string) string { return strings.TrimPrefix(path.Clean(dir), "/") }

func firstLine(root fs.FS, file string) string {
	f, err := root.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	s := bufio.NewScanner(io.LimitReader(f, 4096))
	s.Scan()
	return strings.TrimSpace(s.Text())
}

func runtimeName(base string) string {
	base = strings.ToLower(base)
	for _, known := range []struct{ part, name string }{
		{"oclgrind", "oclgrind"},
		{"pocl", "pocl"},
		{"nvidia", "nvidia"},
		{"igdrcl", "intel"},
		{"intelocl", "intel-cpu"},
		{"rusticl", "rusticl"},
		{"mesaopencl", "clover"},
		{"amdocl", "amd"},
	} {
		if strings.Contains(base, known.part) {
			return known.name
		}
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(base, "lib"), ".so")
	return slug(name)
}

// slug keeps letters and digits, and replaces everything between them with one dash.
func slug(s string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(s) {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			b.WriteRune(r)
		case b.Len() > 0 && !strings.HasSuffix(b.String(), "-"):
			b.WriteByte('-')
		}
	}
	out := strings.Trim(b.String()[:min(b.Len(), 32)], "-")
	if out == "" {
		return "opencl"
	}
	return out
}

// poclLimit returns a memory limit for PoCL in GiB: half of the host's memory. PoCL's
// default depends on the memory that is free at the moment, but the size of a GPU must
// not change.
func poclLimit(root fs.FS) string {
	data, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return "1"
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) >= 2 && f[0] == "MemTotal:" {
			kib, _ := strconv.ParseUint(f[1], 10, 64)
			return strconv.FormatUint(max(1, kib>>21), 10)
		}
	}
	return "1"
}
