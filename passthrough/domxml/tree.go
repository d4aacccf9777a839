package domxml

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strings"
)

// ErrSyntax means that a text is not valid domain XML.
var ErrSyntax = errors.New("not the XML of a libvirt domain")

const (
	maxSize  = 4 << 20 // longest string of libvirt's protocol
	maxDepth = 64
	maxAttrs = 256
	maxText  = 4096 // text of an element that is kept, in bytes; all text that is used is shorter
)

// node is an element with the positions of its bytes: raw[start:open] is the start tag,
// raw[close:end] the end tag. An empty-element tag has no end tag: open, close and end
// are equal.
type node struct {
	name                    string // with its prefix, if any
	attrs                   []xml.Attr
	text                    string
	children                []*node
	start, open, close, end int
}

// parseTree finds the elements of a document.
func parseTree(raw []byte) (*node, error) {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %w", ErrSyntax, fmt.Errorf(format, args...))
	}
	if len(raw) > maxSize {
		return nil, bad("%d bytes, libvirt takes up to %d", len(raw), maxSize)
	}
	d := xml.NewDecoder(bytes.NewReader(raw))
	var root *node
	var path []*node
	for {
		at := int(d.InputOffset())
		token, err := d.RawToken()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, bad("%w", err)
		}
		after := int(d.InputOffset())
		switch t := token.(type) {
		case xml.StartElement:
			n := &node{name: full(t.Name), attrs: t.Attr, start: at, open: after}
			if len(n.attrs) > maxAttrs {
				return nil, bad("<%.60s> has %d attributes", n.name, len(n.attrs))
			}
			for i, a := range n.attrs {
				for _, b := range n.attrs[:i] {
					if a.Name == b.Name {
						return nil, bad("attribute %s of <%s> is there twice", full(a.Name), n.name)
					}
				}
			}
			switch {
			case len(path) > 0:
				parent := path[len(path)-1]
				parent.children = append(parent.children, n)
			case root != nil:
				return nil, bad("there is something after </%s>", root.name)
			default:
				root = n
			}
			if path = append(path, n); len(path) > maxDepth {
				return nil, bad("elements are nested more than %d deep", maxDepth)
			}
		case xml.EndElement:
			if len(path) == 0 || path[len(path)-1].name != full(t.Name) {
				return nil, bad("</%s> ends nothing", full(t.Name))
			}
			n := path[len(path)-1]
			n.close, n.end = at, after
			path = path[:len(path)-1]
		case xml.CharData:
			if len(path) > 0 {
				n := path[len(path)-1]
				n.text += string(t[:min(len(t), max(0, maxText-len(n.text)))])
			} else if len(bytes.TrimSpace(t)) > 0 {
				return nil, bad("text outside of all elements")
			}
		case xml.Directive:
			return nil, bad("it has a document type")
		}
	}
	switch {
	case len(path) > 0:
		return nil, bad("<%s> does not end", path[len(path)-1].name)
	case root == nil || root.name != "domain":
		return nil, bad("there is no <domain>")
	}
	return root, nil
}

func full(n xml.Name) string {
	if n.Space == "" {
		return n.Local
	}
	return n.Space + ":" + n.Local
}

// empty reports whether it is an empty-element tag, <name/>.
func (n *node) empty() bool { return n.open == n.end }

// child returns the first child with that name, or nil. A nil node has none.
func (n *node) child(path ...string) *node {
	for _, name := range path {
		if n == nil {
			return nil
		}
		var found *node
		for _, c := range n.children {
			if c.name == name {
				found = c
				break
			}
		}
		n = found
	}
	return n
}

func (n *node) all(name string) []*node {
	var out []*node
	if n != nil {
		for _, c := range n.children {
			if c.name == name {
				out = append(out, c)
			}
		}
	}
	return out
}

// attr returns the value of an attribute; empty: there is none.
func (n *node) attr(name string) string {
	if n != nil {
		for _, a := range n.attrs {
			if full(a.Name) == name {
				return a.Value
			}
		}
	}
	return ""
}

func (n *node) content() string {
	if n == nil {
		return ""
	}
	return strings.TrimSpace(n.text)
}

// span is a range of bytes in the document or in a tag.
type span struct{ from, to int }

// value finds the value of an attribute in a start tag that the decoder has accepted: a
// name, an equals sign and a quoted value, with white space between them.
func value(tag []byte, name string) (span, bool) {
	space := func(i int) int {
		for i < len(tag) && strings.IndexByte(" \t\r\n", tag[i]) >= 0 {
			i++
		}
		return i
	}
	i := 1
	for i < len(tag) && strings.IndexByte(" \t\r\n/>", tag[i]) < 0 {
		i++
	}
	for {
		i = space(i)
		from := i
		for i < len(tag) && strings.IndexByte(" \t\r\n=/>", tag[i]) < 0 {
			i++
		}
		if i == from || i >= len(tag) {
			return span{}, false
		}
		found := string(tag[from:i]) == name
		if i = space(i); i >= len(tag) || tag[i] != '=' {
			return span{}, false
		}
		if i = space(i + 1); i >= len(tag) {
			return span{}, false
		}
		quote := tag[i]
		n := bytes.IndexByte(tag[i+1:], quote)
		if quote != '\'' && quote != '"' || n < 0 {
			return span{}, false
		}
		if found {
			return span{i + 1, i + 1 + n}, true
		}
		i += n + 2
	}
}

// escape escapes a text for an attribute or an element.
func escape(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", "'", "&apos;", `"`, "&quot;", "\n", "&#10;", "\r", "&#13;", "\t", "&#9;").Replace(s)
}
