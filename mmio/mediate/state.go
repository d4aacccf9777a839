package mediate

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// A saved VGPU is: a magic number, the length of a record, the record (CBOR), pages of memory that are
// not zero, each behind its number, a number that is none, and the SHA-256 of all before.
// All addresses in it are the VM's own, so it says nothing of the GPU that it was on.

const (
	stateMagic  = "gpuctl-vgpu-2\n"
	recordSpare = 1 << 20 // for registers
	entryLimit  = 9       // bytes of an entry of a page table
	endOfPages  = 0xffffffff
	maxAge      = int64(100 * 365 * 24 * time.Hour)
)

// A record is an array of its fields, and so are those in it: one that claims to have many
// entries has to be as long as these are.
type record struct {
	_ struct{} `cbor:",toarray"`

	Memory   uint64
	Channels int
	Mode     Mode
	Plain    map[uint8][]uint32
	Values   []uint32 // registers, in the order of values
	Faults   []uint32
	Age      int64 // ns, of the PTIMER
	Mapped   bool
	Chans    []chanRecord
	Spaces   []spaceRecord // Para
	Queue    [][2]uint32   // channel and put of each command
}

type chanRecord struct {
	_ struct{} `cbor:",toarray"`

	Value, Put, State           uint32
	Valid, Listed, Dead, Unlist bool
	Space                       int // its number in Spaces plus 1 (Para)
	Userd                       []byte
	Position                    nvc0.Position
}

type spaceRecord struct {
	_ struct{} `cbor:",toarray"`

	Number uint32
	Tables []tableRecord
}

type tableRecord struct {
	_ struct{} `cbor:",toarray"`

	Index, Size  int
	Large, Small []uint64 // nil: none
}

// values is the registers that are a word each.
func (r *registers) values() []*uint32 {
	return []*uint32{
		&r.window, &r.bar[0], &r.bar[1], &r.playlist, &r.kicked, &r.tlbSpace, &r.contextData, &r.contextInst,
		&r.intr, &r.graphIntr, &r.source, &r.listIntr, &r.slots,
	}
}

// Pause lets no further command of a VM begin; one that runs goes on to its end. What the VM
// submits meanwhile waits. Errors wrap [ErrNoVGPU].
func (g *GPU) Pause(vm mmio.VM) error {
	defer g.lock()()
	v := g.vgpus[vm]
	if v == nil {
		return fmt.Errorf("VM %d: %w", vm, ErrNoVGPU)
	}
	if v.paused {
		return nil
	}
	if _, err := g.sched.Leave(g.hw.Now(), v.id); err != nil {
		return fmt.Errorf("VM %d: %w", vm, err)
	}
	v.paused = true
	v.waiting = append(v.ready, v.waiting...)
	v.ready = nil
	return nil
}

// Resume ends a pause. Errors wrap [ErrNoVGPU], or [ErrBusy] while a command from before the
// pause still runs.
func (g *GPU) Resume(vm mmio.VM) error {
	defer g.lock()()
	v := g.vgpus[vm]
	if v == nil {
		return fmt.Errorf("VM %d: %w", vm, ErrNoVGPU)
	}
	if !v.paused {
		return nil
	}
	if g.running != nil && g.running.v == v {
		return fmt.Errorf("VM %d: %w: ask again when it has ended", vm, ErrBusy)
	}
	if err := g.sched.Join(g.hw.Now(), v.id, v.request.Weight); err != nil {
		return fmt.Errorf("VM %d: %w", vm, err)
	}
	v.paused = false
	v.left = g.config.Work
	v.promote()
	return nil
}

// Save writes all of a paused VGPU. Errors wrap [ErrNoVGPU], [ErrBusy] if it is not paused or a
// command still runs, or what w returns.
func (g *GPU) Save(vm mmio.VM, w io.Writer) error {
	v, text, err := g.begin(vm)
	if err != nil {
		return err
	}
	sum := sha256.New()
	out := io.MultiWriter(w, sum)
	head := binary.LittleEndian.AppendUint32([]byte(stateMagic), uint32(len(text)))
	if _, err := out.Write(append(head, text...)); err != nil {
		return fmt.Errorf("VM %d: save: %w", vm, err)
	}
	page := make([]byte, 4+nvc0.PageSize)
	for i := range v.size / nvc0.PageSize {
		some, err := v.savePage(i, page[4:])
		if err != nil {
			return err
		}
		if !some {
			continue
		}
		binary.LittleEndian.PutUint32(page, uint32(i))
		if _, err := out.Write(page); err != nil {
			return fmt.Errorf("VM %d: save: %w", vm, err)
		}
	}
	if _, err := out.Write(binary.LittleEndian.AppendUint32(nil, endOfPages)); err != nil {
		return fmt.Errorf("VM %d: save: %w", vm, err)
	}
	if _, err := w.Write(sum.Sum(nil)); err != nil {
		return fmt.Errorf("VM %d: save: %w", vm, err)
	}
	return nil
}

