package capture

import (
	"bytes"
	"encoding/binary"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strings"
)

const removed = "REMOVED"

// sensitive matches names of secrets.
const sensitive = `pass(?:word|wd|phrase|code)|\bpass\b|secret|token|credential|api[-_]?key|private[-_]?key|(?:\b|_)key\b|\bpsk\b|\bauth\b`

type replacement struct {
	of   *regexp.Regexp
	with []byte
}

// scrubber removes secrets.
type scrubber struct {
	secrets []replacement
	name    *regexp.Regexp // name of a secret in YAML
}

func newScrubber() *scrubber {
	const named = `(?i)([\w.-]*(?:` + sensitive + `)[\w.-]*=`
	return &scrubber{
		secrets: []replacement{
			{regexp.MustCompile(`(?s)-----BEGIN [A-Z0-9 ]*(?:PRIVATE KEY|CERTIFICATE|OPENSSH)[A-Z0-9 ]*-----.*?(?:-----END [A-Z0-9 ]+-----|\z)`), []byte(removed)},
			{regexp.MustCompile(`\b([a-z][a-z0-9+.-]{1,20}://)[^/\s:@"']*:[^/\s@"']*@`), []byte("${1}" + removed + "@")},
			// name=value, as on command lines
			{regexp.MustCompile(named + `")[^"\n]*`), []byte("${1}" + removed)},
			{regexp.MustCompile(named + `')[^'\n]*`), []byte("${1}" + removed)},
			{regexp.MustCompile(named + `)[^\s"'&,;]+`), []byte("${1}" + removed)},
			// name: value, as in configuration files
			{regexp.MustCompile(`(?im)^([ \t-]*"?[\w.-]*(?:` + sensitive + `)[\w.-]*"?[ \t]*:[ \t]+)[^\s].*$`), []byte("${1}" + removed)},
			{regexp.MustCompile(`(?i)\b(bearer|basic) [a-z0-9+/=._-]{8,}`), []byte("${1} " + removed)},
		},
		name: regexp.MustCompile(`(?i)^([ \t-]*)"?[\w.-]*(?:` + sensitive + `)[\w.-]*"?[ \t]*:`),
	}
}

// text removes secrets from a text. Binary data is returned unchanged.
func (s *scrubber) text(data []byte) []byte {
	// All patterns need one of these characters.
	if bytes.IndexByte(data, 0) >= 0 || !bytes.ContainsAny(data, "=:@") && !bytes.Contains(data, []byte(" ")) {
		return data
	}
	for _, r := range s.secrets {
		data = r.of.ReplaceAll(data, r.with)
	}
	return data
}

// yaml removes, in addition, what is indented below the name of a secret.
func (s *scrubber) yaml(data []byte) []byte {
	var out bytes.Buffer
	below := -1 // indentation of the name whose value is being removed
	for line := range strings.Lines(string(s.text(data))) {
		text := strings.TrimLeft(line, " \t")
		indent := len(line) - len(text)
		if below >= 0 && (strings.TrimSpace(text) == "" || indent > below || indent == below && strings.HasPrefix(text, "- ")) {
			continue
		}
		below = -1
		if m := s.name.FindStringSubmatch(line); m != nil {
			below = len(m[1])
		}
		out.WriteString(line)
	}
	return out.Bytes()
}

// cutElements returns the elements that may contain secrets, or anything. They are
// removed from XML.
func cutElements() []string {
	return []string{
		"metadata", "cmdline", "commandline", "sysinfo", "launchSecurity", "auth", "secret", "encryption", "cookies", "description", "title", "ssl", "initarg", "initenv",
	}
}

// cutAttributes returns the attributes that may contain secrets.
func cutAttributes() []string {
	return []string{"passwd", "password", "passphrase", "query", "secret", "token"}
}

