package profile

import (
	"bytes"
	_ "embed" // the data files
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Version is the only version of the file format.
const Version = 1

// Limits for the files and lists that are read.
const (
	maxFile     = 1 << 20
	maxProfiles = 1000
	maxList     = 64
	maxText     = 1024
	maxDevice   = 63
)

//go:embed data.yaml
var builtin string

//go:embed emulated.yaml
var emulated string

// ID is a PCI function's identity.
type ID struct {
	Vendor, Device, SubVendor, SubDevice uint16
	Class                                uint32 // 24 bits
}

// managed reports whether the function is a display controller or an accelerator, by its
// class.
func (id ID) managed() bool {
	base := id.Class >> 16
	return base == 0x03 || base == 0x12
}

// How is how a function's device is found among those of its runtime.
type How string

// Ways of finding a device.
const (
	ByAddress How = "pci"   // by the PCI address that the runtime reports
	ByOrder   How = "order" // by the order of the addresses of functions with the same profile
	ByNumber  How = "number"
)

// Profile describes the runtimes for a device.
type Profile struct {
	Name      string
	Model     string   // empty: the name that the runtime reports
	Drivers   []string // kernel drivers, one of which must be bound; empty: any or none
	Libraries []string // in the order in which they are tried
	Env       map[string]string
	How       How
	Number    uint32 // used with ByNumber
	CUDA      bool   // NVIDIA's driver serves CUDA programs on it
}

// Runtimes returns the runtimes in the order in which they are tried.
func (p *Profile) Runtimes() []*gpuctlv1.Runtime {
	var out []*gpuctlv1.Runtime
	for _, lib := range p.Libraries {
		env := make(map[string]string, len(p.Env))
		for k, v := range p.Env {
			env[k] = v
		}
		out = append(out, &gpuctlv1.Runtime{Library: lib, Env: env})
	}
	return out
}

// Binds reports whether a function that is bound to this kernel driver can be used.
func (p *Profile) Binds(driver string) bool {
	return len(p.Drivers) == 0 || slices.Contains(p.Drivers, driver)
}

// Set is a set of profiles.
type Set struct{ rules []rule }

// rule is one pattern. Of equally specific rules, the last one wins.
type rule struct {
	vendor, device       uint16
	anyDevice            bool
	sub                  bool
	subVendor, subDevice uint16
	profile              *Profile
}

// matches returns how specific the rule is for the identity; 0: it does not match.
func (r *rule) matches(id ID) int {
	switch {
	case r.vendor != id.Vendor:
		return 0
	case r.anyDevice && id.managed():
		return 1
	case r.anyDevice || r.device != id.Device:
		return 0
	case !r.sub:
		return 2
	case r.subVendor == id.SubVendor && r.subDevice == id.SubDevice:
		return 3
	}
	return 0
}

// Lookup returns the most specific profile for a function.
func (s *Set) Lookup(id ID) (*Profile, bool) {
	var best *Profile
	most := 1
	for i := range s.rules {
		if n := s.rules[i].matches(id); n >= most {
			best, most = s.rules[i].profile, n
		}
	}
	return best, best != nil
}

// File is a file of profiles.
type File struct {
	Name string // for messages
	Data []byte
}

// Options are the options of Load.
type Options struct {
	Emulated bool // also load the profiles of emulated devices
	Extra    []File
}

// ReadDir reads the .yaml files of a folder in the order of their names. If the folder
// does not exist, it returns none.
func ReadDir(fsys fs.FS, dir string) ([]File, error) {
	entries, err := fs.ReadDir(fsys, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("profiles: %w", err)
	}
	var out []File
	for _, e := range entries {
		if e.IsDir() || path.Ext(e.Name()) != ".yaml" || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		data, err := readFile(fsys, path.Join(dir, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("profiles: %w", err)
		}
		out = append(out, File{e.Name(), data})
	}
	return out, nil
}

func readFile(fsys fs.FS, name string) ([]byte, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxFile+1)) // Load refuses a file that is longer
}

// Load makes a set of the program's own profiles and of further files. Later files
// override earlier ones. Errors name the file, and all errors of a file are joined.
func Load(o Options) (*Set, error) {
	files := []File{{"built-in profiles", []byte(builtin)}}
	if o.Emulated {
		files = append(files, File{"built-in profiles of emulated devices", []byte(emulated)})
	}
	s := &Set{}
	for _, f := range append(files, o.Extra...) {
		if err := s.add(f); err != nil {
			return nil, err
		}
	}
	return s, nil
}

type fileYAML struct {
	Version  int           `yaml:"version"`
	Profiles []profileYAML `yaml:"profiles"`
}

type profileYAML struct {
	Name      string            `yaml:"name"`
	Model     string            `yaml:"model"`
	Match     []string          `yaml:"match"`
	Drivers   []string          `yaml:"drivers"`
	Libraries []string          `yaml:"libraries"`
	Env       map[string]string `yaml:"env"`
	Device    string            `yaml:"device"`
	CUDA      bool              `yaml:"cuda"`
}

