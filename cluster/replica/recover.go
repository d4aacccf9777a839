package replica

import (
	"errors"
	"fmt"

	"github.com/hashicorp/raft"
)

// Server is a server of a recovered cluster.
type Server struct {
	ID, Address string
	Voter       bool
}

// Recover writes a new list of servers into a node's folder. It is for a cluster that has
// lost its majority for ever. The node must not run.
//
// It is dangerous. Entries that the lost hosts had committed and this one does not have
// are lost. Entries that this one has and that were never committed become committed. If
// a lost host comes back, there are two clusters, and both believe that they own the
// GPUs: erase its folder before it starts. Run Recover on the host with the longest log,
// with that host as the only voter, and join the others again; or on all remaining hosts
// with the same servers.
func Recover(cfg Config, servers []Server) error {
	if err := cfg.fill(); err != nil {
		return err
	}
	if cfg.Dir == "" {
		return errors.New("recover: a node in memory has nothing to recover")
	}
	var c raft.Configuration
	self := false
	for _, x := range servers {
		suffrage := raft.Nonvoter
		if x.Voter {
			suffrage = raft.Voter
		}
		self = self || x.ID == cfg.ID
		c.Servers = append(c.Servers, raft.Server{ID: raft.ServerID(x.ID), Address: raft.ServerAddress(x.Address), Suffrage: suffrage})
	}
	if !self {
		return fmt.Errorf("recover: this host, with id %s, is not among the servers", cfg.ID)
	}
	s := &Store{cfg: cfg, log: cfg.Log, fsm: newFSM(cfg.Log), guard: newGuard(cfg.Log)}
	disk, err := s.disk()
	if err != nil {
		return fmt.Errorf("recover %s: %w", cfg.Dir, err)
	}
	_, trans := raft.NewInmemTransport(raft.ServerAddress(cfg.Address))
	s.closers = append(s.closers, trans)
	err = raft.RecoverCluster(cfg.raft(), s.fsm, disk.Logs, disk.Stable, disk.Snapshots, trans, c)
	if err = errors.Join(err, s.fsm.err(), s.closeFiles()); err != nil {
		return fmt.Errorf("recover %s: %w", cfg.Dir, err)
	}
	return nil
}