// cutXML removes from libvirt's XML what may be secret. XML that cannot be parsed is an
// error: then nothing of it may be kept.
func cutXML(data []byte) ([]byte, error) {
	d := xml.NewDecoder(bytes.NewReader(data))
	d.CharsetReader = func(string, io.Reader) (io.Reader, error) { return nil, errors.New("not in UTF-8") }
	var out bytes.Buffer
	var open []string
	cut := 0 // depth of the element that is being removed; 0: none
	for {
		from := d.InputOffset()
		token, err := d.RawToken()
		if errors.Is(err, io.EOF) {
			if len(open) > 0 {
				return nil, errors.New("XML is cut off")
			}
			return out.Bytes(), nil
		}
		if err != nil {
			return nil, fmt.Errorf("XML can't be read: %w", err)
		}
		raw := data[from:d.InputOffset()]
		switch t := token.(type) {
		case xml.StartElement:
			open = append(open, t.Name.Local)
			if len(open) > maxParts {
				return nil, errors.New("XML is too deep")
			}
			if cut == 0 && slices.Contains(cutElements(), t.Name.Local) {
				cut = len(open)
				out.WriteString("<!-- " + t.Name.Local + " removed -->")
			}
			if cut == 0 {
				out.Write(cutTag(t, raw))
			}
		case xml.EndElement:
			if len(open) == 0 || open[len(open)-1] != t.Name.Local {
				return nil, errors.New("XML is not nested")
			}
			if cut == 0 {
				out.Write(raw)
			} else if cut == len(open) {
				cut = 0
			}
			open = open[:len(open)-1]
		case xml.Comment, xml.Directive, xml.ProcInst: // written by the operator or an editor
		default:
			if cut == 0 {
				out.Write(raw)
			}
		}
	}
}

// cutTag removes attributes by writing the tag again.
func cutTag(t xml.StartElement, raw []byte) []byte {
	if !slices.ContainsFunc(t.Attr, func(a xml.Attr) bool { return slices.Contains(cutAttributes(), a.Name.Local) }) {
		return raw
	}
	name := func(n xml.Name) string {
		if n.Space != "" {
			return n.Space + ":" + n.Local
		}
		return n.Local
	}
	var out bytes.Buffer
	out.WriteString("<" + name(t.Name))
	for _, a := range t.Attr {
		if slices.Contains(cutAttributes(), a.Name.Local) {
			a.Value = removed
		}
		out.WriteString(" " + name(a.Name) + `="`)
		_ = xml.EscapeText(&out, []byte(a.Value))
		out.WriteString(`"`)
	}
	if bytes.HasSuffix(raw, []byte("/>")) {
		out.WriteString("/")
	}
	out.WriteString(">")
	return out.Bytes()
}

func uuidPattern() *regexp.Regexp {
	return regexp.MustCompile(`(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`)
}

// redactor replaces what identifies the host by numbers.
type redactor struct {
	known              map[string]string
	count              map[string]int
	uuid, mac, ip, ip6 *regexp.Regexp
	serial             *regexp.Regexp
	names              *regexp.Regexp // names of the host and domains; nil: none
	kinds              map[string]string
}

func newRedactor(files, facts map[string][]byte) *redactor {
	r := &redactor{
		known: map[string]string{}, count: map[string]int{}, kinds: map[string]string{},
		uuid:   uuidPattern(),
		mac:    regexp.MustCompile(`(?i)\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b`),
		ip:     regexp.MustCompile(`\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b`),
		ip6:    regexp.MustCompile(`(?i)[0-9a-f:]*:[0-9a-f:]*:[0-9a-f:.]*`),
		serial: regexp.MustCompile(`(?i)(serial(?:[ _-]?(?:number|no))?["']?\s*(?:[:=>]|is)\s*["']?)[^\s<"',]+`),
	}
	if host := strings.TrimSpace(string(files["proc/sys/kernel/hostname"])); host != "" {
		r.kinds[host] = "host"
		short, _, _ := strings.Cut(host, ".")
		r.kinds[short] = "host"
	}
	for _, line := range strings.Split(string(facts["xl-list.txt"]), "\n") {
		if f := strings.Fields(line); len(f) >= 6 && f[0] != "Name" && f[0] != "Domain-0" && f[0] != "(null)" {
			r.kinds[f[0]] = "domain"
		}
	}
	if m := regexp.MustCompile(`(?m)^host\s*:\s*(\S+)`).FindSubmatch(facts["xl-info.txt"]); m != nil {
		r.kinds[string(m[1])] = "host"
	}
	name := regexp.MustCompile(`(?s)<name>\s*([^<]+?)\s*</name>`)
	for _, file := range slices.Sorted(maps.Keys(facts)) {
		if strings.HasPrefix(file, "domain/") {
			if m := name.FindSubmatch(facts[file]); m != nil && string(m[1]) != "Domain-0" {
				r.kinds[string(m[1])] = "domain"
			}
		}
	}
	delete(r.kinds, "")
	if len(r.kinds) > 0 {
		quoted := slices.Sorted(maps.Keys(r.kinds))
		// The longest first, because Go's alternation takes the first match.
		slices.SortStableFunc(quoted, func(a, b string) int { return len(b) - len(a) })
		for i, s := range quoted {
			quoted[i] = regexp.QuoteMeta(s)
		}
		r.names = regexp.MustCompile(`(^|[^A-Za-z0-9_])(` + strings.Join(quoted, "|") + `)($|[^A-Za-z0-9_])`)
	}
	return r
}

