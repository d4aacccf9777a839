package endpoint

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

func TestFenceKeepsWhatItHasSeen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens.json")
	cluster := "one"
	open := func() *Fence {
		t.Helper()
		f, err := OpenFence(path, func() string { return cluster })
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	admit := func(f *Fence, vm string, token uint64, stale bool) {
		t.Helper()
		if err := f.Admit(&gpuctlv1.SiteMachine{Uuid: vm, Migration: "m", Token: token}); errors.Is(err, migrate.ErrStale) != stale || !stale && err != nil {
			t.Errorf("vm %s, token %d: %v", vm, token, err)
		}
	}
	f := open()
	admit(f, "a", 0, false) // of a version without tokens
	admit(f, "a", 7, false)
	admit(f, "a", 7, false)
	admit(f, "a", 6, true)
	admit(f, "a", 0, true)
	admit(f, "b", 3, false)
	f = open() // hostd was restarted
	admit(f, "a", 6, true)
	admit(f, "a", 9, false)
	admit(f, "a", 7, true)
	cluster = "two" // where counting begins anew
	admit(f, "a", 1, false)
	for i := range uint64(mostFenced) {
		f.kept.Tokens[string(rune('一'+i))] = 100 + i
	}
	admit(f, "new", 5000, false)
	if n := len(f.kept.Tokens); n != mostFenced {
		t.Errorf("%d are kept", n)
	}
	admit(f, "new", 4999, true)
}

// TestHostRefusesStepsOfADriverThatWasReplaced asks a host's service as two
// drivers do, of which the second has taken over.
func TestHostRefusesStepsOfADriverThatWasReplaced(t *testing.T) {
	fence, err := OpenFence(filepath.Join(t.TempDir(), "tokens.json"), func() string { return "c" })
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	(&Local{Whereabouts: Whereabouts{Name: "h1"}, Fence: fence}).Handle(mux)
	srv := httptest.NewServer(mux)
	defer srv.Close()
	driver := func(token uint64) *Remote {
		return &Remote{Host: "h1", Migration: "m-1", Token: token, Service: gpuctlv1connect.NewSiteServiceClient(srv.Client(), srv.URL)}
	}
	web := vm.VM{UUID: lost, Name: "web"}
	silent := func(uint64, uint64, string) {}
	steps := map[string]func(context.Context, *Remote) error{
		"where":    func(ctx context.Context, r *Remote) error { _, err := r.Where(ctx, web); return err },
		"reserve":  func(ctx context.Context, r *Remote) error { return r.Reserve(ctx, web, "h1/a", "c") },
		"prepare":  func(ctx context.Context, r *Remote) error { _, err := r.Prepare(ctx, web, "h1/a", "c"); return err },
		"expect":   func(ctx context.Context, r *Remote) error { return r.Expect(ctx, web, nil) },
		"attach":   func(ctx context.Context, r *Remote) error { return r.Attach(ctx, web, "h1/a", false, "") },
		"detach":   func(ctx context.Context, r *Remote) error { _, err := r.Detach(ctx, web, "h1/a"); return err },
		"giveback": func(ctx context.Context, r *Remote) error { return r.GiveBack(ctx, web, "h1/a") },
		"move":     func(ctx context.Context, r *Remote) error { return r.Move(ctx, web, "h2", silent) },
		"pause":    func(ctx context.Context, r *Remote) error { return r.Pause(ctx, web) },
		"unpause":  func(ctx context.Context, r *Remote) error { return r.Unpause(ctx, web) },
		"stop":     func(ctx context.Context, r *Remote) error { return r.Stop(ctx, web, "h1/a") },
		"start":    func(ctx context.Context, r *Remote) error { return r.Start(ctx, web, "h1/a", false) },
		"define":   func(ctx context.Context, r *Remote) error { return r.Define(ctx, web, "<domain/>") },
		"undefine": func(ctx context.Context, r *Remote) error { return r.Undefine(ctx, web) },
		"freeze":   func(ctx context.Context, r *Remote) error { return r.Freeze(ctx, web, migrate.Freezing{}, silent) },
		"deposit":  func(ctx context.Context, r *Remote) error { return r.Deposit(ctx, web, nil, "h2", silent) },
		"forget":   func(ctx context.Context, r *Remote) error { return r.Forget(ctx, web) },
		"release":  func(ctx context.Context, r *Remote) error { return r.Release(ctx, web, "h1/a") },
		"takeup":   func(ctx context.Context, r *Remote) error { return r.TakeUp(ctx, web, "h1/a") },
		"await":    func(ctx context.Context, r *Remote) error { return r.Await(ctx, web, "h1/a") },
		"park":     func(ctx context.Context, r *Remote) error { _, err := r.ParkParts(ctx, web); return err },
		"parts":    func(ctx context.Context, r *Remote) error { return r.ExpectParts(ctx, web, nil) },
		"take":     func(ctx context.Context, r *Remote) error { return r.TakeParts(ctx, web, "h2") },
		"drop":     func(ctx context.Context, r *Remote) error { return r.DropParts(ctx, web) },
		"contents": func(ctx context.Context, r *Remote) error {
			return other(r).Contents(ctx, 31, io.Discard)
		},
		"give": func(ctx context.Context, r *Remote) error { return other(r).Give(ctx, 31, "s") },
		"thaw": func(ctx context.Context, r *Remote) error { return r.Thaw(ctx, web, "h1/a", nil, silent) },
	}
	// The second has asked where the VM is, and decides by that.
	if _, err := driver(8).Where(t.Context(), web); err == nil || errors.Is(err, migrate.ErrStale) {
		t.Fatal(err) // this host has no libvirt
	}
	for name, step := range steps {
		err := step(t.Context(), driver(7))
		if peer := name == "contents" || name == "give"; peer && err == nil || !peer && !errors.Is(err, migrate.ErrStale) {
			t.Errorf("%s of the first driver: %v", name, err)
		}
	}
	if err := driver(8).Forget(t.Context(), web); err != nil {
		t.Errorf("the second driver: %v", err)
	}
	// A plan asks as nobody's driver.
	if _, err := (&Remote{Host: "h1", Service: driver(0).Service}).Where(t.Context(), web); errors.Is(err, migrate.ErrStale) || connect.CodeOf(err) == connect.CodeAborted {
		t.Errorf("a plan: %v", err)
	}
}
