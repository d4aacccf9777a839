package state

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

func TestCommandWithAnIDIsAppliedOnce(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 2))
	c := command(t, put("a", whole("h/g0")))
	c.Id = "x"
	first := r.send(c)
	other := command(t, put("b", whole("h/g1")))
	other.Id = "x"
	if again := r.send(other); !proto.Equal(first, again) || r.View().Claim("b") != nil {
		t.Errorf("%v, want %v", again, first)
	}
	restored := New()
	if err := restored.Restore(bytes.NewReader(persisted(t, r.Store))); err != nil {
		t.Fatal(err)
	}
	if again := restored.Apply(r.at+1, other); !proto.Equal(first, again) {
		t.Errorf("after a restore: %v", again)
	}
	note := func(id string) *clusterv1.Command {
		n := command(t, &clusterv1.Note{Event: &clusterv1.Event{Message: "n"}})
		n.Id = id
		return n
	}
	for n := range maxEvents + 50 {
		r.at++
		r.Apply(r.at, note(fmt.Sprint("n", n)))
	}
	v := r.View()
	if err := v.Check(); err != nil {
		t.Fatal(err)
	}
	if v.answers != maxRecents || len(v.Events(0, "", 0)) != maxEvents || len(v.Events(0, "", 3)) != 3 {
		t.Errorf("%d answers, %d events", v.answers, v.events)
	}
	if r.send(other).GetOutcome() != ok || r.View().Claim("b") == nil {
		t.Error("a forgotten command is not applied")
	}
}

func TestWatchersAreWokenByTheirKinds(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 1))
	v := r.View()
	gpus, claims, hosts, both, anything := v.Changed(kindGPU), v.Changed(kindClaim), v.Changed(kindHost), v.Changed(kindHost, kindClaim), v.Changed()
	woken := func(name string, ch <-chan struct{}, want bool) {
		t.Helper()
		select {
		case <-ch:
			if !want {
				t.Errorf("%s: woken", name)
			}
		default:
			if want {
				t.Errorf("%s: not woken", name)
			}
		}
	}
	r.send(nil)
	woken("nothing", anything, false)
	r.do(put("c", whole("h/g0")))
	woken("GPUs", gpus, true)
	woken("claims", claims, true)
	woken("hosts", hosts, false)
	woken("hosts and claims", both, true)
	woken("anything", anything, true)
	woken("GPUs, asked late", v.Changed(kindGPU), true)
	woken("GPUs, of now", r.View().Changed(kindGPU), false)
	now := r.View()
	if err := r.Restore(bytes.NewReader(persisted(t, r.Store))); err != nil {
		t.Fatal(err)
	}
	woken("restored", now.Changed(kindMigration), true)
	if now.GPU("h/g0") == nil {
		t.Error("an old view lost its objects")
	}
}

func TestListingGoesOnAfterAName(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"b", "a", "ab", "c"} {
		r.do(testHost(name, 1))
	}
	var names []string
	for o := range r.View().Objects(kindHost, "a") {
		names = append(names, Name(o))
		if KindOf(o) != kindHost || Revision(o) == 0 {
			t.Errorf("%v", o)
		}
	}
	if want := []string{"ab", "b", "c"}; !slices.Equal(names, want) {
		t.Errorf("%q", names)
	}
	n := 0
	for range r.View().GPUsOfHost("a") {
		n++
	}
	if n != 1 || r.View().Object(kindGPU, "ab/g0").GetGpu() == nil || r.View().Object(99, "a") != nil || r.View().Host("") != nil {
		t.Errorf("%d GPUs of a", n)
	}
}

func TestEntries(t *testing.T) {
	c := command(t, testHost("h", 1))
	data, err := Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	back, err := Decode(data)
	if err != nil || !proto.Equal(c, back) {
		t.Errorf("%v, %v", back, err)
	}
	for name, bad := range map[string][]byte{
		"nothing": nil, "a byte": {1}, "format": append([]byte{2}, data[1:]...), "policy": append([]byte{1, 9}, data[2:]...), "cut": data[:len(data)-1],
	} {
		if _, err := Decode(bad); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
	unknown := []byte{1, byte(clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP), 0xfa, 0x1f, 0} // field 511
	var e *ErrUnknownCommand
	if _, err := Decode(unknown); !errors.As(err, &e) || e.Policy != clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP {
		t.Errorf("unknown operation: %v", err)
	}
	c.Version = Protocol + 1
	if data, err = Encode(c); err != nil {
		t.Fatal(err)
	}
	if _, err := Decode(data); !errors.As(err, &e) || e.Policy != clusterv1.UnknownPolicy_UNKNOWN_POLICY_STOP || e.Version != Protocol+1 {
		t.Errorf("newer: %v", err)
	}
	note, _ := Encode(command(t, &clusterv1.Note{Event: &clusterv1.Event{}}))
	if note[1] != byte(clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP) {
		t.Error("a note must not stop anybody")
	}
	if _, err := Encode(&clusterv1.Command{Actor: "\xff"}); err == nil {
		t.Error("no text, and no error")
	}
}

// Views are read while entries are applied; each stays what it was.
func TestViewsAreReadWhileEntriesAreApplied(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 8))
	var readers sync.WaitGroup
	stop := make(chan struct{})
	for range 3 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				v := r.View()
				changed := v.Changed(kindClaim)
				before, err := 0, v.Check()
				for range v.Assignments() {
					before++
				}
				select {
				case <-changed:
				case <-stop:
				}
				after := 0
				for range v.Assignments() {
					after++
				}
				if err != nil || before != after {
					t.Errorf("%d assignments became %d in one view: %v", before, after, err)
					return
				}
			}
		})
	}
	for n := range 200 {
		id := fmt.Sprint("c", n)
		as := r.want(ok, "", put(id, share("h/g3", 5), whole("h/g1"))).GetAssignments()
		r.want(ok, "", r.confirm("h", n%2 == 0, as...))
		r.want(ok, "", &clusterv1.ReleaseAssignments{Claim: id})
		if n%2 == 1 {
			r.want(ok, "", r.confirm("h", true, as...))
		}
		if n%50 == 0 {
			if err := r.Restore(bytes.NewReader(persisted(t, r.Store))); err != nil {
				t.Error(err)
			}
		}
	}
	close(stop)
	readers.Wait()
}
