package executor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// in opens an executor whose session has that folder, where the process is from then on.
func (c *client) in(generation uint32, dir string) *session {
	c.t.Helper()
	c.t.Chdir(dir)
	s := c.executor(generation)
	s.cfg.Dir = dir
	return s
}

// What a program includes goes along when its session moves to where the application's files
// are not: they have changed, or the executor is on another host.
func TestIncludedFilesGoAlongInASwap(t *testing.T) {
	c := newClient(t)
	a := c.in(1, t.TempDir())
	a.activate()
	ctx, q, _ := c.setup(0)
	files := []uint32{c.program(ctx, "#include \"../b.h\"\n"), c.program(ctx, "#define V 42\n")}
	paths := []byte("//home/me/sub/a.h\x00//home/me/b.h\x00/home/me\x00")
	const source = "kernel void f(global uint *a) { a[get_global_id(0)] = V; }"
	p, object, linked := c.program(ctx, "#include <a.h>\n"+source), c.program(ctx, "#include \"b.h\"\n"+source), c.id()
	c.call(&wire.BuildWithFiles{Program: p, Options: []byte("-Isub -DX"), Files: files, Paths: paths})
	c.call(&wire.CompileWithFiles{Program: object, Files: files, Paths: paths})
	c.call(&wire.LinkProgram{ID: linked, Context: ctx, Inputs: []uint32{object}})
	for _, f := range files {
		c.post(&wire.Release{ID: f})
	}
	s := c.in(2, t.TempDir())
	c.swap(a, s)
	for _, p := range []uint32{p, linked} {
		if v := c.ran(ctx, q, p); v != 42 {
			t.Errorf("program %d wrote %d", p, v)
		}
	}
	if b := c.call(&wire.BuildInfo{Program: p, Device: 1, Param: cl.ProgramBuildOptions}); cl.CString(b) != "-Isub -DX" {
		t.Errorf("options are %q", b)
	}
	inside(s, p, func(p *program) {
		b := p.container(s.devices[0])
		s.mu.Unlock()
		defer s.mu.Lock()
		other := newClient(t)
		o := other.in(1, t.TempDir())
		o.activate()
		ctx, q, _ := other.setup(0)
		p2 := other.id()
		other.call(&wire.CreateProgramBinary{ID: p2, Context: ctx, Devices: []uint32{1}, Mode: wire.DataInline, Binary: b})
		for _, options := range []string{"", "-Isub -DX"} {
			other.call(&wire.BuildProgram{Program: p2, Options: []byte(options)})
			if v := other.ran(ctx, q, p2); v != 42 {
				t.Errorf("its binary, built with %q, wrote %d", options, v)
			}
		}
	})
}

// Runtimes take no option, or take several, for a folder whose name has a blank or a quote, and an application need not
// give it: it may just work there.
func TestIncludedFilesOfAFolderWithABlankInItsName(t *testing.T) {
	c := newClient(t)
	s := c.in(1, t.TempDir())
	s.activate()
	ctx, q, _ := c.setup(0)
	files := []uint32{c.program(ctx, "#include \"../b.h\"\n"), c.program(ctx, "#define V 42\n")}
	const source = "\nkernel void f(global uint *a) { a[get_global_id(0)] = V; }"
	var all []uint32
	for _, cwd := range []string{"/home/My Project", "/home/my\"quote\"", "/home/-I \\"} {
		for include, options := range map[string]string{"#include \"a.h\"": "", "#include <a.h>": "-DX -I .", "#include \"../b.h\"": ""} {
			p := c.program(ctx, include+source)
			paths := []byte("/" + cwd + "/a.h\x00//home/b.h\x00" + cwd + "\x00")
			slot := c.start(&wire.BuildWithFiles{Program: p, Options: []byte(options), Files: files, Paths: paths})
			if st, _ := c.answer(slot); st != cl.Success {
				t.Errorf("%q in %q: %v", include, cwd, st)
			} else if v := c.ran(ctx, q, p); v != 42 {
				t.Errorf("%q in %q wrote %d", include, cwd, v)
			}
			all = append(all, p)
		}
	}
	to := c.in(2, t.TempDir())
	c.swap(s, to)
	for _, p := range all {
		if v := c.ran(ctx, q, p); v != 42 {
			t.Errorf("%d wrote %d", p, v)
		}
	}
}

// The log named a file that the application cannot find: where the executor has it.
func TestBuildLogNamesIncludedFilesAsTheApplicationHasThem(t *testing.T) {
	c := newClient(t)
	s := c.in(1, t.TempDir())
	s.activate()
	ctx, _, _ := c.setup(0)
	file := c.program(ctx, "\n#error here it is\n")
	for _, cwd := range []string{"/home/me", "/home/My Project"} {
		p := c.program(ctx, "#include \"sub/a.h\"\nkernel void f() {}")
		slot := c.start(&wire.BuildWithFiles{Program: p, Files: []uint32{file}, Paths: []byte("/" + cwd + "/sub/a.h\x00" + cwd + "\x00")})
		if st, _ := c.answer(slot); st != cl.BuildProgramFailure {
			t.Errorf("%v", st)
		}
		log := cl.CString(c.call(&wire.BuildInfo{Program: p, Device: 1, Param: cl.ProgramBuildLog}))
		if !strings.Contains(log, " "+cwd+"/sub/a.h:2:") || strings.Contains(log, includeDir+"/") {
			t.Errorf("%s", log)
		}
	}
}

