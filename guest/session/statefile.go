package session

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

// Files of suspended sessions are where an operator wants them, and have in them
// what an application wants. gpuguest, which may be root, makes, names and removes
// them with the rights of the session's user, who owns them.

// owned runs f with the rights to files of the session's user.
func (s *session) owned(f func() error) error {
	uid, err := confine.Owner(s.executorsDir())
	if err != nil {
		return fmt.Errorf("user of session %s: %w", s.id, err)
	}
	return confine.AsOwner(uid, f)
}

// createState makes the file and hands it over to the executor.
func (s *session) createState(ctx context.Context, e *executor, path string) error {
	var f *os.File
	err := s.owned(func() (err error) {
		f, err = beneath.OpenFile(filepath.Dir(path), filepath.Base(path), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		return err
	})
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%w: the session's user must be allowed to make files there, as in /var/tmp", err)
		}
		return err
	}
	defer f.Close()
	return e.give(ctx, path, f)
}

// openState hands the file of a suspended session over to the executor.
func (s *session) openState(ctx context.Context, e *executor, path string) error {
	var f *os.File
	err := s.owned(func() (err error) {
		f, err = beneath.OpenFile(filepath.Dir(path), filepath.Base(path), os.O_RDONLY, 0)
		return err
	})
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	uid, err := confine.Owner(s.executorsDir())
	if err != nil {
		return err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || st.Uid != uid {
		return fmt.Errorf("%s is not the file that session %s was suspended to", path, s.id)
	}
	return e.give(ctx, path, f)
}

// removeState removes a file of the session, if it is there.
func (s *session) removeState(path string) error {
	err := s.owned(func() error { return unix.Unlink(path) })
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// finishState makes a finished file durable and gives it its name.
func (s *session) finishState(part, path string) error {
	return s.owned(func() error { return syncRename(part, path) })
}
