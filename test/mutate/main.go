// Command mutate removes each check of a package in turn and reports whether the
// package's tests notice. A check is a line with a comment "//check:NAME": the
// condition of an if or of a case never holds then, a default is never taken, and a call is not
// made. The source stays as it is: a copy in which each check can be switched off is
// compiled once, with an overlay, and the tests run once for each check.
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
	"strconv"
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
	pkg        string
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
	if err := m.build(ctx, all); err != nil {
		return err
	}
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
	add := func(where, from, to token.Pos, with func(name, text string) string) {
		line := set.Position(where).Line
		name, ok := names[line]
		if !ok {
			return
		}
		delete(names, line)
		all = append(all, check{name, file, tree.Name.Name, line, at(from), at(to), with(name, string(text[at(from):at(to)]))})
	}
	unless := func(name string) string { return fmt.Sprintf("!mutateRemoved(%q)", name) }
	both := func(name, cond string) string { return unless(name) + " && (" + cond + ")" }
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.IfStmt:
			add(n.Body.Lbrace, n.Cond.Pos(), n.Cond.End(), both)
		case *ast.CaseClause:
			if n.List == nil {
				add(n.Colon, n.Case, n.Colon+1, func(name, _ string) string {
					return "default:\nif mutateRemoved(" + strconv.Quote(name) + ") { break }\n"
				})
			} else {
				add(n.Colon, n.List[0].Pos(), n.List[0].End(), both)
			}
		case *ast.ExprStmt:
			add(n.Pos(), n.Pos(), n.End(), func(name, call string) string { return "if " + unless(name) + " { " + call + " }" })
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

// switches is a file of the changed package: it says which check is switched off.
const switches = `package %s

import "os"

var mutateOff = os.Getenv("MUTATE_OFF")

func mutateRemoved(name string) bool { return name == mutateOff }
`

// build compiles the tests with a switch for each check.
func (m *mutator) build(ctx context.Context, all []check) error {
	replace := map[string]string{}
	write := func(file string, text []byte) error {
		changed := filepath.Join(m.tmp, filepath.Base(file))
		replace[file] = changed
		return os.WriteFile(changed, text, 0o600)
	}
	byFile := map[string][]check{}
	for _, c := range all {
		byFile[c.file] = append(byFile[c.file], c)
	}
	for file, some := range byFile {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		slices.SortFunc(some, func(a, b check) int { return b.from - a.from }) // from the end, so that places stay
		for _, c := range some {
			text = slices.Concat(text[:c.from], []byte(c.with), text[c.to:])
		}
		if err := write(file, text); err != nil {
			return err
		}
	}
	if err := write(filepath.Join(m.dir, "zz_mutate.go"), fmt.Appendf(nil, switches, all[0].pkg)); err != nil {
		return err
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		return err
	}
	file := filepath.Join(m.tmp, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-o", filepath.Join(m.tmp, "tests"), "-overlay", file, m.dir)
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("it can't be built with switches: %w\n%s", err, text)
	}
	return nil
}

// try runs the tests without a check, and returns how they noticed, "" if they did not.
func (m *mutator) try(ctx context.Context, c *check) (how string, err error) {
	runs, off := []string{"."}, ""
	if c != nil {
		off = c.name
	}
	if m.first != "" && c != nil {
		runs = []string{m.first, "."}
	}
	for _, tests := range runs {
		if how, err = m.tests(ctx, tests, off); how != "" || err != nil {
			return how, err
		}
	}
	return "", nil
}

var failed = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

func (m *mutator) tests(ctx context.Context, pattern, off string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(m.tmp, "tests"), "-test.failfast", "-test.short", "-test.timeout=300s", "-test.run="+pattern,
		fmt.Sprintf("-rapid.checks=%d", m.checks), "-rapid.nofailfile", "-rapid.shrinktime=1ms")
	cmd.Dir = m.dir
	cmd.Env = append(os.Environ(), "MUTATE_OFF="+off)
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