// AtRest returns an error that wraps [ErrBusy] while a paused VM's memory may change: a command
// from before the pause runs.
func (g *GPU) AtRest(vm mmio.VM) error {
	defer g.lock()()
	v := g.vgpus[vm]
	if v == nil {
		return fmt.Errorf("VM %d: %w", vm, ErrNoVGPU)
	}
	return v.atRest()
}

// begin takes the record of a paused VGPU.
func (g *GPU) begin(vm mmio.VM) (*VGPU, []byte, error) {
	defer g.lock()()
	v := g.vgpus[vm]
	if v == nil {
		return nil, nil, fmt.Errorf("VM %d: %w", vm, ErrNoVGPU)
	}
	if err := v.atRest(); err != nil {
		return nil, nil, err
	}
	mode, err := cbor.CoreDetEncOptions().EncMode()
	if err != nil {
		return nil, nil, err
	}
	text, err := mode.Marshal(v.record())
	if err != nil {
		return nil, nil, fmt.Errorf("VM %d: save: %w", vm, err)
	}
	return v, text, nil
}

// atRest returns an error if the VM's memory may change.
func (v *VGPU) atRest() error {
	if v.gone || !v.paused || v.g.running != nil && v.g.running.v == v {
		return fmt.Errorf("VM %d: %w: pause it, and wait for that", v.request.VM, ErrBusy)
	}
	return nil
}

// savePage reads a page, and reports whether anything is in it. The GPU is not locked
// while it is written, which may take long.
func (v *VGPU) savePage(i uint64, p []byte) (some bool, err error) {
	defer v.g.lock()()
	if err := v.atRest(); err != nil {
		return false, err
	}
	v.load(GuestPA(i*nvc0.PageSize), p)
	return !slices.Equal(p, v.g.zeros[:len(p)]), nil
}

// record is the VM's state but for its memory.
func (v *VGPU) record() record {
	r := record{
		Memory: v.size, Channels: len(v.channels), Mode: v.request.Mode, Plain: map[uint8][]uint32{},
		Faults: v.faults[:], Age: int64(v.g.now() - v.epoch), Mapped: v.mapped,
	}
	for id, p := range v.plain {
		if p != nil {
			r.Plain[uint8(id)] = p
		}
	}
	for _, p := range v.values() {
		r.Values = append(r.Values, *p)
	}
	number := map[*space]int{}
	if v.request.Mode == Para {
		for at, s := range v.spaces {
			r.Spaces = append(r.Spaces, v.spaceRecord(uint32(at), s))
		}
		slices.SortFunc(r.Spaces, func(a, b spaceRecord) int { return int(a.Number) - int(b.Number) })
		for i, s := range r.Spaces {
			number[v.spaces[GuestPA(s.Number)]] = i + 1
		}
	}
	for i := range v.channels {
		c := &v.channels[i]
		to := chanRecord{Value: c.value, Put: c.put, State: c.context, Valid: c.valid, Listed: c.listed, Dead: c.dead, Unlist: c.unlist}
		if c.valid {
			to.Space = number[c.space]
			to.Userd = make([]byte, nvc0.PageSize)
			v.g.hw.Load(nvc0.Mediator, c.userd, to.Userd)
			to.Position = v.g.hw.Position(v.first + i)
		}
		r.Chans = append(r.Chans, to)
	}
	for _, c := range v.waiting {
		r.Queue = append(r.Queue, [2]uint32{uint32(c.channel), c.put})
	}
	return r
}

// spaceRecord is a para-virtual space, in the VM's terms.
func (v *VGPU) spaceRecord(number uint32, s *space) spaceRecord {
	r := spaceRecord{Number: number}
	for i, t := range s.tables {
		r.Tables = append(r.Tables, tableRecord{
			Index: i, Size: int(t.size),
			Large: v.entries(t.large, nvc0.LargeEntries>>t.size), Small: v.entries(t.small, nvc0.SmallEntries>>t.size),
		})
	}
	slices.SortFunc(r.Tables, func(a, b tableRecord) int { return a.Index - b.Index })
	return r
}

func (v *VGPU) entries(at HostPA, n int) []uint64 {
	if at == 0 {
		return nil
	}
	b := make([]byte, 8*n)
	v.g.hw.Load(nvc0.Mediator, at, b)
	all := make([]uint64, n)
	for i := range all {
		all[i] = uint64(v.guestTerms(nvc0.PTE(binary.LittleEndian.Uint64(b[8*i:]))))
	}
	return all
}

