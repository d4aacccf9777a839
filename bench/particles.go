package main

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/cluster/cost"
	"github.com/gpuctl/gpuctl/test/rig"
)

// A run like that of LAMMPS on the poster of mrCUDA: in each step its host waits twice for the GPU, and transfers 256 KiB
// there and back.
const particles = 65536

// moved runs time steps on a remote GPU, and moves them to a local one after parts of them. How
// long each run takes is predicted before, by the cost model. Figures are means: a run's time depends on
// where its threads happen to sleep, and no single one says much.
func (b *bench) moved(ctx context.Context) error {
	stream, err := rawStream(b.mib << 20)
	if err != nil {
		return err
	}
	local, err := b.startCarried(ctx, "")
	if err != nil {
		return err
	}
	defer local.Close()
	far, err := b.startCarried(ctx, "mixed") // a session begins on a remote GPU
	if err != nil {
		return err
	}
	defer far.Close()
	gpu := rig.Basic
	if b.device() == gpuID {
		gpu = gpuID
	}
	const length = 4 * time.Second // of the run on the remote GPU
	first, err := b.steps(ctx, far, gpu, 200, never)
	if err != nil {
		return err
	}
	steps := int(length.Seconds() / first.took.Seconds() * 200)
	// Twice, as the first move compiles for the GPU, which may take longer than a run.
	var move rig.Swap
	for _, n := range []int{5 * steps, steps} {
		run, err := b.steps(ctx, far, gpu, n, 10)
		if err != nil {
			return err
		}
		move = run.swap
	}

	shares := []int{25, 50, 75, never} // of the steps after which it moves, in percent
	took, predicted := map[int][]float64{}, map[int][]float64{}
	var alone []float64 // on the local GPU
	for range b.rounds {
		run, model, err := b.predict(ctx, local, far, gpu, steps, stream, move)
		if err != nil {
			return err
		}
		here, err := b.steps(ctx, local, gpu, steps, never)
		if err != nil {
			return err
		}
		alone = append(alone, here.took.Seconds())
		away := model.Away(run, cost.Network{})
		for _, share := range shares {
			want := away
			if share != never {
				// It goes on there while it is prepared here.
				prepared := (move.Total - move.Stopped).Seconds() / away.Seconds()
				want = model.Moved(run, cost.Network{}, float64(share)/100+prepared)
			}
			got, err := b.steps(ctx, far, gpu, steps, share)
			if err != nil {
				return err
			}
			if got.sum != here.sum {
				return fmt.Errorf("%d steps, moved after %d %%: the sum is %s, and %s on the local GPU", steps, share, got.sum, here.sum)
			}
			if share != never {
				move = got.swap // what operations see
			}
			took[share] = append(took[share], got.took.Seconds())
			predicted[share] = append(predicted[share], want.Seconds())
		}
	}
	here, away := mean(alone), mean(took[never])
	b.report.add(fmt.Sprintf("%d steps of %d particles on a remote GPU, all of them; native: on the local one", steps, particles), "s", here, away, "", nil)
	for _, share := range shares {
		was, want := mean(took[share]), mean(predicted[share])
		name := "never moved; native: predicted"
		if share != never {
			name = fmt.Sprintf("moved home after %d %%; native: predicted", share)
		}
		b.report.add(name, "s", want, was, "within 5 %", func() bool { return was >= 0.95*want && was <= 1.05*want })
		if share != never {
			b.report.add("of what a remote GPU takes longer, spared", "%", 0, 100*(away-was)/(away-here), "", nil)
		}
	}
	return nil
}

// predict returns the run and what the model says of its costs, from the second half of a fifth of it on
// either GPU and from a move. A step counts as one call, and what it takes longer as that call's time.
func (b *bench) predict(ctx context.Context, local, far *rig.Rig, gpu string, steps int, stream float64, move rig.Swap) (cost.Run, cost.Model, error) {
	var took [2]time.Duration
	n := steps / 10
	for i, r := range []*rig.Rig{local, far} {
		part, err := b.steps(ctx, r, gpu, 2*n, never)
		if err != nil {
			return cost.Run{}, cost.Model{}, err
		}
		took[i] = part.half * time.Duration(steps) / time.Duration(n)
	}
	run := cost.Run{Compute: took[0], Calls: uint64(steps), Regions: 1, Size: move.Frozen}
	return run, cost.Model{
		Replay: cost.Linear{Fixed: max(move.Stopped.Seconds()-float64(move.Frozen)/stream/1e9, 0)},
		Sync:   cost.Copy{Rate: stream * 1e9},
		Remote: cost.Linear{PerCall: max(took[1]-took[0], 0).Seconds() / float64(steps)},
	}, nil
}

// steppedRun is a run of the program particles.
type steppedRun struct {
	took, half time.Duration // half: of the second half of its steps
	sum        string
	swap       rig.Swap
}

var summed = regexp.MustCompile(`^sum ([0-9a-f]{16}), ([0-9.]+) s, ([0-9.]+) s$`)

// never is the part of its steps after which a run moves that does not.
const never = 0

// steps runs so many steps, and moves them after a part of them, in percent.
func (b *bench) steps(ctx context.Context, r *rig.Rig, gpu string, n, mark int) (steppedRun, error) {
	var run steppedRun
	cmd := r.Command(ctx, gpu, r.Program("particles"), "--steps", strconv.Itoa(n), "--particles", strconv.Itoa(particles), "--mark", strconv.Itoa(mark))
	var line string
	if mark == never {
		text, err := output(cmd)
		if err != nil {
			return run, err
		}
		line = string(text)
	} else {
		stdin, wait, err := live(cmd, "mark")
		if err != nil {
			return run, err
		}
		defer stdin.Close()
		id, err := r.Session(ctx)
		if err != nil {
			return run, err
		}
		if run.swap, err = r.Operate(ctx, "migrate", id, "--to", gpu); err != nil {
			return run, err
		}
		if line, err = wait(); err != nil {
			return run, err
		}
	}
	m := summed.FindStringSubmatch(strings.TrimSpace(line))
	if m == nil {
		return run, fmt.Errorf("particles says %q", line)
	}
	run.sum = m[1]
	for i, d := range []*time.Duration{&run.took, &run.half} {
		seconds, err := strconv.ParseFloat(m[2+i], 64)
		if err != nil {
			return run, fmt.Errorf("particles: %w", err)
		}
		*d = time.Duration(seconds * 1e9)
	}
	return run, nil
}
