package query

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/expr"
)

const (
	gpuKind  = clusterv1.Kind_KIND_GPU
	hostKind = clusterv1.Kind_KIND_HOST
)

func must(t testing.TB, kind clusterv1.Kind, where string) *Query {
	t.Helper()
	q, err := Compile(kind, where)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func someGPU() *clusterv1.GPU {
	return &clusterv1.GPU{
		Id: "n1/0000:65:00.0", Host: "n1", Name: "0000:65:00.0", Model: "A100", Vendor: "NVIDIA", Type: "gpu",
		Limits: &gpuctlv1.Limits{GlobalMemory: 80 << 30, Fp64: true, Extensions: []string{"cl_khr_fp64"}},
		Health: clusterv1.Health_HEALTH_OK, Rank: 7, Present: true, NumaNode: -1, UsedMemory: 40 << 30, FreeMemory: 40 << 30,
		Profiles: []*clusterv1.Profile{{Name: "nvidia-1"}},
	}
}

func someHost() *clusterv1.Host {
	return &clusterv1.Host{
		Name: "n1", Labels: map[string]string{"zone": "a", "Größe": "ß"}, State: clusterv1.HostState_HOST_STATE_READY,
		Memory: 1 << 40, JoinedUnixMs: 1_700_000_000_000, Nics: []*clusterv1.NIC{{Speed: 1e9}, {Speed: 25e9}},
	}
}

func TestMatch(t *testing.T) {
	for _, c := range []struct {
		kind  clusterv1.Kind
		where string
		want  bool
		exact bool // lowered as a whole
	}{
		{gpuKind, "", true, false},
		{gpuKind, "memory >= 40*GiB && !free", true, true},
		{gpuKind, "gpu.memory > 80*GiB", false, true},
		{gpuKind, `"cl_khr_fp64" in extensions`, true, true},
		{gpuKind, `extensions.exists(e, e.endsWith("fp64"))`, true, false},
		{gpuKind, `host == "n1" && extensions.exists(e, e == "no")`, false, false},
		{gpuKind, `type == "gpu" ? rank == 7 : free`, true, true},
		{gpuKind, `model in ["H100", "A100"] && rank in [1, 7]`, true, true},
		{gpuKind, `id.startsWith("n1/") && model.matches("^A1.0$") && name.contains(":65:")`, true, true},
		{gpuKind, `health != "ok"`, false, true},
		{gpuKind, "free_memory * 2 == memory && used_memory % 2 == 0 && -numa_node == 1", true, true},
		{gpuKind, `"nvidia-1" in profiles && size(profiles) == 1 && model.size() == 4`, true, true},
		{gpuKind, "memory / (rank - 7) > 0 || fp64", true, true},
		{hostKind, `labels.zone == "a" && labels["zone"] != "b"`, true, true},
		{hostKind, `has(labels.zone) && !has(labels.rack) && "zone" in labels`, true, true},
		{hostKind, `state == "ready" && nic_speed == 25000000000`, true, true},
		{hostKind, `size(labels["Größe"]) == 1`, true, true},
		{hostKind, `joined > timestamp("2023-01-01T00:00:00Z")`, true, false},
		{hostKind, `labels["rack"] == "r1" || name == "n1"`, true, true},
	} {
		o := wrapGPU(someGPU())
		if c.kind == hostKind {
			o = wrapHost(someHost())
		}
		q := must(t, c.kind, c.where)
		if got, err := q.Match(o); err != nil || got != c.want {
			t.Errorf("%s = %v, %v; want %v", c.where, got, err, c.want)
		}
		if q.exact != c.exact {
			t.Errorf("%s: lowered %v, want %v", c.where, q.exact, c.exact)
		}
	}
}

func TestErrorsNameTheObject(t *testing.T) {
	for where, want := range map[string]string{
		`labels["rack"] == "r1"`:                      "no such key: rack",
		`name == "n1" && labels.rack == "r1"`:         "no such key: rack",
		`9223372036854775807 + numa_nodes > cpus + 1`: "",
		`1 / numa_nodes == 1`:                         "division by zero",
		`memory * memory > 1`:                         "overflow",
	} {
		_, err := must(t, hostKind, where).Match(wrapHost(someHost()))
		if want == "" {
			if err != nil {
				t.Errorf("%s: %v", where, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "host n1") {
			t.Errorf("%s: %v; want %q of host n1 in it", where, err, want)
		}
	}
}

func TestWrongExpressionsSayWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		kind        clusterv1.Kind
		where, part string
	}{
		{gpuKind, "memry > 1", "did you mean memory"},
		{gpuKind, "gpu.memry > 1", "did you mean memory"},
		{gpuKind, "zzzzz == 1", "a gpu has no field zzzzz; fields: "},
		{gpuKind, "memory", "not true or false"},
		{gpuKind, `memory > "1"`, "no matching overload"},
		{gpuKind, "memory >", "yntax error"},
		{gpuKind, `model.matches("[")`, "missing closing"},
		{gpuKind, strings.Repeat("!", 5000), "longer than"},
		{gpuKind, strings.Repeat("(", 1000) + "free" + strings.Repeat(")", 1000), "recursion"},
		{hostKind, "free", "host has no field free"},
		{clusterv1.Kind_KIND_UNSPECIFIED, "true", "no objects of kind"},
		{clusterv1.Kind(99), "", "no objects of kind"},
	} {
		_, err := Compile(c.kind, c.where)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), c.part) {
			t.Errorf("%.20s: %v; want %q in it", c.where, err, c.part)
		}
	}
}

