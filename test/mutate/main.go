// Command mutate removes each check of a package in turn and reports whether the
// package's tests notice. A check is a line with a comment "//check:NAME": the
// condition of an if or of a case never holds then, a default is never taken, and a call is not
// made. The source stays as it is: a changed copy is compiled with an overlay.
//
//	mutate [-only NAME,NAME] [-first REGEXP] FOLDER
//
// The exit status is 0 if each was noticed.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

// check is a place where a check can be removed.
type check struct {
	name, file string
	line       int
	from, to   int    // bytes of the file that are replaced
	with       string // what replaces them
}

var errSurvived = errors.New("nobody noticed")

func run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("mutate", flag.ContinueOnError)
	only := fs.String("only", "", "the `names` of the checks to remove, with commas between (default: all)")
	first := fs.String("first", "", "a `regexp` of tests that are quick and notice most; all others run if these do not")
	checks := fs.Int("checks", 20, "how many random cases a property is tried with")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() != 1 {
		return errors.New("name one folder")
	}
	dir, err := filepath.Abs(fs.Arg(0))
	if err != nil {
		return err
	}
	all, err := find(dir)
	if err != nil {
		return err
	}
	if *only != "" {
		all = slices.DeleteFunc(all, func(c check) bool { return !slices.Contains(strings.Split(*only, ","), c.name) })
	}
	if len(all) == 0 {
		return fmt.Errorf("no checks in %s", dir)
	}
	m := &mutator{dir: dir, first: *first, checks: *checks}
	if m.tmp, err = os.MkdirTemp("", "mutate"); err != nil {
		return err
	}
	defer os.RemoveAll(m.tmp)
	if how, err := m.try(ctx, nil); err != nil {
		return fmt.Errorf("with all checks: %w", err)
	} else if how != "" {
		return fmt.Errorf("the tests fail with all checks: %s", how)
	}
	var alive []string
	for _, c := range all {
		begin := time.Now()
		how, err := m.try(ctx, &c)
		if err != nil {
			return fmt.Errorf("without %s (%s:%d): %w", c.name, filepath.Base(c.file), c.line, err)
		}
		if how == "" {
			alive = append(alive, c.name)
			how = "NOT NOTICED"
		}
		fmt.Fprintf(out, "%-20s %-16s %5.1f s  %s\n", c.name, fmt.Sprintf("%s:%d", filepath.Base(c.file), c.line), time.Since(begin).Seconds(), how)
	}
	fmt.Fprintf(out, "%d of %d removed checks were noticed\n", len(all)-len(alive), len(all))
	if len(alive) > 0 {
		return fmt.Errorf("%s: %w", strings.Join(alive, ", "), errSurvived)
	}
	return nil
}

// find lists the checks of a folder.
func find(dir string) (all []check, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		some, err := findIn(file)
		if err != nil {
			return nil, err
		}
		for _, c := range some {
			if seen[c.name] {
				return nil, fmt.Errorf("%s:%d: there are two checks %s", file, c.line, c.name)
			}
			seen[c.name] = true
		}
		all = append(all, some...)
	}
	return all, nil
}

func findIn(file string) (all []check, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, file, text, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	names := map[int]string{} // by line
	for _, group := range tree.Comments {
		for _, c := range group.List {
			if name, ok := strings.CutPrefix(c.Text, "//check:"); ok {
				names[set.Position(c.Pos()).Line] = name
			}
		}
	}
	at := func(p token.Pos) int { return set.Position(p).Offset }
	add := func(where token.Pos, from, to token.Pos, with func(string) string) {
		line := set.Position(where).Line
		name, ok := names[line]
		if !ok {
			return
		}
		delete(names, line)
		all = append(all, check{name, file, line, at(from), at(to), with(string(text[at(from):at(to)]))})
	}
	never := func(cond string) string { return "false && (" + cond + ")" }
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.IfStmt:
			add(n.Body.Lbrace, n.Cond.Pos(), n.Cond.End(), never)
		case *ast.CaseClause:
			if n.List == nil {
				add(n.Colon, n.Case, n.Colon, func(string) string { return "case 255" })
			} else {
				add(n.Colon, n.List[0].Pos(), n.List[0].End(), never)
			}
		case *ast.ExprStmt:
			add(n.Pos(), n.Pos(), n.End(), func(string) string { return "{}" })
		}
		return true
	})
	for line, name := range names {
		return nil, fmt.Errorf("%s:%d: check %s is on no if, case, default or call", file, line, name)
	}
	slices.SortFunc(all, func(a, b check) int { return a.line - b.line })
	return all, nil
}

type mutator struct {
	dir, tmp, first string
	checks          int
}

// try runs the tests without a check, and returns how they noticed, "" if they did not.
func (m *mutator) try(ctx context.Context, c *check) (how string, err error) {
	program := filepath.Join(m.tmp, "tests")
	args := []string{"test", "-c", "-vet=off", "-o", program}
	if c != nil {
		overlay, err := m.overlay(c)
		if err != nil {
			return "", err
		}
		args = append(args, "-overlay", overlay)
	}
	build := exec.CommandContext(ctx, "go", append(args, m.dir)...)
	if text, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("it can't be built: %w\n%s", err, text)
	}
	runs := []string{"."}
	if m.first != "" && c != nil {
		runs = []string{m.first, "."}
	}
	for _, tests := range runs {
		if how, err = m.tests(ctx, program, tests); how != "" || err != nil {
			return how, err
		}
	}
	return "", nil
}

var failed = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

func (m *mutator) tests(ctx context.Context, program, pattern string) (string, error) {
	cmd := exec.CommandContext(ctx, program, "-test.failfast", "-test.short", "-test.timeout=300s", "-test.run="+pattern,
		fmt.Sprintf("-rapid.checks=%d", m.checks), "-rapid.nofailfile", "-rapid.shrinktime=1ms")
	cmd.Dir = m.dir
	text, err := cmd.CombinedOutput()
	if err == nil {
		return "", nil
	}
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	if f := failed.FindSubmatch(text); f != nil {
		return string(f[1]), nil
	}
	line, _, _ := bytes.Cut(bytes.TrimSpace(text), []byte("\n"))
	return string(line), nil
}

// overlay writes the changed file, and returns what tells the compiler of it.
func (m *mutator) overlay(c *check) (string, error) {
	text, err := os.ReadFile(c.file)
	if err != nil {
		return "", err
	}
	changed := filepath.Join(m.tmp, filepath.Base(c.file))
	text = slices.Concat(text[:c.from], []byte(c.with), text[c.to:])
	if err := os.WriteFile(changed, text, 0o600); err != nil {
		return "", err
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {c.file: changed}})
	if err != nil {
		return "", err
	}
	file := filepath.Join(m.tmp, "overlay.json")
	return file, os.WriteFile(file, overlay, 0o600)
}
