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
	// maxCache is the largest size of a session's built programs in bytes. They are in
	// memory.
	maxCache = 64 << 20
	// maxEntry is the largest size of one of them in bytes.
	maxEntry = 16 << 20
	// cacheRest is the time without a build after which builds are kept, because some
	// runtimes compile when they are asked for a binary. A build waits no longer than
	// cachePatience.
	cacheRest     = 300 * time.Millisecond
	cachePatience = 5 * time.Second
	// The same for runtimes whose binaries are dear. A program that does not last that long
	// does not pay for them.
	dearRest     = 10 * time.Second
	dearPatience = time.Minute
)

// programCache keeps the builds of the session's programs on one device, so that an
// executor of the same session that comes back to the device need not build them again. It
// is in the session's folder. Other executors of the session can write there, and the
// application may have taken control of one of them, for example of one with another
// runtime. So an entry is valid only if it is signed with a key that gpuguest gives only to
// executors for this device.
type programCache struct {
	dir    string // empty: there is no cache
	secret []byte

	mu    sync.Mutex
	known bool
	sizes map[string]int64 // by file name
	total int64
}

// builtProgram is an entry. It has one binary of the vendor for each device.
type builtProgram struct {
	Binaries  [][]byte
	Signature signature
	Kernels   []string
}

// errNoBinary is returned for a program if its runtime returns no binary for one of its
// devices.
var errNoBinary = errors.New("no binary for a device")

// errDear is returned for a program whose binaries must not be asked for.
var errDear = errors.New("a kernel has a fixed group size")

// programKey identifies the result of a build.
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

// file returns the name of an entry's file. It is different for each device.
func (c *programCache) file(k programKey) string { return hex.EncodeToString(c.sign("name", k, nil)) }

// get returns nil if there is no such entry, or if it is not valid.
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

// put adds an entry. It removes the oldest entries if there is no room.
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

// look reads which entries exist already.
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

// room removes the oldest entries until n bytes are free.
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

// mayVary matches text that can make two builds of the same source differ: included files,
// and the date and time of the build.
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

// programKey returns the key of the program's build. If two builds of the same source may
// differ, the key contains the program's serial number, too. Only executables have a key.
func (s *session) programKey(p *program, serial uint64) (programKey, bool) {
	var k programKey
	if s.cache.dir == "" || s.quirk.badBinaries || p.content.Kind != portable.Executable {
		return k, false
	}
	content, err := p.content.Marshal()
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
	done   chan struct{} // closed when the build is kept, or will not be kept
}

// keep requests that the program's build is kept when there is time. The caller holds s.mu.
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

// keepNow keeps the build of a program that is being prepared. The session may leave this
// executor soon.
func (s *session) keepNow(p *program, serial uint64) {
	if s.quirk.dearBinaries {
		return // the swap does not wait for that
	}
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
		rest, patience := cacheRest, cachePatience
		if s.quirk.dearBinaries {
			rest, patience = dearRest, dearPatience
		}
		wait := min(rest-time.Since(s.built), patience-time.Since(s.unkept[0].since))
		if wait > 0 || s.frozen {
			s.mu.Unlock()
			time.Sleep(min(max(wait, cacheRest/10), cacheRest))
			continue
		}
		u := s.unkept[0]
		s.unkept, s.storing = s.unkept[1:], u
		s.mu.Unlock()
		began := time.Now()
		err := errDear
		if !s.quirk.dearBinaries || !fixedGroups(u.vendor) {
			err = s.cache.keep(u)
		}
		if err != nil {
			s.log.Debug("built program not kept", "err", err)
		}
		cl.ReleaseProgram(u.vendor)
		close(u.done)
		if s.quirk.dearBinaries {
			time.Sleep(time.Since(began)) // launches get their turn
		}
	}
}

// fixedGroups reports whether a built program has a kernel with a fixed group size
// (reqd_work_group_size). It returns true if the runtime does not answer.
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

// unused returns channels that must be closed before the program is built again. A program
// that has kernels cannot be built again, and what is kept must be the former build. The
// caller holds s.mu.
func (s *session) unused(p *program) []chan struct{} {
	var over []chan struct{}
	if p.desc != nil {
		over = append(over, p.desc.done)
	}
	if s.storing != nil && s.storing.prog == p {
		over = append(over, s.storing.done)
	}
	s.keepNot(p)
	return over
}

// keepNot drops the program's builds that are still to be kept.
func (s *session) keepNot(p *program) {
	s.unkept = slices.DeleteFunc(s.unkept, func(u *unkept) bool {
		if u.prog == p {
			cl.ReleaseProgram(u.vendor)
		}
		return u.prog == p
	})
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

// recall creates the program from the build that was kept on this device. It returns false
// if there is none, or if it cannot be loaded any more.
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

// included returns a program that others can include. The caller releases it. A program
// that was created from a binary has no source in the runtime, so another one is created
// from the source. The first is not changed, because it may have kernels, and may get more.
func (p *program) included() (cl.Program, cl.Status) {
	if !p.recalled || len(p.content.Inputs) > 0 {
		cl.RetainProgram(p.vendor)
		return p.vendor, cl.Success
	}
	return p.ctx.vendorProgram(unbuilt(&p.content), nil, nil)
}

// original gives a program that was created from a binary its source again, because it is
// to be built again.
func (s *session) original(p *program) cl.Status {
	if !p.recalled || len(p.content.Inputs) > 0 { // a linked program stays linked
		return cl.Success
	}
	old := p.vendor
	if st := s.makeProgram(p); st != cl.Success {
		return st
	}
	cl.ReleaseProgram(old)
	p.recalled = false
	return p.ready()
}
