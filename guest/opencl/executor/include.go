package executor

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// Files that a program includes are the application's, and the executor can't read them
// where they are. The application's library sends their text with the build. They are headers of
// the program whose names begin with fileMark, and lie in the session's folder as in the
// application's file system, below a folder that their contents name. Options name that folder
// relative to the session's, which is the executor's working folder: so a program
// is the same in every session.
const (
	fileMark   = "//"
	includeDir = "include"
	// maxIncluded is how many bytes of files stay, which are in memory. Of those that were needed within includedRest more
	// do: something may be built with them, by the other executor of a swap, too.
	maxIncluded  = 64 << 20
	mostIncluded = 4 * maxIncluded
	includedRest = time.Minute
	// maxPlaces is how many files and folders a program may need, which are more than their names' bytes in memory.
	maxPlaces = 1 << 17
)

// inclusion is what a build includes of the application's files.
type inclusion struct {
	files []portable.Header
	cwd   string // the application's working folder
}

// inclusion takes the files of a request.
func (s *session) inclusion(ids []uint32, paths []byte) (inclusion, cl.Status) {
	names := strings.Split(string(paths), "\x00")
	if len(names) < len(ids)+1 {
		return inclusion{}, cl.InvalidValue
	}
	in := inclusion{cwd: names[len(ids)]}
	if !filepath.IsAbs(in.cwd) {
		return inclusion{}, cl.InvalidValue
	}
	for i, id := range ids {
		p := lookup[program](s, id)
		if p == nil || p.content.Kind != portable.Source {
			return inclusion{}, cl.InvalidProgram
		}
		if !isFile(names[i]) {
			return inclusion{}, cl.InvalidValue
		}
		in.files = append(in.files, portable.Header{Name: names[i], Program: portable.Program{Kind: portable.Source, Source: p.content.Source}})
	}
	return in, cl.Success
}

// isFile reports whether a header's name is the path of a file.
func isFile(name string) bool {
	path, ok := strings.CutPrefix(name, fileMark)
	return ok && path != "" && filepath.Clean("/"+path) == "/"+path
}

// rootSize is how many bytes of the sum of a program's files name their folder.
const rootSize = 16

// root is the folder of a program's files; empty if it has none.
func root(hs []portable.Header) string {
	h, any := sha256.New(), false
	for i := range hs {
		if !isFile(hs[i].Name) {
			continue
		}
		any = true
		for _, b := range [][]byte{[]byte(hs[i].Name), hs[i].Program.Source} {
			h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(b))))
			h.Write(b)
		}
	}
	if !any {
		return ""
	}
	return filepath.Join(includeDir, hex.EncodeToString(h.Sum(nil)[:rootSize]))
}

// options returns options with which a runtime finds the files. Each folder in which it is to look
// has that of the files before it.
func (in *inclusion) options(o string) string {
	dir := root(in.files)
	if dir == "" {
		return o
	}
	var b strings.Builder
	b.WriteString(include(dir, in.cwd)) // a runtime looks in the working folder, too
	for w, rest := word(o); w != ""; w, rest = word(rest) {
		if path, ok := strings.CutPrefix(unquoted(w), "-I"); ok {
			if path == "" {
				var next string
				next, rest = word(rest)
				w, path = w+" "+next, unquoted(next)
			}
			if !filepath.IsAbs(path) {
				path = filepath.Join(in.cwd, path)
			}
			b.WriteString(include(dir, path))
		}
		b.WriteString(w + " ")
	}
	return strings.TrimSuffix(b.String(), " ")
}

// include returns the option for the folder of the files that is path to the application. Runtimes do not agree on
// how an option with a blank or a quote is written, so such a folder has another name, too.
func include(dir, path string) string {
	path = filepath.Clean("/" + path)
	if name := escaped(path); name != path && len(name) < maxName {
		path = name
	}
	if strings.ContainsAny(path, " \t\r\n\v\f") {
		return `-I "` + filepath.Join(dir, path) + `" `
	}
	return "-I " + filepath.Join(dir, path) + " "
}

// maxName is the length of the longest name of a file in bytes.
const maxName = 255

// escaped returns the other name of a folder, which begins with a percent sign, or the path if it needs none.
func escaped(path string) string {
	const plain = "/-._+,=@~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	if strings.Trim(path, plain) == "" {
		return path
	}
	var b strings.Builder
	for i := range len(path) {
		if path[i] == '/' || strings.IndexByte(plain, path[i]) < 0 {
			fmt.Fprintf(&b, "%%%02X", path[i])
		} else {
			b.WriteByte(path[i])
		}
	}
	return b.String()
}

