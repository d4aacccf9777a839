package replica_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/replica"
)

// TestFileSystemWithoutRoom fills the file system of a running node, makes room
// again, and looks for everything that was acknowledged.
func TestFileSystemWithoutRoom(t *testing.T) {
	dir := replica.SmallFS(t, "24m")
	ctx, stop := context.WithTimeout(t.Context(), 3*time.Minute) // a cluster of one is impatient, a busy machine is slow
	defer stop()
	cfg := replica.Config{ID: "a", Name: "a", Address: "a:1", Dir: filepath.Join(dir, "store"), Timing: replica.Solo()}
	s, err := replica.Open(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if s != nil {
			s.Close()
		}
	}()
	if err := s.Bootstrap(ctx, &clusterv1.InitCluster{ClusterId: "c"}); err != nil {
		t.Fatal(err)
	}
	total := 0 // acknowledged; of the others, one a round may be there
	ballast := filepath.Join(dir, "ballast")
	for round := range 5 {
		f, err := os.Create(ballast)
		if err != nil {
			t.Fatal(err)
		}
		for chunk := make([]byte, 4096); err == nil; {
			_, err = f.Write(chunk)
		}
		f.Close()
		acked := 0
		for ; acked < 2000; acked++ {
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			_, err = s.Apply(short, note(strings.Repeat("x", 2000)))
			cancel()
			if err != nil && s.Health() != nil {
				break
			}
			if ctx.Err() != nil {
				t.Fatalf("round %d: %v", round, err)
			}
			if err != nil {
				acked-- // it may be there
			}
		}
		if err == nil {
			t.Fatalf("round %d: %d writes without room, then %v; health %v", round, acked, err, s.Health())
		}
		t.Logf("round %d: %d writes, then %v; health: %v", round, acked, err, s.Health())
		if round%2 == 1 { // also when it is started without room
			if err := s.Halt(); err != nil {
				t.Error(err)
			}
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			s2, err := replica.Open(short, cfg)
			cancel()
			if err == nil {
				s2.Halt()
			} else if !errors.Is(err, context.DeadlineExceeded) && !strings.Contains(err.Error(), "no space") {
				t.Errorf("open without room: %v", err)
			}
			t.Logf("opened without room: %v", err)
			os.Remove(ballast)
			if s, err = replica.Open(ctx, cfg); err != nil {
				t.Fatal(err)
			}
		}
		os.Remove(ballast)
		if _, err := s.Apply(ctx, note("room")); err != nil {
			t.Fatal(err)
		}
		acked++
		v, err := s.Read(ctx, false)
		if err != nil {
			t.Fatal(err)
		}
		if total += acked; len(notes(v)) < total || v.ClusterID() != "c" {
			t.Fatalf("%d notes of %d that were acknowledged", len(notes(v)), total)
		}
		if err := s.Health(); err != nil {
			t.Error(err)
		}
	}
}
