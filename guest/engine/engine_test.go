package engine_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/internal/news"
)

var errBroken = errors.New("broken")

// trail records what steps and undos do.
type trail struct {
	did    []string
	broken map[string]error // by "step" or "undo step"
}

func (tr *trail) step(name string, commit bool) engine.Step {
	return engine.Step{
		Name: name, Commit: commit,
		Run:  func(context.Context) error { tr.did = append(tr.did, name); return tr.broken[name] },
		Undo: func(context.Context) error { tr.did = append(tr.did, "undo "+name); return tr.broken["undo "+name] },
	}
}

func (tr *trail) run(ctx context.Context, late *[]string, fault engine.Fault) error {
	r := &engine.Runner{
		Start: time.Now(),
		Begin: func(_, _ int, name string) error { return tr.broken["begin "+name] },
		After: func(name string, _ bool) error { return fault.Fail(name) },
		Late:  func(name string, _ error) { *late = append(*late, name) },
	}
	return r.Run(ctx, []engine.Step{tr.step("a", false), tr.step("b", true), tr.step("c", false)})
}

func TestStepsAreUndoneLastFirstUpToTheCommit(t *testing.T) {
	for broken, want := range map[string]string{
		"":        "a b c",
		"a":       "a undo a",
		"begin b": "a undo a",
		"b":       "a b undo b undo a",
		"c":       "a b c", // after the commit
	} {
		tr := &trail{broken: map[string]error{broken: errBroken}}
		var late []string
		err := tr.run(t.Context(), &late, engine.Fault{})
		if got := strings.Join(tr.did, " "); got != want {
			t.Errorf("%q broken: %s, not %s", broken, got, want)
		}
		if failed := broken != "" && broken != "c"; failed != errors.Is(err, errBroken) {
			t.Errorf("%q broken: %v", broken, err)
		}
		if slices.Contains(late, "c") != (broken == "c") {
			t.Errorf("%q broken: late %v", broken, late)
		}
	}
}

func TestUndoThatFailsIsLeftAndTheOthersRun(t *testing.T) {
	tr := &trail{broken: map[string]error{"b": errBroken, "undo b": errors.New("stuck")}}
	var late []string
	err := tr.run(t.Context(), &late, engine.Fault{})
	var se *engine.StepError
	if !errors.As(err, &se) || se.Step != "b" || len(se.Left) != 1 || se.Left[0].Name != "b" || !strings.Contains(err.Error(), "not taken back yet: undo b: stuck") {
		t.Fatalf("%v", err)
	}
	if got := strings.Join(tr.did, " "); got != "a b undo b undo a" {
		t.Error(got)
	}
	delete(tr.broken, "undo b")
	err = engine.Retry(t.Context(), slog.New(slog.DiscardHandler), func(ctx context.Context) (err error) {
		se.Left, err = engine.Undo(ctx, se.Left)
		return err
	})
	if err != nil || len(se.Left) > 0 || tr.did[len(tr.did)-1] != "undo b" {
		t.Errorf("%v, %v", err, tr.did)
	}
}

func TestCancelledOperationIsUndoneWithAContextThatIsNot(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	undone := false
	r := &engine.Runner{Start: time.Now(), Begin: func(int, int, string) error { return nil }, After: func(string, bool) error { return nil }}
	err := r.Run(ctx, []engine.Step{
		{Name: "a", Run: func(context.Context) error { cancel(); return nil }, Undo: func(ctx context.Context) error { undone = ctx.Err() == nil; return nil }},
		{Name: "b", Run: func(context.Context) error { t.Error("it goes on"); return nil }},
	})
	if !errors.Is(err, context.Canceled) || !undone {
		t.Errorf("%v, undone %v", err, undone)
	}
	if err := engine.Retry(ctx, slog.New(slog.DiscardHandler), func(context.Context) error { return errBroken }); !errors.Is(err, context.Canceled) {
		t.Errorf("repeated without end: %v", err)
	}
}

