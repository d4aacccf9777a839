package celenv

import (
	"context"
	"errors"
	"fmt"
	"regexp/syntax"
	"strings"
	"time"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/overloads"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"
	"github.com/google/cel-go/ext"
	"github.com/google/cel-go/interpreter"
)

const (
	// MaxLength is the longest expression, in bytes.
	MaxLength = 4096
	// MaxText is the longest text that an evaluation may make, in bytes.
	MaxText = 8192

	maxNesting  = 64     // brackets and operators of an expression
	maxCost     = 20_000 // of one evaluation, in CEL's units
	maxLoops    = 16
	maxPattern  = 512 // bytes of a regular expression
	maxStates   = 500 // states of the program that it is compiled to
	checkEvery  = 64  // iterations of a loop between two checks of the context
	accumulator = "@result"
)

// longest limits the time of one evaluation. Usually the limit on its cost ends it much
// earlier.
const longest = 2 * time.Second

// ErrRefused means that an expression uses something that this language does not have.
var ErrRefused = errors.New("not available in these expressions")

// Env is an environment for expressions.
type Env struct{ env *cel.Env }

// New returns an environment with the variables and constants that options declare. Names
// are looked up in the container first.
func New(container string, options ...cel.EnvOption) (*Env, error) {
	// Names in the container take precedence over CEL's own, such as type.
	all := append([]cel.EnvOption{
		ext.Strings(), cel.Container(container), cel.EnableHiddenAccumulatorName(true),
		cel.ParserRecursionLimit(maxNesting), cel.ParserExpressionSizeLimit(MaxLength),
	}, options...)
	env, err := cel.NewEnv(all...)
	if err != nil {
		return nil, fmt.Errorf("expression environment: %w", err)
	}
	return &Env{env}, nil
}

// Compile parses and checks an expression.
func (e *Env) Compile(source string) (*cel.Ast, *cel.Issues) {
	parsed, issues := e.env.Parse(source)
	if issues.Err() != nil {
		return nil, issues
	}
	return e.Check(parsed)
}

// Parse parses an expression.
func (e *Env) Parse(source string) (*cel.Ast, *cel.Issues) { return e.env.Parse(source) }

// Check determines the types of a parsed expression. Types grow with loops and with
// nested literals, so the number of loops is limited, and nested literals are not
// permitted.
func (e *Env) Check(parsed *cel.Ast) (*cel.Ast, *cel.Issues) {
	if why := shape(parsed.NativeRep().Expr()); why != "" {
		errs := common.NewErrors(parsed.Source())
		errs.ReportErrorString(common.NoLocation, why)
		return nil, cel.NewIssues(errs)
	}
	return e.env.Check(parsed)
}

// shape returns which part of a parsed expression makes types grow too much; empty: none.
func shape(e ast.Expr) (why string) {
	loops := 0
	bound := map[string]bool{}    // variables of loops
	collected := map[int64]bool{} // lists that a macro makes: its result and one element
	var literals []ast.Expr
	ast.PreOrderVisit(e, ast.NewExprVisitor(func(e ast.Expr) {
		switch e.Kind() {
		case ast.ComprehensionKind:
			loops++
			c := e.AsComprehension()
			bound[c.IterVar()], bound[c.IterVar2()] = true, true
		case ast.CallKind:
			if c := e.AsCall(); c.FunctionName() == operators.Add && accumulates(c) {
				collected[c.Args()[1].ID()] = true
			}
		case ast.ListKind, ast.MapKind, ast.StructKind:
			literals = append(literals, e)
		}
	}))
	if loops > maxLoops {
		return fmt.Sprintf("%d loops (all, exists, map, filter): at most %d", loops, maxLoops)
	}
	for _, literal := range literals {
		if collected[literal.ID()] {
			continue
		}
		ast.PreOrderVisit(literal, ast.NewExprVisitor(func(e ast.Expr) {
			switch e.Kind() {
			case ast.ListKind, ast.MapKind, ast.StructKind, ast.ComprehensionKind:
				if e.ID() != literal.ID() {
					why = "a list or map in a list or map is not available in these expressions"
				}
			case ast.IdentKind:
				if bound[e.AsIdent()] {
					why = fmt.Sprintf("a loop's variable (%s) in a list or map is not available in these expressions", e.AsIdent())
				}
			}
		}))
	}
	return why
}

