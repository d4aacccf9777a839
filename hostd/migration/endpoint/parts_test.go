package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/hostd/mediated"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// other is what a driver's host would ask its peer.
func other(r *Remote) otherParts {
	peer := func(string) (gpuctlv1connect.SiteServiceClient, error) { return r.Service, nil }
	return otherParts{&Local{Whereabouts: Whereabouts{Name: "h2", Peer: peer}}, r.request(vm.VM{UUID: lost, Name: "web"}), r.Host}
}

// partKeeper keeps parts that are bytes.
type partKeeper struct {
	parts    []*gpuctlv1.SitePart
	contents []byte
	fail     error
	log      []string
}

func (k *partKeeper) did(format string, args ...any) error {
	k.log = append(k.log, fmt.Sprintf(format, args...))
	return k.fail
}

func (k *partKeeper) Parts(string) []*gpuctlv1.SitePart { return k.parts }
func (k *partKeeper) Room() []*gpuctlv1.SitePartRoom    { return nil }
func (k *partKeeper) DropParts(_ context.Context, m vm.VM, migration string) error {
	return k.did("drop %s %s", m.Name, migration)
}

func (k *partKeeper) ParkParts(_ context.Context, m vm.VM, migration string) ([]*gpuctlv1.SitePart, error) {
	return k.parts, k.did("park %s %s", m.Name, migration)
}

func (k *partKeeper) ExpectParts(_ context.Context, m vm.VM, migration string, parts []*gpuctlv1.SitePart) error {
	k.parts = parts
	return k.did("expect %s %s %d", m.Name, migration, len(parts))
}

func (k *partKeeper) TakeParts(ctx context.Context, m vm.VM, migration string, from mediated.Source) error {
	var b bytes.Buffer
	if err := from.Contents(ctx, 31, &b); err != nil {
		return err
	}
	k.contents = b.Bytes()
	if err := from.Give(ctx, 31, "seal"); err != nil {
		return err
	}
	return k.did("take %s %s", m.Name, migration)
}

func (k *partKeeper) Contents(_ context.Context, m vm.VM, migration string, slot uint32, w io.Writer) error {
	for p := k.contents; len(p) > 0; { // in pieces of any size
		n := min(len(p), 70_001)
		if _, err := w.Write(p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return k.did("contents %s %s %d", m.Name, migration, slot)
}

func (k *partKeeper) GivePart(_ context.Context, m vm.VM, migration string, slot uint32, seal string) error {
	return k.did("give %s %s %d %s", m.Name, migration, slot, seal)
}

// partHosts is two hosts with parts, as a driver sees them.
func partHosts(t *testing.T) (home, away *Remote, keepers [2]*partKeeper, locals [2]*Local) {
	t.Helper()
	var remotes [2]*Remote
	for i, name := range []string{"h1", "h2"} {
		fence, err := OpenFence(filepath.Join(t.TempDir(), "tokens.json"), func() string { return "c" })
		if err != nil {
			t.Fatal(err)
		}
		keepers[i] = &partKeeper{}
		locals[i] = &Local{
			Whereabouts: Whereabouts{Name: name, Peer: func(host string) (gpuctlv1connect.SiteServiceClient, error) {
				return remotes[map[string]int{"h1": 0, "h2": 1}[host]].Service, nil
			}},
			Fence: fence, Parts: keepers[i], Party: func(*gpuctlv1.SiteMachine, string) error { return nil },
		}
		mux := http.NewServeMux()
		locals[i].Handle(mux)
		srv := httptest.NewServer(mux)
		t.Cleanup(srv.Close)
		remotes[i] = &Remote{Host: name, Migration: "m-1", Token: 7, Service: gpuctlv1connect.NewSiteServiceClient(srv.Client(), srv.URL)}
	}
	return remotes[0], remotes[1], keepers, locals
}

func TestPartsGoFromHostToHost(t *testing.T) {
	home, away, k, _ := partHosts(t)
	web := vm.VM{UUID: lost, Name: "web"}
	k[0].parts = []*gpuctlv1.SitePart{{Slot: 31, Memory: 1 << 28, Config: []byte("config")}}
	k[0].contents = bytes.Repeat([]byte("0123456789"), 50_000)
	parts, err := home.ParkParts(t.Context(), web)
	if err == nil {
		err = away.ExpectParts(t.Context(), web, parts)
	}
	if err == nil {
		err = away.TakeParts(t.Context(), web, "h1")
	}
	if err == nil {
		err = home.DropParts(t.Context(), web)
	}
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(k[0].contents, k[1].contents) || string(k[1].parts[0].GetConfig()) != "config" {
		t.Errorf("%d bytes came, part %v", len(k[1].contents), k[1].parts)
	}
	log := strings.Join(append(k[0].log, k[1].log...), ", ")
	if log != "park web m-1, contents web m-1 31, give web m-1 31 seal, drop web m-1, expect web m-1 1, take web m-1" {
		t.Error(log)
	}
}

func TestPartsOfStrangersStay(t *testing.T) {
	home, away, k, l := partHosts(t)
	web := vm.VM{UUID: lost, Name: "web"}
	k[0].contents = []byte("secret")
	l[0].Party = func(*gpuctlv1.SiteMachine, string) error { return errors.New("it takes no part") }
	if err := away.TakeParts(t.Context(), web, "h1"); err == nil || errors.Is(err, migrate.ErrUnreachable) || len(k[1].contents) > 0 || len(k[0].log) > 0 {
		t.Errorf("%v, %q came, %v", err, k[1].contents, k[0].log)
	}
	if err := other(home).Give(t.Context(), 31, "seal"); err == nil || len(k[0].log) > 0 {
		t.Errorf("given: %v", err)
	}
	// What may succeed later is tried again, by its driver.
	l[0].Party, k[0].fail = l[1].Party, fmt.Errorf("it is still here: %w", cards.ErrBusy)
	if err := away.TakeParts(t.Context(), web, "h1"); !errors.Is(err, migrate.ErrUnreachable) {
		t.Error(err)
	}
	l[0].Parts = nil
	if _, err := home.ParkParts(t.Context(), web); err == nil || !strings.Contains(err.Error(), "no mediated GPUs") {
		t.Error(err)
	}
	if err := home.DropParts(t.Context(), web); err != nil {
		t.Error(err)
	}
}
