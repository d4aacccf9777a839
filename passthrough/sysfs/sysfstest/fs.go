package sysfstest

import (
	"bytes"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
)

const maxLinks = 40 // most symbolic links on one path, as in Linux

// node is a folder, a link or a file.
type node struct {
	parent   *node
	children map[string]*node // entries of a folder
	link     string
	show     func() (string, error) // nil: it cannot be read
	store    func(data string) error
	device   *device // device that is locked during a write
}

func newFolder(parent *node) *node { return &node{parent: parent, children: map[string]*node{}} }

func (n *node) isDir() bool { return n.children != nil }

func (n *node) mode() fs.FileMode {
	switch {
	case n.isDir():
		return fs.ModeDir | 0o755
	case n.link != "":
		return fs.ModeSymlink | 0o777
	}
	var m fs.FileMode
	if n.show != nil {
		m |= 0o444
	}
	if n.store != nil {
		m |= 0o200
	}
	return m
}

// folder makes the folders of a path. It follows links.
func (n *node) folder(name string) *node {
	if name == "." || name == "" {
		return n
	}
	for part := range strings.SplitSeq(name, "/") {
		child := n.children[part]
		if child == nil {
			child = newFolder(n)
			n.children[part] = child
		}
		if n = n.through(child); n == nil {
			panic("sysfstest: a link to nowhere on the way to " + name)
		}
	}
	return n
}

// through returns the destination of a link in n, or the child itself.
func (n *node) through(child *node) *node {
	if child.link == "" {
		return child
	}
	target, err := n.find(child.link, false)
	if err != nil {
		return nil
	}
	return target
}

// put puts a node at a path below n.
func (n *node) put(name string, child *node) {
	dir := n.folder(path.Dir(name))
	child.parent = dir
	dir.children[path.Base(name)] = child
}

func (n *node) drop(name string) {
	dir := n
	for part := range strings.SplitSeq(path.Dir(name), "/") {
		if part == "." {
			continue
		}
		child := dir.children[part]
		if child == nil {
			return
		}
		if dir = dir.through(child); dir == nil || !dir.isDir() {
			return
		}
	}
	delete(dir.children, path.Base(name))
}

func text(s string) *node { return &node{show: func() (string, error) { return s, nil }} }

func shows(f func() string) *node {
	return &node{show: func() (string, error) { return f(), nil }}
}

// find finds the node at a path. If last, a link at the end is not followed.
func (n *node) find(name string, last bool) (*node, error) {
	links := 0
	return n.walk(name, last, &links)
}

func (n *node) walk(name string, last bool, links *int) (*node, error) {
	at := n
	parts := strings.Split(name, "/")
	for i, part := range parts {
		switch part {
		case "", ".":
			continue
		case "..":
			if at.parent != nil {
				at = at.parent
			}
			continue
		}
		if !at.isDir() {
			return nil, syscall.ENOTDIR
		}
		child := at.children[part]
		if child == nil {
			return nil, fs.ErrNotExist
		}
		if child.link != "" && (!last || i < len(parts)-1) {
			if *links++; *links > maxLinks {
				return nil, syscall.ELOOP
			}
			if path.IsAbs(child.link) {
				return nil, fs.ErrNotExist // it leads out of the machine
			}
			target, err := at.walk(child.link, false, links)
			if err != nil {
				return nil, err
			}
			child = target
		}
		at = child
	}
	return at, nil
}

func (m *Machine) lookup(op, name string, last bool) (*node, error) {
	fail := func(err error) (*node, error) { return nil, &fs.PathError{Op: op, Path: name, Err: err} }
	if !fs.ValidPath(name) {
		return fail(fs.ErrInvalid)
	}
	if m.crashed {
		return fail(ErrCrashed)
	}
	n, err := m.root.find(name, last)
	if err != nil {
		return fail(err)
	}
	return n, nil
}

// Open opens a file or folder. Its content is that at the time of opening.
func (m *Machine) Open(name string) (fs.File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.lookup("open", name, false)
	if err != nil {
		return nil, err
	}
	return m.open(name, n)
}

func (m *Machine) open(name string, n *node) (fs.File, error) {
	i := info{path.Base(name), n.mode(), 4096}
	if n.isDir() {
		return &openDir{i, entries(n)}, nil
	}
	if n.show == nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.EACCES}
	}
	s, err := n.show()
	return &openFile{i, bytes.NewReader([]byte(s)), name, err}, nil
}

// ReadFile reads all of a file.
func (m *Machine) ReadFile(name string) ([]byte, error) {
	f, err := m.Open(name)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(f)
}

// ReadDir returns a folder's entries, sorted by name.
func (m *Machine) ReadDir(name string) ([]fs.DirEntry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.lookup("readdir", name, false)
	if err != nil {
		return nil, err
	}
	if !n.isDir() {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: syscall.ENOTDIR}
	}
	return entries(n), nil
}

// ReadLink returns the destination of a symbolic link.
func (m *Machine) ReadLink(name string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.lookup("readlink", name, true)
	if err != nil {
		return "", err
	}
	if n.link == "" {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrInvalid}
	}
	return n.link, nil
}

// Lstat returns information about a file, without following a link.
func (m *Machine) Lstat(name string) (fs.FileInfo, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.lookup("lstat", name, true)
	if err != nil {
		return nil, err
	}
	return info{path.Base(name), n.mode(), 4096}, nil
}

func entries(n *node) []fs.DirEntry {
	out := []fs.DirEntry{}
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		out = append(out, fs.FileInfoToDirEntry(info{name, n.children[name].mode(), 4096}))
	}
	return out
}

type info struct {
	name string
	mode fs.FileMode
	size int64
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.size }
func (i info) Mode() fs.FileMode  { return i.mode }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) IsDir() bool        { return i.mode.IsDir() }
func (i info) Sys() any           { return nil }

type openFile struct {
	info info
	*bytes.Reader
	name string
	err  error // error of the attribute's show function
}

func (f *openFile) Stat() (fs.FileInfo, error) { return f.info, nil }
func (f *openFile) Close() error               { return nil }
func (f *openFile) Read(p []byte) (int, error) {
	if f.err != nil {
		return 0, &fs.PathError{Op: "read", Path: f.name, Err: f.err}
	}
	return f.Reader.Read(p)
}

type openDir struct {
	info info
	rest []fs.DirEntry
}

func (d *openDir) Stat() (fs.FileInfo, error) { return d.info, nil }
func (d *openDir) Close() error               { return nil }
func (d *openDir) Read([]byte) (int, error) {
	return 0, &fs.PathError{Op: "read", Path: d.info.name, Err: syscall.EISDIR}
}

func (d *openDir) ReadDir(n int) ([]fs.DirEntry, error) {
	if n <= 0 {
		n = len(d.rest)
	} else if len(d.rest) == 0 {
		return nil, io.EOF
	}
	n = min(n, len(d.rest))
	out := d.rest[:n]
	d.rest = d.rest[n:]
	return out, nil
}
