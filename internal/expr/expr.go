package expr

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/google/cel-go/cel"

	"github.com/gpuctl/gpuctl/internal/celenv"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

// ErrInvalid is wrapped by all errors about an expression that cannot be used.
var ErrInvalid = errors.New("invalid expression")

// Fields are the variables of an expression and their types. Each can be written with or
// without the kind before it, as in memory and gpu.memory.
type Fields struct {
	kind  string
	types map[string]*cel.Type
}

// GPU returns the fields of a GPU. Memory is in bytes.
func GPU() Fields {
	return Fields{"gpu", map[string]*cel.Type{
		"id": cel.StringType, "model": cel.StringType, "vendor": cel.StringType, "type": cel.StringType,
		"memory": cel.IntType, "free_memory": cel.IntType, "max_alloc": cel.IntType, "local_memory": cel.IntType,
		"compute_units": cel.IntType, "clock_mhz": cel.IntType, "max_work_group_size": cel.IntType,
		"images": cel.BoolType, "fp64": cel.BoolType, "free": cel.BoolType,
		"runtime": cel.StringType, "driver": cel.StringType, "version": cel.StringType,
		"rank": cel.IntType, "pci_address": cel.StringType, "extensions": cel.ListType(cel.StringType),
		"uuid": cel.StringType, "engines": cel.ListType(cel.StringType),
	}}
}

// Session returns the fields of a session. Memory is what it uses, in bytes.
func Session() Fields {
	return Fields{"session", map[string]*cel.Type{
		"id": cel.StringType, "claim": cel.StringType, "pid": cel.IntType, "command": cel.StringType,
		"state": cel.StringType, "gpu": cel.StringType, "model": cel.StringType, "memory": cel.IntType,
		"generation": cel.IntType, "calls": cel.IntType, "launches": cel.IntType, "suspended_to": cel.StringType,
		"engine": cel.StringType,
	}}
}

// Expr is a compiled expression. It is safe for concurrent use.
type Expr struct {
	source  string
	kind    string
	program *celenv.Program
}

// Compile compiles an expression over the fields. The empty expression is true. Errors
// wrap ErrInvalid.
func Compile(source string, fields Fields) (*Expr, error) {
	if strings.TrimSpace(source) == "" {
		return &Expr{}, nil
	}
	if len(source) > celenv.MaxLength {
		return nil, fmt.Errorf("%w: longer than %d bytes", ErrInvalid, celenv.MaxLength)
	}
	var options []cel.EnvOption
	for _, name := range slices.Sorted(maps.Keys(fields.types)) {
		options = append(options, cel.Variable(fields.kind+"."+name, fields.types[name]))
	}
	for name := range units() {
		options = append(options, cel.Variable(name, cel.IntType))
	}
	env, err := celenv.New(fields.kind, options...)
	if err != nil {
		return nil, err
	}
	ast, issues := env.Compile(source)
	if issues.Err() != nil {
		return nil, fmt.Errorf("%w %q: %s%s", ErrInvalid, source, brief(issues), hint(issues, fields))
	}
	program, err := env.Program(ast)
	if err != nil {
		return nil, fmt.Errorf("%w %q: %w", ErrInvalid, source, err)
	}
	return &Expr{source, fields.kind, program}, nil
}

// String returns the expression's source.
func (e *Expr) String() string { return e.source }

// Match reports whether the expression is true for an object, which must have a value for
// each field that the expression was compiled with.
func (e *Expr) Match(ctx context.Context, object map[string]any) (bool, error) {
	if e.program == nil {
		return true, nil
	}
	vars := units()
	for name, value := range object {
		vars[e.kind+"."+name] = value
	}
	matched, err := e.program.Match(ctx, vars)
	if err != nil {
		return false, fmt.Errorf("expression %q: %w", e.source, err)
	}
	return matched, nil
}

// Int converts an amount to a CEL integer. If it is too large, it returns the largest
// integer.
func Int(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

func units() map[string]any {
	return map[string]any{
		"KiB": int64(size.KiB), "MiB": int64(size.MiB), "GiB": int64(size.GiB), "TiB": int64(size.TiB),
	}
}

func brief(issues *cel.Issues) string {
	var all []string
	for _, e := range issues.Errors() {
		all = append(all, e.Message)
	}
	return strings.Join(all, "; ")
}

// hint returns the field whose name is nearest to an unknown one, or all fields.
func hint(issues *cel.Issues, fields Fields) string {
	names := slices.Sorted(maps.Keys(fields.types))
	for _, e := range issues.Errors() {
		_, rest, ok := strings.Cut(e.Message, "undeclared reference to '")
		if !ok {
			continue
		}
		name, _, _ := strings.Cut(rest, "'")
		if h := suggest.Hint(name, names); h != "" {
			return h
		}
		return " (fields: " + strings.Join(names, ", ") + ")"
	}
	return ""
}
