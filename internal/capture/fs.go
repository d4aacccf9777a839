package capture

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
)

// maxLinks is how many links the lookup of one name may follow, as in Linux.
const maxLinks = 40

// FS is a tree of files and symbolic links in memory. Links are followed as the kernel
// does, but never out of the tree. It is safe for concurrent use.
type FS struct{ root *node }

var (
	_ fs.ReadFileFS = (*FS)(nil)
	_ fs.ReadDirFS  = (*FS)(nil)
	_ fs.ReadLinkFS = (*FS)(nil)
	_ fs.StatFS     = (*FS)(nil)
)

// node is a folder, a link or a file.
type node struct {
	name     string
	children map[string]*node // entries of a folder
	link     string
	data     []byte
}

func newFS() *FS { return &FS{&node{name: ".", children: map[string]*node{}}} }

// add adds a node, and makes the folders above it. It fails if one of the names is a file
// or link.
func (f *FS) add(name string, n *node) error {
	dir := f.root
	parts := strings.Split(name, "/")
	for _, part := range parts[:len(parts)-1] {
		next := dir.children[part]
		if next == nil {
			next = &node{name: part, children: map[string]*node{}}
			dir.children[part] = next
		}
		if next.children == nil {
			return errors.New("is below a file or a link")
		}
		dir = next
	}
	n.name = parts[len(parts)-1]
	if dir.children[n.name] != nil {
		return errors.New("is there twice")
	}
	dir.children[n.name] = n
	return nil
}

func (f *FS) file(name string, data []byte) error { return f.add(name, &node{data: data}) }

func (f *FS) symlink(name, target string) error {
	if err := checkLink(name, target); err != nil {
		return err
	}
	return f.add(name, &node{link: target})
}

// lookup finds a name. If last, a link at its end is followed, too.
func (f *FS) lookup(op, name string, last bool) (*node, error) {
	fail := func(err error) (*node, error) { return nil, &fs.PathError{Op: op, Path: name, Err: err} }
	if !fs.ValidPath(name) {
		return fail(fs.ErrInvalid)
	}
	stack := []*node{f.root}
	rest := []string{}
	push := func(p string) {
		parts := strings.Split(p, "/")
		slices.Reverse(parts)
		rest = append(rest, parts...)
	}
	push(name)
	links := 0
	for len(rest) > 0 {
		part := rest[len(rest)-1]
		rest = rest[:len(rest)-1]
		at := stack[len(stack)-1]
		switch {
		case at.children == nil:
			return fail(syscall.ENOTDIR)
		case part == "" || part == ".":
			continue
		case part == "..":
			if len(stack) == 1 {
				return fail(fs.ErrNotExist) // outside of the tree
			}
			stack = stack[:len(stack)-1]
			continue
		}
		next := at.children[part]
		if next == nil {
			return fail(fs.ErrNotExist)
		}
		if next.link != "" && (last || len(rest) > 0) {
			if links++; links > maxLinks {
				return fail(syscall.ELOOP)
			}
			push(next.link)
			continue
		}
		stack = append(stack, next)
	}
	return stack[len(stack)-1], nil
}

// Open opens a file or a folder.
func (f *FS) Open(name string) (fs.File, error) {
	n, err := f.lookup("open", name, true)
	if err != nil {
		return nil, err
	}
	i := info{n, path.Base(name)}
	if n.children != nil {
		return &folder{i, entries(n), 0}, nil
	}
	return &file{i, bytes.NewReader(n.data)}, nil
}

// ReadFile returns a copy of a file's contents.
func (f *FS) ReadFile(name string) ([]byte, error) {
	n, err := f.lookup("read", name, true)
	if err != nil {
		return nil, err
	}
	if n.children != nil {
		return nil, &fs.PathError{Op: "read", Path: name, Err: syscall.EISDIR}
	}
	return slices.Clone(n.data), nil
}

// ReadDir returns a folder's entries, sorted by name.
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	n, err := f.lookup("open", name, true)
	if err != nil {
		return nil, err
	}
	if n.children == nil {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: syscall.ENOTDIR}
	}
	return entries(n), nil
}

// ReadLink returns the destination of a symbolic link.
func (f *FS) ReadLink(name string) (string, error) {
	n, err := f.lookup("readlink", name, false)
	if err != nil {
		return "", err
	}
	if n.link == "" {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrInvalid}
	}
	return n.link, nil
}

// Stat returns information about what a name leads to.
func (f *FS) Stat(name string) (fs.FileInfo, error) {
	n, err := f.lookup("stat", name, true)
	if err != nil {
		return nil, err
	}
	return info{n, path.Base(name)}, nil
}

// Lstat returns information about a name itself.
func (f *FS) Lstat(name string) (fs.FileInfo, error) {
	n, err := f.lookup("lstat", name, false)
	if err != nil {
		return nil, err
	}
	return info{n, path.Base(name)}, nil
}

func entries(n *node) []fs.DirEntry {
	var all []fs.DirEntry
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		all = append(all, fs.FileInfoToDirEntry(info{n.children[name], name}))
	}
	return all
}

type info struct {
	n    *node
	name string
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return int64(len(i.n.data)) }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) IsDir() bool        { return i.n.children != nil }
func (i info) Sys() any           { return nil }

func (i info) Mode() fs.FileMode {
	switch {
	case i.n.children != nil:
		return fs.ModeDir | 0o555
	case i.n.link != "":
		return fs.ModeSymlink | 0o777
	}
	return 0o444
}

type file struct {
	info info
	*bytes.Reader
}

func (f *file) Stat() (fs.FileInfo, error) { return f.info, nil }
func (f *file) Close() error               { return nil }

type folder struct {
	info info
	all  []fs.DirEntry
	at   int
}

func (d *folder) Stat() (fs.FileInfo, error) { return d.info, nil }
func (d *folder) Close() error               { return nil }

func (d *folder) Read([]byte) (int, error) {
	return 0, &fs.PathError{Op: "read", Path: d.info.name, Err: syscall.EISDIR}
}

// ReadDir returns the next n entries, or all remaining ones if n is not positive.
func (d *folder) ReadDir(n int) ([]fs.DirEntry, error) {
	rest := d.all[d.at:]
	if n > 0 && len(rest) == 0 {
		return nil, io.EOF
	}
	if n > 0 && n < len(rest) {
		rest = rest[:n]
	}
	d.at += len(rest)
	return slices.Clone(rest), nil
}
