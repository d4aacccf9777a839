package vgpu

import (
	"context"
	"crypto/rand"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// mdevType is a type of mediated devices that a parent offers.
type mdevType struct {
	parent    pci.Address
	id        string // name of its folder, such as nvidia-22
	name      string // such as A40-8Q; without a name, the id
	available uint32
	known     catalog.VGPUType // as far as the driver reports it
	devices   []string         // UUIDs
}

func (m *Manager) mdevTypes(card *pci.Card) (out []mdevType, err error) {
	for _, a := range m.functions(card) {
		if out, err = m.typesOf(a, out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// typesOf appends the types of one parent.
func (m *Manager) typesOf(a pci.Address, out []mdevType) ([]mdevType, error) {
	dir := m.at(a, "mdev_supported_types")
	entries, _ := m.root.ReadDir(dir) // without the folder, it has none
	for _, e := range entries {
		if len(out) >= maxTypes || !isName(e.Name()) {
			continue
		}
		t := mdevType{parent: a, id: e.Name(), name: plain(m.text(path.Join(dir, e.Name(), "name")))}
		if !isName(t.name) {
			t.name = t.id
		}
		n, err := strconv.ParseUint(m.text(path.Join(dir, e.Name(), "available_instances")), 10, 32)
		if err != nil {
			return nil, fmt.Errorf("available_instances of %s on %s: %w", t.id, a, err)
		}
		t.available = uint32(n)
		t.known = parseDescription(m.text(path.Join(dir, e.Name(), "description")))
		devices, err := m.root.ReadDir(path.Join(dir, e.Name(), "devices"))
		if err == nil {
			for _, d := range devices {
				if IsUUID(d.Name()) {
					t.devices = append(t.devices, d.Name())
				}
			}
		}
		out = append(out, t)
	}
	return out, nil
}

// parseDescription parses a driver's description of a type: NVIDIA's is one line such as
// "num_heads=4, frl_config=60, framebuffer=8192M, max_instance=6"; Intel's has several
// lines, such as "high_gm_size: 384MB".
func parseDescription(s string) catalog.VGPUType {
	var t catalog.VGPUType
	for field := range strings.FieldsFuncSeq(s, func(r rune) bool { return r == ',' || r == '\n' }) {
		name, value, ok := strings.Cut(field, "=")
		if !ok {
			name, value, _ = strings.Cut(field, ":")
		}
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(name) {
		case "framebuffer":
			if n, err := size.Parse(value); err == nil && n <= 1<<50 {
				t.Memory = n
			}
		case "max_instance":
			if n, err := strconv.ParseUint(value, 10, 16); err == nil && n <= maxTypes {
				t.Max = uint32(n)
			}
		}
	}
	return t
}

func (m *Manager) mdevInstances(card *pci.Card) ([]Instance, error) {
	types, err := m.mdevTypes(card)
	if err != nil {
		return nil, err
	}
	var out []Instance
	for _, t := range types {
		for _, id := range t.devices {
			out = append(out, Instance{id, Mdev, t.name, t.parent})
		}
	}
	return out, nil
}

// mdevProfiles adds up the parents of a type: the card itself, or its virtual functions,
// each of which offers one.
func (m *Manager) mdevProfiles(card *pci.Card, use Use) ([]Profile, error) {
	types, err := m.mdevTypes(card)
	if err != nil {
		return nil, err
	}
	r := m.rules(card, use)
	existing, available := map[string]uint32{}, map[string]int64{}
	var order []string
	for _, t := range types {
		if !slices.Contains(order, t.name) {
			order = append(order, t.name)
		}
		existing[t.name] += uint32(len(t.devices))
		available[t.name] += int64(t.available)
		if k, ok := r.types[t.name]; !ok || k.Memory == 0 || k.Max == 0 {
			t.known.Name = t.name
			r.types[t.name] = t.known
		}
	}
	used := add(existing, use.Scheduled)
	scheduled := int64(sum(use.Scheduled))
	var out []Profile
	for _, n := range order {
		t := r.types[n]
		p := Profile{Name: n, Kind: Mdev, Memory: t.Memory, Max: t.Max, Existing: existing[n], Scheduled: use.Scheduled[n], Apart: r.apart(t)}
		if t.Memory != 0 && t.Max != 0 {
			p.Free, p.Why = r.free(t, used)
		} else {
			// Only the driver knows which types can be combined on a parent. So each
			// scheduled instance may take the place of this one.
			if p.Free = uint32(min(available[n], 1<<31)); p.Free == 0 {
				p.Why = "the driver has no more"
			}
		}
		p.limit(available[n]-scheduled, "the driver has no more")
		out = append(out, p)
	}
	return out, nil
}

func (m *Manager) pickMdev(card *pci.Card, profile, id string) (Instance, error) {
	if id == "" {
		id = NewUUID()
	}
	if !IsUUID(id) {
		return Instance{}, fmt.Errorf("%.40q is no UUID in lower case", id)
	}
	if m.exists(path.Join(mdevs, id)) {
		return Instance{}, fmt.Errorf("there is a mediated device %s already", id)
	}
	types, err := m.mdevTypes(card)
	if err != nil {
		return Instance{}, err
	}
	i := slices.IndexFunc(types, func(t mdevType) bool { return t.name == profile && t.available > 0 })
	if i < 0 {
		return Instance{}, fmt.Errorf("%s for %s: %w: the driver has no more", profile, card.Address, ErrFull)
	}
	return Instance{id, Mdev, profile, types[i].parent}, nil
}

func (m *Manager) makeMdev(ctx context.Context, i Instance) error {
	types, err := m.typesOf(i.Function, nil)
	if err != nil {
		return err
	}
	n := slices.IndexFunc(types, func(t mdevType) bool { return t.name == i.Profile })
	if n < 0 {
		return fmt.Errorf("make %s on %s: %w", i.Profile, i.Function, ErrProfile)
	}
	t := types[n]
	if err := m.root.Write(ctx, m.at(t.parent, path.Join("mdev_supported_types", t.id, "create")), i.ID); err != nil {
		return fmt.Errorf("make %s on %s: %w", i.Profile, t.parent, err)
	}
	target, err := m.root.ReadLink(path.Join(mdevs, i.ID, "mdev_type"))
	if err != nil {
		return fmt.Errorf("make %s on %s: %w: %w", i.Profile, t.parent, ErrReadBack, err)
	} else if path.Base(target) != t.id {
		return fmt.Errorf("make %s on %s: %w: %s has type %q", i.Profile, t.parent, ErrReadBack, i.ID, path.Base(target))
	}
	return nil
}

func (m *Manager) deleteMdev(ctx context.Context, i Instance) error {
	if !IsUUID(i.ID) {
		return fmt.Errorf("delete: %.40q is no UUID in lower case", i.ID)
	}
	dir := path.Join(mdevs, i.ID)
	if !m.exists(dir) {
		return nil
	}
	if err := m.root.Write(ctx, path.Join(dir, "remove"), "1"); err != nil && m.exists(dir) {
		return fmt.Errorf("delete the mediated device %s: %w", i.ID, err)
	}
	if m.exists(dir) {
		return fmt.Errorf("delete the mediated device %s: %w: it is still there", i.ID, ErrReadBack)
	}
	return nil
}

// IsUUID reports whether s is a UUID as the kernel writes it.
func IsUUID(s string) bool {
	return regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`).MatchString(s)
}

// NewUUID returns a random UUID (RFC 9562, 5.4).
func NewUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // crypto/rand never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}
