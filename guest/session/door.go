package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

// Anybody may connect. So what the connections of one user occupy must not be missing for
// another user.
const (
	silentPerUser = 16  // connections that have not sent their greeting yet
	silentAll     = 512 // of all users
	turnsPerUser  = 32  // sessions that are being made at the same time
	turnsAll      = 64
	queuePerUser  = 256 // applications that wait for a turn

	refusalsLogged = 20 // at first; then one for each refusalsEvery
	refusalsEvery  = 5 * time.Second
)

var errDropped = errors.New("it said nothing, and others of its user wanted its place")

// door limits the connections of applications. A few of them may be silent; if there are
// too many, the oldest is closed. It also limits how many sessions are made at the same
// time.
type door struct {
	patience time.Duration // with a silent connection whose place nobody needs

	mu     sync.Mutex
	free   *sync.Cond // signalled when a turn has ended, or ctx has
	ctx    context.Context
	silent map[uint32][]io.Closer // by user, oldest first
	all    int                    // the number of silent connections
	turns  map[uint32]int
	busy   int // the number of turns that are taken
	queue  map[uint32]int
}

func newDoor(ctx context.Context, patience time.Duration) *door {
	d := &door{patience: patience, ctx: ctx, silent: map[uint32][]io.Closer{}, turns: map[uint32]int{}, queue: map[uint32]int{}}
	d.free = sync.NewCond(&d.mu)
	context.AfterFunc(ctx, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, conns := range d.silent {
			for _, c := range conns {
				c.Close()
			}
		}
		d.free.Broadcast()
	})
	return d
}

// enter registers a silent connection. If its user has too many, the oldest one of the user
// is closed. If there are too many in all, the oldest one of the user with the most is
// closed.
func (d *door) enter(uid uint32, conn io.Closer) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx.Err() != nil {
		conn.Close()
		return
	}
	d.silent[uid] = append(d.silent[uid], conn)
	d.all++
	most := uid
	if d.all > silentAll {
		for u, conns := range d.silent {
			if len(conns) > len(d.silent[most]) {
				most = u
			}
		}
	}
	if d.all > silentAll || len(d.silent[uid]) > silentPerUser {
		oldest := d.silent[most][0]
		d.forget(most, 0)
		oldest.Close()
	}
}

// leave marks a connection as no longer silent. It returns false if the connection was
// closed to make room.
func (d *door) leave(uid uint32, conn io.Closer) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.Index(d.silent[uid], conn)
	if i >= 0 {
		d.forget(uid, i)
	}
	return i >= 0
}

func (d *door) forget(uid uint32, i int) {
	d.all--
	if d.silent[uid] = slices.Delete(d.silent[uid], i, i+1); len(d.silent[uid]) == 0 {
		delete(d.silent, uid)
	}
}

// turn calls f as soon as the number of sessions that are being made is below the limits.
func (d *door) turn(uid uint32, f func() error) error {
	if err := d.take(uid); err != nil {
		return err
	}
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.busy--
		count(d.turns, uid, -1)
		d.free.Broadcast()
	}()
	return f()
}

func (d *door) take(uid uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.queue[uid] >= queuePerUser {
		return fmt.Errorf("%d applications of user %d wait for a session: try again", d.queue[uid], uid)
	}
	count(d.queue, uid, 1)
	defer count(d.queue, uid, -1)
	for d.turns[uid] >= turnsPerUser || d.busy >= turnsAll {
		if d.ctx.Err() != nil {
			return errors.New("gpuguest is shutting down")
		}
		d.free.Wait()
	}
	d.busy++
	count(d.turns, uid, 1)
	return nil
}

func count(m map[uint32]int, uid uint32, by int) {
	if m[uid] += by; m[uid] == 0 {
		delete(m, uid)
	}
}