// Restore makes a VGPU of what was saved, paused. Its memory, channels and mode have to be
// what they were. Nothing in the stream is trusted: it goes through the checks that the VM's
// own accesses go through. Errors wrap those of [GPU.Create] or [ErrState]; then there is no VGPU.
func (g *GPU) Restore(q Request, from io.Reader) (*VGPU, error) {
	v, err := g.Create(q)
	if err != nil {
		return nil, err
	}
	if err = g.Pause(q.VM); err == nil {
		err = v.restore(from)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("VM %d: restore: %w", q.VM, err), g.Destroy(q.VM))
	}
	return v, nil
}

func (v *VGPU) restore(from io.Reader) error {
	sum := sha256.New()
	in := io.TeeReader(from, sum)
	r, err := readRecord(in, v.recordLimit())
	if err != nil {
		return err
	}
	if r.Memory != v.size || r.Channels != v.request.Channels || r.Mode != v.request.Mode || len(r.Chans) != r.Channels {
		return fmt.Errorf("%w with %d bytes, %d channels and mode %s, and no other", ErrState, v.size, len(v.channels), v.request.Mode)
	}
	if err := v.readPages(in); err != nil {
		return err
	}
	if err := checkSum(from, sum); err != nil {
		return err
	}
	defer v.g.lock()()
	return v.apply(r)
}

// recordLimit is how long the record of such a VGPU can be: its page tables, if they are in
// it, and its channels.
func (v *VGPU) recordLimit() uint32 {
	n := recordSpare + len(v.channels)*2*nvc0.PageSize
	if v.request.Mode == Para {
		n += v.request.Tables * nvc0.PageSize / 8 * entryLimit
	}
	return uint32(n)
}

func readRecord(in io.Reader, limit uint32) (r record, err error) {
	head := make([]byte, len(stateMagic)+4)
	if _, err := io.ReadFull(in, head); err != nil {
		return r, fmt.Errorf("%w: %w", ErrState, err)
	}
	n := binary.LittleEndian.Uint32(head[len(stateMagic):])
	if string(head[:len(stateMagic)]) != stateMagic {
		return r, fmt.Errorf("%w: it begins otherwise", ErrState)
	}
	if n > limit { //check:state-length
		return r, fmt.Errorf("%w: a record of %d bytes, and one of such a VGPU has %d at most", ErrState, n, limit)
	}
	text, err := io.ReadAll(io.LimitReader(in, int64(n)))
	if err == nil && len(text) != int(n) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return r, fmt.Errorf("%w: its record: %w", ErrState, err)
	}
	mode, err := cbor.DecOptions{MaxNestedLevels: 8, MaxArrayElements: nvc0.SmallEntries, MaxMapPairs: 1024, ExtraReturnErrors: cbor.ExtraDecErrorUnknownField}.DecMode()
	if err != nil {
		return r, err
	}
	if err := mode.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("%w: %w", ErrState, err)
	}
	return r, nil
}

func (v *VGPU) readPages(in io.Reader) error {
	var number [4]byte
	page := make([]byte, nvc0.PageSize)
	for next := uint64(0); ; {
		if _, err := io.ReadFull(in, number[:]); err != nil {
			return fmt.Errorf("%w: %w", ErrState, err)
		}
		i := binary.LittleEndian.Uint32(number[:])
		if i == endOfPages {
			return nil
		}
		if uint64(i) < next { //check:state-order
			return fmt.Errorf("%w: page %d comes late", ErrState, i)
		}
		next = uint64(i) + 1
		if _, err := io.ReadFull(in, page); err != nil {
			return fmt.Errorf("%w: %w", ErrState, err)
		}
		if !v.restorePage(i, page) {
			return fmt.Errorf("%w: page %d is not in its memory", ErrState, i)
		}
	}
}

func (v *VGPU) restorePage(i uint32, page []byte) bool {
	defer v.g.lock()()
	return !v.gone && v.store(GuestPA(i)*nvc0.PageSize, page)
}

func checkSum(from io.Reader, sum hash.Hash) error {
	want := make([]byte, sha256.Size)
	if _, err := io.ReadFull(from, want); err != nil || !slices.Equal(want, sum.Sum(nil)) { //check:state-sum
		return fmt.Errorf("%w: its sum is another", ErrState)
	}
	return nil
}

