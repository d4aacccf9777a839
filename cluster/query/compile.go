package query

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/interpreter"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/celenv"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

// ErrInvalid is wrapped by all errors about an expression that cannot be used.
var ErrInvalid = reason.New(reason.Invalid, "invalid expression")

// Query is a compiled expression over the objects of one kind. It is safe for concurrent
// use.
type Query struct {
	kind   clusterv1.Kind
	source string
	fields []field         // fields of the kind
	ctx    context.Context //nolint:containedctx // of Within: it bounds this copy of the query; nil: none does

	// The following are empty for the query that matches everything.
	program *celenv.Program
	byName  map[string]*field   // fields by the names that the program uses
	used    []int               // numbers of the fields that the lowered expression reads, by slot
	lowered predicate           // nil: no part of the expression could be lowered
	parts   []predicate         // parts whose conjunction lowered is
	exact   bool                // lowered is equivalent to the whole expression
	keys    map[string][]string // indexed fields that must equal one of some constants
}

// Compile compiles an expression over the fields of a kind. The empty expression matches
// everything. Errors wrap ErrInvalid.
func Compile(kind clusterv1.Kind, where string) (*Query, error) {
	return newLanguage(kind).compile(where)
}

// Within returns a copy of the query that fails when ctx has ended.
func (q *Query) Within(ctx context.Context) *Query {
	out := *q
	out.ctx = ctx
	return &out
}

func (q *Query) context() context.Context {
	if q.ctx == nil {
		return context.Background()
	}
	return q.ctx
}

// String returns the query's expression.
func (q *Query) String() string { return q.source }

// Kind returns the kind of the objects that the query is over.
func (q *Query) Kind() clusterv1.Kind { return q.kind }

// Uses reports whether the expression may read a field.
func (q *Query) Uses(name string) bool {
	if q.program == nil {
		return false
	}
	if !q.exact {
		return true
	}
	for _, i := range q.used {
		if q.fields[i].name == name {
			return true
		}
	}
	return false
}

// language is the CEL environment for expressions over one kind. Making it takes longer
// than most queries, so it is made once.
type language struct {
	kind   clusterv1.Kind
	name   string
	fields []field
	byName map[string]*field
	env    func() (*celenv.Env, error)
}

func newLanguage(kind clusterv1.Kind) *language {
	l := &language{kind: kind, name: KindName(kind), fields: fieldsOf(kind), byName: map[string]*field{}}
	for i := range l.fields {
		l.byName[l.name+"."+l.fields[i].name] = &l.fields[i]
	}
	l.env = sync.OnceValues(l.newEnv)
	return l
}

func (l *language) newEnv() (*celenv.Env, error) {
	var options []cel.EnvOption
	for i := range l.fields {
		f := &l.fields[i]
		options = append(options, cel.Variable(l.name+"."+f.name, f.celType()))
	}
	for _, unit := range []struct {
		name  string
		bytes int64
	}{{"KiB", size.KiB}, {"MiB", size.MiB}, {"GiB", size.GiB}, {"TiB", size.TiB}} {
		options = append(options, cel.Constant(unit.name, cel.IntType, types.Int(unit.bytes)))
	}
	return celenv.New(l.name, options...)
}

func (l *language) compile(where string) (*Query, error) {
	if len(l.fields) == 0 {
		return nil, fmt.Errorf("%w: there are no objects of kind %q", ErrInvalid, l.name)
	}
	q := &Query{kind: l.kind, source: where, fields: l.fields, byName: l.byName}
	if len(where) > celenv.MaxLength {
		return nil, fmt.Errorf("%w: longer than %d bytes", ErrInvalid, celenv.MaxLength)
	}
	if strings.TrimSpace(where) == "" {
		return q, nil
	}
	env, err := l.env()
	if err != nil {
		return nil, err
	}
	parsed, issues := env.Parse(where)
	if issues.Err() != nil {
		return nil, fmt.Errorf("%w %q: %s", ErrInvalid, where, brief(issues))
	}
	checked, issues := env.Check(parsed)
	if issues.Err() != nil {
		return nil, fmt.Errorf("%w %q: %s%s", ErrInvalid, where, brief(issues), l.hint(parsed.NativeRep()))
	}
	q.program, err = env.Program(checked)
	if err != nil {
		return nil, fmt.Errorf("%w %q: %w", ErrInvalid, where, err)
	}
	q.lower(checked.NativeRep())
	return q, nil
}

func brief(issues *cel.Issues) string {
	var all []string
	for _, e := range issues.Errors() {
		all = append(all, e.Message)
		if len(all) == 3 {
			break
		}
	}
	return strings.Join(all, "; ")
}

// hint returns the field whose name is nearest to an unknown one, or all fields.
func (l *language) hint(parsed *ast.AST) string {
	var names []string
	for i := range l.fields {
		names = append(names, l.fields[i].name)
	}
	var out string
	bound := map[string]bool{} // variables that macros bind
	ast.PreOrderVisit(parsed.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		var name string
		switch e.Kind() {
		case ast.ComprehensionKind:
			c := e.AsComprehension()
			bound[c.IterVar()], bound[c.IterVar2()], bound[c.AccuVar()] = true, true, true
		case ast.SelectKind:
			s := e.AsSelect()
			if s.Operand().Kind() == ast.IdentKind && s.Operand().AsIdent() == l.name && l.byName[l.name+".labels"] == nil {
				name = s.FieldName()
			}
		case ast.IdentKind:
			name = e.AsIdent()
			if name == l.name {
				name = ""
			}
		}
		if name == "" || out != "" || bound[name] || l.byName[l.name+"."+name] != nil || l.byName[name] != nil {
			return
		}
		switch name {
		case "KiB", "MiB", "GiB", "TiB":
			return
		}
		if out = suggest.Hint(name, names); out == "" {
			out = fmt.Sprintf(" (a %s has no field %s; fields: %s)", l.name, name, strings.Join(names, ", "))
		}
	}))
	return out
}

// values gives an object's fields to CEL's interpreter, one at a time.
type values struct {
	q *Query
	o object
}

func (v values) ResolveName(name string) (any, bool) {
	f, ok := v.q.byName[name]
	if !ok {
		return nil, false
	}
	return f.value(v.o), true
}

func (v values) Parent() interpreter.Activation { return nil }

// ask evaluates the expression with CEL's interpreter.
func (q *Query) ask(o object) (bool, error) {
	return q.program.Match(q.context(), values{q, o})
}
