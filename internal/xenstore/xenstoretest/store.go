package xenstoretest

import (
	"maps"
	"slices"
	"strings"
	"syscall"

	"github.com/gpuctl/gpuctl/internal/xenstore"
)

// node is not changed after it is in a view: it is replaced.
type node struct {
	value      string
	children   []string
	perms      []xenstore.Permission
	generation uint64
}

// view is the store, or a transaction's view of it.
type view struct {
	nodes   map[string]*node
	touched map[string]uint64 // generations that a transaction has read; nil outside of a transaction
	written map[string]bool
	changed []change
	next    *uint64 // last generation
}

type change struct {
	path  string
	exact bool // only for watches on this very path; those above it get another event
}

func (v *view) begin() *view {
	return &view{nodes: maps.Clone(v.nodes), touched: map[string]uint64{}, written: map[string]bool{}, next: v.next}
}

// commit commits a transaction. It fails if something that the transaction has read has
// changed.
func (v *view) commit(tx *view) bool {
	for path, seen := range tx.touched {
		if v.generation(path) != seen {
			return false
		}
	}
	for path := range tx.written {
		if n := tx.nodes[path]; n != nil {
			c := *n
			c.generation = v.bump()
			v.nodes[path] = &c
		} else {
			delete(v.nodes, path)
		}
	}
	v.changed = append(v.changed, tx.changed...)
	return true
}

func (v *view) bump() uint64 {
	*v.next++
	return *v.next
}

func (v *view) generation(path string) uint64 {
	if n := v.nodes[path]; n != nil {
		return n.generation
	}
	return 0
}

func (v *view) get(path string) *node {
	if _, seen := v.touched[path]; v.touched != nil && !seen && !v.written[path] {
		v.touched[path] = v.generation(path)
	}
	return v.nodes[path]
}

func (v *view) put(path string, n node) {
	v.get(path)
	n.generation = v.bump()
	v.nodes[path] = &n
	if v.written != nil {
		v.written[path] = true
	}
}

func parent(path string) string {
	at := strings.LastIndexByte(path, '/')
	if at <= 0 {
		return "/"
	}
	return path[:at]
}

// check returns an error unless a domain may access a node or, if the node does not
// exist, make it below the nearest existing one.
func (v *view) check(domain uint16, path string, access xenstore.Access) error {
	n := v.get(path)
	for n == nil && path != "/" {
		if access == xenstore.AccessRead {
			return syscall.ENOENT
		}
		path = parent(path)
		n = v.get(path)
	}
	if domain == 0 || allowed(n.perms, domain, access) {
		return nil
	}
	return syscall.EACCES
}

func allowed(perms []xenstore.Permission, domain uint16, access xenstore.Access) bool {
	if perms[0].Domain == domain {
		return true
	}
	has := perms[0].Access
	for _, p := range perms[1:] {
		if p.Domain == domain {
			has = p.Access
		}
	}
	return has == access || has == xenstore.AccessBoth
}

// make makes a node and those above it.
func (v *view) make(domain uint16, path string) *node {
	if n := v.get(path); n != nil {
		return n
	}
	above := v.make(domain, parent(path))
	perms := slices.Clone(above.perms)
	if domain != 0 {
		perms[0].Domain = domain
	}
	with := *above
	with.children = append(slices.Clone(above.children), path[strings.LastIndexByte(path, '/')+1:])
	v.put(parent(path), with)
	v.put(path, node{perms: perms})
	return v.nodes[path]
}

func (v *view) write(domain uint16, path, value string) error {
	if err := v.check(domain, path, xenstore.AccessWrite); err != nil {
		return err
	}
	n := *v.make(domain, path)
	n.value = value
	v.put(path, n)
	v.changed = append(v.changed, change{path: path})
	return nil
}

func (v *view) mkdir(domain uint16, path string) error {
	if err := v.check(domain, path, xenstore.AccessWrite); err != nil {
		return err
	}
	if v.get(path) == nil {
		v.make(domain, path)
		v.changed = append(v.changed, change{path: path})
	}
	return nil
}

func (v *view) remove(domain uint16, path string) error {
	if path == "/" {
		return syscall.EINVAL
	}
	if v.get(path) == nil {
		if v.get(parent(path)) == nil {
			return syscall.ENOENT
		}
		return nil
	}
	if err := v.check(domain, path, xenstore.AccessWrite); err != nil {
		return err
	}
	above := *v.get(parent(path))
	name := path[strings.LastIndexByte(path, '/')+1:]
	above.children = slices.DeleteFunc(slices.Clone(above.children), func(c string) bool { return c == name })
	v.put(parent(path), above)
	v.drop(path, false)
	return nil
}

func (v *view) drop(path string, exact bool) {
	for _, child := range v.get(path).children {
		v.drop(path+"/"+child, true)
	}
	delete(v.nodes, path)
	if v.written != nil {
		v.written[path] = true
	}
	v.changed = append(v.changed, change{path, exact})
}

// validName reports whether xenstored accepts a path.
func validName(path string) bool {
	if !strings.HasPrefix(path, "/") || len(path) > xenstore.MaxAbsolutePath || strings.Contains(path, "//") || len(path) > 1 && strings.HasSuffix(path, "/") {
		return false
	}
	return strings.IndexFunc(path, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-/_@", r)
	}) < 0
}
