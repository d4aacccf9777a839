package vgpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"

	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

const (
	typeFile      = "nvidia/current_vgpu_type"
	creatableFile = "nvidia/creatable_vgpu_types"
)

// CreatableType is a row of creatable_vgpu_types.
type CreatableType struct {
	ID   uint32
	Name string // without the vendor
}

// ParseCreatable parses the table of NVIDIA's creatable_vgpu_types: a number, a colon and
// a name in each line, after a header line. Other lines are ignored.
func ParseCreatable(data []byte) []CreatableType {
	var out []CreatableType
	for line := range strings.Lines(string(data[:min(len(data), maxText)])) {
		number, name, ok := strings.Cut(line, ":")
		id, err := strconv.ParseUint(strings.TrimSpace(number), 10, 32)
		name = plain(strings.TrimSpace(name))
		if !ok || err != nil || id == 0 || !isName(name) || len(out) >= maxTypes {
			continue
		}
		if !slices.ContainsFunc(out, func(t CreatableType) bool { return t.ID == uint32(id) || t.Name == name }) {
			out = append(out, CreatableType{uint32(id), name})
		}
	}
	return out
}

func isName(s string) bool {
	return s != "" && len(s) <= maxName && utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// vendorVF is the state of one virtual function.
type vendorVF struct {
	address   pci.Address
	current   uint32 // id of its type; 0: none
	creatable []CreatableType
	err       error // why it cannot be read
}

func (m *Manager) vendorVFs(card *pci.Card) []vendorVF {
	var out []vendorVF
	for _, a := range m.functions(card) {
		if !m.exists(m.at(a, typeFile)) {
			continue
		}
		v := vendorVF{address: a}
		v.current, v.err = m.currentType(a)
		if data, err := m.root.ReadFile(m.at(a, creatableFile)); err == nil {
			v.creatable = ParseCreatable(data)
		}
		out = append(out, v)
	}
	return out
}

func (m *Manager) currentType(a pci.Address) (uint32, error) {
	data, err := m.root.ReadFile(m.at(a, typeFile))
	if err != nil {
		return 0, fmt.Errorf("vGPU type of %s: %w", a, err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("vGPU type of %s: %.20q is no number", a, data)
	}
	return uint32(n), nil
}

// typeNames returns a function that finds the names of types by their ids. A table
// contains only types that can still be created, so names are remembered. The name of an
// unknown type is its id.
func (m *Manager) typeNames(vfs []vendorVF) func(uint32) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, v := range vfs {
		for _, t := range v.creatable {
			m.seen[t.ID] = t.Name
		}
	}
	names := map[uint32]string{}
	for _, v := range vfs {
		name := m.seen[v.current]
		if name == "" && v.current != 0 && m.name != nil {
			name = plain(m.name(v.current))
		}
		if !isName(name) {
			name = "type-" + strconv.FormatUint(uint64(v.current), 10)
		}
		names[v.current] = name
	}
	return func(id uint32) string { return names[id] }
}

// learn takes names of types from the caller's instances, because the driver of a full
// card does not list their names any more.
func (m *Manager) learn(vfs []vendorVF, use Use) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, v := range vfs {
		if name := use.Profiles[v.address.String()]; v.current != 0 && m.seen[v.current] == "" && isName(name) {
			m.seen[v.current] = name
		}
	}
}

func (m *Manager) vendorInstances(card *pci.Card) ([]Instance, error) {
	vfs := m.vendorVFs(card)
	name := m.typeNames(vfs)
	var out []Instance
	for _, v := range vfs {
		if v.err != nil {
			return nil, v.err
		}
		if v.current != 0 {
			out = append(out, Instance{v.address.String(), Vendor, name(v.current), v.address})
		}
	}
	return out, nil
}