// numbered returns the same name for the same thing each time.
func (r *redactor) numbered(kind, s, format string) string {
	key := kind + "\x00" + strings.ToLower(s)
	if r.known[key] == "" {
		r.count[kind]++
		r.known[key] = fmt.Sprintf(format, r.count[kind])
	}
	return r.known[key]
}

// ids replaces identifiers and addresses.
func (r *redactor) ids(s string) string {
	s = r.uuid.ReplaceAllStringFunc(s, func(m string) string { return r.numbered("uuid", m, "00000000-0000-4000-8000-%012d") })
	s = r.mac.ReplaceAllStringFunc(s, func(m string) string { return r.numbered("mac", m, "02:00:00:00:00:%02x") })
	s = r.ip.ReplaceAllStringFunc(s, func(m string) string {
		a, err := netip.ParseAddr(m)
		if err != nil || a.IsLoopback() || a.IsUnspecified() {
			return m
		}
		return r.numbered("ip", m, "192.0.2.%d")
	})
	s = r.ip6.ReplaceAllStringFunc(s, func(m string) string {
		a, err := netip.ParseAddr(m)
		if err != nil || !a.Is6() || a.IsLoopback() || a.IsUnspecified() {
			return m
		}
		return r.numbered("ip6", m, "2001:db8::%x")
	})
	return r.serial.ReplaceAllString(s, "${1}"+removed)
}

// words also replaces names.
func (r *redactor) words(s string) string {
	s = r.ids(s)
	if r.names == nil {
		return s
	}
	for range 2 { // twice, because neighbouring matches share the character between them
		s = r.names.ReplaceAllStringFunc(s, func(m string) string {
			part := r.names.FindStringSubmatch(m)
			return part[1] + r.numbered(r.kinds[part[2]], part[2], r.kinds[part[2]]+"-%d") + part[3]
		})
	}
	return s
}

// host redacts the host's files: identifiers everywhere, names in texts for people, and
// the serial numbers in configuration spaces.
func (r *redactor) host(files map[string][]byte, links map[string]string) (map[string][]byte, map[string]string) {
	outFiles, outLinks := map[string][]byte{}, map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		data := files[name]
		switch {
		case path.Base(name) == "config" && strings.HasPrefix(name, "sys/"):
			data = withoutSerial(data)
		case name == "proc/sys/kernel/hostname":
			data = []byte("host-1\n")
		case bytes.IndexByte(data, 0) >= 0:
		case strings.HasPrefix(name, "sys/"):
			data = []byte(r.ids(string(data)))
		default:
			data = []byte(r.words(string(data)))
		}
		outFiles[r.ids(name)] = data
	}
	for _, name := range slices.Sorted(maps.Keys(links)) {
		outLinks[r.ids(name)] = r.ids(links[name])
	}
	return outFiles, outLinks
}

func (r *redactor) facts(facts map[string][]byte) map[string][]byte {
	out := map[string][]byte{}
	element := regexp.MustCompile(`(?s)(<(?:serial|wwn|wwnn|wwpn)>)[^<]*(</)`)
	for _, name := range slices.Sorted(maps.Keys(facts)) {
		out[r.words(name)] = element.ReplaceAll([]byte(r.words(string(facts[name]))), []byte("${1}"+removed+"${2}"))
	}
	return out
}

// withoutSerial zeroes the Device Serial Number capability (PCI Express Base
// Specification, 7.9.3: id 3, eight bytes at offset 4).
func withoutSerial(config []byte) []byte {
	config = bytes.Clone(config)
	seen := map[int]bool{}
	for at := 0x100; at >= 0x100 && at+12 <= len(config) && !seen[at]; {
		seen[at] = true
		header := binary.LittleEndian.Uint32(config[at:])
		if header&0xffff == 3 {
			clear(config[at+4 : at+12])
		}
		at = int(header>>20) &^ 3
	}
	return config
}