// accumulates reports whether a call adds an element to the list of a macro.
func accumulates(c ast.CallExpr) bool {
	return len(c.Args()) == 2 && c.Args()[0].Kind() == ast.IdentKind && c.Args()[0].AsIdent() == accumulator
}

// Program is a compiled expression of type bool. It is safe for concurrent use.
type Program struct{ program cel.Program }

// Program compiles a checked expression. Errors wrap ErrRefused if the expression uses
// something that this language does not have.
func (e *Env) Program(checked *cel.Ast) (*Program, error) {
	if checked.OutputType() != cel.BoolType {
		return nil, fmt.Errorf("it is a %s, not true or false", checked.OutputType())
	}
	if err := admit(checked.NativeRep()); err != nil {
		return nil, err
	}
	p, err := e.env.Program(checked,
		cel.CostLimit(maxCost), cel.CostTracking(costs{}), cel.EvalOptions(cel.OptOptimize), cel.InterruptCheckFrequency(checkEvery))
	if err != nil {
		return nil, err
	}
	return &Program{p}, nil
}

// Match evaluates the program. vars is a map[string]any or an Activation.
func (p *Program) Match(ctx context.Context, vars any) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	if err := ctx.Err(); err != nil {
		return false, err
	}
	out, _, err := p.program.ContextEval(ctx, vars)
	if err != nil {
		return false, errors.Join(err, ctx.Err())
	}
	matched, ok := out.Value().(bool)
	return ok && matched, nil
}

// admit returns an error if an expression uses something that this language does not
// have.
func admit(a *ast.AST) error {
	var err error
	refuse := func(format string, args ...any) {
		if err == nil {
			err = fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, args...))
		}
	}
	known := functions()
	ast.PreOrderVisit(a.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		if t := a.GetType(e.ID()); e.Kind() != ast.ComprehensionKind && !plain(t) {
			refuse("a value of type %s: values are texts, numbers, true, false, times, and lists and maps of these", t)
			return
		}
		if e.Kind() != ast.CallKind {
			return
		}
		c := e.AsCall()
		for _, id := range a.GetOverloadIDs(e.ID()) {
			switch {
			case id == overloads.AddList && accumulates(c):
				// A macro's list has at most as many elements as the list that it reads.
			case id == overloads.AddList:
				refuse("a list added to a list")
			case !known[id]:
				refuse("%s", spoken(c.FunctionName(), id))
			}
		}
		if c.FunctionName() == overloads.Matches {
			pattern := c.Args()[len(c.Args())-1]
			if why := judge(pattern); why != "" {
				refuse("%s", why)
			}
		}
	}))
	return err
}

// spoken returns the name of a function and of its overload, for messages.
func spoken(function, overload string) string {
	if strings.HasSuffix(overload, "_tz") {
		return function + "() with a time zone: times are in UTC"
	}
	return function + "()"
}

// plain reports whether values of a type are scalars, or lists or maps of scalars.
func plain(t *types.Type) bool {
	switch t.Kind() {
	case types.ListKind, types.MapKind:
		for _, p := range t.Parameters() {
			if !scalar(p) {
				return false
			}
		}
		return true
	default:
		return scalar(t)
	}
}

func scalar(t *types.Type) bool {
	switch t.Kind() {
	case types.BoolKind, types.IntKind, types.UintKind, types.DoubleKind, types.StringKind, types.TimestampKind, types.DurationKind:
		return true
	default:
		return false
	}
}

// judge returns what is wrong with a pattern; empty: nothing. CEL reports patterns that
// do not compile.
func judge(e ast.Expr) string {
	if e.Kind() != ast.LiteralKind {
		return "matches() with a pattern that is not a constant"
	}
	pattern, ok := e.AsLiteral().(types.String)
	if !ok {
		return ""
	}
	if len(pattern) > maxPattern {
		return fmt.Sprintf("a pattern of %d bytes: at most %d", len(pattern), maxPattern)
	}
	re, err := syntax.Parse(string(pattern), syntax.Perl)
	if err != nil {
		return ""
	}
	program, err := syntax.Compile(re.Simplify())
	if err == nil && len(program.Inst) > maxStates {
		return fmt.Sprintf("a pattern with %d states: at most %d; write smaller repetitions", len(program.Inst), maxStates)
	}
	return ""
}

