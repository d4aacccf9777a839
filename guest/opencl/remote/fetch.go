package remote

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// A connection of role Fetch is between two far executors. It begins with a preamble whose
// token was made for this one connection, and then has TLS with the certificates of both far
// executors. There is no hello: the one that fetches greets as a target of contents does.
// gpuguest of its host connects, and gpuguest of the other host accepts; each hands its end
// over with a name that has the hash of the other end's certificate.

// Names of connections that are handed over to a far executor, and what follows them: the
// hash of the other end's certificate in hex, and at the end that is asked also ":" and the
// fetch's name.
const (
	fetchedPrefix  = HandedPrefix + "fetch:" // another far executor fetches from here
	fetchingPrefix = "fetching:"             // this one fetches
)

// ErrFetch is returned for a connection between far executors that is not as it was agreed.
var ErrFetch = errors.New("not the fetch that was agreed on")

// FetchName returns the name of the fetch that a token is for. It tells nothing of the token.
func FetchName(t Token) string {
	h := sha256.Sum256(append([]byte("gpuctl fetch "), t[:]...))
	return hex.EncodeToString(h[:16])
}

const fetchName = 32 // characters

// HandFetched returns the name by which gpuguest hands over a connection to the far executor
// from which another one fetches.
func HandFetched(peer []byte, name string) string {
	return fetchedPrefix + hex.EncodeToString(peer) + ":" + name
}

// HandFetching is the same for the far executor that fetches.
func HandFetching(peer []byte) string { return fetchingPrefix + hex.EncodeToString(peer) }

// Handed is what a connection is that was handed over to a far executor.
type Handed struct {
	Role     Role
	Fetching bool   // of role Fetch: this is the end that fetches
	Peer     []byte // of role Fetch: hash of the other end's certificate
	Name     string // of the fetch, at the end that is asked
}

// ParseHanded is the reverse of HandFetched, HandFetching, and of HandedPrefix with a role.
func ParseHanded(name string) (Handed, error) {
	h := Handed{Role: Fetch}
	rest, fetched := strings.CutPrefix(name, fetchedPrefix)
	switch {
	case fetched:
		rest, h.Name, _ = strings.Cut(rest, ":")
		if b, err := hex.DecodeString(h.Name); err != nil || len(h.Name) != fetchName || hex.EncodeToString(b) != h.Name {
			return Handed{}, fmt.Errorf("name of a fetch: %w", ErrPreamble)
		}
	case strings.HasPrefix(name, fetchingPrefix):
		rest, h.Fetching = strings.TrimPrefix(name, fetchingPrefix), true
	default:
		text, ok := strings.CutPrefix(name, HandedPrefix)
		r, known := ParseRole(text)
		if !ok || !known || r == Fetch {
			return Handed{}, fmt.Errorf("connection of role %.20q: %w", text, ErrPreamble)
		}
		return Handed{Role: r}, nil
	}
	var err error
	if h.Peer, err = hex.DecodeString(rest); err != nil || len(h.Peer) != sha256.Size {
		return Handed{}, fmt.Errorf("certificate of a fetch: %w", ErrPreamble)
	}
	return h, nil
}

// Fetch does TLS on a connection of role Fetch whose preamble was sent or read, within
// GreetTimeout. Own and Compress are this far executor's. It closes the connection if it
// returns an error.
func (a *Acceptor) Fetch(ctx context.Context, conn net.Conn, h Handed) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, GreetTimeout)
	defer cancel()
	under := prepare(conn, Fetch, false)
	c, err := a.fetch(ctx, under, h)
	if err != nil {
		under.Close()
		return nil, fmt.Errorf("fetch: %w", err)
	}
	return c, nil
}

func (a *Acceptor) fetch(ctx context.Context, under net.Conn, h Handed) (net.Conn, error) {
	if a.Plain || h.Role != Fetch {
		return nil, ErrFetch
	}
	cfg, err := a.Own.config(h.Peer, Fetch)
	if err != nil {
		return nil, err
	}
	end := tls.Server
	if h.Fetching {
		end = tls.Client
	}
	_ = under.SetDeadline(time.Now().Add(GreetTimeout))
	s, err := seal(ctx, under, cfg, end)
	if err != nil {
		return nil, fmt.Errorf("TLS: %w", err)
	}
	_ = under.SetDeadline(time.Time{})
	return a.Compress.over(s, under), nil
}