// layFolder makes a folder that options name.
func layFolder(dir, name string) error {
	path, err := url.PathUnescape(name)
	if err != nil || escaped(path) != name {
		return os.MkdirAll(filepath.Join(dir, name), 0o700)
	}
	at := filepath.Join(dir, filepath.Clean("/"+path))
	if err := os.MkdirAll(at, 0o700); err != nil || path == name {
		return err
	}
	if err := os.Symlink(at, filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// laidPath matches the beginning of a file's path where a runtime has it from.
var laidPath = regexp.MustCompile(includeDir + `/[0-9a-f]{32}/(%[^/:\s]*)?`)

// readable names files in a log as the application has them.
func readable(log string) string {
	return laidPath.ReplaceAllStringFunc(log, func(at string) string {
		name := at[len(includeDir)+len("/")+2*rootSize+len("/"):]
		if path, err := url.PathUnescape(name); err == nil && path != "" {
			return path
		}
		return "/" + name
	})
}

// again returns the options of a build, given o, of a program that came as a binary, and the files
// that it has. Its own options name their folders.
func again(x *portable.Program, o string) (string, []portable.Header) {
	dir := root(x.Headers)
	switch {
	case o == "":
		return x.Options, x.Headers
	case dir == "":
		return o, nil
	}
	var b strings.Builder
	for w, rest := word(x.Options); w != ""; w, rest = word(rest) {
		if strings.HasPrefix(unquoted(w), dir) {
			b.WriteString("-I " + w + " ")
		}
	}
	return b.String() + o, x.Headers
}

func unquoted(s string) string { return strings.ReplaceAll(s, `"`, "") }

// word cuts the first word off options; its quotes stay.
func word(o string) (w, rest string) {
	o = strings.TrimLeft(o, " \t\r\n\v\f")
	quoted := false
	for i := range len(o) {
		switch {
		case o[i] == '"':
			quoted = !quoted
		case !quoted && strings.IndexByte(" \t\r\n\v\f", o[i]) >= 0:
			return o[:i], o[i:]
		}
	}
	return o, ""
}

// lay writes the files of a program, and of those that it is made of, into the session's folder.
func (s *session) lay(x *portable.Program) error {
	if n := places(x); n > maxPlaces {
		return fmt.Errorf("included files: %d of them and of their folders, more than %d: %w", n, maxPlaces, portable.ErrLimit)
	}
	return s.layAll(x)
}

// places returns at most how many files and folders lay makes.
func places(x *portable.Program) (n int) {
	for i := range x.Inputs {
		n += places(&x.Inputs[i])
	}
	any := false
	for i := range x.Headers {
		n += places(&x.Headers[i].Program)
		if isFile(x.Headers[i].Name) {
			any = true
			n += strings.Count(x.Headers[i].Name, "/")
		}
	}
	if any { // folders that it names, some of them by two names
		n += 2*strings.Count(x.Options, "/") + strings.Count(x.Options, "%2F")
	}
	return n
}

func (s *session) layAll(x *portable.Program) error {
	for i := range x.Inputs {
		if err := s.layAll(&x.Inputs[i]); err != nil {
			return err
		}
	}
	for i := range x.Headers {
		if err := s.layAll(&x.Headers[i].Program); err != nil {
			return err
		}
	}
	dir := root(x.Headers)
	if dir == "" {
		return nil
	}
	if s.cfg.Dir == "" {
		return errors.New("included files: the session has no folder")
	}
	at := filepath.Join(s.cfg.Dir, dir)
	now := time.Now()
	fresh := os.Chtimes(at, now, now) != nil
	for w, rest := word(x.Options); w != ""; w, rest = word(rest) { // also one that only leads to others, as a/../b does
		if name, ok := strings.CutPrefix(filepath.Clean(unquoted(w)), dir+"/"); ok {
			if err := layFolder(at, name); err != nil {
				return fmt.Errorf("included files: %w", err)
			}
		}
	}
	for i := range x.Headers {
		if isFile(x.Headers[i].Name) {
			if err := layFile(filepath.Join(at, x.Headers[i].Name), x.Headers[i].Program.Source); err != nil {
				return fmt.Errorf("included files: %w", err)
			}
		}
	}
	if fresh {
		s.included.trim(filepath.Join(s.cfg.Dir, includeDir))
	}
	return nil
}

// layFile writes a file unless it is there. The other executor of a swap may do the same.
func layFile(path string, text []byte) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// included is what lies in the folder of included files.
type included struct {
	mu    sync.Mutex
	sizes map[string]int64 // of the files of a program, by the name of their folder
}

// trim removes files that no build needs any more, the oldest first, until there are not too many.
func (c *included) trim(dir string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sizes == nil {
		c.sizes = map[string]int64{}
	}
	es, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	total, when, names := int64(0), map[string]time.Time{}, []string(nil)
	for _, e := range es {
		name := e.Name()
		fi, err := e.Info()
		if err != nil {
			continue // the other executor of a swap has removed it
		}
		if _, ok := c.sizes[name]; !ok {
			c.sizes[name] = sizeOf(filepath.Join(dir, name))
		}
		total += c.sizes[name]
		when[name], names = fi.ModTime(), append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int { return when[a].Compare(when[b]) })
	for _, name := range names {
		if total <= maxIncluded || total <= mostIncluded && time.Since(when[name]) < includedRest {
			return
		}
		_ = os.RemoveAll(filepath.Join(dir, name))
		total -= c.sizes[name]
		delete(c.sizes, name)
	}
}

// sizeOf returns how much memory a folder takes.
func sizeOf(dir string) (n int64) {
	_ = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		n += 4096
		if err == nil {
			if fi, err := e.Info(); err == nil && fi.Mode().IsRegular() {
				n += fi.Size()
			}
		}
		return nil
	})
	return n
}

// laid is lay as a step of a request.
func (s *session) laid(x *portable.Program) cl.Status {
	if err := s.lay(x); err != nil {
		s.log.Error("program not made", "err", err)
		return cl.OutOfResources
	}
	return cl.Success
}

func (s *session) buildWithFiles(c call, m *wire.BuildWithFiles) (outcome, error) {
	in, st := s.inclusion(m.Files, m.Paths)
	if st != cl.Success {
		return done(st), nil
	}
	return s.build(c, &wire.BuildProgram{Program: m.Program, Devices: m.Devices, Options: m.Options, Callback: m.Callback}, in)
}

func (s *session) compileWithFiles(c call, m *wire.CompileWithFiles) (outcome, error) {
	in, st := s.inclusion(m.Files, m.Paths)
	if st != cl.Success {
		return done(st), nil
	}
	return s.compile(c, &wire.CompileProgram{
		Program: m.Program, Devices: m.Devices, Options: m.Options, Headers: m.Headers, Names: m.Names, Callback: m.Callback,
	}, in)
}
