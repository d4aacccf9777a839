package cards

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// seated gives VM one the card behind another device, which then leaves: the first free slot is not
// the card's any more.
func seated(t *testing.T) (w *world, at pci.Address) {
	t.Helper()
	w = newWorld(t)
	w.pending = true
	m := w.machines[uuid1].VM
	if err := errors.Join(w.keeper.Reserve(t.Context(), m, "nvidia-0", "vm-x", "m-1"), w.keeper.Prepare(t.Context(), m, "nvidia-0", "vm-x", "m-1")); err != nil {
		t.Fatal(err)
	}
	w.seats[uuid1][firstSeat] = card1[0]
	if err := w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", false, nil); err != nil {
		t.Fatal(err)
	}
	delete(w.seats[uuid1], firstSeat)
	at = pci.Address{Device: firstSeat + 1}
	w.sits(t, at)
	return w, at
}

func (w *world) sits(t *testing.T, at pci.Address) {
	t.Helper()
	now, err := w.GuestAddress(t.Context(), uuid1, card4[0])
	if err != nil || now == nil || *now != at {
		t.Errorf("the VM has its card at %v, %v, and not at %s", now, err, at)
	}
}

// A card that a migration takes from a VM and gives back is where it was, and so is the next
// host's, which is told.
func TestCardOfAMigrationStaysOnItsSlotInTheVM(t *testing.T) {
	w, at := seated(t)
	m := w.machines[uuid1].VM
	for range 2 { // the second finds nothing to detach
		got, err := w.keeper.DetachReleased(t.Context(), m, "nvidia-0", "m-1")
		if err != nil || got == nil || *got != at {
			t.Fatalf("it was at %v, %v; want %s", got, err, at)
		}
	}
	w.restart() // the next hostd knows it
	if err := w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", false, nil); err != nil {
		t.Fatal(err)
	}
	w.sits(t, at)
	if _, err := w.keeper.DetachReleased(t.Context(), m, "nvidia-0", "m-1"); err != nil {
		t.Fatal(err)
	}
	told := pci.Address{Device: 9}
	if err := w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", false, &told); err != nil {
		t.Fatal(err)
	}
	w.sits(t, told)
	if slices.ContainsFunc(w.events, func(e string) bool { return strings.HasPrefix(e, "OtherSlot") }) {
		t.Errorf("%v", w.events)
	}
}

// Where the hypervisor can't be told, or something else is there by now, the VM gets the card
// elsewhere, and the operator is told.
func TestCardOnAnotherSlotInTheVMIsTold(t *testing.T) {
	for name, change := range map[string]func(*world){
		"no slots": func(w *world) { w.noSeats = true },
		"taken":    func(w *world) { w.seats[uuid1][firstSeat+1] = card1[0] },
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := seated(t)
			m := w.machines[uuid1].VM
			if _, err := w.keeper.DetachReleased(t.Context(), m, "nvidia-0", "m-1"); err != nil {
				t.Fatal(err)
			}
			change(w)
			if err := w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", false, nil); err != nil {
				t.Fatal(err)
			}
			w.sits(t, pci.Address{Device: firstSeat})
			if !slices.ContainsFunc(w.events, func(e string) bool {
				return strings.HasPrefix(e, "OtherSlot nvidia-0 VM one has it at 0000:00:04.0, and had its card at 0000:00:05.0 before")
			}) {
				t.Errorf("%v", w.events)
			}
		})
	}
}

// A card that no reset brings back after the VM of a migration has left it is quarantined. The VM goes
// on, or back: no step waits for the card, however often it is repeated.
func TestMigrationDoesNotNeedACardThatItsVMHasLeftDead(t *testing.T) {
	for name, leave := range map[string]func(*world, vm.VM) error{
		"detached": func(w *world, m vm.VM) error { return w.detachReleased(t.Context(), m) },
		"stopped": func(w *world, m vm.VM) error {
			if err := w.keeper.Keep(t.Context(), m, "nvidia-0", "m-1"); err != nil {
				return err
			}
			w.stop(m.UUID)
			return w.keeper.ResetStopped(t.Context(), m, "nvidia-0")
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.pending = true
			if err := w.attach("one", "nvidia-0", true); err != nil {
				t.Fatal(err)
			}
			m := w.machines[uuid1].VM
			w.resetFail[card4[0]] = errors.New("it does not answer")
			for range 2 { // the next driver repeats it
				if err := leave(w, m); err != nil {
					t.Errorf("%v", err)
				}
				if a := w.keeper.assignmentOf(card4[0]); a == nil || a.Phase != quarantined {
					t.Errorf("the card is %+v", a)
				}
			}
			if err := w.keeper.GiveBack(t.Context(), m, "nvidia-0"); err != nil {
				t.Errorf("%v", err)
			}
			// The way back needs it, and says what is wrong.
			if err := w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", true, nil); !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), "quarantined (it does not answer)") {
				t.Errorf("%v", err)
			}
		})
	}
}
