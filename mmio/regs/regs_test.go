package regs

import (
	"strings"
	"testing"
)

// TestEveryDwordOfBAR0IsInTheTableOrDenied is P6 for the table: the lookup finds for
// each dword the row that has it, and no other dword has one.
func TestEveryDwordOfBAR0IsInTheTableOrDenied(t *testing.T) {
	table, err := New()
	if err != nil {
		t.Fatal(err)
	}
	want := map[uint32]ID{}
	for _, r := range rows() {
		for i := range r.Count {
			at := r.Offset + i*r.Stride
			if want[at] != None {
				t.Fatalf("%#x is in two rows", at)
			}
			want[at] = r.ID
			if r.Index(at) != i {
				t.Fatalf("%s: %#x is number %d, want %d", r.Name, at, r.Index(at), i)
			}
		}
	}
	for at := uint32(0); at < Size; at += 4 {
		if id := table.At(at); id != want[at] || table.Row(id).ID != id {
			t.Fatalf("%#x is %s, want %s", at, table.Row(id).Name, table.Row(want[at]).Name)
		}
	}
	if table.At(Size) != None || table.At(^uint32(0)) != None || table.Row(None).Class != Deny || table.Row(IDs).Class != Deny {
		t.Error("what is not in the table is not denied")
	}
}

func TestEveryRegisterHasARow(t *testing.T) {
	table, err := New()
	if err != nil {
		t.Fatal(err)
	}
	for id := ID(1); id < IDs; id++ {
		r := table.Row(id)
		if r.Count == 0 || r.Name == "" || r.Doc == "" {
			t.Errorf("register %d has no row", id)
		}
		if r.Class == Deny && r.Write {
			t.Errorf("%s is denied and may be written", r.Name)
		}
	}
	if !strings.Contains(Markdown(), "PRAMIN") {
		t.Error("the documentation lacks the last row")
	}
}

func TestTableWithAFaultIsRefused(t *testing.T) {
	for name, rows := range map[string][]Register{
		"overlap":          {{PMCID, "a", 0, 4, 4, Const, false, ""}, {PMCIntr, "b", 8, 1, 4, Const, false, ""}},
		"overlap of pages": {{PMCID, "a", 0x1000, 1024, 4, Const, false, ""}, {PMCIntr, "b", 0x1000, 2048, 4, Const, false, ""}},
		"page over a word": {{PMCID, "a", 0x1008, 1, 4, Const, false, ""}, {PMCIntr, "b", 0x1000, 1024, 4, Const, false, ""}},
		"same number":      {{PMCID, "a", 0, 1, 4, Const, false, ""}, {PMCID, "b", 8, 1, 4, Const, false, ""}},
		"outside":          {{PMCID, "a", Size - 4, 2, 4, Const, false, ""}},
		"unaligned":        {{PMCID, "a", 2, 1, 4, Const, false, ""}},
		"no number":        {{None, "a", 0, 1, 4, Const, false, ""}},
	} {
		if _, err := build(rows); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
