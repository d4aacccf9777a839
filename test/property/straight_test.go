package property

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/test/rig"
)

// TestMappedRegionsGoAlongWhenContentsGoStraight has a program that keeps regions mapped, and
// writes them all the time, while it goes from one far executor to another and its contents
// go straight: what it writes is on its own host. The connection is left alone, or cut while
// the program is frozen.
func TestMappedRegionsGoAlongWhenContentsGoStraight(t *testing.T) {
	cuts := []string{"never"}
	if os.Getenv("GPUCTL_SOAK_REMOTE") != "" { // make soak-remote: minutes each
		cuts = append(cuts, "early", "final")
	}
	for _, cut := range cuts { // in the kind of memory that the suite has
		t.Run("cut "+cut, func(t *testing.T) {
			t.Setenv(rig.CarrierVariable, "straight")
			t.Setenv("GPUCTL_TEST_CARRIER_CUT", cut)
			mappedRegions(t, cut)
		})
	}
}

var (
	checksum  = regexp.MustCompile(`checksum (\d+) [0-9a-f]+`)
	iteration = "iteration "
)

func mappedRegions(t *testing.T, cut string) {
	t.Helper()
	ctx, cancel := context.WithCancel(testkit.Context(t))
	defer cancel()
	r := start(t)
	args := []string{"--kib", "512", "--buffers", "3", "--mapped", "--images", "--seed", "5"}
	out := &testkit.Log{}
	cmd := r.Command(ctx, rig.Basic, append([]string{r.Program("stream"), "--stdin", "--verbose"}, args...)...)
	cmd.Stdout, cmd.Stderr = out, out
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	goesOn := func() {
		t.Helper()
		was := strings.Count(out.String(), iteration)
		testkit.Until(t, "the program goes on", func() error {
			select {
			case err := <-ended:
				t.Fatalf("it has ended: %v: %s", err, tail(out.String(), 2000))
			default:
			}
			return testkit.Want(strings.Count(out.String(), iteration) >= was+2)
		})
	}
	goesOn()
	id, err := r.session(ctx)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "both GPUs are known", func() error {
		text, err := r.Gpuctl(ctx, "inventory")
		return errors.Join(err, testkit.Want(strings.Contains(string(text), rig.Pthread) && strings.Contains(string(text), rig.Basic), string(text)))
	})
	straight := uint64(0)
	for _, to := range []string{rig.Pthread, rig.Basic, rig.Pthread} {
		n, err := r.swapped(ctx, id, to)
		if err != nil {
			t.Fatalf("%v\n%s", err, tail(r.GuestLog(), 3000))
		}
		straight += n
		goesOn()
	}
	_ = in.Close()
	if err := <-ended; err != nil {
		t.Fatalf("%v: %s", err, tail(out.String(), 2000))
	}
	m := checksum.FindStringSubmatch(out.String())
	if m == nil {
		t.Fatalf("no checksum: %s", tail(out.String(), 2000))
	}
	env, err := rig.Native(r.Dir, rig.Pthread)
	if err != nil {
		t.Fatal(err)
	}
	native := r.Command(ctx, rig.Basic)
	native.Path, native.Args = r.Program("stream"), append([]string{"stream", "--iterations", m[1]}, args...)
	native.Env = append(native.Env, env...)
	want, err := native.Output()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(want), m[0]) {
		t.Errorf("%s, natively %s\n%s", m[0], want, tail(r.GuestLog(), 3000))
	}
	log := r.GuestLog()
	switch cut {
	case "never":
		if straight == 0 || strings.Contains(log, "contents go through this host") {
			t.Errorf("%d bytes went straight\n%s", straight, tail(log, 3000))
		}
	case "early":
		if !strings.Contains(log, "contents go through this host") {
			t.Errorf("no connection was cut\n%s", tail(log, 3000))
		}
	case "final":
		if !strings.Contains(log, "operation failed") {
			t.Errorf("no connection was cut while the program was frozen\n%s", tail(log, 3000))
		}
	}
}

// swapped moves the session, and returns how many bytes went straight.
func (r *runner) swapped(ctx context.Context, id, to string) (uint64, error) {
	res, err := outcome(r.client.Swap(ctx, connect.NewRequest(&gpuctlv1.HostSwapRequest{Session: id, Verb: gpuctlv1.Verb_VERB_MIGRATE, To: to})))
	return res.GetBytesStraight(), err
}
