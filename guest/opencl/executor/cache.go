package executor

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/gob"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
)

const (
	// maxCache bounds a session's built programs, in bytes: they lie in memory.
	maxCache = 64 << 20
	// maxEntry bounds one of them.
	maxEntry = 16 << 20
	// cacheRest is how long no program has been built before what was built is
	// kept: some runtimes compile to answer with a binary. Nothing waits for
	// longer than cachePatience.
	cacheRest     = 300 * time.Millisecond
	cachePatience = 5 * time.Second
	// stillPatience is how long a program that can be kept in an idle moment
	// only waits for one.
	stillPatience = 30 * time.Second
)

// programCache keeps what the session's programs were built to on one device,
// so that an executor of the same session that comes back to it need not build
// them again. It lies in the session's folder. Other executors of the session
// can write there too, one of another runtime that the application has taken
// over perhaps: an entry counts if it is signed with a key that gpuguest gives
// to executors for this very device alone.
type programCache struct {
	dir    string // empty: there is no cache
	secret []byte

	mu    sync.Mutex
	known bool
	sizes map[string]int64 // by file name
	total int64
}

// builtProgram is an entry. The binaries are the vendor's, one for each device.
type builtProgram struct {
	Binaries  [][]byte
	Signature signature
	Kernels   []string
}

// errNoBinary is returned for a program that its runtime gives no binary of for
// one of its devices.
var errNoBinary = errors.New("no binary for a device")

// programKey names what a build makes.
type programKey [sha256.Size]byte

func newProgramCache(dir string, secret []byte) *programCache {
	c := &programCache{secret: secret, sizes: map[string]int64{}}
	if dir != "" && len(secret) > 0 {
		c.dir = filepath.Join(dir, "programs")
	}
	return c
}

func (c *programCache) sign(what string, k programKey, body []byte) []byte {
	h := hmac.New(sha256.New, c.secret)
	h.Write([]byte(what))
	h.Write(k[:])
	h.Write(body)
	return h.Sum(nil)
}

// file is where an entry is: each device has its own.
func (c *programCache) file(k programKey) string { return hex.EncodeToString(c.sign("name", k, nil)) }

// get returns nil if there is no such entry, or none that is sound.
func (c *programCache) get(k programKey) *builtProgram {
	if c.dir == "" {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(c.dir, c.file(k)), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxEntry+sha256.Size+1))
	if err != nil || len(b) < sha256.Size || len(b) > maxEntry+sha256.Size {
		return nil
	}
	sum, body := b[:sha256.Size], b[sha256.Size:]
	if !hmac.Equal(sum, c.sign("body", k, body)) {
		return nil
	}
	x := &builtProgram{}
	if err := gob.NewDecoder(bytes.NewReader(body)).Decode(x); err != nil {
		return nil
	}
	return x
}

