package query

import (
	"cmp"
	"math"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/overloads"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
)

// column has the values of one field of some objects, in their order.
type column struct {
	numbers []int64
	texts   []string
	truths  []bool
	lists   [][]string
	labels  []map[string]string
}

// rows are the columns that an expression reads, by slot.
type rows []column

// verdict is the result of an expression. failed means CEL's error. As in CEL, false &&
// error is false, and true || error is true.
type verdict uint8

const (
	no verdict = iota
	yes
	failed
)

func of(b bool) verdict {
	if b {
		return yes
	}
	return no
}

// Functions that an expression is lowered to, by its type. Those for numbers and texts
// also report whether there is a value; if not, the expression failed.
type (
	predicate func(r rows, i int) verdict
	numeral   func(r rows, i int) (int64, bool)
	textual   func(r rows, i int) (string, bool)
	listing   func(r rows, i int) []string
	labelling func(r rows, i int) map[string]string
)

// lowerer converts a checked expression to functions. Its methods return nil for
// expressions that they cannot lower.
type lowerer struct {
	q   *Query
	ast *ast.AST
}

// lower sets all fields of the query that depend on its expression.
func (q *Query) lower(checked *ast.AST) {
	l := &lowerer{q, checked}
	q.exact = true
	q.keys = map[string][]string{}
	// The order of the parts does not change the result: false wins at any place.
	parts := conjuncts(checked.Expr(), nil)
	slices.SortStableFunc(parts, func(a, b ast.Expr) int { return cmp.Compare(effort(a), effort(b)) })
	for _, part := range parts {
		l.findKey(part)
		p := l.predicate(part)
		switch {
		case p == nil:
			q.exact = false
		case q.lowered == nil:
			q.lowered = p
		default:
			q.lowered = both(q.lowered, p)
		}
		if p != nil {
			q.parts = append(q.parts, p)
		}
	}
}

// effort estimates the cost of evaluating an expression: comparisons are cheaper than
// searches in lists, and these than patterns.
func effort(e ast.Expr) int {
	most := 0
	ast.PostOrderVisit(e, ast.NewExprVisitor(func(e ast.Expr) {
		switch function, _ := call(e); function {
		case overloads.Matches:
			most = 2
		case operators.In, overloads.Contains:
			most = max(most, 1)
		}
	}))
	return most
}

// conjuncts returns the parts of an expression that must all be true.
func conjuncts(e ast.Expr, to []ast.Expr) []ast.Expr {
	if e.Kind() == ast.CallKind && e.AsCall().FunctionName() == operators.LogicalAnd {
		for _, a := range e.AsCall().Args() {
			to = conjuncts(a, to)
		}
		return to
	}
	return append(to, e)
}

// maxKeys is with how many constants an index is still used, rather than a scan.
const maxKeys = 64

// findKey records that an indexed field must equal a constant, or one of a list.
func (l *lowerer) findKey(e ast.Expr) {
	function, args := call(e)
	switch function {
	case operators.Equals:
		f, value, ok := l.keyed(args[0], args[1])
		if !ok {
			f, value, ok = l.keyed(args[1], args[0])
		}
		if ok {
			l.addKeys(f, value)
		}
	case operators.In:
		if args[1].Kind() != ast.ListKind || len(args[1].AsList().OptionalIndices()) > 0 {
			return
		}
		var f *field
		var values []string
		for _, element := range args[1].AsList().Elements() {
			g, value, ok := l.keyed(args[0], element)
			if !ok || len(values) == maxKeys {
				return
			}
			f, values = g, append(values, value)
		}
		if f != nil {
			l.addKeys(f, values...)
		}
	}
}

func (l *lowerer) addKeys(f *field, values ...string) {
	if _, twice := l.q.keys[f.name]; !twice {
		slices.Sort(values)
		l.q.keys[f.name] = slices.Compact(values)
	}
}

func (l *lowerer) keyed(a, b ast.Expr) (*field, string, bool) {
	f := l.field(a)
	value, ok := l.constant(b).(types.String)
	return f, string(value), f != nil && f.index && ok
}

