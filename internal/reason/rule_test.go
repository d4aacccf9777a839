package reason_test

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

// asked are functions whose answer about a text is a decision.
var asked = map[string][]string{
	"strings": {"Contains", "ContainsAny", "ContainsFunc", "Count", "Cut", "CutPrefix", "CutSuffix", "EqualFold", "HasPrefix", "HasSuffix", "Index", "LastIndex", "Compare"},
	"bytes":   {"Contains", "HasPrefix", "HasSuffix", "Index", "Equal"},
	"slices":  {"Contains", "Index"},
	"regexp":  {"MatchString"},
}

// texts are methods and functions that give an error's words.
var texts = []string{"Error", "Message", "GetMessage", "GetError", "words"}

const (
	logged = "whether it was logged already: nothing else follows"
	spoken = "libvirt has one code for these, and says only in its message which it is"
)

// allowedText are functions that ask about the words of an error, and why.
var allowedText = map[string]string{
	"internal/virt: kind":          spoken,
	"internal/cli: news":           "whether it was said already: nothing else follows",
	"hostd/sessions: lostMessage":  "whether people were told where it computed: nothing else follows",
	"migrate: attempt":             logged,
	"hostd/inventory/nvml: absent": logged,
	"guest/engine: Retry":          logged,
	"guest/session: join":          logged,
	"hostd/mediated: Run":          logged,
	"hostd/borrow: serve":          logged,
	"hostd/borrow: relay":          logged,
	"hostd/sessions: withdraw":     logged,
	"guest/vm/channel: Serve":      logged,
}

// An exit status, a refusal or a retry that depends on a message changes when
// somebody writes a better one.
func TestNoConditionOnTheTextOfAnError(t *testing.T) {
	found := map[string]bool{}
	eachFile(t, func(path string, f *ast.File) {
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Body == nil {
				continue
			}
			where := filepath.Dir(path) + ": " + fn.Name.Name
			for _, what := range conditions(fn) {
				if found[where] = true; allowedText[where] == "" {
					t.Errorf("%s, %s: %s decides by the text of an error: give that a reason (internal/reason) or a value for errors.Is, or say here why it may", path, where, what)
				}
			}
		}
	})
	for where := range allowedText {
		if !found[where] {
			t.Errorf("%s decides by no text any more: take it out of what is allowed", where)
		}
	}
}

func TestRuleFindsConditions(t *testing.T) {
	for body, want := range map[string]int{
		`if strings.Contains(err.Error(), "x") {}`:                                              1,
		`text := err.Error(); low := strings.ToLower(text); return strings.HasPrefix(low, "x")`: 1,
		`if err.Error() == "x" {}`:                                                              1,
		`switch err.Error() { case "x": }`:                                                      1,
		`switch text := e.Message(); { case strings.Contains(text, "x"): }`:                     1,
		`if strings.HasPrefix(u.GetMessage(), "x") {}`:                                          1,
		`if f.Error() != nil || u.GetMessage() != "" {}`:                                        0,
		`return errors.New(err.Error())`:                                                        0,
		`text := other(); if strings.Contains(text, "x") {}`:                                    0,
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "x.go", "package p\nfunc f() { "+body+" }", 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := conditions(f.Decls[0].(*ast.FuncDecl)); len(got) != want {
			t.Errorf("%s: found %q, want %d", body, got, want)
		}
	}
}

