package beneath_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// careful are the packages that open what others can have put there.
var careful = []string{"guest/session", "guest/opencl/compiled", "guest/cuda", "guest/cuda/ask", "guest/cuda/criu", "guest/cuda/holders"}

// privileged are folders of packages that root runs and that open files only
// where nobody else can write: see the table in docs/security.md.
var privileged = []string{"hostd", "migrate", "passthrough", "cluster"}

// naive are calls that follow links and wait for what they open.
var naive = map[string][]string{
	"os":     {"Open", "OpenFile", "Create", "CreateTemp", "ReadFile", "WriteFile", "ReadDir"},
	"unix":   {"Open"},
	"ioutil": {"ReadFile", "WriteFile", "TempFile", "ReadDir"},
}

// following are calls that follow links, too; the packages that root runs say
// of them as well why they may.
var following = map[string][]string{"os": {"Chmod", "Chown", "Chtimes", "Mkdir", "MkdirAll", "MkdirTemp", "Truncate"}, "unix": {"Chmod", "Chown", "Mkdir"}}

// Why calls of the packages that root runs need no care.
const (
	state    = "in the data folder, or the run folder: hostd starts on none that others can change (rundir.Own)"
	own      = "in the run folder, the same"
	operator = "named by who started hostd, or in hostd's configuration"
	kernels  = "a folder of the kernel's"
	user     = "in gpuctl's own user's folder; gpuctl, not hostd, calls it"
)

// allowed are functions that have their reasons.
var allowed = map[string]string{
	"guest/session: openDescriptors": "a folder of the kernel's; what is in it is only pinned",
	"guest/session: adoptAll":        "lists gpuguest's own folder",
	"guest/session: openPipe":        "a named pipe of gpuguest's own, in its own folder",
	"guest/session: syncRename":      "opens nothing that it reads or writes: what it syncs has been written",

	"cluster/access: open":                state,
	"cluster/pki: List":                   user,
	"cluster/pki: make":                   state,
	"cluster/pki: readFile":               state,
	"cluster/pki: sync":                   state,
	"cluster/replica: disk":               state,
	"cluster/replica: prepare":            state,
	"cluster/replica: syncDir":            state,
	"hostd/config: Load":                  operator,
	"hostd/mediated: start":               own,
	"hostd/member: newIdentity":           state,
	"hostd/member: open":                  state,
	"hostd/member: readIdentity":          state,
	"hostd/migration/endpoint: OpenFence": state,
	"hostd/migration/endpoint: sum":       "a file that a VM's definition names, as libvirt opens it; only its sum is compared",
	"hostd/migration/stash: Begin":        own,
	"hostd/migration/stash: Open":         own,
	"hostd/migration/stash: Send":         own,
	"hostd/migration/stash: read":         own,
	"hostd/migration/stash: tidy":         own,
	"hostd: Ensure":                       own,
	"hostd: listen":                       own,
	"hostd: makeData":                     state,
	"hostd/sessions: readJournal":         own,
	"hostd: tail":                         own,
	"passthrough/bind: OpenJournal":       state,
	"passthrough/bind: readJournal":       state,
	"passthrough/bind: write":             state,
	"passthrough/catalog: readFile":       operator,
	"passthrough/reset: Recover":          state,
	"passthrough/reset: readRecord":       state,
	"passthrough/reset: record":           state,
	"passthrough/sysfs: writeOnce":        kernels,
	"passthrough/xen: open":               kernels,
}

func TestFilesOfOthersAreOpenedThroughThisPackage(t *testing.T) {
	found := map[string]bool{}
	for _, pkg := range append(ofRoot(t), careful...) {
		files, err := filepath.Glob(filepath.Join("../..", pkg, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatal(pkg, files, err)
		}
		set := token.NewFileSet()
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(set, file, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range f.Decls {
				where := pkg
				if fn, ok := d.(*ast.FuncDecl); ok {
					where += ": " + fn.Name.Name
				}
				ast.Inspect(d, func(n ast.Node) bool {
					s, ok := n.(*ast.SelectorExpr)
					if !ok {
						return true
					}
					x, ok := s.X.(*ast.Ident)
					if !ok {
						return true
					}
					calls := naive[x.Name]
					if !slices.Contains(careful, pkg) {
						calls = append(slices.Clone(calls), following[x.Name]...)
					}
					for _, name := range calls {
						if name != s.Sel.Name {
							continue
						}
						if found[where] = true; allowed[where] == "" {
							t.Errorf("%s: %s.%s follows what others put there: use internal/beneath, or say here why %q may", set.Position(n.Pos()), x.Name, name, where)
						}
					}
					return true
				})
			}
		}
	}
	for where := range allowed {
		if !found[where] {
			t.Errorf("%s opens nothing any more: take it out of what is allowed", where)
		}
	}
}

// ofRoot are the packages in the privileged folders, without those of tests.
func ofRoot(t *testing.T) (packages []string) {
	const root = "../.."
	for _, folder := range privileged {
		err := filepath.WalkDir(filepath.Join(root, folder), func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.IsDir() || e.Name() == "testdata" || strings.HasSuffix(e.Name(), "test") {
				return err
			}
			if files, _ := filepath.Glob(filepath.Join(path, "*.go")); len(files) == 0 {
				return nil
			}
			pkg, err := filepath.Rel(root, path)
			packages = append(packages, pkg)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return packages
}