// constant returns the value of a literal or a named constant; nil for any other
// expression.
func (l *lowerer) constant(e ast.Expr) ref.Val {
	switch e.Kind() {
	case ast.LiteralKind:
		return e.AsLiteral()
	case ast.IdentKind:
		if r := l.ast.ReferenceMap()[e.ID()]; r != nil {
			return r.Value
		}
	}
	return nil
}

// field returns the field that a variable stands for; nil for any other expression.
func (l *lowerer) field(e ast.Expr) *field {
	if e.Kind() != ast.IdentKind {
		return nil
	}
	r := l.ast.ReferenceMap()[e.ID()]
	if r == nil || r.Value != nil {
		return nil
	}
	return l.q.byName[r.Name]
}

// slot returns the slot of a field in the columns of the query.
func (l *lowerer) slot(f *field) int {
	number := slices.IndexFunc(l.q.fields, func(g field) bool { return g.name == f.name })
	slot := slices.Index(l.q.used, number)
	if slot < 0 {
		slot = len(l.q.used)
		l.q.used = append(l.q.used, number)
	}
	return slot
}

// call returns the function of a call and its arguments, the target first.
func call(e ast.Expr) (string, []ast.Expr) {
	if e.Kind() != ast.CallKind {
		return "", nil
	}
	c := e.AsCall()
	if c.IsMemberFunction() {
		return c.FunctionName(), append([]ast.Expr{c.Target()}, c.Args()...)
	}
	return c.FunctionName(), c.Args()
}

func (l *lowerer) predicate(e ast.Expr) predicate {
	if v, ok := l.constant(e).(types.Bool); ok {
		answer := of(bool(v))
		return func(rows, int) verdict { return answer }
	}
	if f := l.field(e); f != nil && f.truth != nil {
		s := l.slot(f)
		return func(r rows, i int) verdict { return of(r[s].truths[i]) }
	}
	if e.Kind() == ast.SelectKind && e.AsSelect().IsTestOnly() {
		if m := l.labelling(e.AsSelect().Operand()); m != nil {
			name := e.AsSelect().FieldName()
			return func(r rows, i int) verdict {
				_, ok := m(r, i)[name]
				return of(ok)
			}
		}
		return nil
	}
	function, args := call(e)
	switch function {
	case operators.LogicalNot:
		return not(l.predicate(args[0]))
	case operators.LogicalAnd:
		return l.fold(args, both)
	case operators.LogicalOr:
		return l.fold(args, either)
	case operators.Conditional:
		return l.conditional(args)
	case operators.Equals, operators.NotEquals, operators.Less, operators.LessEquals, operators.Greater, operators.GreaterEquals:
		return l.comparison(function, args[0], args[1])
	case operators.In:
		return l.member(args[0], args[1])
	case overloads.StartsWith:
		return l.search(args, strings.HasPrefix)
	case overloads.EndsWith:
		return l.search(args, strings.HasSuffix)
	case overloads.Contains:
		return l.search(args, strings.Contains)
	case overloads.Matches:
		return l.match(args)
	}
	return nil
}

func not(p predicate) predicate {
	if p == nil {
		return nil
	}
	return func(r rows, i int) verdict {
		switch p(r, i) {
		case yes:
			return no
		case no:
			return yes
		case failed:
		}
		return failed
	}
}

func (l *lowerer) fold(args []ast.Expr, join func(a, b predicate) predicate) predicate {
	var out predicate
	for _, a := range args {
		p := l.predicate(a)
		if p == nil {
			return nil
		}
		if out == nil {
			out = p
		} else {
			out = join(out, p)
		}
	}
	return out
}

func both(a, b predicate) predicate {
	return func(r rows, i int) verdict {
		switch a(r, i) {
		case no:
			return no
		case yes:
			return b(r, i)
		case failed:
		}
		if b(r, i) == no {
			return no
		}
		return failed
	}
}

func either(a, b predicate) predicate {
	return func(r rows, i int) verdict {
		switch a(r, i) {
		case yes:
			return yes
		case no:
			return b(r, i)
		case failed:
		}
		if b(r, i) == yes {
			return yes
		}
		return failed
	}
}

