package cards

import "testing"

// libvirt's event that a VM has stopped may come when the VM is being started again.
func TestLateWordOfAStopTakesNothingFromTheNextStart(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", true); err != nil {
		t.Fatal(err)
	}
	w.stop(uuid1)
	if err := w.prepare(uuid1, card4...); err != nil {
		t.Fatal(err)
	}
	w.keeper.Ended(uuid1)
	w.keeper.work.Wait()
	w.run(uuid1, card4...)
	w.settled()

	w.stop(uuid1)
	w.keeper.Ended(uuid1) // of a VM that runs, it is the first word of its end
	w.keeper.work.Wait()
	if len(w.keeper.assignments) != 0 {
		t.Errorf("%v", w.keeper.assignments)
	}
}
