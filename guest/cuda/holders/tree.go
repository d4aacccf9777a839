package holders

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/beneath"
)

// Tree returns a process and all that descend from it, by pid.
func (l *Look) Tree(root int) []*Process {
	var all []*Process
	for pid, p := range l.Processes {
		if l.Descends(pid, root) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b *Process) int { return cmp.Compare(a.PID, b.PID) })
	return all
}

// Threads returns the threads of a process.
func (r Roots) Threads(pid int) ([]int, error) {
	names, err := r.list(strconv.Itoa(pid) + "/task")
	if err != nil {
		return nil, fmt.Errorf("threads of pid %d: %w", pid, err)
	}
	var ids []int
	for _, name := range names {
		if id, err := strconv.Atoi(name); err == nil {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// Taken reports whether a process or a thread has that number, or may have it.
func (r Roots) Taken(id int) bool {
	d, err := beneath.OpenDir(r.proc(), strconv.Itoa(id))
	if err != nil {
		return !gone(err)
	}
	d.Close()
	return true
}

// Ties returns what ties the processes to others: terminals, and pipes of which a process that
// is none of them has an end.
func (r Roots) Ties(l *Look, tree []*Process) (ties []string, err error) {
	inside := map[int]bool{}
	pipes := map[string]int{}
	for _, p := range tree {
		inside[p.PID] = true
		if p.zombie {
			continue
		}
		links, err := r.links(p)
		if err != nil {
			return nil, fmt.Errorf("descriptors of pid %d: %w", p.PID, err)
		}
		if p.Terminal != 0 {
			ties = append(ties, fmt.Sprintf("pid %d (%s) has a controlling terminal", p.PID, p.Name))
		}
		for _, link := range links {
			switch {
			case strings.HasPrefix(link, "pipe:["):
				pipes[link] = p.PID
			case strings.HasPrefix(link, "/dev/pts/"), strings.HasPrefix(link, "/dev/tty"), link == "/dev/console":
				ties = append(ties, fmt.Sprintf("pid %d (%s) has the terminal %s open", p.PID, p.Name, link))
			}
		}
	}
	for pid, p := range l.Processes {
		if inside[pid] || len(pipes) == 0 || p.zombie {
			continue
		}
		links, err := r.links(p)
		if err != nil {
			continue // it has ended, and has no ends of pipes any more
		}
		for _, link := range links {
			if mine, ok := pipes[link]; ok {
				delete(pipes, link)
				ties = append(ties, fmt.Sprintf("pid %d has a pipe to pid %d (%s)", mine, pid, p.Name))
			}
		}
	}
	slices.Sort(ties)
	return slices.Compact(ties), nil
}

// links returns what the descriptors of a process are.
func (r Roots) links(p *Process) ([]string, error) {
	at, err := r.alive(p)
	if err != nil {
		return nil, err
	}
	d, err := beneath.OpenDir(r.proc(), at+"/fd")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(mostFDs)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var links []string
	buf := make([]byte, 512)
	for _, name := range names {
		if n, err := unix.Readlinkat(int(d.Fd()), name, buf); err == nil {
			links = append(links, string(buf[:n]))
		}
	}
	return links, nil
}

func (r Roots) list(dir string) ([]string, error) {
	d, err := beneath.OpenDir(r.proc(), dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(mostFDs)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}
