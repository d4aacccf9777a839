package subid

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"time"
)

// File is where a host says which users belong to whom.
const File = "/etc/subuid"

const (
	lookEvery  = time.Second // at the file
	patience   = time.Second // with the first look
	mostRanges = 1 << 16
	mostBytes  = 16 << 20
)

// Owners knows whose users are. It reads its file again when that has changed. Nobody waits for that:
// names may be those of a directory service that does not answer. nil knows none.
type Owners struct {
	path string
	id   func(name string) (uint32, bool)

	mu     sync.Mutex
	looked time.Time
	looks  bool
	read   fs.FileInfo // what the ranges are of; nil: there was no file
	ranges []span
}

// span is users of one owner.
type span struct {
	owner        uint32
	first, count uint64
}

// New returns the owners of a file like /etc/subuid. It waits for a second at most until the file is read.
func New(path string) *Owners {
	o := &Owners{path: path, id: lookup}
	read := make(chan struct{})
	go func() { defer close(read); o.look() }()
	select {
	case <-read:
	case <-time.After(patience):
	}
	return o
}

func lookup(name string) (uint32, bool) {
	u, err := user.Lookup(name)
	if err != nil {
		return 0, false
	}
	id, err := strconv.ParseUint(u.Uid, 10, 32)
	return uint32(id), err == nil
}

// Of returns whose a user is: itself, or the user who has it by the file. Root's are their own,
// because root has containers for others.
func (o *Owners) Of(uid uint32) uint32 {
	if o == nil || uid == 0 {
		return uid
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.looks && time.Since(o.looked) >= lookEvery {
		o.looks = true
		go o.look()
	}
	for _, s := range o.ranges {
		if n := uint64(uid); n >= s.first && n-s.first < s.count {
			return s.owner
		}
	}
	return uid
}

// look reads the file if it has changed. If it cannot be read, what it said before counts.
func (o *Owners) look() {
	o.mu.Lock()
	before := o.read
	o.mu.Unlock()
	st, ranges, err := o.changed(before)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.looks, o.looked = false, time.Now()
	if err == nil {
		o.read, o.ranges = st, ranges
	}
}

var errAsBefore = errors.New("as before")

func (o *Owners) changed(before fs.FileInfo) (fs.FileInfo, []span, error) {
	f, err := os.Open(o.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if before != nil && os.SameFile(st, before) && st.ModTime().Equal(before.ModTime()) && st.Size() == before.Size() {
		return nil, nil, errAsBefore
	}
	ranges, err := parse(io.LimitReader(f, mostBytes), o.id)
	return st, ranges, err
}

// parse reads lines "NAME:FIRST:COUNT", where NAME may be a number. It leaves out lines that are none, those
// of root and of users that there are not.
func parse(r io.Reader, id func(string) (uint32, bool)) ([]span, error) {
	var out []span
	in := bufio.NewScanner(r)
	for in.Scan() && len(out) < mostRanges {
		f := strings.Split(strings.TrimSpace(in.Text()), ":")
		if len(f) != 3 || strings.HasPrefix(f[0], "#") {
			continue
		}
		first, err1 := strconv.ParseUint(f[1], 10, 32)
		count, err2 := strconv.ParseUint(f[2], 10, 32)
		owner, ok := id(f[0])
		if n, err := strconv.ParseUint(f[0], 10, 32); err == nil && !ok {
			owner, ok = uint32(n), true
		}
		if err1 != nil || err2 != nil || !ok || owner == 0 || first == 0 || count == 0 {
			continue
		}
		out = append(out, span{owner, first, count})
	}
	return out, in.Err()
}
