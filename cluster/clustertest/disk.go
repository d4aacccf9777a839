package clustertest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	"github.com/gpuctl/gpuctl/cluster/replica"
)

// Disk is the disk of a node, with faults on command.
type Disk struct {
	mu    sync.Mutex
	fail  error
	delay time.Duration
	hang  chan struct{} // closed when a hanging disk continues
}

// Full makes each write fail with ENOSPC, until Well.
func (d *Disk) Full() { d.set(fmt.Errorf("test: %w", syscall.ENOSPC), 0) }

// Break makes each write fail with EIO.
func (d *Disk) Break() { d.set(fmt.Errorf("test: %w", syscall.EIO), 0) }

// Slow delays each write by up to twice that time.
func (d *Disk) Slow(delay time.Duration) { d.set(nil, delay) }

// Hang blocks all writes, until another of these methods is called.
func (d *Disk) Hang() {
	d.set(nil, 0)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hang = make(chan struct{})
}

// Well ends all faults.
func (d *Disk) Well() { d.set(nil, 0) }

var errDead = errors.New("test: the process is gone")

func (d *Disk) set(fail error, delay time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail, d.delay = fail, delay
	if d.hang != nil {
		close(d.hang)
		d.hang = nil
	}
}

func (d *Disk) write(f func() error) error {
	d.mu.Lock()
	fail, delay, hang := d.fail, d.delay, d.hang
	d.mu.Unlock()
	if hang != nil {
		<-hang
		return d.write(f)
	}
	if fail != nil {
		return fail
	}
	if delay > 0 {
		time.Sleep(time.Duration(rand.Int64N(int64(2 * delay)))) //nolint:gosec // a test's dice
	}
	return f()
}

func (d *Disk) wrap(s replica.Storage) replica.Storage {
	return replica.Storage{Logs: &logs{s.Logs, d}, Stable: &stable{s.Stable, d}, Snapshots: &snapshots{s.Snapshots, d}}
}

type logs struct {
	raft.LogStore
	disk *Disk
}

// IsMonotonic implements raft.MonotonicLogStore.
func (l *logs) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

func (l *logs) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }
func (l *logs) StoreLogs(logs []*raft.Log) error {
	return l.disk.write(func() error { return l.LogStore.StoreLogs(logs) })
}

func (l *logs) DeleteRange(from, to uint64) error {
	return l.disk.write(func() error { return l.LogStore.DeleteRange(from, to) })
}

type stable struct {
	raft.StableStore
	disk *Disk
}

func (s *stable) Set(key, value []byte) error {
	return s.disk.write(func() error { return s.StableStore.Set(key, value) })
}

func (s *stable) SetUint64(key []byte, value uint64) error {
	return s.disk.write(func() error { return s.StableStore.SetUint64(key, value) })
}

type snapshots struct {
	raft.SnapshotStore
	disk *Disk
}

func (s *snapshots) Create(v raft.SnapshotVersion, index, term uint64, c raft.Configuration, at uint64, t raft.Transport) (sink raft.SnapshotSink, err error) {
	err = s.disk.write(func() error {
		sink, err = s.SnapshotStore.Create(v, index, term, c, at, t)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &snapshotSink{sink, s.disk}, nil
}

type snapshotSink struct {
	raft.SnapshotSink
	disk *Disk
}

func (s *snapshotSink) Write(p []byte) (n int, err error) {
	err = s.disk.write(func() error {
		n, err = s.SnapshotSink.Write(p)
		return err
	})
	return n, err
}

func (s *snapshotSink) Close() error { return s.disk.write(s.SnapshotSink.Close) }
