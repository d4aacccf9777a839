package cuda

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/criu"
)

// pair is what a restore is told.
func pair(from, to ask.UUID) ask.Pair { return ask.Pair{Old: from, New: to} }

func uuidOf(n byte) ask.UUID { return ask.NewUUID([16]byte{15: n}) }

func TestPairs(t *testing.T) {
	a, b, c, d := uuidOf(1), uuidOf(2), uuidOf(3), uuidOf(4)
	for _, k := range []struct {
		name                   string
		uses, dest, shown, now []ask.UUID
		want                   []ask.Pair // nil with ok: none needed
		bad                    bool
	}{
		{"where it was", []ask.UUID{a}, []ask.UUID{a}, []ask.UUID{a, b}, []ask.UUID{a, b}, nil, false},
		{"to the other: both are named", []ask.UUID{a}, []ask.UUID{b}, []ask.UUID{a, b}, []ask.UUID{a, b}, []ask.Pair{pair(a, b), pair(b, a)}, false},
		{"of three", []ask.UUID{a}, []ask.UUID{c}, []ask.UUID{a, b, c}, []ask.UUID{a, b, c}, []ask.Pair{pair(a, c), pair(b, b), pair(c, a)}, false},
		{"the card was changed", []ask.UUID{a}, []ask.UUID{b}, []ask.UUID{a}, []ask.UUID{b}, []ask.Pair{pair(a, b)}, false},
		{"another card was changed", []ask.UUID{a}, []ask.UUID{a}, []ask.UUID{a, b}, []ask.UUID{a, c}, []ask.Pair{pair(a, a), pair(b, c)}, false},
		{"two that change places", []ask.UUID{a, b}, []ask.UUID{b, a}, []ask.UUID{a, b}, []ask.UUID{a, b}, []ask.Pair{pair(a, b), pair(b, a)}, false},
		{"fewer cards", []ask.UUID{a}, []ask.UUID{c}, []ask.UUID{a, b}, []ask.UUID{c}, nil, true},
		{"two to one", []ask.UUID{a, b}, []ask.UUID{c, c}, []ask.UUID{a, b}, []ask.UUID{c, d}, nil, true},
		{"one that is not there", []ask.UUID{a}, []ask.UUID{d}, []ask.UUID{a}, []ask.UUID{a}, nil, true},
		{"one too few", []ask.UUID{a, b}, []ask.UUID{c}, []ask.UUID{a, b}, []ask.UUID{c, d}, nil, true},
	} {
		got, err := pairsFor(k.uses, k.dest, k.shown, k.now)
		if (err != nil) != k.bad || !slices.Equal(got, k.want) {
			t.Errorf("%s: %v, %v", k.name, got, err)
		}
	}
}

func FuzzParseRecord(f *testing.F) {
	good, err := json.Marshal(record{
		Version: recordVersion, ID: "d-1", PID: 7, GPUs: []gpu{{UUID: uuidOf(1)}},
		Members: []*member{{PID: 7, Start: 9, Uses: []ask.UUID{uuidOf(1)}, Used: []uint64{1}, Slots: []int{0}}},
		Op:      &opRecord{Kind: kindSwap, Home: [][]ask.UUID{{uuidOf(1)}}},
	})
	if err != nil {
		f.Fatal(err)
	}
	if _, err := parseRecord(good); err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"version":1,"pid":7,"members":[null]}`))
	f.Add([]byte(`{"version":1,"pid":7,"members":[{"pid":7,"start":1,"uses":["x"],"used":[1],"slots":[-1]}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseRecord(b)
		if err != nil {
			return
		}
		if r.Op != nil {
			_ = r.aim()
		}
		for _, m := range r.Members {
			for _, slot := range m.Slots {
				_ = r.GPUs[slot]
			}
		}
	})
}

// manifestOf makes a folder's manifest as a suspend does.
func manifestOf(t testing.TB, change func(*criu.Manifest, *record)) *criu.Manifest {
	t.Helper()
	m := &criu.Manifest{Session: "d-0123abcd", Root: 6, Processes: []criu.Process{{PID: 6}, {PID: 7}}}
	r := &record{
		Version: recordVersion, ID: "d-0123abcd", PID: 6, GPUs: []gpu{{UUID: uuidOf(1)}},
		Members: []*member{{PID: 7, Start: 9, Uses: []ask.UUID{uuidOf(1)}, Used: []uint64{1}, Slots: []int{0}}},
	}
	if change != nil {
		change(m, r)
	}
	var err error
	if m.State, err = json.Marshal(r); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestSessionOfAFolderIsNotBelieved(t *testing.T) {
	if _, err := recordOf(manifestOf(t, nil)); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*criu.Manifest, *record){
		"a path for an id":       func(m *criu.Manifest, r *record) { r.ID = "d-../../a"; m.Session = r.ID },
		"an id of others":        func(_ *criu.Manifest, r *record) { r.ID = "d-0123abce" },
		"an operation":           func(_ *criu.Manifest, r *record) { r.Op = &opRecord{Home: [][]ask.UUID{nil}} },
		"suspended already":      func(_ *criu.Manifest, r *record) { r.SuspendedTo = toMemory },
		"another root":           func(_ *criu.Manifest, r *record) { r.PID = 7 },
		"a process of this host": func(_ *criu.Manifest, r *record) { r.Members[0].PID = 1234 },
		"a slot too many":        func(_ *criu.Manifest, r *record) { r.Members[0].Slots[0] = 1 },
		"init":                   func(m *criu.Manifest, r *record) { r.PID, m.Root = 1, 1 },
	} {
		if r, err := recordOf(manifestOf(t, change)); err == nil {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

func FuzzRecordOf(f *testing.F) {
	f.Add("d-0123abcd", 6, []byte(manifestOf(f, nil).State))
	f.Add("d-/../etc/", 6, []byte(`{"version":1,"id":"d-/../etc/","pid":6,"members":[{"pid":7,"start":1}]}`))
	f.Fuzz(func(t *testing.T, session string, root int, state []byte) {
		m := &criu.Manifest{Session: session, Root: root, Processes: []criu.Process{{PID: root}, {PID: 7}}, State: state}
		r, err := recordOf(m)
		if err != nil {
			return
		}
		if filepath.Base(recordName(r.ID)) != r.ID+".json" || r.PID <= 1 {
			t.Errorf("%+v", r)
		}
	})
}
