package network

import (
	"fmt"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// FuzzLinks describes interfaces that are stacked in whatever way, loops
// included, beside one that the kernel's own bytes say. It ends, and counts what
// carries an interface once.
func FuzzLinks(f *testing.F) {
	request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	real, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil {
		f.Fatal(err)
	}
	stack := []byte{1, 10, 0, 0, 2, 10, 0, 0, 10, 12, 0, 1, 12, 0, 0, 2, 13, 0, 12, 3, 20, 0, 21, 3, 21, 0, 20, 3}
	for _, m := range real {
		f.Add(m, stack, "25000\n")
	}
	f.Add([]byte{}, []byte{1, 2, 0, 2, 2, 1, 0, 2, 3, 1, 0, 1, 4, 3, 0, 0}, "-1")
	f.Fuzz(func(t *testing.T, message, stack []byte, speed string) {
		k := &fakeKernel{}
		if l := deserialized(message); l != nil {
			k.links = append(k.links, l)
		}
		root := fstest.MapFS{}
		for stack = stack[:min(len(stack), 256)]; len(stack) >= 4; stack = stack[4:] {
			name := fmt.Sprintf("e%d", len(k.links))
			a := attrs(int(stack[0]), name, int(stack[1]), int(stack[2]), stack[3]&16 == 0)
			switch stack[3] % 4 {
			case 0:
				k.links = append(k.links, &netlink.Device{LinkAttrs: a})
				root["sys/class/net/"+name+"/speed"] = &fstest.MapFile{Data: []byte(speed)}
				root["sys/class/net/"+name+"/device/vendor"] = &fstest.MapFile{}
			case 1:
				b := netlink.NewLinkBond(a)
				b.Mode, b.ActiveSlave = netlink.BondMode(stack[3]>>5), int(stack[0])
				k.links = append(k.links, b)
			case 2:
				k.links = append(k.links, &netlink.Bridge{LinkAttrs: a})
			case 3:
				k.links = append(k.links, &netlink.Vlan{LinkAttrs: a})
			}
		}
		h := &Host{root: root, k: k}
		for _, l := range k.links {
			got, err := h.Link(t.Context(), l.Attrs().Name)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.IsSorted(got.Physical) || len(slices.Compact(slices.Clone(got.Physical))) != len(got.Physical) {
				t.Fatalf("%s is carried by %q", got.Name, got.Physical)
			}
		}
	})
}

// deserialized reads a message of the kernel; nil: it is none. The library may
// trust the kernel, which has no reason to lie.
func deserialized(b []byte) (l netlink.Link) {
	defer func() {
		if recover() != nil {
			l = nil
		}
	}()
	if len(b) < unix.SizeofIfInfomsg {
		return nil
	}
	l, err := netlink.LinkDeserialize(&unix.NlMsghdr{Type: unix.RTM_NEWLINK}, b)
	if err != nil || l.Attrs().Name == "" {
		return nil
	}
	return l
}