func TestAnExpensiveExpressionEnds(t *testing.T) {
	q := must(t, gpuKind, "extensions.all(a, extensions.all(b, extensions.all(c, extensions.all(d, a == a))))")
	g := someGPU()
	g.Limits.Extensions = make([]string, 100)
	if _, err := q.Match(wrapGPU(g)); err == nil || !strings.Contains(err.Error(), "cost") {
		t.Errorf("10^8 comparisons: %v", err)
	}
}

// TestOneLanguage keeps the fields of the one-host expressions: who knows one
// language knows the other.
func TestOneLanguage(t *testing.T) {
	known := map[string]bool{}
	for _, f := range Fields(gpuKind) {
		known[f.Name] = true
	}
	for name := range expr.OfGPU(&gpuctlv1.GPU{}) {
		if !known[name] {
			t.Errorf("a GPU has no field %s", name)
		}
	}
	known = map[string]bool{"memory": true, "calls": true, "launches": true} // usage is not replicated
	for _, f := range Fields(clusterv1.Kind_KIND_SESSION) {
		known[f.Name] = true
	}
	for name := range expr.OfSession(&gpuctlv1.Session{}) {
		if !known[name] {
			t.Errorf("a session has no field %s", name)
		}
	}
}

func TestEveryFieldCanBeRead(t *testing.T) {
	wraps := map[clusterv1.Kind]object{
		hostKind: wrapHost(someHost()), gpuKind: wrapGPU(someGPU()),
		clusterv1.Kind_KIND_MODEL:       wrapModel(&clusterv1.Model{}),
		clusterv1.Kind_KIND_VGPU:        wrapVGPU(&clusterv1.VGPU{}),
		clusterv1.Kind_KIND_CLAIM:       wrapClaim(&clusterv1.Claim{}),
		clusterv1.Kind_KIND_ASSIGNMENT:  wrapAssignment(&clusterv1.Assignment{}),
		clusterv1.Kind_KIND_SESSION:     wrapSession(&clusterv1.Session{}),
		clusterv1.Kind_KIND_MIGRATION:   wrapMigration(&clusterv1.Migration{}),
		clusterv1.Kind_KIND_RESERVATION: wrapReservation(&clusterv1.Reservation{}),
	}
	for kind, o := range wraps {
		for _, f := range Fields(kind) {
			if f.Doc == "" {
				t.Errorf("%s.%s: no doc", KindName(kind), f.Name)
			}
			where := fmt.Sprintf("%s.%s == %s", KindName(kind), f.Name, f.Name)
			q := must(t, kind, where)
			if ok, err := q.Match(o); !ok || err != nil {
				t.Errorf("%s = %v, %v", where, ok, err)
			}
			if ok, err := q.ask(o); !ok || err != nil {
				t.Errorf("interpreter: %s = %v, %v", where, ok, err)
			}
		}
	}
}

