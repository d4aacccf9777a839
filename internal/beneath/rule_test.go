package beneath_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// careful are the packages that open what others can have put there.
var careful = []string{"guest/session"}

// naive are calls that follow links and wait for what they open.
var naive = map[string][]string{
	"os":     {"Open", "OpenFile", "Create", "CreateTemp", "ReadFile", "WriteFile", "ReadDir"},
	"unix":   {"Open"},
	"ioutil": {"ReadFile", "WriteFile", "TempFile", "ReadDir"},
}

// allowed are functions that have their reasons.
var allowed = map[string]string{
	"guest/session: openDescriptors": "a folder of the kernel's; what is in it is only pinned",
	"guest/session: adoptAll":        "lists gpuguest's own folder",
	"guest/session: openPipe":        "a named pipe of gpuguest's own, in its own folder",
	"guest/session: syncRename":      "opens nothing that it reads or writes: what it syncs has been written",
}

func TestFilesOfOthersAreOpenedThroughThisPackage(t *testing.T) {
	found := map[string]bool{}
	for _, pkg := range careful {
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
					for _, name := range naive[x.Name] {
						if name != s.Sel.Name {
							continue
						}
						if found[where] = true; allowed[where] == "" {
							t.Errorf("%s: %s.%s follows what others put there: use internal/beneath, or say here why it may", set.Position(n.Pos()), x.Name, name)
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
