package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/hostd/command"
	"github.com/gpuctl/gpuctl/internal/cli"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

const root = "../.."

// documents are what people read. The folder of the manual is generated.
func documents(t *testing.T) (paths []string) {
	t.Helper()
	for _, pattern := range []string{"*.md", "docs/*.md", "*/DESIGN.md", "*/*/DESIGN.md", "*/*/*/DESIGN.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, found...)
	}
	if len(paths) < 15 {
		t.Fatalf("only %d documents: %v", len(paths), paths)
	}
	return paths
}

var (
	codeSpan  = regexp.MustCompile("`([^`\n]+)`")
	flagName  = regexp.MustCompile(`^--[a-z][a-z-]*`)
	wordOfRef = regexp.MustCompile(`^[a-z][a-z-]*$`)
	target    = regexp.MustCompile(`^[a-z][a-z-]*$`)
)

// snippets are the commands in a document: indented lines, and code between words.
func snippets(text string) (out []string) {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "    ") && !strings.HasPrefix(strings.TrimSpace(line), "#") {
			command, _, _ := strings.Cut(line, "  #")
			out = append(out, strings.Split(command, ";")...)
		}
		for _, m := range codeSpan.FindAllStringSubmatch(line, -1) {
			out = append(out, m[1])
		}
	}
	return out
}

// unknown returns what of a command does not exist; empty: all of it does.
func unknown(top *cobra.Command, words []string) string {
	at := top
	for i, w := range words {
		if strings.HasPrefix(w, "#") || w == "--" {
			break
		}
		if name := flagName.FindString(w); name != "" {
			name = name[2:]
			if at.Flags().Lookup(name) == nil && at.InheritedFlags().Lookup(name) == nil && name != "help" {
				return "--" + name + " of " + at.CommandPath()
			}
			continue
		}
		if !at.HasSubCommands() || !wordOfRef.MatchString(w) || i > 0 && strings.HasPrefix(words[i-1], "-") {
			continue // an argument
		}
		next := slices.IndexFunc(at.Commands(), func(c *cobra.Command) bool { return c.Name() == w || c.HasAlias(w) })
		if next < 0 {
			if at == top || at.Args != nil && at.Args(at, []string{w}) != nil {
				return w + " of " + at.CommandPath()
			}
			continue
		}
		at = at.Commands()[next]
	}
	return ""
}

// What documents tell people to type exists: commands, their flags, and targets of make.
func TestCommandsOfTheDocumentsExist(t *testing.T) {
	programs := map[string]*cobra.Command{"gpuctl": cli.Command(cmdutil.Stdio{}), "hostd": command.Command(cmdutil.Stdio{})}
	for _, c := range programs {
		c.InitDefaultCompletionCmd()
	}
	dry := exec.Command("make", "-s", "-C", root, "-pRrn", "clean") // prints the rules
	rules, err := dry.Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, path := range documents(t) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Base(path) == "CHANGELOG.md" {
			continue // of commands that have gone, too
		}
		for _, s := range snippets(string(text)) {
			words := strings.Fields(s)
			if len(words) < 2 || strings.ContainsAny(s, "─═…") {
				continue // a picture, or a message
			}
			name := strings.TrimPrefix(words[0], "bin/")
			if c := programs[name]; c != nil && (name == "gpuctl" || strings.HasPrefix(words[1], "-") || unknown(c, words[1:2]) == "") { // or it is said of hostd
				seen[name]++
				if what := unknown(c, words[1:]); what != "" {
					t.Errorf("%s: %q: there is no %s", path, s, what)
				}
			}
			if name != "make" {
				continue
			}
			for _, w := range words[1:] {
				if !target.MatchString(w) || strings.HasSuffix(words[0], ":") {
					break
				}
				if seen["make"]++; !strings.Contains(string(rules), "\n"+w+":") {
					t.Errorf("%s: %q: there is no target %s", path, s, w)
				}
			}
		}
	}
	t.Log(seen)
	for name, least := range map[string]int{"gpuctl": 100, "hostd": 5, "make": 30} {
		if seen[name] < least {
			t.Errorf("%d commands of %s were found: the test reads too little", seen[name], name)
		}
	}
}

func TestCommandsThatDoNotExistAreFound(t *testing.T) {
	c := cli.Command(cmdutil.Stdio{})
	for line, want := range map[string]string{
		"gpuctl get gpus -o wide":                    "",
		"gpuctl get gpus --where 'memory > 4*GiB'":   "",
		"gpuctl run --gpu any -- program --its-flag": "",
		"gpuctl atach web1 0000:65:00.0":             "atach of gpuctl",
		"gpuctl get gpus --wher x":                   "--wher of gpuctl get gpus",
		"gpuctl cluster tokns":                       "tokns of gpuctl cluster",
	} {
		if got := unknown(c, strings.Fields(line)[1:]); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}
