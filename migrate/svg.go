package migrate

import (
	"fmt"
	"html"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/size"
)

// SVG draws a migration's timeline: a bar for each step, the downtime of the
// applications, and the bytes that were copied.
func SVG(m *clusterv1.Migration) []byte {
	const (
		left, width, row, top = 110, 640, 22, 56
		maxRows               = 100
	)
	steps := m.GetSteps()
	if len(steps) > maxRows {
		steps = steps[len(steps)-maxRows:]
	}
	var begin, end int64
	for _, s := range steps {
		if begin == 0 || s.GetStartedUnixNs() < begin {
			begin = s.GetStartedUnixNs()
		}
		end = max(end, s.GetStartedUnixNs()+s.GetTookNs())
	}
	span := max(1, end-begin)
	x := func(at int64) float64 { return left + width*float64(at-begin)/float64(span) }
	var b strings.Builder
	height := top + row*len(steps) + 40
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", left+width+150, height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	title := fmt.Sprintf("%s of %s: %s to %s", m.GetVerb(), m.GetObject(), m.GetFrom(), m.GetTo())
	fmt.Fprintf(&b, `<text x="10" y="20" font-size="15" font-weight="bold">%s</text>`+"\n", html.EscapeString(clean(title)))
	state := strings.ToLower(strings.TrimPrefix(m.GetState().String(), "MIGRATION_STATE_"))
	if n := len(m.GetMachine().GetLost()); n > 0 {
		state += fmt.Sprintf(", %d sessions lost", n)
	}
	fmt.Fprintf(&b, `<text x="10" y="40">%s, %s, downtime %s, %s copied</text>`+"\n",
		state, seconds(time.Duration(span)), seconds(time.Duration(m.GetStoppedNs())), size.Format(m.GetBytes()))
	if from, to := still(steps); to > from {
		fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="#fde3e0"/>`+"\n", x(from), top-4, x(to)-x(from), row*len(steps)+4)
	}
	for i, s := range steps {
		y := top + row*i
		color := "#2f6fb3"
		name := s.GetName()
		switch {
		case s.GetError() != "":
			color = "#c0392b"
		case s.GetUndo():
			color = "#b9770e"
		}
		if s.GetUndo() {
			name = "undo " + name
		}
		text := seconds(time.Duration(s.GetTookNs()))
		if s.GetBytes() > 0 {
			text += ", " + size.Format(s.GetBytes())
		}
		from, to := x(s.GetStartedUnixNs()), x(s.GetStartedUnixNs()+s.GetTookNs())
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text>`, left-8, y+13, html.EscapeString(clean(name)))
		fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" rx="2" fill="%s">`, from, y+2, max(1.5, to-from), row-8, color)
		fmt.Fprintf(&b, `<title>%s</title></rect>`, html.EscapeString(clean(text+" "+s.GetError())))
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" fill="#444">%s</text>`+"\n", to+5, y+13, text)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" fill="#a33">shaded: downtime of the applications</text>`+"\n</svg>\n", left, height-14)
	return []byte(b.String())
}

// still returns the downtime: from freeze to thaw, or from park to restore of parts of mediated
// GPUs. If the applications are still frozen, it ends with the last step.
func still(steps []*clusterv1.MigrationStep) (from, to int64) {
	var last int64
	for _, s := range steps {
		name, began := s.GetName(), s.GetStartedUnixNs()
		ended := began + s.GetTookNs()
		last = max(last, ended)
		stills := name == StepFreeze || name == StepStop || name == StepPark
		stirs := name == StepThaw || name == StepStart || name == StepRestore
		switch {
		case stills && !s.GetUndo(), stirs && s.GetUndo():
			if to = 0; from == 0 {
				from = began
			}
		case (stills || stirs) && s.GetError() == "":
			to = ended
		}
	}
	if from > 0 && to == 0 {
		to = last
	}
	return from, to
}

func seconds(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d >= time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	}
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

// clean removes control characters, which XML does not permit.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0xfffe || r == 0xffff {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}
