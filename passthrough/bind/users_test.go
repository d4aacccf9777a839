package bind_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// Many processes with many files cost no more than the patience.
func TestUsersIsBounded(t *testing.T) {
	r := newRig(t, bind.WithPatience(time.Nanosecond, time.Minute))
	for pid := range 10 {
		r.machine.Run(100+pid, "p", "/dev/null")
	}
	if _, err := r.Users(t.Context(), gpuCard); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if err := r.Take(t.Context(), gpuCard, bind.XenPciback); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("taken without a look: %v", err)
	}
}

// What cannot be looked at is not called free.
func TestUsersSeesAllOrFails(t *testing.T) {
	r := newRig(t)
	b := bind.New(denied{r.machine, "proc/7/fd"}, r.journal)
	r.machine.Run(7, "secret", "/dev/null")
	if _, err := b.Users(t.Context(), gpuCard); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("got %v", err)
	}
}

// A driver that is told to let go of a card that a thread has open may wait for ever.
func TestUsersSeesAProcessWhoseFirstThreadHasEnded(t *testing.T) {
	r := newRig(t)
	r.machine.Run(7, "half")
	r.machine.File("proc/7/task/7/stat", "")
	r.machine.Link("proc/7/task/9/fd/3", "/sys/bus/pci/devices/"+gpuCard[0].String()+"/resource0")
	users, err := r.Users(t.Context(), gpuCard)
	if err != nil || len(users) != 1 || users[0].PID != 7 {
		t.Errorf("%v, %v", users, err)
	}
}

type denied struct {
	sysfs.Root
	name string
}

func (d denied) ReadDir(name string) ([]fs.DirEntry, error) {
	if name == d.name {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: syscall.EACCES}
	}
	return d.Root.ReadDir(name)
}

func BenchmarkUsers(b *testing.B) {
	r := newRig(b)
	for pid := range 500 {
		var files []string
		for i := range 20 {
			files = append(files, fmt.Sprintf("/run/%d", i))
		}
		r.machine.Run(1000+pid, "p", files...)
	}
	for b.Loop() {
		if _, err := r.Users(b.Context(), gpuCard); err != nil {
			b.Fatal(err)
		}
	}
}