func TestFaultIsOfOneStep(t *testing.T) {
	steps := []string{"a", "b"}
	for text, ok := range map[string]bool{"": true, "a": true, "kill_target@b": true, "kill_self@a": true, "c": false, "kill_all@a": false, "kill_self@": false} {
		if _, err := engine.ParseFault(text, true, steps); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := engine.ParseFault("a", false, steps); err == nil {
		t.Error("allowed")
	}
	f, _ := engine.ParseFault("kill_source@b", true, steps)
	if f.Victim("a") != "" || f.Victim("b") != "source" || f.Deadly("b") || f.Fail("b") != nil {
		t.Errorf("%+v", f)
	}
	f, _ = engine.ParseFault("kill_self@b", true, steps)
	if f.Victim("b") != "" || !f.Deadly("b") || f.Deadly("a") || f.Fail("b") != nil {
		t.Errorf("%+v", f)
	}
	f, _ = engine.ParseFault("b", true, steps)
	tr := &trail{}
	var late []string
	if err := tr.run(t.Context(), &late, f); err != nil || !slices.Equal(late, []string{"b"}) {
		t.Errorf("%v, late %v", err, late) // b is committed
	}
	f, _ = engine.ParseFault("a", true, steps)
	if err := tr.run(t.Context(), &late, f); !errors.Is(err, engine.ErrInjected) {
		t.Error(err)
	}
}

func TestReporterKeepsWhatTheStepHasSaid(t *testing.T) {
	var said []*gpuctlv1.Progress
	r := engine.NewReporter(func(p *gpuctlv1.Progress) { said = append(said, p) })
	r.Step(1, 3, "copy")
	r.Bytes(5, 10, "")
	r.Waits("for the driver")
	r.Step(2, 3, "switch")
	if p := said[2]; p.GetStep() != "copy" || p.GetBytesDone() != 5 || p.GetMessage() != "for the driver" {
		t.Errorf("%v", p)
	}
	if p := said[3]; p.GetStep() != "switch" || p.GetSteps() != 3 || p.GetBytesDone() != 0 || p.GetMessage() != "" {
		t.Errorf("%v", p)
	}
}

func TestRefusalHasEveryReason(t *testing.T) {
	if engine.Refuse(nil) != nil {
		t.Error("refused without a reason")
	}
	err := engine.Refuse([]*gpuctlv1.Reason{{Message: "too small"}, {Message: "too old"}})
	if err.Error() != "too small; too old" {
		t.Error(err)
	}
}

func TestRunFolderHasOneUser(t *testing.T) {
	dir := t.TempDir()
	lock, err := engine.LockFolder(dir, "lock")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := engine.LockFolder(dir, "lock"); !errors.Is(err, engine.ErrLocked) {
		t.Errorf("%v", err)
	}
	lock.Close()
	if lock, err = engine.LockFolder(dir, "lock"); err != nil {
		t.Fatal(err)
	}
	lock.Close()
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := engine.LockFolder(dir, "link"); err == nil || errors.Is(err, engine.ErrLocked) {
		t.Errorf("%v", err)
	}
}

func TestOperationThatIsTriedAgainEndsOnce(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	broken := func(context.Context) error { return errBroken }

	owner, end := context.WithCancel(t.Context())
	l := engine.NewLife(t.Context(), owner)
	tries, finished := 0, make(chan struct{})
	l.Repeat(log, func(context.Context) error {
		if tries++; tries < 2 {
			return errBroken
		}
		return nil
	}, func() { l.Over(); close(finished) })
	<-finished
	<-l.Done()

	given := engine.NewLife(t.Context(), owner)
	finished = make(chan struct{})
	given.Repeat(log, broken, func() { given.Over(); close(finished) })
	given.GiveUp()
	<-finished

	left := engine.NewLife(t.Context(), owner)
	left.Repeat(log, broken, func() { t.Error("it is finished, and the next gpuguest goes on with it") })
	end()
	<-left.Done()
	err := left.Run(&engine.Runner{Start: time.Now()}, []engine.Step{{Name: "a"}})
	if err == nil {
		t.Error("steps run after the end")
	}
}

func TestWatchBeginsWithAllAndEndsWithItsEngine(t *testing.T) {
	var changes news.Changes[string, string]
	ended := make(chan struct{})
	w := engine.Watched[string]{
		Changes: &changes, List: func(context.Context) []string { return []string{"a", "b"} },
		Snapshot: func(id string) *gpuctlv1.Session { return &gpuctlv1.Session{Id: id} }, Ended: ended,
	}
	var got []string
	err := w.Watch(t.Context(), func(s *gpuctlv1.Session) error {
		got = append(got, s.GetId())
		switch len(got) {
		case 2:
			changes.Put("c", "c")
		case 3:
			close(ended)
		}
		return nil
	})
	if err != nil || !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("%v, %v", got, err)
	}
	if err := w.Watch(t.Context(), func(*gpuctlv1.Session) error { return errBroken }); !errors.Is(err, errBroken) {
		t.Errorf("%v", err)
	}
}
