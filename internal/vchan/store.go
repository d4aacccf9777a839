package vchan

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strconv"

	"github.com/gpuctl/gpuctl/internal/xenstore"
)

// Nodes below a listener's path.
const (
	nodeRing = "/ring-ref"
	nodePort = "/event-channel"
)

// published is what a server has written for its ring, as decimal numbers.
type published struct {
	store      *xenstore.Client
	path       string
	ring, port string
}

// holds reports whether xenstore contains it.
func (p *published) holds(ctx context.Context) (bool, error) {
	for node, want := range map[string]string{nodeRing: p.ring, nodePort: p.port} {
		is, err := p.store.Read(ctx, p.path+node)
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		if err != nil || is != want {
			return false, err
		}
	}
	return true, nil
}

// publish writes both nodes in one transaction, readable for peer.
func (p *published) publish(ctx context.Context, peer uint16) error {
	return p.store.Transaction(ctx, func(tx xenstore.Tx) error {
		for node, value := range map[string]string{nodeRing: p.ring, nodePort: p.port} {
			if err := tx.Write(ctx, p.path+node, value); err != nil {
				return err
			}
			perms, err := tx.Permissions(ctx, p.path+node)
			if err != nil {
				return err
			}
			owner := xenstore.Permission{Domain: perms[0].Domain, Access: xenstore.AccessNone} // this domain
			if err := tx.SetPermissions(ctx, p.path+node, owner, xenstore.Permission{Domain: peer, Access: xenstore.AccessRead}); err != nil {
				return err
			}
		}
		return nil
	})
}

// withdraw removes the path if it still contains p.
func (p *published) withdraw(ctx context.Context) error {
	return p.store.Transaction(ctx, func(tx xenstore.Tx) error {
		is, err := tx.Read(ctx, p.path+nodeRing)
		switch {
		case errors.Is(err, fs.ErrNotExist) || err == nil && is != p.ring:
			return nil
		case err != nil:
			return err
		}
		return tx.Remove(ctx, p.path)
	})
}

// read reads both nodes in one transaction, and parses their numbers.
func (p *published) read(ctx context.Context) (ring, port uint32, err error) {
	err = p.store.Transaction(ctx, func(tx xenstore.Tx) (err error) {
		if p.ring, err = tx.Read(ctx, p.path+nodeRing); err == nil {
			p.port, err = tx.Read(ctx, p.path+nodePort)
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, fmt.Errorf("%w: %w", ErrNoServer, err)
	}
	if err == nil {
		ring, err = number(p.ring)
	}
	if err == nil {
		port, err = number(p.port)
	}
	return ring, port, err
}

// number parses what libxenvchan writes with %d. 0 is invalid.
func number(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == 0 || n > math.MaxInt32 {
		return 0, fmt.Errorf("%w: %.20q names no grant or port", ErrProtocol, s)
	}
	return uint32(n), nil
}