func (s *Set) add(f File) error {
	if len(f.Data) > maxFile {
		return fmt.Errorf("%s: larger than %d bytes", f.Name, maxFile)
	}
	dec := yaml.NewDecoder(bytes.NewReader(f.Data))
	dec.KnownFields(true)
	var y fileYAML
	if err := dec.Decode(&y); err != nil {
		return fmt.Errorf("%s: %w", f.Name, err)
	}
	if err := dec.Decode(new(any)); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: more than one document", f.Name)
	}
	if y.Version != Version {
		return fmt.Errorf("%s: version %d, this program knows %d", f.Name, y.Version, Version)
	}
	if len(y.Profiles) > maxProfiles {
		return fmt.Errorf("%s: more than %d profiles", f.Name, maxProfiles)
	}
	var errs []error
	names, patterns := map[string]bool{}, map[string]string{}
	for i := range y.Profiles {
		p := &y.Profiles[i]
		rules, err := p.rules(names, patterns)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: profile %d (%.40q): %w", f.Name, i+1, p.Name, err))
			continue
		}
		s.rules = append(s.rules, rules...)
	}
	return errors.Join(errs...)
}

var (
	namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
	idPattern   = regexp.MustCompile(`^([0-9a-f]{4}):([0-9a-f]{4})(:[0-9a-f]{4}:[0-9a-f]{4})?$`)
	anyPattern  = regexp.MustCompile(`^([0-9a-f]{4}):\*$`)
	envPattern  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

func (y *profileYAML) rules(names map[string]bool, patterns map[string]string) ([]rule, error) {
	p, err := y.profile()
	if err != nil {
		return nil, err
	}
	if names[p.Name] {
		return nil, errors.New("there are two of that name")
	}
	names[p.Name] = true
	if len(y.Match) == 0 || len(y.Match) > maxList {
		return nil, fmt.Errorf("match: needs one to %d patterns", maxList)
	}
	var out []rule
	for _, m := range y.Match {
		r, err := parsePattern(strings.ToLower(m))
		if err != nil {
			return nil, err
		}
		if other, twice := patterns[strings.ToLower(m)]; twice {
			return nil, fmt.Errorf("match: %s is in profile %s, too", m, other)
		}
		patterns[strings.ToLower(m)] = p.Name
		r.profile = p
		out = append(out, r)
	}
	return out, nil
}

func parsePattern(m string) (rule, error) {
	number := func(s string) uint16 {
		n, _ := strconv.ParseUint(s, 16, 16) // the patterns permit hexadecimal digits only
		return uint16(n)
	}
	if g := anyPattern.FindStringSubmatch(m); g != nil {
		return rule{vendor: number(g[1]), anyDevice: true}, nil
	}
	g := idPattern.FindStringSubmatch(m)
	if g == nil {
		return rule{}, fmt.Errorf("match: %.40q is not vendor:device, vendor:device:subvendor:subdevice or vendor:*", m)
	}
	r := rule{vendor: number(g[1]), device: number(g[2]), sub: g[3] != ""}
	if r.sub {
		r.subVendor, r.subDevice = number(g[3][1:5]), number(g[3][6:])
	}
	return r, nil
}

func (y *profileYAML) profile() (*Profile, error) {
	p := &Profile{Name: y.Name, Model: y.Model, Drivers: y.Drivers, Libraries: y.Libraries, Env: y.Env, CUDA: y.CUDA}
	if !namePattern.MatchString(y.Name) {
		return nil, errors.New("name: needs small letters, digits, dots or dashes, 63 at most")
	}
	if err := plain("model", y.Model); err != nil {
		return nil, err
	}
	if len(y.Libraries) == 0 || len(y.Libraries) > maxList || len(y.Drivers) > maxList || len(y.Env) > maxList {
		return nil, fmt.Errorf("needs one to %d libraries, at most as many drivers and variables", maxList)
	}
	for _, lib := range y.Libraries {
		if lib == "" || strings.Contains(lib, "/") && (!path.IsAbs(lib) || path.Clean(lib) != lib) {
			return nil, fmt.Errorf("libraries: %.60q is neither a name nor a whole path", lib)
		}
		if err := plain("libraries", lib); err != nil {
			return nil, err
		}
	}
	for _, d := range y.Drivers {
		if d == "" || strings.ContainsAny(d, "/ ") {
			return nil, fmt.Errorf("drivers: %.60q is no driver's name", d)
		}
	}
	for k, v := range y.Env {
		if !envPattern.MatchString(k) {
			return nil, fmt.Errorf("env: %.60q is no variable's name", k)
		}
		if err := plain("env "+k, v); err != nil {
			return nil, err
		}
	}
	switch y.Device {
	case "", string(ByAddress):
		p.How = ByAddress
	case string(ByOrder):
		p.How = ByOrder
	default:
		n, err := strconv.ParseUint(y.Device, 10, 8)
		if err != nil || n > maxDevice {
			return nil, fmt.Errorf("device: %.40q is not pci, order or a number up to %d", y.Device, maxDevice)
		}
		p.How, p.Number = ByNumber, uint32(n)
	}
	return p, nil
}

func plain(what, s string) error {
	if len(s) > maxText || strings.ContainsFunc(s, unicode.IsControl) {
		return fmt.Errorf("%s: longer than %d bytes, or with control characters", what, maxText)
	}
	return nil
}
