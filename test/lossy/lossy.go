package lossy

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Quality says what a link does to each packet, in both directions.
type Quality struct {
	Loss    float64       // part of the packets that are lost
	Delay   time.Duration // of each packet
	Jitter  time.Duration // up to so much more, so that packets overtake each other
	Reorder float64       // part of the packets that are delayed ten times as long
}

// Addresses of the two ends.
const (
	Near = "10.77.0.1"
	Far  = "10.77.0.2"
)

// Counts is what has happened to packets.
type Counts struct{ Passed, Lost, Overtaken, Cut int64 }

// Link is a link between two namespaces.
type Link struct {
	quality Quality
	ends    [2]*os.File
	spaces  [2]*space
	cut     atomic.Bool
	wg      sync.WaitGroup

	passed, lost, overtaken, gone atomic.Int64
}

// ErrMissing is returned where namespaces or TUN devices are not to be had.
var ErrMissing = errors.New("no network namespaces or TUN devices")

// space is a thread in a network namespace of its own.
type space struct {
	todo chan func()
	over chan struct{}
}

// do runs f on the thread.
func (s *space) do(f func()) {
	done := make(chan struct{})
	s.todo <- func() { defer close(done); f() }
	<-done
}

// newSpace makes a namespace, and the link's end in it.
func newSpace(addr string) (*space, *os.File, error) {
	s := &space{todo: make(chan func()), over: make(chan struct{})}
	var end *os.File
	made := make(chan error)
	go func() {
		defer close(s.over)
		runtime.LockOSThread() // for good: the thread ends with this function
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			end, err = open(addr)
		}
		made <- err
		if err != nil {
			return
		}
		for f := range s.todo {
			f()
		}
	}()
	if err := <-made; err != nil {
		return nil, nil, fmt.Errorf("namespace of %s: %w: %w", addr, ErrMissing, err)
	}
	return s, end, nil
}

// open makes a TUN device with that address in the caller's namespace.
func open(addr string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	err = configure(fd, addr)
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "link of "+addr), nil
}

func configure(fd int, addr string) error {
	const name = "link"
	tun, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	tun.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, tun); err != nil {
		return fmt.Errorf("make a TUN device: %w", err)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s) }()
	for _, x := range []struct {
		dev string
		op  uint
		set func(r *unix.Ifreq) error
	}{
		{name, unix.SIOCSIFADDR, func(r *unix.Ifreq) error { return r.SetInet4Addr(net.ParseIP(addr).To4()) }},
		{name, unix.SIOCSIFNETMASK, func(r *unix.Ifreq) error { return r.SetInet4Addr([]byte{255, 255, 255, 252}) }},
		{name, unix.SIOCSIFFLAGS, up},
		{"lo", unix.SIOCSIFFLAGS, up},
	} {
		r, err := unix.NewIfreq(x.dev)
		if err == nil {
			err = x.set(r)
		}
		if err == nil {
			err = unix.IoctlIfreq(s, x.op, r)
		}
		if err != nil {
			return fmt.Errorf("set up %s: %w", x.dev, err)
		}
	}
	return nil
}

func up(r *unix.Ifreq) error {
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return nil
}

// New makes two namespaces and a link. It needs root.
func New(q Quality) (*Link, error) {
	l := &Link{quality: q}
	for i, addr := range []string{Near, Far} {
		var err error
		if l.spaces[i], l.ends[i], err = newSpace(addr); err != nil {
			l.Close()
			return nil, err
		}
	}
	for i := range l.ends {
		l.wg.Go(func() { l.carry(l.ends[i], l.ends[1-i]) })
	}
	return l, nil
}

// InNear runs f on a thread in the near namespace. Processes that f starts are in it, too.
func (l *Link) InNear(f func()) { l.spaces[0].do(f) }

// Listen listens on TCP in the far namespace.
func (l *Link) Listen() (ln net.Listener, err error) {
	l.spaces[1].do(func() { ln, err = net.Listen("tcp", Far+":0") })
	return ln, err
}

// Cut loses all packets, or stops to do so.
func (l *Link) Cut(cut bool) { l.cut.Store(cut) }

// Counts returns what has happened so far.
func (l *Link) Counts() Counts {
	return Counts{l.passed.Load(), l.lost.Load(), l.overtaken.Load(), l.gone.Load()}
}

// Close ends the link and its namespaces.
func (l *Link) Close() {
	for i := range l.ends {
		if l.spaces[i] == nil {
			continue
		}
		_ = l.ends[i].Close()
		close(l.spaces[i].todo)
		<-l.spaces[i].over
	}
	l.wg.Wait()
}

// packet is one that is on its way.
type packet struct {
	due time.Time
	n   int64 // in the order in which they were sent
	b   []byte
}

type queue []packet

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }
func (q queue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)        { *q = append(*q, x.(packet)) } //nolint:forcetypeassert // heap's
func (q *queue) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}

const (
	maxPacket = 64 << 10
	mostQueue = 4096 // packets; more are lost, as on a router
)

// carry passes packets on in one direction until the link is closed.
func (l *Link) carry(from, to *os.File) {
	var mu sync.Mutex
	var q queue
	news := make(chan struct{}, 1)
	over := make(chan struct{})
	defer close(over)
	l.wg.Go(func() { l.deliver(&mu, &q, news, over, to) })
	buf := make([]byte, maxPacket)
	for n := int64(0); ; n++ {
		k, err := from.Read(buf)
		if err != nil {
			return
		}
		if l.cut.Load() {
			l.gone.Add(1)
			continue
		}
		if rand.Float64() < l.quality.Loss {
			l.lost.Add(1)
			continue
		}
		wait := l.quality.Delay
		if l.quality.Jitter > 0 {
			wait += rand.N(l.quality.Jitter)
		}
		if rand.Float64() < l.quality.Reorder {
			wait += 9 * l.quality.Delay
		}
		mu.Lock()
		if len(q) < mostQueue {
			heap.Push(&q, packet{time.Now().Add(wait), n, append([]byte(nil), buf[:k]...)})
		} else {
			l.lost.Add(1)
		}
		mu.Unlock()
		select {
		case news <- struct{}{}:
		default:
		}
	}
}

// deliver writes packets when they are due.
func (l *Link) deliver(mu *sync.Mutex, q *queue, news, over <-chan struct{}, to *os.File) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for last := int64(-1); ; {
		mu.Lock()
		wait := time.Hour
		if len(*q) > 0 {
			wait = time.Until((*q)[0].due)
		}
		if wait > 0 {
			mu.Unlock()
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-news:
			case <-over:
				return
			}
			continue
		}
		p, _ := heap.Pop(q).(packet)
		mu.Unlock()
		if p.n < last {
			l.overtaken.Add(1)
		}
		last = max(last, p.n)
		if l.cut.Load() {
			l.gone.Add(1)
		} else if _, err := to.Write(p.b); err == nil {
			l.passed.Add(1)
		}
	}
}