// functions returns the permitted overloads. The cost of each is proportional to the size
// of its arguments, or counted by costs.
func functions() map[string]bool {
	known := map[string]bool{}
	for _, id := range []string{
		operators.Conditional, overloads.Conditional, overloads.LogicalAnd, overloads.LogicalOr, overloads.LogicalNot, overloads.NotStrictlyFalse,
		overloads.Equals, overloads.NotEquals,
		overloads.AddInt64, overloads.AddUint64, overloads.AddDouble, overloads.AddString,
		overloads.AddTimestampDuration, overloads.AddDurationTimestamp, overloads.AddDurationDuration,
		overloads.SubtractInt64, overloads.SubtractUint64, overloads.SubtractDouble,
		overloads.SubtractTimestampTimestamp, overloads.SubtractTimestampDuration, overloads.SubtractDurationDuration,
		overloads.MultiplyInt64, overloads.MultiplyUint64, overloads.MultiplyDouble,
		overloads.DivideInt64, overloads.DivideUint64, overloads.DivideDouble, overloads.ModuloInt64, overloads.ModuloUint64,
		overloads.NegateInt64, overloads.NegateDouble,
		overloads.IndexList, overloads.IndexMap, overloads.InList, overloads.InMap,
		overloads.SizeString, overloads.SizeList, overloads.SizeMap, overloads.SizeStringInst, overloads.SizeListInst, overloads.SizeMapInst,
		overloads.ContainsString, overloads.StartsWithString, overloads.EndsWithString, overloads.MatchesString, overloads.Matches,
		overloads.TimestampToYear, overloads.TimestampToMonth, overloads.TimestampToDayOfYear,
		overloads.TimestampToDayOfMonthZeroBased, overloads.TimestampToDayOfMonthOneBased, overloads.TimestampToDayOfWeek,
		overloads.TimestampToHours, overloads.TimestampToMinutes, overloads.TimestampToSeconds, overloads.TimestampToMilliseconds,
		overloads.DurationToHours, overloads.DurationToMinutes, overloads.DurationToSeconds, overloads.DurationToMilliseconds,
		charAt, indexOf, indexOfFrom, lastIndexOf, lastIndexOfFrom, lowerASCII, upperASCII, substringFrom, substring, trim,
	} {
		known[id] = true
	}
	comparable := []string{"bool", "int64", "int64_double", "int64_uint64", "uint64", "uint64_double", "uint64_int64", "double", "double_int64", "double_uint64", "string", "timestamp", "duration"}
	for _, op := range []string{"less", "less_equals", "greater", "greater_equals"} {
		for _, t := range comparable {
			known[op+"_"+t] = true
		}
	}
	for _, to := range []string{"int64", "uint64", "double", "bool", "string", "timestamp", "duration"} {
		for _, from := range []string{"int64", "uint64", "double", "bool", "string", "timestamp", "duration"} {
			known[from+"_to_"+to] = true
		}
	}
	return known
}

// Overloads of ext.Strings, which does not export their names.
const (
	charAt          = "string_char_at_int"
	indexOf         = "string_index_of_string"
	indexOfFrom     = "string_index_of_string_int"
	lastIndexOf     = "string_last_index_of_string"
	lastIndexOfFrom = "string_last_index_of_string_int"
	lowerASCII      = "string_lower_ascii"
	upperASCII      = "string_upper_ascii"
	substringFrom   = "string_substring_int"
	substring       = "string_substring_int_int"
	trim            = "string_trim"
)

// costs counts calls that CEL underestimates.
type costs struct{}

var _ interpreter.ActualCostEstimator = costs{}

// CallCost returns the cost of a call, after the call; nil: CEL's own estimate.
func (costs) CallCost(_, overload string, args []ref.Val, result ref.Val) *uint64 {
	var cost uint64
	switch overload {
	case indexOf, indexOfFrom, lastIndexOf, lastIndexOfFrom:
		cost = 1 + extent(args[0])*extent(args[1])/100
	case charAt, lowerASCII, upperASCII, substringFrom, substring, trim:
		cost = 1 + extent(args[0])/10
	case overloads.AddString:
		cost = 1 + extent(result)/10
	default:
		return nil
	}
	if extent(result) > MaxText {
		cost = maxCost + 1
	}
	return &cost
}

func extent(v ref.Val) uint64 {
	if s, ok := v.(types.String); ok {
		return uint64(len(s))
	}
	if s, ok := v.(traits.Sizer); ok {
		if n, ok := s.Size().(types.Int); ok && n > 0 {
			return uint64(n)
		}
	}
	return 1
}