// A program that writes a header anew and builds, again and again, filled the memory of the VM: the session's folder is
// there, and all files stayed.
func TestIncludedFilesOfEarlierBuildsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	s := &session{cfg: Config{Dir: dir}}
	const builds = 12
	var first string
	for i := range builds {
		text := bytes.Repeat([]byte{'\n'}, maxIncluded/8)
		text[0] += byte(i)
		x := portable.Program{Headers: []portable.Header{{Name: "//home/me/a.h", Program: portable.Program{Source: text}}}}
		if err := s.lay(&x); err != nil {
			t.Fatal(err)
		}
		at := filepath.Join(dir, root(x.Headers))
		if _, err := os.Stat(filepath.Join(at, "home/me/a.h")); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = at
		}
		past := time.Now().Add(-time.Hour + time.Duration(i)*time.Minute)
		if at != first { // that one is still needed
			if err := os.Chtimes(at, past, past); err != nil {
				t.Fatal(err)
			}
		}
	}
	left, err := os.ReadDir(filepath.Join(dir, includeDir))
	if err != nil || len(left) != 7 { // folders count, too
		t.Errorf("the files of %d of %d builds are there: %v", len(left), builds, err)
	}
	if _, err := os.Stat(first); err != nil {
		t.Error(err)
	}
	s.included.sizes[filepath.Base(first)] = mostIncluded // it has gone on so fast that all of them are new
	x := portable.Program{Headers: []portable.Header{{Name: "//a.h"}}}
	if err := s.lay(&x); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(first); err == nil {
		t.Error("files of more than mostIncluded bytes stay")
	}
}

// A container of some MiB could have millions of folders made, each of which takes more memory than its name.
func TestProgramThatNeedsMillionsOfFoldersIsRefused(t *testing.T) {
	s := &session{cfg: Config{Dir: t.TempDir()}}
	deep := strings.Repeat("/a", 1000)
	x := portable.Program{}
	for i := range 200 {
		x.Headers = append(x.Headers, portable.Header{Name: fmt.Sprintf("//%d%s", i, deep)})
	}
	y := portable.Program{Headers: []portable.Header{{Name: "//a"}}}
	for i := range 200 {
		y.Options += fmt.Sprintf("-I %s/%d%s ", root(y.Headers), i, deep)
	}
	for _, x := range []portable.Program{x, y, {Inputs: []portable.Program{x}}, {Headers: []portable.Header{{Name: "a", Program: y}}}} {
		if err := s.lay(&x); !errors.Is(err, portable.ErrLimit) {
			t.Error(err)
		}
	}
}

// The name of a file may be as long as a name can be, and what could not be written leaves nothing.
func TestIncludedFileWithALongName(t *testing.T) {
	dir := t.TempDir()
	if err := layFile(filepath.Join(dir, strings.Repeat("a", 255)), []byte("text")); err != nil {
		t.Error(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := layFile(filepath.Join(dir, "sub", strings.Repeat("a", 256)), []byte("text")); err == nil {
		t.Error("a name that is too long")
	}
	if left, err := os.ReadDir(filepath.Join(dir, "sub")); err != nil || len(left) != 0 {
		t.Error(left, err)
	}
}

// An application chooses the paths of the files that it sends.
func TestIncludedFilesStayInTheirFolder(t *testing.T) {
	c := newClient(t)
	parent := t.TempDir()
	dir := filepath.Join(parent, "session")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s := c.in(1, dir)
	s.activate()
	ctx, _, _ := c.setup(0)
	file := c.program(ctx, "stolen\n")
	for _, path := range []string{"//../../../a", "//x/../../../../a", "//", "///a", "/a", "a", ""} {
		slot := c.start(&wire.BuildWithFiles{Program: c.program(ctx, "kernel void f() {}"), Files: []uint32{file}, Paths: []byte(path + "\x00/\x00")})
		if st, _ := c.answer(slot); st != cl.InvalidValue {
			t.Errorf("%q: %v", path, st)
		}
	}
	c.call(&wire.BuildWithFiles{
		Program: c.program(ctx, "kernel void f() {}"), Options: []byte("-I ../../../../b -I /../../../../b"),
		Files: []uint32{file}, Paths: []byte("//c\x00/../../..\x00"),
	})
	slot := c.start(&wire.BuildWithFiles{Program: c.program(ctx, "kernel void f() {}"), Files: []uint32{file}, Paths: []byte("//c\x00")})
	if st, _ := c.answer(slot); st != cl.InvalidValue {
		t.Errorf("without a working folder: %v", st)
	}
	if found, err := os.ReadDir(parent); err != nil || len(found) != 1 {
		t.Errorf("beside the session's folder: %v, %v", found, err)
	}
}

// A header that has the name of a file of the application's is none: a swap would lay it into the folder of such
// files, and compile without it.
func TestAHeaderIsNotTakenForAFile(t *testing.T) {
	c := newClient(t)
	c.executor(1).activate()
	ctx, _, _ := c.setup(0)
	header, object := c.program(ctx, "#define X 1\n"), c.program(ctx, "#include \"//x.h\"\nkernel void f() {}")
	slot := c.start(&wire.CompileProgram{Program: object, Headers: []uint32{header}, Names: []byte("//x.h\x00")})
	if st, _ := c.answer(slot); st != cl.InvalidValue {
		t.Error(st)
	}
	c.call(&wire.CompileProgram{Program: c.program(ctx, "#include \"y.h\"\nkernel void f() {}"), Headers: []uint32{header}, Names: []byte("y.h\x00")})
}