// vendorProfiles returns the types that the catalogue has and those that the driver
// offers. A type of the catalogue that the driver does not offer now is full.
func (m *Manager) vendorProfiles(card *pci.Card, use Use) ([]Profile, error) {
	vfs := m.vendorVFs(card)
	m.learn(vfs, use)
	r := m.rules(card, use)
	name := m.typeNames(vfs)
	existing := map[string]uint32{}
	offered := map[string]int{} // number of free functions on which a type can be created
	var order []string
	empty := 0
	for _, v := range vfs {
		if v.err != nil {
			return nil, v.err
		}
		for _, t := range v.creatable {
			if v.current == 0 && !use.held(v.address.String()) {
				offered[t.Name]++
			}
			order = append(order, t.Name)
		}
		if v.current != 0 {
			existing[name(v.current)]++
			order = append(order, name(v.current))
		} else if !use.held(v.address.String()) {
			empty++
		}
	}
	if e, ok := m.models(card.Main()); ok {
		for _, t := range e.VGPU {
			order = append(order, t.Name)
		}
	}
	used := add(existing, use.Scheduled)
	var out []Profile
	seen := map[string]bool{}
	for _, n := range order {
		if seen[n] {
			continue
		}
		seen[n] = true
		t, known := r.types[n]
		if !known {
			t = catalog.VGPUType{Name: n}
		}
		p := Profile{Name: n, Kind: Vendor, Memory: t.Memory, Max: t.Max, Existing: existing[n], Scheduled: use.Scheduled[n], Apart: r.apart(t)}
		p.Free, p.Why = r.free(t, used)
		p.limit(int64(offered[n]), "the driver does not offer it now")
		p.limit(int64(empty)-int64(sum(use.Scheduled)), "no virtual function is free")
		out = append(out, p)
	}
	return out, nil
}

// limit lowers Free.
func (p *Profile) limit(n int64, why string) {
	if n < int64(p.Free) {
		if p.Free = uint32(max(n, 0)); p.Free == 0 {
			p.Why = why
		}
	}
}

func (m *Manager) pickVendor(card *pci.Card, profile string, use Use) (Instance, error) {
	for _, v := range m.vendorVFs(card) {
		if v.err != nil || v.current != 0 || use.held(v.address.String()) {
			continue
		}
		if slices.ContainsFunc(v.creatable, func(t CreatableType) bool { return t.Name == profile }) {
			return Instance{v.address.String(), Vendor, profile, v.address}, nil
		}
	}
	return Instance{}, fmt.Errorf("%s for %s: %w: no virtual function offers it", profile, card.Address, ErrFull)
}

func (m *Manager) makeVendor(ctx context.Context, inst Instance) error {
	data, err := m.root.ReadFile(m.at(inst.Function, creatableFile))
	if err != nil {
		return fmt.Errorf("make %s on %s: %w", inst.Profile, inst.Function, err)
	}
	creatable := ParseCreatable(data)
	i := slices.IndexFunc(creatable, func(t CreatableType) bool { return t.Name == inst.Profile })
	if i < 0 {
		return fmt.Errorf("make %s on %s: %w: the driver does not offer it any more", inst.Profile, inst.Function, ErrFull)
	}
	if now, err := m.currentType(inst.Function); err != nil {
		return fmt.Errorf("make %s on %s: %w", inst.Profile, inst.Function, err)
	} else if now != 0 {
		return fmt.Errorf("make %s on %s: %w: it has a vGPU of type %d", inst.Profile, inst.Function, ErrInUse, now)
	}
	if err := m.root.Write(ctx, m.at(inst.Function, typeFile), strconv.FormatUint(uint64(creatable[i].ID), 10)); err != nil {
		return fmt.Errorf("make %s on %s: %w", inst.Profile, inst.Function, err)
	}
	if now, err := m.currentType(inst.Function); err != nil {
		return fmt.Errorf("make %s on %s: %w", inst.Profile, inst.Function, err)
	} else if now != creatable[i].ID {
		return fmt.Errorf("make %s on %s: %w: type %d", inst.Profile, inst.Function, ErrReadBack, now)
	}
	return nil
}

func (m *Manager) deleteVendor(ctx context.Context, i Instance) error {
	now, err := m.currentType(i.Function)
	if err == nil && now == 0 || !m.exists(m.at(i.Function, typeFile)) {
		return nil
	}
	if err := m.root.Write(ctx, m.at(i.Function, typeFile), "0"); err != nil {
		if errors.Is(err, syscall.EBUSY) {
			err = fmt.Errorf("%w: a VM has it: %w", ErrInUse, err)
		}
		return fmt.Errorf("delete the vGPU on %s: %w", i.Function, err)
	}
	if now, err := m.currentType(i.Function); err != nil {
		return fmt.Errorf("delete the vGPU on %s: %w", i.Function, err)
	} else if now != 0 {
		return fmt.Errorf("delete the vGPU on %s: %w: type %d", i.Function, ErrReadBack, now)
	}
	return nil
}