// conditions are the decisions by an error's text in a function: also by
// variables that have got it.
func conditions(fn *ast.FuncDecl) (found []string) {
	var held []string // variables
	for _, p := range fn.Type.Params.List {
		for _, n := range p.Names {
			if typ, ok := p.Type.(*ast.Ident); ok && typ.Name == "string" && n.Name == "message" { // as libvirt's is handed on
				held = append(held, n.Name)
			}
		}
	}
	isText := func(e ast.Node) (is bool) {
		ast.Inspect(e, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				switch c := n.Fun.(type) {
				case *ast.SelectorExpr:
					is = is || slices.Contains(texts, c.Sel.Name) && len(n.Args) == 0
				case *ast.Ident:
					is = is || slices.Contains(texts, c.Name) && len(n.Args) == 1
				}
			case *ast.Ident:
				is = is || slices.Contains(held, n.Name)
			case *ast.FuncLit:
				return false
			}
			return true
		})
		return is
	}
	for before := -1; before != len(held); { // until nothing more holds one
		before = len(held)
		ast.Inspect(fn.Body, func(n ast.Node) bool {
			if a, ok := n.(*ast.AssignStmt); ok && len(a.Lhs) == len(a.Rhs) {
				for i, l := range a.Lhs {
					if id, ok := l.(*ast.Ident); ok && texty(a.Rhs[i]) && isText(a.Rhs[i]) && !slices.Contains(held, id.Name) {
						held = append(held, id.Name)
					}
				}
			}
			return true
		})
	}
	empty := func(e ast.Expr) bool {
		switch e := e.(type) {
		case *ast.Ident:
			return e.Name == "nil"
		case *ast.BasicLit:
			return e.Value == `""` || e.Kind != token.STRING
		}
		return false
	}
	ast.Inspect(fn.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			s, ok := n.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, ok := s.X.(*ast.Ident)
			if ok && slices.Contains(asked[x.Name], s.Sel.Name) && slices.ContainsFunc(n.Args, func(a ast.Expr) bool { return isText(a) }) {
				found = append(found, x.Name+"."+s.Sel.Name)
			}
		case *ast.BinaryExpr:
			if (n.Op == token.EQL || n.Op == token.NEQ) && !empty(n.X) && !empty(n.Y) && !stored(n.X) && !stored(n.Y) && (plain(n.X) && isText(n.X) || plain(n.Y) && isText(n.Y)) {
				found = append(found, "a comparison")
			}
		case *ast.SwitchStmt:
			if n.Tag != nil && plain(n.Tag) && isText(n.Tag) {
				found = append(found, "a switch")
			}
		}
		return true
	})
	return found
}

// stored is a field of an object's, which is compared with what it is to be.
func stored(e ast.Expr) bool {
	c, ok := e.(*ast.CallExpr)
	if !ok {
		return false
	}
	s, ok := c.Fun.(*ast.SelectorExpr)
	return ok && strings.HasPrefix(s.Sel.Name, "Get")
}

// plain is what is a text itself, not something made of one, as its length.
func plain(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident, *ast.BasicLit:
		return true
	case *ast.CallExpr:
		return texty(e)
	}
	return false
}

// texty is an expression whose value is the text of what is in it.
func texty(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return true
	case *ast.BinaryExpr:
		return e.Op == token.ADD
	case *ast.CallExpr:
		switch f := e.Fun.(type) {
		case *ast.Ident:
			return f.Name == "string" || f.Name == "clean" || slices.Contains(texts, f.Name)
		case *ast.SelectorExpr:
			x, ok := f.X.(*ast.Ident)
			return slices.Contains(texts, f.Sel.Name) && len(e.Args) == 0 || ok && x.Name == "strings" && !slices.Contains(asked["strings"], f.Sel.Name) || ok && x.Name == "fmt" && f.Sel.Name == "Sprintf"
		}
	}
	return false
}

// eachFile goes through the Go files of the whole source that are neither tests
// nor generated. What only tests use is as a test.
func eachFile(t *testing.T, see func(path string, f *ast.File)) {
	const root = "../.."
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case e.IsDir() && path != root && (strings.HasPrefix(e.Name(), ".") || slices.Contains([]string{"testdata", "test", "node_modules"}, e.Name()) || strings.HasSuffix(e.Name(), "test")):
			return fs.SkipDir
		case e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		if !ast.IsGenerated(f) {
			see(filepath.ToSlash(rel), f)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