func (l *lowerer) conditional(args []ast.Expr) predicate {
	c, a, b := l.predicate(args[0]), l.predicate(args[1]), l.predicate(args[2])
	if c == nil || a == nil || b == nil {
		return nil
	}
	return func(r rows, i int) verdict {
		switch c(r, i) {
		case yes:
			return a(r, i)
		case no:
			return b(r, i)
		case failed:
		}
		return failed
	}
}

// holds returns a function that applies a comparison's operator to an order.
func holds(operator string) func(order int) bool {
	switch operator {
	case operators.Equals:
		return func(o int) bool { return o == 0 }
	case operators.NotEquals:
		return func(o int) bool { return o != 0 }
	case operators.Less:
		return func(o int) bool { return o < 0 }
	case operators.LessEquals:
		return func(o int) bool { return o <= 0 }
	case operators.Greater:
		return func(o int) bool { return o > 0 }
	}
	return func(o int) bool { return o >= 0 }
}

func (l *lowerer) comparison(operator string, x, y ast.Expr) predicate {
	test := holds(operator)
	if a, b := l.numeral(x), l.numeral(y); a != nil && b != nil {
		if p := l.plainNumbers(operator, x, y); p != nil {
			return p
		}
		return func(r rows, i int) verdict {
			m, ok := a(r, i)
			if !ok {
				return failed
			}
			n, ok := b(r, i)
			if !ok {
				return failed
			}
			return of(test(cmp.Compare(m, n)))
		}
	}
	if a, b := l.textual(x), l.textual(y); a != nil && b != nil {
		if p := l.plainTexts(operator, x, y); p != nil {
			return p
		}
		return func(r rows, i int) verdict {
			s, ok := a(r, i)
			if !ok {
				return failed
			}
			t, ok := b(r, i)
			if !ok {
				return failed
			}
			return of(test(cmp.Compare(s, t)))
		}
	}
	if operator != operators.Equals && operator != operators.NotEquals {
		return nil
	}
	a, b := l.predicate(x), l.predicate(y)
	if a == nil || b == nil {
		return nil
	}
	return func(r rows, i int) verdict {
		m, n := a(r, i), b(r, i)
		if m == failed || n == failed {
			return failed
		}
		return of((m == n) == (operator == operators.Equals))
	}
}

// plainNumbers compares a field with a constant directly, because most filters do only
// that.
func (l *lowerer) plainNumbers(operator string, x, y ast.Expr) predicate {
	f := l.field(x)
	a := l.numeral(y)
	if f == nil || !l.fixed(y) {
		return nil
	}
	n, ok := a(nil, 0)
	if !ok {
		return nil
	}
	s := l.slot(f)
	switch operator {
	case operators.Equals:
		return func(r rows, i int) verdict { return of(r[s].numbers[i] == n) }
	case operators.NotEquals:
		return func(r rows, i int) verdict { return of(r[s].numbers[i] != n) }
	case operators.Less:
		return func(r rows, i int) verdict { return of(r[s].numbers[i] < n) }
	case operators.LessEquals:
		return func(r rows, i int) verdict { return of(r[s].numbers[i] <= n) }
	case operators.Greater:
		return func(r rows, i int) verdict { return of(r[s].numbers[i] > n) }
	case operators.GreaterEquals:
		return func(r rows, i int) verdict { return of(r[s].numbers[i] >= n) }
	}
	return nil
}

func (l *lowerer) plainTexts(operator string, x, y ast.Expr) predicate {
	f := l.field(x)
	value, ok := l.constant(y).(types.String)
	if f == nil || !ok {
		return nil
	}
	s, t := l.slot(f), string(value)
	switch operator {
	case operators.Equals:
		return func(r rows, i int) verdict { return of(r[s].texts[i] == t) }
	case operators.NotEquals:
		return func(r rows, i int) verdict { return of(r[s].texts[i] != t) }
	}
	return nil
}