// put adds an entry; the oldest make room for it.
func (c *programCache) put(k programKey, x *builtProgram) error {
	if c.dir == "" {
		return nil
	}
	var body bytes.Buffer
	if err := gob.NewEncoder(&body).Encode(x); err != nil {
		return err
	}
	if body.Len() > maxEntry {
		return fmt.Errorf("%d bytes: %w", body.Len(), portable.ErrLimit)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.look(); err != nil {
		return err
	}
	data := append(c.sign("body", k, body.Bytes()), body.Bytes()...)
	if err := c.room(int64(len(data))); err != nil {
		return err
	}
	f, err := os.CreateTemp(c.dir, "new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(c.dir, c.file(k)))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return err
	}
	c.total += int64(len(data)) - c.sizes[c.file(k)]
	c.sizes[c.file(k)] = int64(len(data))
	return nil
}

// look finds out what is there already.
func (c *programCache) look() error {
	if c.known {
		return nil
	}
	if err := os.Mkdir(c.dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	es, err := os.ReadDir(c.dir)
	if err != nil {
		return err
	}
	for _, e := range es {
		if fi, err := e.Info(); err == nil && fi.Mode().IsRegular() {
			c.sizes[e.Name()] = fi.Size()
			c.total += fi.Size()
		}
	}
	c.known = true
	return nil
}

// room removes the oldest entries until there are n bytes to be had.
func (c *programCache) room(n int64) error {
	if c.total+n <= maxCache {
		return nil
	}
	type entry struct {
		name string
		when time.Time
	}
	var es []entry
	for name := range c.sizes {
		fi, err := os.Lstat(filepath.Join(c.dir, name))
		if err != nil {
			c.total -= c.sizes[name]
			delete(c.sizes, name)
			continue
		}
		es = append(es, entry{name, fi.ModTime()})
	}
	sort.Slice(es, func(i, j int) bool { return es[i].when.Before(es[j].when) })
	for _, e := range es {
		if c.total+n <= maxCache {
			break
		}
		if err := os.Remove(filepath.Join(c.dir, e.name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		c.total -= c.sizes[e.name]
		delete(c.sizes, e.name)
	}
	return nil
}

// mayVary finds what can make two builds of one source differ: files that it
// includes, and the time of day.
var mayVary = regexp.MustCompile(`include|import|embed|__DATE__|__TIME|##|\\\s*\n|\?\?`)

func varies(x *portable.Program) bool {
	if mayVary.Match(x.Source) {
		return true
	}
	for i := range x.Headers {
		if varies(&x.Headers[i].Program) {
			return true
		}
	}
	return slices.ContainsFunc(x.Inputs, func(in portable.Program) bool { return varies(&in) })
}

// programKey names what the program is built to. A build that another one of
// the same source need not equal is named after its serial, too. Only
// executables have a name.
func (s *session) programKey(p *program, serial uint64) (programKey, bool) {
	var k programKey
	if s.cache.dir == "" || s.quirk.badBinaries || p.content.Kind != portable.Executable {
		return k, false
	}
	x := p.content
	x.SpecConstants = p.spec
	content, err := x.Marshal()
	if err != nil {
		return k, false
	}
	h := sha256.New()
	field := func(b []byte) {
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(b))))
		h.Write(b)
	}
	text := func(s string) { field([]byte(s)) }
	text("gpuctl program 1")
	for _, param := range []uint32{cl.PlatformName, cl.PlatformVendor, cl.PlatformVersion} {
		b, _ := cl.GetPlatformInfo(s.platf, param)
		field(b)
	}
	for _, d := range p.devices {
		for _, param := range []uint32{cl.DeviceName, cl.DeviceVendor, cl.DeviceVersion, cl.DriverVersion, cl.DeviceOpenclCVersion} {
			text(infoString(d.vendor, param))
		}
		text(fmt.Sprint(d.part, d.index, p.built[d.id] != nil && p.built[d.id].Status == cl.BuildSuccess))
	}
	field(content)
	if varies(&p.content) {
		text(fmt.Sprint("build ", p.id, serial))
	}
	return programKey(h.Sum(nil)), true
}

// unkept is a program whose build is to be kept.
type unkept struct {
	key    programKey
	vendor cl.Program
	desc   *description
	prog   *program
	since  time.Time
	done   chan struct{} // closed when it is kept, or will not be
	// unwanted says that somebody waits for done, and not for it to be kept.
	unwanted bool
}

// keep has the program's build kept once there is time. The caller holds s.mu.
func (s *session) keep(p *program, serial uint64) {
	k, ok := s.programKey(p, serial)
	if !ok || s.closed.Load() {
		return
	}
	s.built = time.Now()
	cl.RetainProgram(p.vendor)
	s.unkept = append(s.unkept, &unkept{key: k, vendor: p.vendor, desc: p.desc, prog: p, since: s.built, done: make(chan struct{})})
	if !s.keeping {
		s.keeping = true
		go s.keepAll()
	}
}

// keepNow is for a program that is being prepared: the session may leave again
// at once.
func (s *session) keepNow(p *program, serial uint64) {
	if k, ok := s.programKey(p, serial); ok {
		if err := s.cache.keep(&unkept{key: k, vendor: p.vendor, desc: p.desc}); err != nil {
			s.log.Debug("built program not kept", "program", p.id, "err", err)
		}
	}
}

func (s *session) keepAll() {
	for {
		s.mu.Lock()
		if len(s.unkept) == 0 || s.closed.Load() {
			for _, u := range s.unkept {
				cl.ReleaseProgram(u.vendor)
			}
			s.unkept, s.storing, s.keeping = nil, nil, false
			s.mu.Unlock()
			return
		}
		wait := min(cacheRest-time.Since(s.built), cachePatience-time.Since(s.unkept[0].since))
		if wait > 0 || s.frozen {
			s.mu.Unlock()
			time.Sleep(max(wait, cacheRest/10))
			continue
		}
		u := s.unkept[0]
		s.unkept, s.storing = s.unkept[1:], u
		s.mu.Unlock()
		keep := s.cache.keep
		if s.quirk.stillBinaries && fixedGroups(u.vendor) {
			keep = s.keepStill
		}
		if err := keep(u); err != nil {
			s.log.Debug("built program not kept", "err", err)
		}
		cl.ReleaseProgram(u.vendor)
		close(u.done)
	}
}

// fixedGroups reports whether a built program has a kernel of a fixed group
// size (reqd_work_group_size), or can't be asked.
func fixedGroups(v cl.Program) bool {
	return slices.ContainsFunc(kernelNames(v), func(name string) bool {
		k, st := cl.CreateKernel(v, name)
		if st != cl.Success {
			return true
		}
		defer cl.ReleaseKernel(k)
		b, st := cl.GetKernelWorkGroupInfo(k, 0, cl.KernelCompileWorkGroupSize)
		return st != cl.Success || slices.ContainsFunc(b, func(x byte) bool { return x != 0 })
	})
}

// keepStill keeps a program's build at a moment when no command runs, and lets
// none begin before that is done. It gives up if there is no such moment for long.
func (s *session) keepStill(u *unkept) error {
	<-u.desc.done // not while the others wait
	for from := time.Now(); time.Since(from) < stillPatience; time.Sleep(cacheRest / 10) {
		s.mu.Lock()
		cs := s.contexts()
		marks, launched := s.markers(cs), launches(cs)
		s.mu.Unlock()
		await(marks)
		s.mu.Lock()
		if u.unwanted {
			s.mu.Unlock()
			return ErrBusy
		}
		// Somebody waits for the session to stand still, or it does.
		over := s.frozen || s.closed.Load() || s.gate.Load()
		if !over && launches(s.contexts()) == launched {
			defer s.mu.Unlock()
			return s.cache.keep(u)
		}
		s.mu.Unlock()
	}
	return ErrBusy
}

// launches is how many commands the queues have taken. The caller holds s.mu.
func launches(cs []*clContext) (n uint64) {
	for _, c := range cs {
		for _, q := range c.queues {
			n += q.seq
		}
	}
	return n
}

// unused returns what must be over before the program is built anew: a program
// that has kernels can't be, and what is kept must be of the former build. The
// caller holds s.mu.
func (s *session) unused(p *program) []chan struct{} {
	var over []chan struct{}
	if p.desc != nil {
		over = append(over, p.desc.done)
	}
	if s.storing != nil && s.storing.prog == p {
		s.storing.unwanted = true
		over = append(over, s.storing.done)
	}
	s.unkept = slices.DeleteFunc(s.unkept, func(u *unkept) bool {
		if u.prog == p {
			cl.ReleaseProgram(u.vendor)
		}
		return u.prog == p
	})
	return over
}

func (c *programCache) keep(u *unkept) error {
	<-u.desc.done
	if u.desc.err != nil {
		return u.desc.err
	}
	bs, st := cl.GetProgramBinaries(u.vendor)
	if st != cl.Success {
		return fmt.Errorf("binaries: %w", st)
	}
	if slices.ContainsFunc(bs, func(b []byte) bool { return len(b) == 0 }) {
		return errNoBinary
	}
	return c.put(u.key, &builtProgram{Binaries: bs, Signature: u.desc.sig, Kernels: kernelNames(u.vendor)})
}

// recall makes the program of what it was built to here before. It reports
// false where that is not known, or not loadable any more.
func (s *session) recall(p *program, serial uint64) bool {
	k, ok := s.programKey(p, serial)
	if !ok {
		return false
	}
	x := s.cache.get(k)
	ds := p.builtFor()
	if x == nil || len(ds) != len(p.devices) || len(x.Binaries) != len(ds) ||
		slices.ContainsFunc(x.Binaries, func(b []byte) bool { return len(b) == 0 }) {
		return false
	}
	v, each, st := cl.CreateProgramWithBinary(p.ctx.vendor, vendorIDs(ds), x.Binaries)
	if st != cl.Success {
		return false
	}
	ok = !slices.ContainsFunc(each, func(st cl.Status) bool { return st != cl.Success }) &&
		cl.BuildProgram(v, vendorIDs(ds), p.content.Options) == cl.Success
	names := kernelNames(v)
	slices.Sort(names)
	slices.Sort(x.Kernels)
	if !ok || !slices.Equal(names, x.Kernels) {
		s.log.Warn("built program does not load", "program", p.id, "kernels", strings.Join(x.Kernels, " "))
		cl.ReleaseProgram(v)
		return false
	}
	p.vendor, p.recalled = v, true
	s.out.expect(mayPrint(&p.content))
	p.exact = p.isExact()
	p.desc = &description{done: make(chan struct{}), sig: x.Signature, sure: true}
	close(p.desc.done)
	return true
}

// included is a program for others to include, which the caller releases. One
// that was made of a binary has no source there, and stays what it is: there may
// be kernels of it, and more to come.
func (p *program) included() (cl.Program, cl.Status) {
	if !p.recalled || len(p.content.Inputs) > 0 {
		cl.RetainProgram(p.vendor)
		return p.vendor, cl.Success
	}
	return p.ctx.vendorProgram(unbuilt(&p.content), nil, nil)
}

// original gives a program that was made of a binary its source again, for one
// that is to be built anew.
func (s *session) original(p *program) cl.Status {
	if !p.recalled || len(p.content.Inputs) > 0 { // what was linked stays so
		return cl.Success
	}
	old := p.vendor
	if st := s.makeProgram(p); st != cl.Success {
		return st
	}
	cl.ReleaseProgram(old)
	p.recalled = false
	return cl.Success
}
