// Package timeline draws how fast a program was while operations on it ran, for demos.
package timeline

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// Band is one operation on the timeline.
type Band struct {
	From, To time.Duration
	Stopped  time.Duration // the downtime
	Verb     string
}

// Timeline is when each frame was taken.
type Timeline struct {
	start time.Time

	mu     sync.Mutex
	frames []time.Duration
	bands  []Band
	end    time.Duration
}

// New returns a timeline that begins now.
func New() *Timeline { return &Timeline{start: time.Now()} }

// Now returns the time since the beginning.
func (t *Timeline) Now() time.Duration { return time.Since(t.start) }

// Frame notes that a frame was taken now.
func (t *Timeline) Frame() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.frames = append(t.frames, t.Now())
}

// Count returns the number of frames.
func (t *Timeline) Count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.frames)
}

// Mark adds an operation.
func (t *Timeline) Mark(b Band) { t.bands = append(t.bands, b) }

// Finish sets the end to now.
func (t *Timeline) Finish() { t.end = t.Now() }

// Length returns the time from the beginning to the end.
func (t *Timeline) Length() time.Duration { return t.end }

// rates are the frames per second in n equal parts of the run.
func (t *Timeline) rates(n int) (v []float64, top float64) {
	v = make([]float64, n)
	for _, f := range t.frames {
		v[min(n-1, int(float64(n)*float64(f)/float64(t.end)))]++
	}
	for i := range v {
		v[i] *= float64(n) / t.end.Seconds()
		top = max(top, v[i])
	}
	return v, max(top, 1)
}

const (
	columns = 72
	rows    = 8
)

// Draw writes the timeline with block characters. what is the unit of its frames, in the
// plural.
func (t *Timeline) Draw(w io.Writer, what string) {
	v, top := t.rates(columns)
	blocks := []rune(" ▁▂▃▄▅▆▇█")
	fmt.Fprintf(w, "  %s per second\n", what)
	for row := rows - 1; row >= 0; row-- {
		label := "      "
		switch row {
		case rows - 1:
			label = fmt.Sprintf("%5.0f ", top)
		case 0:
			label = "    0 "
		}
		var line strings.Builder
		for _, x := range v {
			line.WriteRune(blocks[max(0, min(8, int(x/top*rows*8)-row*8))])
		}
		fmt.Fprintf(w, "  %s│%s\n", label, line.String())
	}
	axis := []rune(strings.Repeat("─", columns))
	at := func(d time.Duration) int { return min(columns-1, int(float64(columns)*float64(d)/float64(t.end))) }
	for _, b := range t.bands {
		for i := at(b.From); i <= at(b.To); i++ {
			axis[i] = '━'
		}
		axis[at(b.From)] = '▲'
	}
	fmt.Fprintf(w, "        └%s\n         0 s%*.1f s\n", string(axis), columns-5, t.end.Seconds())
	for _, b := range t.bands {
		fmt.Fprintf(w, "  ▲ %-10s %6.2f s to %6.2f s, downtime %.1f ms\n", b.Verb, b.From.Seconds(), b.To.Seconds(), ms(b.Stopped))
	}
}

// SVG draws the curve, and the operations as bands with their downtime.
func (t *Timeline) SVG(title string) []byte {
	const width, height, left, bottom, top = 900, 320, 60, 270, 40
	v, high := t.rates(120)
	x := func(d time.Duration) float64 { return left + (width-left-20)*float64(d)/float64(t.end) }
	y := func(r float64) float64 { return bottom - (bottom-top)*r/high }
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	fmt.Fprintf(&b, `<text x="%d" y="20" font-size="15">%s</text>`+"\n", left, title)
	for i, s := range t.bands {
		fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="#f5c46b" fill-opacity="0.6"/>`+"\n", x(s.From), top, max(1, x(s.To)-x(s.From)), bottom-top)
		fmt.Fprintf(&b, `<text x="%.1f" y="%d">%s: downtime %.1f ms</text>`+"\n", x(s.From)+3, top+14+16*(i%2), s.Verb, ms(s.Stopped))
	}
	fmt.Fprint(&b, `<polyline fill="none" stroke="#1f5fa8" stroke-width="1.5" points="`)
	for i, r := range v {
		fmt.Fprintf(&b, "%.1f,%.1f ", x(time.Duration((float64(i)+0.5)/float64(len(v))*float64(t.end))), y(r))
	}
	fmt.Fprintln(&b, `"/>`)
	fmt.Fprintf(&b, `<path d="M%d %d V%d H%d" fill="none" stroke="black"/>`+"\n", left, top, bottom, width-20)
	for i := range 5 {
		r, d := high*float64(i)/4, t.end*time.Duration(i)/4
		fmt.Fprintf(&b, `<text x="%d" y="%.1f" text-anchor="end">%.0f</text>`+"\n", left-6, y(r)+4, r)
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%.1f s</text>`+"\n", x(d), bottom+18, d.Seconds())
	}
	fmt.Fprintln(&b, `</svg>`)
	return b.Bytes()
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