// fixed reports whether a numeric expression reads no field.
func (l *lowerer) fixed(e ast.Expr) bool {
	if l.constant(e) != nil {
		return true
	}
	function, args := call(e)
	switch function {
	case operators.Add, operators.Subtract, operators.Multiply, operators.Divide, operators.Modulo, operators.Negate:
		return !slices.ContainsFunc(args, func(a ast.Expr) bool { return !l.fixed(a) })
	}
	return false
}

func (l *lowerer) member(x, y ast.Expr) predicate {
	if m := l.labelling(y); m != nil {
		return searchIn(l.textual(x), func(r rows, i int, s string) bool {
			_, ok := m(r, i)[s]
			return ok
		})
	}
	if list := l.listing(y); list != nil {
		return searchIn(l.textual(x), func(r rows, i int, s string) bool { return slices.Contains(list(r, i), s) })
	}
	if y.Kind() != ast.ListKind || len(y.AsList().OptionalIndices()) > 0 {
		return nil
	}
	var texts []string
	var numbers []int64
	for _, e := range y.AsList().Elements() {
		switch v := l.constant(e).(type) {
		case types.String:
			texts = append(texts, string(v))
		case types.Int:
			numbers = append(numbers, int64(v))
		default:
			return nil
		}
	}
	if len(texts)+len(numbers) == 0 {
		// The interpreter does not even evaluate the second operand.
		return func(rows, int) verdict { return no }
	}
	if len(numbers) == 0 {
		if a := l.textual(x); a != nil {
			return searchIn(a, func(_ rows, _ int, s string) bool { return slices.Contains(texts, s) })
		}
	}
	if a := l.numeral(x); a != nil && len(texts) == 0 {
		return func(r rows, i int) verdict {
			n, ok := a(r, i)
			if !ok {
				return failed
			}
			return of(slices.Contains(numbers, n))
		}
	}
	return nil
}

func searchIn(a textual, test func(r rows, i int, s string) bool) predicate {
	if a == nil {
		return nil
	}
	return func(r rows, i int) verdict {
		s, ok := a(r, i)
		if !ok {
			return failed
		}
		return of(test(r, i, s))
	}
}

func (l *lowerer) search(args []ast.Expr, test func(s, part string) bool) predicate {
	if len(args) != 2 {
		return nil
	}
	a, b := l.textual(args[0]), l.textual(args[1])
	if a == nil || b == nil {
		return nil
	}
	if f, v := l.field(args[0]), l.constant(args[1]); f != nil && v != nil {
		s := l.slot(f)
		part, _ := b(nil, 0)
		return func(r rows, i int) verdict { return of(test(r[s].texts[i], part)) }
	}
	return func(r rows, i int) verdict {
		s, ok := a(r, i)
		if !ok {
			return failed
		}
		part, ok := b(r, i)
		if !ok {
			return failed
		}
		return of(test(s, part))
	}
}

func (l *lowerer) match(args []ast.Expr) predicate {
	if len(args) != 2 {
		return nil
	}
	pattern, ok := l.constant(args[1]).(types.String)
	if !ok {
		return nil
	}
	re, err := regexp.Compile(string(pattern))
	if err != nil {
		return nil
	}
	return searchIn(l.textual(args[0]), func(_ rows, _ int, s string) bool { return re.MatchString(s) })
}

func (l *lowerer) listing(e ast.Expr) listing {
	f := l.field(e)
	if f == nil || f.list == nil {
		return nil
	}
	s := l.slot(f)
	return func(r rows, i int) []string { return r[s].lists[i] }
}

func (l *lowerer) labelling(e ast.Expr) labelling {
	f := l.field(e)
	if f == nil || f.labels == nil {
		return nil
	}
	s := l.slot(f)
	return func(r rows, i int) map[string]string { return r[s].labels[i] }
}