// apply brings the VGPU to a record's state.
func (v *VGPU) apply(r record) error {
	v.left = v.g.config.Work
	for id, p := range r.Plain {
		if int(id) >= len(v.plain) || v.plain[id] == nil || len(v.plain[id]) != len(p) { //check:state-registers
			return fmt.Errorf("%w: register %d", ErrState, id)
		}
		copy(v.plain[id], p)
	}
	to := v.values()
	if len(r.Values) != len(to) || len(r.Faults) != len(v.faults) { //check:state-values
		return fmt.Errorf("%w: %d values", ErrState, len(r.Values))
	}
	for i, w := range r.Values {
		*to[i] = w
	}
	if v.window&^0x00ffffff != 0 || (v.bar[0]|v.bar[1])&instTarget != 0 { //check:state-targets
		return fmt.Errorf("%w: addresses in other memory", ErrState)
	}
	copy(v.faults[:], r.Faults)
	v.epoch = v.g.now() - time.Duration(min(max(r.Age, 0), maxAge))
	v.mapped = r.Mapped && v.request.Mode == Para && uint64(v.slots)<<12+ParaSlots*nvc0.PageSize <= v.request.Guest.MemorySize()
	for _, s := range r.Spaces {
		if err := v.applySpace(s); err != nil {
			return err
		}
	}
	for i := range r.Chans {
		if err := v.applyChannel(i, &r.Chans[i], r.Spaces); err != nil {
			return err
		}
	}
	v.g.writePlaylist()
	for _, c := range r.Queue {
		if c[0] >= uint32(len(v.channels)) || len(v.waiting) >= v.request.Pending+len(v.channels) { //check:state-queue
			return fmt.Errorf("%w: a command of channel %d", ErrState, c[0])
		}
		v.waiting = append(v.waiting, command{v, int(c[0]), c[1] & (1<<nvc0.MaxRingOrder - 1)})
	}
	v.interrupts()
	return nil
}

func (v *VGPU) applyChannel(i int, r *chanRecord, spaces []spaceRecord) error {
	c := &v.channels[i]
	c.context = r.State
	if !r.Valid {
		c.value, c.listed = r.Value&^nvc0.ChannelValid, r.Listed
		return nil
	}
	if v.setChannel(uint32(i), r.Value|nvc0.ChannelValid); !c.valid || len(r.Userd) != nvc0.PageSize {
		return fmt.Errorf("%w: channel %d", ErrState, i)
	}
	if v.request.Mode == Para && r.Space > 0 {
		if r.Space > len(spaces) { //check:state-space
			return fmt.Errorf("%w: the space of channel %d", ErrState, i)
		}
		c.space = v.spaces[GuestPA(spaces[r.Space-1].Number)]
		c.space.users++
		v.bind(i)
	}
	v.g.hw.Store(nvc0.Mediator, c.userd, r.Userd)
	v.g.hw.SetPosition(v.first+i, r.Position)
	c.listed, c.unlist, c.put = r.Listed, r.Unlist, r.Put&(1<<nvc0.MaxRingOrder-1)
	if r.Dead {
		v.kill(i)
	}
	return nil
}

// applySpace makes a para-virtual space as calls would.
func (v *VGPU) applySpace(r spaceRecord) error {
	bad := func(what string) error { return fmt.Errorf("%w: space %d: %s", ErrState, r.Number, what) }
	if v.request.Mode != Para {
		return bad("the mode has none")
	}
	if _, ok := v.paraNew(r.Number, callWork); !ok {
		return bad("it can't be made")
	}
	s := v.spaces[GuestPA(r.Number)]
	for _, t := range r.Tables {
		if t.Index < 0 || t.Index >= nvc0.DirectoryLen || t.Size < 0 || t.Size > 3 { //check:state-table
			return bad("an entry of its directory")
		}
		want := tables{size: uint8(t.Size)}
		if t.Large != nil {
			want.large = 1
		}
		if t.Small != nil {
			want.small = 1
		}
		if !v.setTables(s, t.Index, want) {
			return bad("a table")
		}
		have := s.tables[t.Index]
		if !v.applyTable(have.large, t.Large, nvc0.LargeEntries>>t.Size, true) || !v.applyTable(have.small, t.Small, nvc0.SmallEntries>>t.Size, false) {
			return bad("an entry of a table")
		}
	}
	return nil
}

func (v *VGPU) applyTable(at HostPA, entries []uint64, n int, large bool) bool {
	if entries == nil {
		return true
	}
	if len(entries) != n { //check:state-entries
		return false
	}
	for i, raw := range entries {
		e := v.translate(nvc0.PTE(raw), large)
		if e == 0 && nvc0.PTE(raw).Present() {
			return false
		}
		if e != 0 {
			var b [8]byte
			binary.LittleEndian.PutUint64(b[:], uint64(e))
			v.g.hw.Store(nvc0.Mediator, at+HostPA(8*i), b[:])
		}
	}
	return true
}