// expression draws one that type checks, of a type.
func expression(t *rapid.T, kind clusterv1.Kind, typ string, depth int) string {
	pick := func(options ...string) string { return rapid.SampledFrom(options).Draw(t, typ) }
	sub := func(typ string) string { return expression(t, kind, typ, depth-1) }
	var fields []string
	for _, f := range Fields(kind) {
		if f.Type == typ {
			fields = append(fields, f.Name)
		}
	}
	if depth == 0 {
		switch typ {
		case "bool":
			return pick(append(fields, "true", "false")...)
		case "int":
			return pick(append(fields, fields...)...) + pick("", "", " + 1", "/0", " * 3*GiB")
		case "string":
			if kind == hostKind && rapid.Bool().Draw(t, "label") {
				return pick(`labels.zone`, `labels["rack"]`, `labels["a b"]`, `labels[name]`, `labels["zo" + "ne"]`)
			}
			return pick(append(fields, `"n1"`, `"a"`, `""`, `"A100"`, `"ß"`)...)
		}
	}
	order := pick("==", "!=", "<", "<=", ">", ">=")
	switch typ {
	case "bool":
		switch rapid.IntRange(0, 13).Draw(t, "bool form") {
		case 0:
			return "(" + sub("bool") + " && " + sub("bool") + ")"
		case 1:
			return "(" + sub("bool") + " || " + sub("bool") + ")"
		case 2:
			return "!(" + sub("bool") + ")"
		case 3:
			return "(" + sub("bool") + " ? " + sub("bool") + " : " + sub("bool") + ")"
		case 4, 5:
			return "(" + sub("int") + order + sub("int") + ")"
		case 6, 7:
			return "(" + sub("string") + order + sub("string") + ")"
		case 8:
			return "(" + sub("string") + " in [" + pick("", `"n1"`, `"n1", "a"`) + "])"
		case 9:
			return "(" + sub("int") + " in [" + pick("", "1", "0, GiB, 7") + "])"
		case 10:
			return sub("string") + pick(".startsWith(", ".endsWith(", ".contains(") + sub("string") + ")"
		case 11:
			return sub("string") + `.matches(` + pick(`"^n"`, `"[a-f]+$"`, `""`, `"1|ß"`) + ")"
		case 12:
			if kind == hostKind {
				return pick(`has(labels.zone)`, `has(labels.rack)`, `("zone" in labels)`, `(name in labels)`, `labels.exists(k, labels[k] == "a")`)
			}
			return "(" + sub("string") + pick(" in extensions)", " in profiles)")
		default:
			return "(" + sub("bool") + pick("==", "!=") + sub("bool") + ")"
		}
	case "int":
		switch rapid.IntRange(0, 4).Draw(t, "int form") {
		case 0:
			return pick("0", "1", "7", "-1", "40*GiB", "9223372036854775807", "-9223372036854775808", "TiB", "25*1000*1000*1000")
		case 1:
			return "(" + sub("int") + pick("+", "-", "*", "/", "%") + sub("int") + ")"
		case 2:
			return "-(" + sub("int") + ")"
		case 3:
			return "size(" + sub("string") + ")"
		}
		return expression(t, kind, typ, 0)
	}
	return expression(t, kind, typ, 0)
}

func anyObject(t *rapid.T, kind clusterv1.Kind) object {
	name := rapid.SampledFrom([]string{"n1", "n2", "", "ß", "a"})
	if kind == hostKind {
		h := someHost()
		h.Name = name.Draw(t, "name")
		h.Labels = rapid.MapOf(rapid.SampledFrom([]string{"zone", "rack", "n1", "a b"}), name).Draw(t, "labels")
		h.Memory = rapid.SampledFrom([]uint64{0, 1 << 40, 1<<64 - 1}).Draw(t, "memory")
		h.Cpus = rapid.Uint32().Draw(t, "cpus")
		h.State = clusterv1.HostState(rapid.IntRange(0, 5).Draw(t, "state"))
		h.Down = rapid.Bool().Draw(t, "down")
		return wrapHost(h)
	}
	g := someGPU()
	g.Host = name.Draw(t, "host")
	g.Id = g.Host + "/" + g.Name
	g.Model = rapid.SampledFrom([]string{"A100", "H100", ""}).Draw(t, "model")
	g.Rank = rapid.Uint32Range(0, 8).Draw(t, "rank")
	g.Health = clusterv1.Health(rapid.IntRange(0, 4).Draw(t, "health"))
	g.Free = rapid.Bool().Draw(t, "free")
	g.FreeMemory = rapid.SampledFrom([]uint64{0, 1, 40 << 30, 1<<64 - 1}).Draw(t, "free_memory")
	if rapid.Bool().Draw(t, "bare") {
		g.Limits, g.Profiles = nil, nil
	}
	return wrapGPU(g)
}