func (l *lowerer) textual(e ast.Expr) textual {
	if v, ok := l.constant(e).(types.String); ok {
		s := string(v)
		return func(rows, int) (string, bool) { return s, true }
	}
	if f := l.field(e); f != nil {
		if f.text == nil {
			return nil
		}
		s := l.slot(f)
		return func(r rows, i int) (string, bool) { return r[s].texts[i], true }
	}
	if e.Kind() == ast.SelectKind && !e.AsSelect().IsTestOnly() {
		m := l.labelling(e.AsSelect().Operand())
		if m == nil {
			return nil
		}
		name := e.AsSelect().FieldName()
		return func(r rows, i int) (string, bool) {
			s, ok := m(r, i)[name]
			return s, ok
		}
	}
	function, args := call(e)
	if function != operators.Index {
		return nil
	}
	m, name := l.labelling(args[0]), l.textual(args[1])
	if m == nil || name == nil {
		return nil
	}
	return func(r rows, i int) (string, bool) {
		n, ok := name(r, i)
		if !ok {
			return "", false
		}
		s, ok := m(r, i)[n]
		return s, ok
	}
}

func (l *lowerer) numeral(e ast.Expr) numeral {
	if v, ok := l.constant(e).(types.Int); ok {
		n := int64(v)
		return func(rows, int) (int64, bool) { return n, true }
	}
	if f := l.field(e); f != nil {
		if f.number == nil {
			return nil
		}
		s := l.slot(f)
		return func(r rows, i int) (int64, bool) { return r[s].numbers[i], true }
	}
	function, args := call(e)
	switch function {
	case overloads.Size:
		return l.size(args[0])
	case operators.Negate:
		a := l.numeral(args[0])
		if a == nil {
			return nil
		}
		return func(r rows, i int) (int64, bool) {
			n, ok := a(r, i)
			return -n, ok && n != math.MinInt64
		}
	case operators.Add:
		return l.arithmetic(args, add)
	case operators.Subtract:
		return l.arithmetic(args, subtract)
	case operators.Multiply:
		return l.arithmetic(args, multiply)
	case operators.Divide:
		return l.arithmetic(args, func(a, b int64) (int64, bool) {
			if b == 0 || a == math.MinInt64 && b == -1 {
				return 0, false
			}
			return a / b, true
		})
	case operators.Modulo:
		return l.arithmetic(args, func(a, b int64) (int64, bool) {
			if b == 0 || a == math.MinInt64 && b == -1 {
				return 0, false
			}
			return a % b, true
		})
	}
	return nil
}

func (l *lowerer) arithmetic(args []ast.Expr, compute func(a, b int64) (int64, bool)) numeral {
	a, b := l.numeral(args[0]), l.numeral(args[1])
	if a == nil || b == nil {
		return nil
	}
	if l.fixed(args[0]) && l.fixed(args[1]) {
		m, okA := a(nil, 0)
		n, okB := b(nil, 0)
		if okA && okB {
			v, ok := compute(m, n)
			return func(rows, int) (int64, bool) { return v, ok }
		}
	}
	return func(r rows, i int) (int64, bool) {
		m, ok := a(r, i)
		if !ok {
			return 0, false
		}
		n, ok := b(r, i)
		if !ok {
			return 0, false
		}
		return compute(m, n)
	}
}

// Integers in CEL do not wrap on overflow.

func add(a, b int64) (int64, bool) {
	c := a + b
	return c, (c > a) == (b > 0)
}

func subtract(a, b int64) (int64, bool) {
	c := a - b
	return c, (c < a) == (b > 0)
}

func multiply(a, b int64) (int64, bool) {
	if a == 0 || b == 0 {
		return 0, true
	}
	c := a * b
	if (c < 0) != ((a < 0) != (b < 0)) || c/b != a || a == -1 && b == math.MinInt64 || b == -1 && a == math.MinInt64 {
		return 0, false
	}
	return c, true
}

func (l *lowerer) size(e ast.Expr) numeral {
	if m := l.labelling(e); m != nil {
		return func(r rows, i int) (int64, bool) { return int64(len(m(r, i))), true }
	}
	if list := l.listing(e); list != nil {
		return func(r rows, i int) (int64, bool) { return int64(len(list(r, i))), true }
	}
	if a := l.textual(e); a != nil {
		return func(r rows, i int) (int64, bool) {
			s, ok := a(r, i)
			return int64(utf8.RuneCountInString(s)), ok
		}
	}
	return nil
}
