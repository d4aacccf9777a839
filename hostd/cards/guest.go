package cards

import (
	"context"
	"fmt"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// goesTo returns where a function is to be in the VM; nil: anywhere. Only the main function
// has such a place: it is the one that programs know by its address.
func (c *change) goesTo(f pci.Address) *pci.Address {
	if len(c.assignment.Functions) == 0 || f != c.assignment.Functions[0] {
		return nil
	}
	return c.assignment.Guest
}

// noteGuest notes where the VM has the card, before it is detached. When the VM does not have
// it any more, or that can't be told, what was noted before stays.
func (c *change) noteGuest(ctx context.Context) {
	at, err := c.k.Hypervisor.GuestAddress(ctx, c.assignment.UUID, c.assignment.Functions[0])
	if err != nil {
		c.k.Log.Warn("where a VM has its card is not known", "gpu", c.assignment.GPU, "machine", c.assignment.vm(), "err", err)
	}
	if at != nil {
		c.assignment.Guest = at
	}
}

// compareGuest tells the operator if the VM has a card elsewhere than the one before. The
// card works there, and nothing is undone because of that.
func (c *change) compareGuest(ctx context.Context) {
	want := c.assignment.Guest
	if want == nil {
		return
	}
	at, err := c.k.Hypervisor.GuestAddress(ctx, c.assignment.UUID, c.assignment.Functions[0])
	switch {
	case err != nil:
		c.k.Log.Warn("where a VM has its card is not known", "gpu", c.assignment.GPU, "machine", c.assignment.vm(), "err", err)
	case at != nil && *at != *want:
		c.k.Log.Warn("a VM has its card at another address than before", "gpu", c.assignment.GPU, "machine", c.assignment.vm(), "before", want, "now", at)
		c.k.Event(c.assignment.GPU, "OtherSlot", fmt.Sprintf("VM %s has it at %s, and had its card at %s before: programs that asked for the address go on with the old one", c.assignment.vm(), at, want))
	}
}

// guestOf returns where a VM had a card that is assigned to it.
func (k *Keeper) guestOf(uuid, gpu string) *pci.Address {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, a := range k.assignments {
		if a.UUID == uuid && a.GPU == gpu {
			return a.Guest
		}
	}
	return nil
}