// TestBothPathsAgree compares lowered expressions with CEL's interpreter.
func TestBothPathsAgree(t *testing.T) {
	cache := NewCache()
	lowered, failures := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		kind := rapid.SampledFrom([]clusterv1.Kind{hostKind, gpuKind}).Draw(t, "kind")
		where := expression(t, kind, "bool", rapid.IntRange(0, 4).Draw(t, "depth"))
		q, err := cache.Compile(kind, where)
		if err != nil {
			if errors.Is(err, ErrInvalid) && (strings.Contains(err.Error(), "recursion") || strings.Contains(err.Error(), "longer")) {
				t.Skip()
			}
			t.Fatalf("generated %s: %v", where, err)
		}
		for range 4 {
			o := anyObject(t, kind)
			want, wantErr := q.ask(o)
			got, gotErr := q.Match(o)
			if got != want || (gotErr == nil) != (wantErr == nil) || gotErr != nil && !strings.HasSuffix(gotErr.Error(), wantErr.Error()) {
				t.Fatalf("%s of %v:\n  %v, %v\ninterpreter:\n  %v, %v", where, o, got, gotErr, want, wantErr)
			}
			if q.lowered == nil {
				continue
			}
			// Match asks the interpreter when something fails: look at what the
			// lowered expression says itself.
			r := make(rows, len(q.used))
			for slot, number := range q.used {
				r[slot] = q.fields[number].column(1)
				q.fields[number].put(r[slot], 0, o)
			}
			verdict := q.lowered(r, 0)
			if q.exact {
				lowered++
				if (verdict == failed) != (wantErr != nil) || (verdict == yes) != want {
					t.Fatalf("%s of %v: lowered says %d, interpreter %v, %v", where, o, verdict, want, wantErr)
				}
				if verdict == failed {
					failures++
				}
			} else if verdict == no && (want || wantErr != nil) {
				t.Fatalf("%s of %v: its lowered part says no, interpreter %v, %v", where, o, want, wantErr)
			}
		}
	})
	if lowered < 100 || failures < 5 {
		t.Errorf("only %d were lowered and %d of them failed: the test shows too little", lowered, failures)
	}
}

func FuzzCompile(f *testing.F) {
	for _, s := range []string{
		"", "free && memory >= 40*GiB", `model == "A100"`, `labels["a"] == 'b'`, "extensions.all(e, e != '')", "a.b.c.d", "1/0 == 1",
		`id.matches("(")`, "[1,2].map(x, x*x).size() > 1", "has(gpu.labels.x)", "{1:2}[1] == 2", `"%s".format([id]) == ""`, "?.[", "\x00",
	} {
		f.Add(s, int32(2))
		f.Add(s, int32(1))
	}
	cache := NewCache()
	f.Fuzz(func(t *testing.T, where string, kind int32) {
		q, err := cache.Compile(clusterv1.Kind(kind), where)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("%q: %v", where, err)
			}
			return
		}
		for _, o := range []object{wrapHost(someHost()), wrapGPU(someGPU()), wrapGPU(&clusterv1.GPU{}), wrapHost(&clusterv1.Host{})} {
			if state.KindOf(o) != q.Kind() || q.program == nil {
				continue
			}
			want, wantErr := q.ask(o)
			got, gotErr := q.Match(o)
			if got != want || (gotErr == nil) != (wantErr == nil) {
				t.Fatalf("%q: %v, %v; interpreter %v, %v", where, got, gotErr, want, wantErr)
			}
		}
	})
}

func names(objects []object) []string {
	var out []string
	for _, o := range objects {
		out = append(out, state.Name(o))
	}
	return out
}

// check says what is wrong with the blocks; nothing, if all is well.
func (t *table) check() string {
	last := ""
	for _, b := range t.blocks {
		if len(b.objects) != len(b.names) || len(b.stored) != len(b.names) || len(b.names) > 2*blockSize {
			return fmt.Sprintf("a block of %d names, %d objects, %d stored", len(b.names), len(b.objects), len(b.stored))
		}
		if len(b.names) == 0 {
			return "an empty block"
		}
		for i, n := range b.names {
			if n <= last {
				return n + " after " + last
			}
			if state.Name(b.objects[i]) != n {
				return n + " is called " + state.Name(b.objects[i])
			}
			if b.stored[i] != state.Stored(b.objects[i]) {
				return n + " is stored as another"
			}
			last = n
		}
	}
	return ""
}
